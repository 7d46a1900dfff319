#include "ops/rope.h"

#include <ATen/ATen.h>

#include <cmath>
#include <string>

namespace gnomon {
namespace {

int64_t RotatedColumns(const Component& component, int64_t head_dim, bool last_is_height) {
  const int64_t free = last_is_height ? head_dim - 1 : head_dim;
  if (!component.Find("dims")) {
    TORCH_CHECK_VALUE(last_is_height || head_dim % 2 == 0,
                      "gnomon.attention: RoPE rotates pairs and q has ", head_dim,
                      " columns; expected an even number, or a smaller even dims");
    return free - free % 2;
  }
  const int64_t dims = component.Integer("dims", 0);
  TORCH_CHECK_VALUE(dims >= 0 && dims % 2 == 0 && dims <= free,
                    "gnomon.attention: RoPE has dims = ", dims,
                    "; expected an even number, at most ", free,
                    last_is_height ? " (the last coordinate is a height)" : "");
  return dims;
}

}  // namespace

at::Tensor Rotate(const Component& component, const at::Tensor& x, const c10::SymInt& position,
                  const std::optional<at::Tensor>& firsts, bool last_is_height) {
  const int64_t dims =
      RotatedColumns(component, x.sym_size(3).guard_int(__FILE__, __LINE__), last_is_height);
  const double base = component.Number("base", 10000.0);
  TORCH_CHECK_VALUE(base > 0 && std::isfinite(base), "gnomon.attention: RoPE has base = ", base,
                    "; expected a positive number");
  const std::string layout = component.Choice("layout", {"interleaved", "half"});
  if (dims == 0) return x;

  // In float64: float32 angles are off by 8e-3 at position a million.
  const at::TensorOptions options = x.options().dtype(at::kDouble);
  at::Tensor positions = at::arange(position, position + x.sym_size(2), options);
  if (firsts) positions = positions + firsts->to(at::kDouble).reshape({-1, 1, 1});
  const at::Tensor frequencies =
      (at::arange(dims / 2, options) * (-2.0 / static_cast<double>(dims)) * std::log(base)).exp();
  const at::Tensor angles = positions.unsqueeze(-1) * frequencies;
  const at::Tensor cosine = angles.cos().to(x.scalar_type());
  const at::Tensor sine = angles.sin().to(x.scalar_type());

  const bool half = layout == "half";
  const at::Tensor first = half ? x.narrow(3, 0, dims / 2) : x.slice(3, 0, dims, 2);
  const at::Tensor second = half ? x.narrow(3, dims / 2, dims / 2) : x.slice(3, 1, dims, 2);
  const at::Tensor turned_first = first * cosine - second * sine;
  const at::Tensor turned_second = second * cosine + first * sine;
  const at::Tensor rotated = half ? at::cat({turned_first, turned_second}, 3)
                                  : at::stack({turned_first, turned_second}, 4).flatten(3);
  return at::cat({rotated, x.slice(3, dims)}, 3);
}

}  // namespace gnomon
