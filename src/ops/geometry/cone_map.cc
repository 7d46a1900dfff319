#include "ops/geometry/cone_map.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "core/cone_map.h"
#include "ops/geometry/geometry.h"
#include "ops/geometry/half_space.h"
#include "ops/operators/argument_list.h"
#include "ops/operators/autograd.h"
#include "ops/operators/executor.h"
#include "ops/operators/kernel_arguments.h"
#include "ops/operators/pair_rotation.h"
#include "ops/operators/tensors.h"
#include "ops/operators/token_map_cuda.h"

namespace gnomon {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Kernels read columns in groups of this size; D - 1 columns would leave a remainder in every row.
constexpr int64_t kColumnStep = 4;

int ScalarsOf(std::string_view function) { return function == "penumbral" ? 2 : 1; }

ConeMap FindMap(std::string_view function, std::string_view map, double r) {
  const bool as_is = map == "none";
  TORCH_CHECK_VALUE(as_is || map == (function == "umbral" ? "psi" : "xi"),
                    "gnomon.cone_map: map is ", map,
                    "; expected psi for umbral, xi for penumbral, or none");
  TORCH_CHECK_VALUE(function == "umbral" || function == "penumbral",
                    "gnomon.cone_map: function is ", function, "; expected umbral or penumbral");
  const ConeMap::Function kernel =
      function == "umbral" ? ConeMap::Function::kUmbral : ConeMap::Function::kPenumbral;
  return {kernel, as_is, r, kFarthest};
}

void CheckConeTokens(const char* name, const at::Tensor& tokens) {
  TORCH_CHECK_VALUE(tokens.dim() == 4 && tokens.size(3) >= 2, "gnomon.cone_map: ", name,
                    " has shape ", tokens.sizes(),
                    "; expected (batch, heads, length, head_dim) with head_dim >= 2");
  TORCH_CHECK_TYPE(tokens.scalar_type() == at::kDouble || HasTokenMapKernel(tokens.scalar_type()),
                   "gnomon.cone_map: ", name, " has dtype ", tokens.scalar_type(),
                   "; expected float32, float64, bfloat16 or float16");
}

void CheckConeTokens(const at::Tensor& q, const at::Tensor& k) {
  CheckConeTokens("q", q);
  CheckConeTokens("k", k);
  TORCH_CHECK_TYPE(q.scalar_type() == k.scalar_type(), "gnomon.cone_map: k has dtype ",
                   k.scalar_type(), ", but q has ", q.scalar_type(), "; expected the same dtype");
}

// The rotations of q and k, which are applied before the map.
using Rotations = std::array<PendingRotation, 2>;

Rotations RotationsOf(const OptionalTensor& q_cosine, const OptionalTensor& q_sine,
                      const OptionalTensor& k_cosine, const OptionalTensor& k_sine, int64_t block) {
  return {{{{OrUndefined(q_cosine), OrUndefined(q_sine)}, block},
           {{OrUndefined(k_cosine), OrUndefined(k_sine)}, block}}};
}

// Tokens in the computing type, rotated by PyTorch's operators.
at::Tensor RotatedTokens(const at::Tensor& tokens, const PendingRotation& rotation) {
  const at::Tensor wide = InType(tokens, ComputingType(tokens));
  return rotation.exists() ? RotateComposed(wide, rotation, /*back=*/false) : wide;
}

// Tokens (B, H, L, D) in the kernels' form.
template <class T>
MappedCones<T> ConesOf(const at::Tensor& tokens, const ConeMap& map) {
  MappedCones<T> cones;
  cones.map = map;
  cones.batch = tokens.size(0);
  cones.heads = tokens.size(1);
  cones.rows = tokens.size(2);
  cones.columns = tokens.size(3) - 1;
  cones.tokens = {tokens.const_data_ptr<T>(),
                  {tokens.stride(0), tokens.stride(1), tokens.stride(2)}};
  return cones;
}

template <class T>
void Run(const MappedCones<T>& cones) {
  constexpr int64_t kGrain = 1 << 14;  // numbers
  ParallelFor(cones.count(), std::max<int64_t>(1, kGrain / (cones.columns + 1)),
              [&](int64_t begin, int64_t end) { MapConeTokens(cones, begin, end); });
}

template <class T>
void MapTokens(const at::Tensor& tokens_in, const ConeMap& map, at::Tensor& x,
               at::Tensor& scalars) {
  const at::Tensor tokens = WithRows(tokens_in);
  MappedCones<T> cones = ConesOf<T>(tokens, map);
  cones.width = x.size(3);
  cones.x = x.data_ptr<T>();
  cones.scalars = scalars.data_ptr<T>();
  Run(cones);
}

template <class T>
at::Tensor MapGradient(const at::Tensor& tokens_in, const OptionalTensor& d_x_in,
                       const OptionalTensor& d_scalars_in, const ConeMap& map) {
  const at::Tensor tokens = WithRows(tokens_in);
  at::Tensor gradient = EmptyOnCpu(tokens.sym_sizes(), tokens.scalar_type(), tokens, false);
  const at::Tensor d_x = Contiguous(d_x_in);
  const at::Tensor d_scalars = Contiguous(d_scalars_in);
  MappedCones<T> cones = ConesOf<T>(tokens, map);
  cones.width = d_x.defined() ? d_x.size(3) : 0;
  cones.d_x = Data<T>(d_x);
  cones.d_scalars = Data<T>(d_scalars);
  cones.d_tokens = gradient.data_ptr<T>();
  Run(cones);
  return gradient;
}

using MapOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Uninitialised tensors (B, H, L, D - 1), with D - 1 rounded up to kColumnStep, and (S, B, H, L).
template <MakeEmpty make_empty>
std::pair<at::Tensor, at::Tensor> EmptyTokens(const at::Tensor& tokens, int scalars,
                                              at::ScalarType type) {
  const c10::SymInt columns =
      (tokens.sym_size(3) - 1 + (kColumnStep - 1)) / kColumnStep * kColumnStep;
  return {make_empty({tokens.sym_size(0), tokens.sym_size(1), tokens.sym_size(2), columns}, type,
                     tokens, false),
          make_empty({scalars, tokens.sym_size(0), tokens.sym_size(1), tokens.sym_size(2)},
                     ComputingType(tokens), tokens, false)};
}

template <MakeEmpty make_empty = EmptyBeside>
MapOutputs MapForwardMeta(const at::Tensor& q, const at::Tensor& k, std::string_view function,
                          std::string_view /*map*/, double /*r*/,
                          const OptionalTensor& /*q_cosine*/, const OptionalTensor& /*q_sine*/,
                          const OptionalTensor& /*k_cosine*/, const OptionalTensor& /*k_sine*/,
                          int64_t /*block*/, std::optional<at::ScalarType> type) {
  const at::ScalarType of_tokens = type.value_or(q.scalar_type());
  auto [x, row_scalars] = EmptyTokens<make_empty>(q, ScalarsOf(function), of_tokens);
  auto [y, column_scalars] = EmptyTokens<make_empty>(k, ScalarsOf(function), of_tokens);
  return {x, row_scalars, y, column_scalars};
}

MapOutputs MapForwardCpu(const at::Tensor& q, const at::Tensor& k, std::string_view function,
                         std::string_view map, double r, const OptionalTensor& q_cosine,
                         const OptionalTensor& q_sine, const OptionalTensor& k_cosine,
                         const OptionalTensor& k_sine, int64_t block,
                         std::optional<at::ScalarType> type) {
  CheckConeTokens(q, k);
  const Rotations rotations = RotationsOf(q_cosine, q_sine, k_cosine, k_sine, block);
  const at::Tensor wide_q = RotatedTokens(q, rotations[0]);
  const at::Tensor wide_k = RotatedTokens(k, rotations[1]);
  MapOutputs outputs = MapForwardMeta<EmptyOnCpu>(wide_q, wide_k, function, map, r, {}, {}, {}, {},
                                                  block, std::nullopt);
  auto& [x, row_scalars, y, column_scalars] = outputs;
  const ConeMap cone = FindMap(function, map, r);
  const auto run = [&, &x = x, &rows = row_scalars, &y = y, &columns = column_scalars](auto zero) {
    MapTokens<decltype(zero)>(wide_q, cone, x, rows);
    MapTokens<decltype(zero)>(wide_k, cone, y, columns);
  };
  wide_q.scalar_type() == at::kDouble ? run(0.0) : run(0.0f);
  x = InType(x, type.value_or(q.scalar_type()));
  y = InType(y, type.value_or(q.scalar_type()));
  return outputs;
}

using MapNeeded = std::array<bool, 2>;
using MapGradients = std::tuple<at::Tensor, at::Tensor>;

// The gradient of raw tokens, given that of rotated tokens in the computing type.
at::Tensor GradientOfRaw(const at::Tensor& gradient, const at::Tensor& tokens,
                         const PendingRotation& rotation) {
  return InType(rotation.exists() ? RotateComposed(gradient, rotation, /*back=*/true) : gradient,
                tokens.scalar_type());
}

MapGradients MapBackwardCpu(const OptionalTensor& d_x, const OptionalTensor& d_rows,
                            const OptionalTensor& d_y, const OptionalTensor& d_columns,
                            const at::Tensor& q, const at::Tensor& k, std::string_view function,
                            std::string_view map, double r, MapNeeded needed,
                            const OptionalTensor& q_cosine, const OptionalTensor& q_sine,
                            const OptionalTensor& k_cosine, const OptionalTensor& k_sine,
                            int64_t block) {
  CheckConeTokens(q, k);
  const ConeMap cone = FindMap(function, map, r);
  const Rotations rotations = RotationsOf(q_cosine, q_sine, k_cosine, k_sine, block);
  const auto gradient = [&](const at::Tensor& tokens, const OptionalTensor& d_tokens,
                            const OptionalTensor& d_scalars, const PendingRotation& rotation) {
    const at::Tensor wide = RotatedTokens(tokens, rotation);
    const OptionalTensor d_wide =
        d_tokens ? OptionalTensor(InType(*d_tokens, wide.scalar_type())) : std::nullopt;
    return GradientOfRaw(wide.scalar_type() == at::kDouble
                             ? MapGradient<double>(wide, d_wide, d_scalars, cone)
                             : MapGradient<float>(wide, d_wide, d_scalars, cone),
                         tokens, rotation);
  };
  const at::Tensor none = EmptyOnCpu({c10::SymInt(0)}, q.scalar_type(), q, false);
  return {needed[0] ? gradient(q, d_x, d_rows, rotations[0]) : none,
          needed[1] ? gradient(k, d_y, d_columns, rotations[1]) : none};
}

// The following functions compute the same map with PyTorch operators, on any device.
struct TensorValues {
  at::Tensor m;
  at::Tensor dm;
  std::vector<at::Tensor> scalars;
  std::vector<at::Tensor> d_scalars;
};

TensorValues UmbralValues(const at::Tensor& z, bool as_is, double r) {
  const double by_sinh = 1 / std::sinh(r);
  if (as_is) return {at::full_like(z, by_sinh), at::zeros_like(z), {z}, {at::ones_like(z)}};
  const at::Tensor h = z.clamp(-kFarthest, kFarthest).exp();
  const at::Tensor slope = h * (z.abs() <= kFarthest);
  return {h * by_sinh, slope * by_sinh, {h}, {slope}};
}

TensorValues PenumbralValues(const at::Tensor& z, bool as_is, double r) {
  at::Tensor u, rest, slope, m, dm;
  if (as_is) {
    const at::Tensor share = z / r;
    u = share.clamp(0, 1);
    rest = 1 - u;
    slope = share.ge(0).logical_and(share.le(1)).to(z.scalar_type()) / r;
    m = at::full_like(z, 1 / r);
    dm = at::zeros_like(z);
  } else {
    const at::Tensor small = z.abs().neg().exp();
    const at::Tensor above = (1 + small).reciprocal();
    const at::Tensor below = small * above;
    const at::Tensor negative = z < 0;
    u = at::where(negative, below, above);
    rest = at::where(negative, above, below);
    slope = u * rest;
    m = u;
    dm = slope;
  }
  // Avoids the square root of 0: its second derivatives would be NaN even where where() discards
  // the value.
  const at::Tensor a_square = rest * (1 + u);
  const at::Tensor is_inside = a_square > 0;
  const at::Tensor root = at::where(is_inside, a_square, 1.0).sqrt();
  const at::Tensor a = at::where(is_inside, root, 0.0);
  const at::Tensor a_slope = at::where(is_inside, -u * slope / root, 0.0);
  const at::Tensor square = u * u;
  const at::Tensor d_square = 2 * u * slope;
  const at::Tensor below = (1 + a).reciprocal();
  return {
      m, dm, {square * below, square}, {(d_square - square * below * a_slope) * below, d_square}};
}

// Checks the names as FindMap does.
TensorValues MapValuesOf(const at::Tensor& tokens, std::string_view function, std::string_view map,
                         double r) {
  FindMap(function, map, r);
  const at::Tensor z = tokens.select(3, tokens.size(3) - 1);
  if (function == "umbral") return UmbralValues(z, map == "none", r);
  return PenumbralValues(z, map == "none", r);
}

MapOutputs MapForwardComposite(const at::Tensor& q, const at::Tensor& k, std::string_view function,
                               std::string_view map, double r, const OptionalTensor& q_cosine,
                               const OptionalTensor& q_sine, const OptionalTensor& k_cosine,
                               const OptionalTensor& k_sine, int64_t block,
                               std::optional<at::ScalarType> type) {
  CheckConeTokens(q, k);
  const Rotations rotations = RotationsOf(q_cosine, q_sine, k_cosine, k_sine, block);
  const auto mapped = [&](const at::Tensor& raw, const PendingRotation& rotation) {
    const at::Tensor tokens = RotatedTokens(raw, rotation);
    const TensorValues values = MapValuesOf(tokens, function, map, r);
    const int64_t columns = tokens.size(3) - 1;
    const int64_t padding = (kColumnStep - columns % kColumnStep) % kColumnStep;
    const at::Tensor x = values.m.unsqueeze(3) * tokens.narrow(3, 0, columns);
    return std::pair(InType(at::constant_pad_nd(x, {0, padding}), type.value_or(q.scalar_type())),
                     at::stack(values.scalars));
  };
  const auto [x, row_scalars] = mapped(q, rotations[0]);
  const auto [y, column_scalars] = mapped(k, rotations[1]);
  return {x, row_scalars, y, column_scalars};
}

MapGradients MapBackwardComposite(const OptionalTensor& d_x, const OptionalTensor& d_rows,
                                  const OptionalTensor& d_y, const OptionalTensor& d_columns,
                                  const at::Tensor& q, const at::Tensor& k,
                                  std::string_view function, std::string_view map, double r,
                                  MapNeeded needed, const OptionalTensor& q_cosine,
                                  const OptionalTensor& q_sine, const OptionalTensor& k_cosine,
                                  const OptionalTensor& k_sine, int64_t block) {
  CheckConeTokens(q, k);
  const Rotations rotations = RotationsOf(q_cosine, q_sine, k_cosine, k_sine, block);
  const auto gradient = [&](const at::Tensor& raw, const OptionalTensor& d_tokens,
                            const OptionalTensor& d_scalars, const PendingRotation& rotation) {
    const at::Tensor tokens = RotatedTokens(raw, rotation);
    const TensorValues values = MapValuesOf(tokens, function, map, r);
    const int64_t columns = tokens.size(3) - 1;
    const at::Tensor w = tokens.narrow(3, 0, columns);
    at::Tensor d_w = at::zeros_like(w);
    at::Tensor d_z = at::zeros_like(values.m);
    if (d_tokens) {
      const at::Tensor d = InType(*d_tokens, tokens.scalar_type()).narrow(3, 0, columns);
      d_w = values.m.unsqueeze(3) * d;
      d_z = values.dm * (d * w).sum(3);
    }
    for (size_t s = 0; d_scalars && s < values.d_scalars.size(); ++s) {
      d_z = d_z + values.d_scalars[s] * d_scalars->select(0, static_cast<int64_t>(s));
    }
    return GradientOfRaw(at::cat({d_w, d_z.unsqueeze(3)}, 3), raw, rotation);
  };
  const at::Tensor none = at::empty({0}, q.options());
  return {needed[0] ? gradient(q, d_x, d_rows, rotations[0]) : none,
          needed[1] ? gradient(k, d_y, d_columns, rotations[1]) : none};
}

constexpr const char* kConeMap = "gnomon.cone_map";

MapOutputs MapForwardCuda(const at::Tensor& q, const at::Tensor& k, std::string_view function,
                          std::string_view map, double r, const OptionalTensor& q_cosine,
                          const OptionalTensor& q_sine, const OptionalTensor& k_cosine,
                          const OptionalTensor& k_sine, int64_t block,
                          std::optional<at::ScalarType> type) {
  if (q.scalar_type() == at::kDouble) {
    return MapForwardComposite(q, k, function, map, r, q_cosine, q_sine, k_cosine, k_sine, block,
                               type);
  }
  CheckConeTokens(q, k);
  const ConeMap cone = FindMap(function, map, r);
  const Rotations rotations = RotationsOf(q_cosine, q_sine, k_cosine, k_sine, block);
  const MapOutputs outputs =
      MapForwardMeta(q, k, function, map, r, q_cosine, q_sine, k_cosine, k_sine, block, type);
  const auto& [x, row_scalars, y, column_scalars] = outputs;
  MapTokensOnGpu(
      kConeMap,
      {{{.tokens = q, .rotation = rotations[0], .mapped = x, .scalars = row_scalars},
        {.tokens = k, .rotation = rotations[1], .mapped = y, .scalars = column_scalars}}},
      cone);
  return outputs;
}

MapGradients MapBackwardMeta(const OptionalTensor& /*d_x*/, const OptionalTensor& /*d_rows*/,
                             const OptionalTensor& /*d_y*/, const OptionalTensor& /*d_columns*/,
                             const at::Tensor& q, const at::Tensor& k,
                             std::string_view /*function*/, std::string_view /*map*/, double /*r*/,
                             MapNeeded needed, const OptionalTensor& /*q_cosine*/,
                             const OptionalTensor& /*q_sine*/, const OptionalTensor& /*k_cosine*/,
                             const OptionalTensor& /*k_sine*/, int64_t /*block*/) {
  const auto like = [](const at::Tensor& tokens, bool is_needed) {
    return is_needed ? at::empty_symint(tokens.sym_sizes(), tokens.options())
                     : at::empty({0}, tokens.options());
  };
  return {like(q, needed[0]), like(k, needed[1])};
}

MapGradients MapBackwardCuda(const OptionalTensor& d_x, const OptionalTensor& d_rows,
                             const OptionalTensor& d_y, const OptionalTensor& d_columns,
                             const at::Tensor& q, const at::Tensor& k, std::string_view function,
                             std::string_view map, double r, MapNeeded needed,
                             const OptionalTensor& q_cosine, const OptionalTensor& q_sine,
                             const OptionalTensor& k_cosine, const OptionalTensor& k_sine,
                             int64_t block) {
  if (q.scalar_type() == at::kDouble || (d_x && d_y && d_x->scalar_type() != d_y->scalar_type())) {
    return MapBackwardComposite(d_x, d_rows, d_y, d_columns, q, k, function, map, r, needed,
                                q_cosine, q_sine, k_cosine, k_sine, block);
  }
  CheckConeTokens(q, k);
  const ConeMap cone = FindMap(function, map, r);
  const Rotations rotations = RotationsOf(q_cosine, q_sine, k_cosine, k_sine, block);
  const MapGradients gradients =
      MapBackwardMeta(d_x, d_rows, d_y, d_columns, q, k, function, map, r, needed, q_cosine, q_sine,
                      k_cosine, k_sine, block);
  std::array<TokenMapTensors, 2> sides;
  if (needed[0]) {
    sides[0] = {.tokens = q,
                .rotation = rotations[0],
                .mapped = OrUndefined(d_x),
                .scalars = OrUndefined(d_rows),
                .d_tokens = std::get<0>(gradients)};
  }
  if (needed[1]) {
    sides[1] = {.tokens = k,
                .rotation = rotations[1],
                .mapped = OrUndefined(d_y),
                .scalars = OrUndefined(d_columns),
                .d_tokens = std::get<1>(gradients)};
  }
  if (needed[0] || needed[1]) MapTokensBackwardOnGpu(kConeMap, sides, cone);
  return gradients;
}

MapOutputs CallForward(const at::Tensor& q, const at::Tensor& k, std::string_view function,
                       std::string_view map, double r, const OptionalTensor& q_cosine,
                       const OptionalTensor& q_sine, const OptionalTensor& k_cosine,
                       const OptionalTensor& k_sine, int64_t block,
                       std::optional<at::ScalarType> type) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gnomon::cone_map", "")
                             .typed<decltype(MapForwardCpu)>();
  return op.call(q, k, function, map, r, q_cosine, q_sine, k_cosine, k_sine, block, type);
}

MapGradients CallBackward(const OptionalTensor& d_x, const OptionalTensor& d_rows,
                          const OptionalTensor& d_y, const OptionalTensor& d_columns,
                          const at::Tensor& q, const at::Tensor& k, std::string_view function,
                          std::string_view map, double r, MapNeeded needed,
                          const OptionalTensor& q_cosine, const OptionalTensor& q_sine,
                          const OptionalTensor& k_cosine, const OptionalTensor& k_sine,
                          int64_t block) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gnomon::cone_map_backward", "")
                             .typed<decltype(MapBackwardCpu)>();
  return op.call(d_x, d_rows, d_y, d_columns, q, k, function, map, r, needed, q_cosine, q_sine,
                 k_cosine, k_sine, block);
}

class ConeMapFunction : public torch::autograd::Function<ConeMapFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                               std::string function, std::string map, double r,
                               const Rotations& rotations, MapNeeded needed,
                               const MapOutputs& outputs) {
    const auto& [of_q, of_k] = rotations;
    context->save_for_backward(
        {q, k, of_q.turns.cosine, of_q.turns.sine, of_k.turns.cosine, of_k.turns.sine});
    context->saved_data["function"] = std::move(function);
    context->saved_data["map"] = std::move(map);
    context->saved_data["r"] = r;
    context->saved_data["block"] = of_q.block;
    context->saved_data["needed"] = c10::List<bool>(c10::ArrayRef<bool>(needed));
    context->set_materialize_grads(false);
    const auto& [x, row_scalars, y, column_scalars] = outputs;
    return {x, row_scalars, y, column_scalars};
  }

  static variable_list backward(AutogradContext* context, const variable_list& d_outputs) {
    const variable_list saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const c10::List<bool> flags = data["needed"].toBoolList();
    const MapNeeded needed = {flags[0], flags[1]};
    // The operator's batching rule does not batch the turns.
    const bool rotates = saved[2].defined() || saved[4].defined();
    const bool batched =
        rotates && std::any_of(d_outputs.begin(), d_outputs.end(), [](const at::Tensor& d) {
          return d.defined() && !IsPlainTensor(d);
        });
    const auto [d_q, d_k] = (batched ? MapBackwardComposite : CallBackward)(
        AsOptional(d_outputs[0]), AsOptional(d_outputs[1]), AsOptional(d_outputs[2]),
        AsOptional(d_outputs[3]), saved[0], saved[1], data["function"].toStringRef(),
        data["map"].toStringRef(), data["r"].toDouble(), needed, AsOptional(saved[2]),
        AsOptional(saved[3]), AsOptional(saved[4]), AsOptional(saved[5]), data["block"].toInt());
    return {needed[0] ? d_q : at::Tensor(), needed[1] ? d_k : at::Tensor(), {}, {}, {}, {}, {}, {}};
  }
};

MapOutputs MapForwardAutograd(const at::Tensor& q, const at::Tensor& k, std::string_view function,
                              std::string_view map, double r, const OptionalTensor& q_cosine,
                              const OptionalTensor& q_sine, const OptionalTensor& k_cosine,
                              const OptionalTensor& k_sine, int64_t block,
                              std::optional<at::ScalarType> type) {
  // PyTorch's operators have derivatives of any order, and with respect to the turns.
  if (HasTangent(q) || HasTangent(k) ||
      AreDifferentiated({&q_cosine, &q_sine, &k_cosine, &k_sine})) {
    return MapForwardComposite(q, k, function, map, r, q_cosine, q_sine, k_cosine, k_sine, block,
                               type);
  }
  const MapNeeded needed = {q.requires_grad(), k.requires_grad()};
  const MapOutputs outputs = BelowAutograd([&] {
    return CallForward(q, k, function, map, r, q_cosine, q_sine, k_cosine, k_sine, block, type);
  });
  if (!RecordsGradients(needed)) return outputs;
  const variable_list recorded = ApplyFunction<ConeMapFunction>(
      q, k, std::string(function), std::string(map), r,
      RotationsOf(q_cosine, q_sine, k_cosine, k_sine, block), needed, outputs);
  return {recorded[0], recorded[1], recorded[2], recorded[3]};
}

// If the gradient is itself differentiated, it is composed of PyTorch's operators.
MapGradients MapBackwardAutograd(const OptionalTensor& d_x, const OptionalTensor& d_rows,
                                 const OptionalTensor& d_y, const OptionalTensor& d_columns,
                                 const at::Tensor& q, const at::Tensor& k,
                                 std::string_view function, std::string_view map, double r,
                                 MapNeeded needed, const OptionalTensor& q_cosine,
                                 const OptionalTensor& q_sine, const OptionalTensor& k_cosine,
                                 const OptionalTensor& k_sine, int64_t block) {
  const OptionalTensor tokens[] = {q, k};
  if (AreDifferentiated({&d_x, &d_rows, &d_y, &d_columns, &tokens[0], &tokens[1], &q_cosine,
                         &q_sine, &k_cosine, &k_sine})) {
    return MapBackwardComposite(d_x, d_rows, d_y, d_columns, q, k, function, map, r, needed,
                                q_cosine, q_sine, k_cosine, k_sine, block);
  }
  return BelowAutograd([&] {
    return CallBackward(d_x, d_rows, d_y, d_columns, q, k, function, map, r, needed, q_cosine,
                        q_sine, k_cosine, k_sine, block);
  });
}

}  // namespace

ConeTokens CallConeMap(const RawTokens& tokens, std::string_view function, std::string_view map,
                       double r) {
  const PendingRotation& of_q = tokens.q_rotation;
  const PendingRotation& of_k = tokens.k_rotation;
  const OptionalTensor turns[] = {AsOptional(of_q.turns.cosine), AsOptional(of_q.turns.sine),
                                  AsOptional(of_k.turns.cosine), AsOptional(of_k.turns.sine)};
  // Learned turns get gradients from the rotation alone.
  if (AreDifferentiated({&turns[0], &turns[1], &turns[2], &turns[3]}) ||
      (of_q.exists() && of_k.exists() && of_q.block != of_k.block)) {
    const auto [q, k] = RotateTokens(tokens.q, of_q, tokens.k, of_k, ComputingType(tokens.q));
    return CallConeMap({q, k, {}, {}, tokens.type}, function, map, r);
  }
  auto [x, row_scalars, y, column_scalars] =
      CallForward(tokens.q, tokens.k, function, map, r, AsOptional(of_q.turns.cosine),
                  AsOptional(of_q.turns.sine), AsOptional(of_k.turns.cosine),
                  AsOptional(of_k.turns.sine), std::max(of_q.block, of_k.block), tokens.type);
  return {x, row_scalars, y, column_scalars};
}

TORCH_LIBRARY_IMPL(gnomon, CPU, m) {
  m.impl("cone_map", MapForwardCpu);
  m.impl("cone_map_backward", MapBackwardCpu);
}

TORCH_LIBRARY_IMPL(gnomon, CUDA, m) {
  m.impl("cone_map", MapForwardCuda);
  m.impl("cone_map_backward", MapBackwardCuda);
}

TORCH_LIBRARY_IMPL(gnomon, Meta, m) {
  m.impl("cone_map", MapForwardMeta<>);
  m.impl("cone_map_backward", MapBackwardMeta);
}

TORCH_LIBRARY_IMPL(gnomon, Autograd, m) {
  m.impl("cone_map", MapForwardAutograd);
  m.impl("cone_map_backward", MapBackwardAutograd);
}

MappedTokens MapCones(const RawTokens& raw, const char* function, const std::string& map,
                      double r) {
  const auto mapped = [&] {
    if (map != "exp") return CallConeMap(raw, function, map, r);
    const auto as_point = [](const at::Tensor& tangent) {
      const HalfSpacePoint point = ExponentialMap(tangent);
      return at::cat({point.x, OverColumns(point.height)}, 3);
    };
    const auto [q, k] =
        RotateTokens(raw.q, raw.q_rotation, raw.k, raw.k_rotation, ComputingType(raw.q));
    return CallConeMap({as_point(q), as_point(k), {}, {}, raw.type}, function, "none", r);
  };
  const ConeTokens cones = mapped();
  return {.function = function,
          .x = cones.x,
          .y = cones.y,
          .factor = {},
          .row_scalars = cones.row_scalars,
          .column_scalars = cones.column_scalars};
}

void TakeLogarithm(const char* function, const at::Tensor& gamma, MappedTokens* tokens) {
  tokens->function = function;
  tokens->factor = TimesNumber(gamma, -1);
  tokens->row_constant = [gamma] { return OverRows(gamma) * std::numbers::ln2; };
}

}  // namespace gnomon
