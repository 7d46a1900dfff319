#include "ops/attention/einstein_midpoint.h"

#include <ATen/ATen.h>

#include "ops/geometry/geometry.h"
#include "ops/operators/tensors.h"

namespace gnomon {

at::Tensor LogLorentzFactor(const at::Tensor& v, int64_t heads) {
  const at::Tensor log = -0.5 * (-SquaredNorm(v)).log1p();
  return log.repeat_interleave(heads / SizeOf(v, 1), 1);
}

at::Tensor WeighValues(const at::Tensor& v) {
  const at::Tensor factor = (1 - SquaredNorm(v)).rsqrt().unsqueeze(3);
  return at::cat({v * factor, factor}, 3);
}

void UnweighValues(at::Tensor& o, at::Tensor& lse, at::Tensor& statistics) {
  const c10::SymInt columns = o.sym_size(3) - 1;
  const at::Tensor sum = o.select_symint(3, columns);
  const at::Tensor known = at::where(sum > 0, sum, 1.0);
  o = o.narrow_symint(3, 0, columns) / known.unsqueeze(3);
  lse = lse + known.log();
  statistics =
      at::cat({statistics.slice(0, 0, 1), statistics.slice(0, 1, 2) * known.detach().unsqueeze(0),
               statistics.slice(0, 2)});
}

}  // namespace gnomon
