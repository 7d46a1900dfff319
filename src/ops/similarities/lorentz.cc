#include <ATen/ATen.h>

#include <cmath>
#include <string>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/geometry/geometry.h"
#include "ops/geometry/half_space.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace lorentz {
namespace {

// A token in the form that src/definitions/lorentz-inl.h reads.
struct LorentzToken {
  at::Tensor x;
  at::Tensor scalars;  // (3, B, H, L)
};

// The smaller number; NaN in `a` stays NaN. Up to PyTorch 2.13, the forward derivative of minimum()
// subtracts the tangents, and that of the large limit `b` would cancel the digits of the other.
at::Tensor Least(const at::Tensor& a, const at::Tensor& b) { return at::where(a > b, b, a); }

// The point of the hyperboloid above x (B, H, L, D); `root` is the square root of c, (H, 1).
LorentzToken Above(const at::Tensor& x, const at::Tensor& root) {
  const Radius radius = RadiusOf(x);
  const at::Tensor most = root * std::sinh(kFarthest);
  const at::Tensor length = Least(radius.length, most);
  const at::Tensor square = length * length;
  const at::Tensor time = (root * root + square).sqrt();
  return {radius.unit, at::stack({length + square / (time + root), root / (length + time),
                                  Least(radius.divisor, most)})};
}

// The exponential map at (0, sqrt(c)).
LorentzToken FromTangent(const at::Tensor& x, const at::Tensor& root) {
  const Radius radius = RadiusOf(x);
  const at::Tensor distance = (radius.length / root).clamp_max(kFarthest);
  const at::Tensor sinh = (radius.divisor / root).clamp_max(kFarthest).sinh();
  return {radius.unit, at::stack({root * distance.expm1(), (-distance).exp(), root * sinh})};
}

bool HasTime(const Component& component) { return component.Choice("map") == "none"; }

LorentzToken MapToHyperboloid(const Component& component, const at::Tensor& token,
                              const at::Tensor& root) {
  if (component.Choice("map") == "exp") return FromTangent(token, root);
  return Above(HasTime(component) ? SplitLast(token).first : token, root);
}

// Law et al. 2019, section 3.
MappedTokens Map(const Component& component, const at::Tensor& q, const at::Tensor& k_in,
                 const HeadParameters& heads) {
  const at::Tensor& curvature = heads.others[0];
  if (component.IsTensor("c") && curvature.is_cpu() && HasNumbers(curvature)) {
    const auto least = curvature.min().item<double>();
    TORCH_CHECK_VALUE(least > 0, "gnomon.attention: c of lorentz is ", least,
                      " in one head; expected positive numbers");
  }
  const at::Tensor root = curvature.sqrt();
  const bool differs = component.IsTensor("c") || component.Find("c") == "learned";
  const int64_t group = SizeOf(q, 1) / SizeOf(k_in, 1);
  at::Tensor k = k_in;
  at::Tensor key_root = root;
  if (group > 1) {
    // Heads with different curvatures need separate keys.
    if (differs) {
      k = k.repeat_interleave(group, 1);
    } else {
      key_root = root.slice(0, 0, SizeOf(k, 1));
    }
  }
  const LorentzToken query = MapToHyperboloid(component, q, OverRows(root));
  const LorentzToken key = MapToHyperboloid(component, k, OverRows(key_root));
  MappedTokens tokens{.function = "lorentz",
                      .x = query.x,
                      .y = key.x,
                      .factor = -heads.factor,
                      .row_scalars = query.scalars,
                      .column_scalars = key.scalars};
  if (component.Find("bias")) {
    tokens.row_constant = [bias = heads.others[1]] { return OverRows(bias); };
  }
  return tokens;
}

at::Tensor UnitCurvature(const Component& /*component*/, const ModuleShape& n) {
  return at::ones({n.heads}, at::kDouble);
}

// Modules learn a factor of the initial value, which is 0 for a bias, so a bias cannot be learned.
at::Tensor NoBias(const Component& component, const ModuleShape& n) {
  TORCH_CHECK_VALUE(
      component.Find("bias") != "learned", "gnomon: ", component.name(),
      ":bias=learned is not supported, because a bias that all scores of a query share affects "
      "only lse and sinks; expected a number, or a tensor in attention()");
  return at::zeros({n.heads}, at::kDouble);
}

// An optional per-head parameter.
Parameter OptionalHeads(const char* name, const char* default_value,
                        at::Tensor (*start)(const Component&, const ModuleShape&)) {
  Parameter parameter = PerHead(name, default_value, {.start = start});
  parameter.argument = CatalogueParameter::Argument::kOptional;
  return parameter;
}

std::vector<Parameter> Parameters() {
  Parameter curvature =
      OptionalHeads("c", "1", UnitCurvature)
          .Means("positive per-head constant of the hyperboloid, whose curvature is -1 / c");
  curvature.lowest = 0;
  curvature.above = true;
  return {PerHead("scale", "learned").Means("per-head factor"), curvature,
          OptionalHeads("bias", "0", NoBias)
              .Means("added to all scores of a head; affects only lse and sinks, and has no "
                     "gradient without them. Modules accept only a number"),
          Choice("map", {"space", "exp", "none"})
              .Points("none")
              .Means("\"space\": a token x becomes the point (sqrt(c + |x|^2), x); \"exp\": the "
                     "exponential map at (sqrt(c), 0), with tangent vectors clamped to length 30 "
                     "sqrt(c) (scores then grow as e^(|q| + |k|)); \"none\": tokens are points (t, "
                     "x), and the time t is set to sqrt(c + |x|^2)")};
}

const RegisterSimilarity lorentz({
    .catalogue =
        {.name = "lorentz",
         .title = "Lorentzian distance",
         .formula = "scale (2 c + 2 (q.k)_L) + bias, where (x.y)_L = -x_0 y_0 + x_1 y_1 + ..., and "
                    "q and k are points of the hyperboloid (x.x)_L = -c",
         .latex = R"(s_h \left(2 c_h + 2 \langle q, k \rangle_L\right) + b_h)",
         .note = "The Lorentzian product of q and k is -q_0 k_0 + q_1 k_1 + ..., and that of a "
                 "point with itself is -c",
         .details = "Apart from scale and bias, this is the negative squared Lorentzian distance, "
                    "which hyperbolic language models such as HELM and Hypformer use as a score. "
                    "RoPE rotates only the spatial coordinates, whose norm is at most sqrt(c) "
                    "sinh(30). To average values on the hyperboloid, use aggregation = "
                    "\"lorentz_centroid\", which takes c from this similarity. If c is a tensor "
                    "and several query heads share a key head, the keys are copied for each query "
                    "head. Scores of tokens with a norm below 1e-6 are approximate.",
         .source = "Law et al. 2019, Lorentzian Distance Learning for Hyperbolic Representations; "
                   "Chen et al. 2022, Fully Hyperbolic Neural Networks",
         .class_name = "Lorentz"},
    .parameters = Parameters(),
    .map = Map,
    .has_height = HasTime,
    .height_is_first = HasTime,
    .curvature = [](const std::vector<at::Tensor>& others) { return others[0]; },
});

}  // namespace
}  // namespace lorentz
}  // namespace gnomon
