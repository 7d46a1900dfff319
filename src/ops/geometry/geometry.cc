#include "ops/geometry/geometry.h"

#include <ATen/ATen.h>

namespace gnomon {

std::pair<at::Tensor, at::Tensor> SplitLast(const at::Tensor& x) {
  const c10::SymInt last = x.sym_size(-1) - 1;
  return {x.narrow_symint(-1, 0, last), x.select_symint(-1, last)};
}

at::Tensor SafeSqrt(const at::Tensor& x) {
  const at::Tensor positive = x > 0;
  return at::where(positive, at::where(positive, x, 1.0).sqrt(), 0.0);
}

at::Tensor SquaredNorm(const at::Tensor& x) { return x.square().sum(-1); }

Radius RadiusOf(const at::Tensor& x) {
  const at::Tensor square = SquaredNorm(x);
  const at::Tensor norm = SafeSqrt(square);
  const at::Tensor divisor = norm.clamp_min(kOrigin);
  return {x / OverColumns(divisor),
          at::where(norm > kOrigin, norm, square * (0.5 / kOrigin) + kOrigin / 2), divisor};
}

at::Tensor OverRows(const at::Tensor& heads) { return heads.unsqueeze(1); }

at::Tensor OverColumns(const at::Tensor& x) { return x.unsqueeze(3); }

at::Tensor OntoHyperboloid(const at::Tensor& sums) {
  const at::Tensor square = (SquaredNorm(sums.slice(-1, 1)) - sums.select(-1, 0).square()).abs();
  const at::Tensor known = square > 0;
  return sums * at::where(known, at::where(known, square, 1.0).rsqrt(), 0.0).unsqueeze(-1);
}

at::Tensor InUnitBall(const at::Tensor& x) {
  const double most = 1 - (x.scalar_type() == at::kDouble ? 1e-12 : 1e-5);
  return x * (most / SafeSqrt(SquaredNorm(x)).clamp_min(most)).unsqueeze(-1);
}

}  // namespace gnomon
