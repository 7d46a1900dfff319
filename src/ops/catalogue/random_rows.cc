#include "ops/catalogue/random_rows.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

namespace gnomon {

at::Tensor RandomRows(uint64_t stream, std::vector<int64_t> sizes, int64_t columns) {
  sizes.push_back(columns);
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  const at::Generator state = at::detail::getDefaultCPUGenerator().clone();
  const auto drawn = at::empty({}, options.dtype(at::kLong)).random_(state).item<int64_t>();
  const at::Generator generator =
      at::detail::createCPUGenerator(static_cast<uint64_t>(drawn) + stream);
  return at::randn(sizes, generator, options) / std::sqrt(static_cast<double>(columns));
}

}  // namespace gnomon
