#include "ops/operators/argument_list.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>

namespace gnomon {

void ExpectTensor(const char* operation, std::string_view name, const at::Tensor& tensor,
                  const AxisLetters& shape, at::ScalarType dtype, AxisLengths<int64_t>& lengths) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.rank);
  for (size_t axis = 0; fits && axis < shape.rank; ++axis) {
    const int64_t size = tensor.size(static_cast<int64_t>(axis));
    std::optional<int64_t>& length = lengths[shape.letters[axis]];
    if (shape.shared[axis] && size == 1) continue;
    fits = !length || *length == size;
    if (!length) length = size;
  }
  if (!fits) {
    std::string letters;
    std::string sizes;
    for (size_t axis = 0; axis < shape.rank; ++axis) {
      const char letter = shape.letters[axis];
      const std::string one = shape.shared[axis] ? "1 or " : "";
      const char* comma = axis > 0 ? ", " : "";
      letters += comma + one + letter;
      sizes += comma + one + (lengths[letter] ? std::to_string(*lengths[letter]) : "any");
    }
    TORCH_CHECK_VALUE(false, operation, ": ", name, " has shape ", tensor.sizes(), "; expected (",
                      letters, ") = (", sizes, ")");
  }
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, operation, ": ", name, " has dtype ",
                   tensor.scalar_type(), "; expected ", dtype);
}

void ExpectDevice(const char* operation, std::string_view name, const at::Tensor& tensor,
                  at::Device device) {
  TORCH_CHECK_TYPE(tensor.device() == device, operation, ": ", name, " is on ", tensor.device(),
                   "; expected ", device);
}

at::Tensor EmptyBeside(c10::SymIntArrayRef sizes, at::ScalarType type, const at::Tensor& beside,
                       bool rows_first) {
  const at::TensorOptions options = beside.options().dtype(type);
  if (!rows_first) return at::empty_symint(sizes, options);
  return at::empty_symint({sizes[0], sizes[2], sizes[1], sizes[3]}, options).transpose(1, 2);
}

at::Tensor EmptyOnCpu(c10::SymIntArrayRef sizes, at::ScalarType type, const at::Tensor& /*beside*/,
                      bool rows_first) {
  const at::IntArrayRef n = C10_AS_INTARRAYREF_SLOW(sizes);
  if (!rows_first) return at::detail::empty_cpu(n, type);
  // Gives empty tensors the same strides as transpose().
  const auto length = [&](size_t axis) { return std::max<int64_t>(n[axis], 1); };
  const int64_t row = length(1) * length(3);
  return at::detail::empty_strided_cpu(n, {length(2) * row, length(3), row, 1}, type);
}

}  // namespace gnomon
