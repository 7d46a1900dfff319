// Points of hyperboloids, with the time as the first coordinate.
#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include "ops/geometry/geometry.h"

namespace gnomon {
namespace {

// The square root of c, as a tensor that broadcasts with all axes of the points but the last.
at::Tensor RootOf(const char* name, const at::Tensor& x, const HeadValue& c) {
  TORCH_CHECK_TYPE(x.is_floating_point() && !c10::isFloat8Type(x.scalar_type()), "gnomon.lorentz.",
                   name, ": points have dtype ", x.scalar_type(),
                   "; expected a floating-point dtype");
  if (!c.is_number()) return c.tensor().sqrt();
  TORCH_CHECK_VALUE(c.number() > 0, "gnomon.lorentz.", name, ": c is ", c.number(),
                    "; expected a positive number");
  return at::scalar_tensor(c.number(), x.options()).sqrt();
}

}  // namespace

namespace lorentz {

torch::Tensor lift(const torch::Tensor& x, const HeadValue& c) {
  const at::Tensor root = RootOf("lift", x, c);
  TORCH_CHECK_VALUE(x.dim() >= 1, "gnomon.lorentz.lift: x has shape ", x.sym_sizes(),
                    "; expected (..., D)");
  const at::Tensor time = (SquaredNorm(x) + root.square()).sqrt().to(x.scalar_type());
  return at::cat({time.unsqueeze(-1), x}, -1);
}

torch::Tensor centroid(const torch::Tensor& points, const HeadValue& c) {
  const at::Tensor root = RootOf("centroid", points, c);
  TORCH_CHECK_VALUE(points.dim() >= 2 && points.sym_size(-1) >= 2,
                    "gnomon.lorentz.centroid: points have shape ", points.sym_sizes(),
                    "; expected (..., n, D) with D >= 2; the first coordinate is the time");
  return (OntoHyperboloid(points.mean(-2)) * root.unsqueeze(-1)).to(points.scalar_type());
}

}  // namespace lorentz
}  // namespace gnomon
