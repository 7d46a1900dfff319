#include "ops/token_map.h"

#include <ATen/ATen.h>

#include <cmath>
#include <string>
#include <utility>

namespace gnomon {
namespace {

// (B, H, L, D) to (B, H, L, D - 1) and (B, H, L).
std::pair<at::Tensor, at::Tensor> SplitHeight(const at::Tensor& x) {
  const c10::SymInt last = x.sym_size(3) - 1;
  return {x.narrow_symint(3, 0, last), x.select_symint(3, last)};
}

// (H) to (H, 1), to go with (B, H, Lq).
at::Tensor OverRows(const at::Tensor& heads) { return heads.unsqueeze(1); }

// sqrt of x >= 0, with derivative 0 at 0.
at::Tensor SafeSqrt(const at::Tensor& x) {
  const at::Tensor positive = x > 0;
  return at::where(positive, at::where(positive, x, 1.0).sqrt(), 0.0);
}

double Radius(const Component& component, double default_value) {
  const double r = component.Number("r", default_value);
  TORCH_CHECK_VALUE(r > 0 && std::isfinite(r), "gnomon: ", component.name(), ":r=", r,
                    "; expected a positive number");
  return r;
}

void RefuseLater(const Component& component, const char* key, const char* value) {
  TORCH_CHECK_NOT_IMPLEMENTED(component.Find(key) != value, "gnomon: ", component.name(), " with ",
                              key, "=\"", value, "\" is not implemented in this version");
}

// A token below the horosphere, scaled so that r = 1.
struct PenumbralToken {
  at::Tensor x;
  at::Tensor u2;  // the height squared
  at::Tensor a;   // sqrt(1 - u^2), the radius of the geodesic's shadow
};

PenumbralToken MapToken(const at::Tensor& token, const std::string& map, double r) {
  const auto [x, z] = SplitHeight(token);
  if (map == "xi") {
    const at::Tensor u = z.sigmoid();
    // 1 - u^2 = sigmoid(-z) (1 + sigmoid(z)), without the cancellation.
    return {x * u.unsqueeze(3), u * u, SafeSqrt((-z).sigmoid() * (1 + u))};
  }
  const at::Tensor u = (z / r).clamp(0, 1);
  return {x / r, u * u, SafeSqrt((1 - u) * (1 + u))};
}

}  // namespace

MappedTokens MapDot(const Component&, const at::Tensor& q, const at::Tensor& k,
                    const at::Tensor& scale) {
  return {"dot", q, k, {}, {}, scale, {}};
}

MappedTokens MapLaplacian(const Component&, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& gamma) {
  return {"laplacian", q, k, {}, {}, -gamma, {}};
}

MappedTokens MapGaussian(const Component&, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& gamma) {
  return {"gaussian", q, k, {}, {}, -gamma, {}};
}

// Tseng et al. 2023, section 4 and the map psi.
MappedTokens MapUmbral(const Component& component, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& gamma) {
  RefuseLater(component, "map", "exp");
  RefuseLater(component, "score", "log");
  component.Choice("score", {"height"});
  const std::string map = component.Choice("map", {"psi", "none"});
  const double by_sinh = 1.0 / std::sinh(Radius(component, 0.1));
  const auto map_token = [&](const at::Tensor& token) -> std::pair<at::Tensor, at::Tensor> {
    const auto [x, z] = SplitHeight(token);
    if (map == "none") return {x * by_sinh, z};
    const at::Tensor height = z.exp();
    return {x * (height * by_sinh).unsqueeze(3), height};
  };
  const auto [x, u] = map_token(q);
  const auto [y, v] = map_token(k);
  return {"umbral", x, y, u.unsqueeze(0), v.unsqueeze(0), gamma * 0.5, -OverRows(gamma) * u};
}

// Tseng et al. 2023, eq. 23 and the map xi.
MappedTokens MapPenumbral(const Component& component, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& gamma) {
  RefuseLater(component, "map", "exp");
  RefuseLater(component, "score", "log");
  const std::string map = component.Choice("map", {"xi", "none"});
  const std::string score = component.Choice("score", {"height", "height2"});
  const double r = Radius(component, 1.0);
  const PenumbralToken query = MapToken(q, map, r);
  const PenumbralToken key = MapToken(k, map, r);
  if (score == "height2") {
    return {"penumbral_square",
            query.x,
            key.x,
            query.a.unsqueeze(0),
            key.a.unsqueeze(0),
            gamma * (r * r / 4),
            -OverRows(gamma) * (r * r)};
  }
  const auto scalars = [](const PenumbralToken& token) {
    return at::stack({token.u2 / (1 + token.a), token.u2});
  };
  return {"penumbral", query.x, key.x, scalars(query), scalars(key), gamma * (-r / 2), {}};
}

}  // namespace gnomon
