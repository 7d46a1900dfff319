#include "ops/attention/call_checks.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "ops/operators/attention_operators.h"
#include "ops/operators/devices.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

void CheckChunks(const std::optional<std::vector<int64_t>>& chunks) {
  if (!chunks) return;
  constexpr int64_t kMost = int64_t{1} << 30;
  const std::vector<int64_t>& n = *chunks;
  bool right = n.size() == 3 && n[0] >= 1;
  for (const int64_t number : n) right = right && number >= 0 && number < kMost;
  TORCH_CHECK_VALUE(right, "gnomon.attention: chunks is ", at::IntArrayRef(n),
                    "; expected (size, before, after) with size >= 1, before >= 0 and after >= 0");
}

}  // namespace

void CheckDropoutRate(const char* operation, double rate) {
  TORCH_CHECK_VALUE(rate >= 0 && rate <= 1, operation, ": dropout is ", rate,
                    "; expected a probability from 0 to 1");
}

void CheckDropout(const char* operation, double rate, const OptionalTensor& seed) {
  CheckDropoutRate(operation, rate);
  if (!seed) return;
  TORCH_CHECK_TYPE(seed->scalar_type() == at::kLong, operation, ": seed has dtype ",
                   seed->scalar_type(), "; expected int64");
  TORCH_CHECK_VALUE(seed->numel() == 1, operation, ": seed has shape ", seed->sizes(),
                    "; expected one element");
}

at::Tensor SeedOrDrawn(const OptionalTensor& seed) {
  // A 0-dimensional tensor, because a compiled graph accepts such a CPU tensor next to GPU tensors.
  return seed ? seed->reshape({})
              : at::randint(std::numeric_limits<int64_t>::max(), {},
                            at::TensorOptions().dtype(at::kLong));
}

void CheckTolerance(const char* operation, double tolerance) {
  TORCH_CHECK_VALUE(tolerance >= 0 && tolerance < 1, operation, ": tolerance is ", tolerance,
                    "; expected at least 0 and less than 1");
}

void CheckOptions(const CallArguments& arguments) {
  CheckDropout(OperatorArguments::kOperation, arguments.dropout, arguments.seed);
  CheckTolerance(OperatorArguments::kOperation, arguments.tolerance);
  if (arguments.score_softcap) {
    const double cap = *arguments.score_softcap;
    TORCH_CHECK_VALUE(cap > 0 && std::isfinite(cap), OperatorArguments::kOperation,
                      ": score_softcap is ", cap, "; expected a positive number, or None");
  }
  CheckChunks(arguments.chunks);
  for (const auto& [name, side] :
       {std::pair("left", &arguments.left), std::pair("right", &arguments.right)}) {
    TORCH_CHECK_VALUE(!*side || **side >= 0, "gnomon.attention: ", name, " of window is ", **side,
                      "; expected at least 0, or None for unbounded");
  }
}

void CheckTokenType(const char* operation, const char* name, const at::Tensor& tensor,
                    const at::Tensor& q) {
  const std::string problem = WhyRefused(tensor.device());
  TORCH_CHECK_NOT_IMPLEMENTED(problem.empty(), operation, ": ", name, " is on ", tensor.device(),
                              "; ", problem);
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, operation, ": ", name, " has layout ",
                   tensor.layout(), "; expected a strided tensor");
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble || IsLow(dtype), operation, ": ",
                   name, " has dtype ", dtype, "; expected bfloat16, float16, float32 or float64");
  TORCH_CHECK_TYPE(dtype == q.scalar_type(), operation, ": ", name, " has dtype ", dtype,
                   ", but q has ", q.scalar_type(), "; expected the same dtype");
  TORCH_CHECK_TYPE(tensor.device() == q.device(), operation, ": ", name, " is on ", tensor.device(),
                   ", but q is on ", q.device(), "; expected the same device");
}

void CheckIntegerType(const char* operation, const char* name, const at::Tensor& tensor,
                      const at::Tensor& q) {
  TORCH_CHECK_TYPE(at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false), operation, ": ",
                   name, " has dtype ", tensor.scalar_type(), "; expected integers");
  TORCH_CHECK_TYPE(tensor.device() == q.device(), operation, ": ", name, " is on ", tensor.device(),
                   ", but q is on ", q.device(), "; expected the same device");
}

OptionalTensor CheckIntegers(const char* operation, const char* name, const OptionalTensor& tensor,
                             const at::Tensor& q, const OptionalSymInt& length) {
  if (!tensor) return std::nullopt;
  CheckIntegerType(operation, name, *tensor, q);
  std::vector<c10::SymInt> sizes = {q.sym_size(0)};
  if (length) sizes.push_back(*length);
  // Without a batch axis, the integers apply to the whole batch.
  const size_t absent = tensor->dim() + 1 == static_cast<int64_t>(sizes.size()) ? 1 : 0;
  const auto expected = c10::SymIntArrayRef(sizes).slice(absent);
  TORCH_CHECK_VALUE(length || tensor->sym_sizes() == expected, operation, ": ", name, " has shape ",
                    tensor->sym_sizes(), "; expected (B,) = (", q.sym_size(0),
                    ",), or () if shared across the batch");
  TORCH_CHECK_VALUE(!length || tensor->sym_sizes() == expected, operation, ": ", name,
                    " has shape ", tensor->sym_sizes(), "; expected (B, length) = (", q.sym_size(0),
                    ", ", length.value_or(0), "), or (length,) if shared across the batch");
  const at::Tensor integers = tensor->to(at::kLong);
  return absent == 0 ? integers : integers.expand_symint(sizes).contiguous();
}

void CheckTokens(const char* operation, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& v) {
  for (const auto& [name, tensor] : {std::pair("q", &q), std::pair("k", &k), std::pair("v", &v)}) {
    CheckTokenType(operation, name, *tensor, q);
    TORCH_CHECK_VALUE(tensor->dim() == 4, operation, ": ", name, " has shape ", tensor->sym_sizes(),
                      "; expected four axes, (batch, heads, length, head_dim)");
    TORCH_CHECK_VALUE(tensor->sym_size(3) >= 1, operation, ": ", name, " has shape ",
                      tensor->sym_sizes(), "; expected head_dim >= 1");
  }
  TORCH_CHECK_VALUE(k.sym_size(0) == q.sym_size(0) && k.sym_size(3) == q.sym_size(3), operation,
                    ": k has shape ", k.sym_sizes(),
                    "; expected (B, Hkv, Lk, D) with B = ", q.sym_size(0),
                    " and D = ", q.sym_size(3), " as in q ", q.sym_sizes());
  TORCH_CHECK_VALUE(v.sym_size(0) == k.sym_size(0) && v.sym_size(1) == k.sym_size(1) &&
                        v.sym_size(2) == k.sym_size(2),
                    operation, ": v has shape ", v.sym_sizes(),
                    "; expected (B, Hkv, Lk, Dv) as in k ", k.sym_sizes());
  TORCH_CHECK_VALUE(
      k.sym_size(1) >= 1 && q.sym_size(1) % k.sym_size(1) == 0, operation, ": q has ",
      q.sym_size(1), " heads and k has ", k.sym_size(1),
      "; expected the number of heads of q to be a multiple of the number of heads of k");
}

at::Tensor Broadcast(const char* name, const char* expected, const at::Tensor& tensor,
                     std::vector<c10::SymInt> sizes) {
  const auto axes = static_cast<int64_t>(sizes.size());
  bool fits = tensor.defined() && tensor.dim() <= axes;
  for (int64_t axis = -1; fits && axis >= -tensor.dim(); --axis) {
    const c10::SymInt& length = sizes[static_cast<size_t>(axes + axis)];
    fits = tensor.sym_size(axis) == length || tensor.sym_size(axis) == 1;
  }
  TORCH_CHECK_VALUE(fits, OperatorArguments::kOperation, ": ", name, " has shape ",
                    tensor.defined() ? tensor.sym_sizes() : c10::SymIntArrayRef(), "; expected ",
                    expected, " = ", c10::SymIntArrayRef(sizes),
                    ", or a shape that broadcasts to it");
  return tensor.expand_symint(sizes);
}

at::Tensor BroadcastPairs(const char* name, const at::Tensor& pairs, const at::Tensor& q,
                          const at::Tensor& k) {
  std::vector<c10::SymInt> sizes = {q.sym_size(0), q.sym_size(1), q.sym_size(2), k.sym_size(2)};
  Broadcast(name, "(B, H, Lq, Lk)", pairs, sizes);
  // Shared axes are not expanded.
  for (int64_t axis = 0; axis < 2; ++axis) {
    if (pairs.dim() < 4 - axis || pairs.sym_size(axis - 4) == 1)
      sizes[static_cast<size_t>(axis)] = 1;
  }
  return pairs.expand_symint(sizes);
}

at::Tensor WithoutHidden(const at::Tensor& k, const OptionalTensor& key_starts,
                         const OptionalTensor& key_lengths) {
  if (!key_starts && !key_lengths) return k;
  const at::Tensor columns = at::arange(k.sym_size(2), k.options().dtype(at::kLong)).unsqueeze(0);
  at::Tensor visible = columns >= 0;
  if (key_starts) visible = visible.logical_and(columns >= key_starts->unsqueeze(1));
  if (key_lengths) visible = visible.logical_and(columns < key_lengths->unsqueeze(1));
  return at::where(visible.unsqueeze(1).unsqueeze(3), k, 0.0);
}

}  // namespace gnomon
