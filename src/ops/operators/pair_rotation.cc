#include "ops/operators/pair_rotation.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/rotation.h"
#include "cpu/workspace.h"
#include "ops/operators/argument_list.h"
#include "ops/operators/autograd.h"
#include "ops/operators/executor.h"
#include "ops/operators/kernel_arguments.h"
#include "ops/operators/tensors.h"
#include "ops/operators/token_map_cuda.h"

namespace gnomon {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kRotateTokens = "gnomon.rotate_tokens";

bool TurnsInOnePass(const at::Tensor& x, const Turns& turns) {
  if (!x.is_cpu() || (x.scalar_type() != at::kFloat && x.scalar_type() != at::kDouble)) {
    return false;
  }
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return false;
  }
  const auto has_tangent = [](const at::Tensor& tensor) {
    return tensor._fw_grad(/*level=*/0).defined();
  };
  if (!HasNumbers(x) || has_tangent(x)) return false;
  for (const at::Tensor* turn : {&turns.cosine, &turns.sine}) {
    if (!HasNumbers(*turn) || has_tangent(*turn) || turn->scalar_type() != x.scalar_type() ||
        (at::GradMode::is_enabled() && turn->requires_grad())) {
      return false;
    }
  }
  return true;
}

template <class T>
void RunRotation(const at::Tensor& x_in, const Turns& turns, int64_t block, bool back,
                 at::Tensor& turned) {
  const at::Tensor x = WithRows(x_in);
  const int64_t pairs = turns.cosine.size(-1);
  const at::Tensor cosine = turns.cosine.contiguous();
  const at::Tensor sine = turns.sine.contiguous();
  const auto view = [](const at::Tensor& tensor) {
    View<const T> rows{tensor.const_data_ptr<T>(), {0, 0, 0}};
    // Missing axes and axes of size 1 broadcast. Expanding the tensor would cost an operator call.
    const int64_t lacking = 4 - tensor.dim();
    for (int64_t axis = lacking; axis < 3; ++axis) {
      if (tensor.size(axis - lacking) != 1) {
        rows.stride[static_cast<size_t>(axis)] = tensor.stride(axis - lacking);
      }
    }
    return rows;
  };
  PairRotation<T> rotation;
  rotation.batch = x.size(0);
  rotation.heads = x.size(1);
  rotation.rows = x.size(2);
  rotation.columns = x.size(3);
  rotation.pairs = pairs;
  rotation.block = block;
  rotation.back = back;
  rotation.tokens = view(x);
  rotation.cosines = view(cosine);
  rotation.sines = view(sine);
  rotation.turned = {turned.data_ptr<T>(), {turned.stride(0), turned.stride(1), turned.stride(2)}};
  constexpr int64_t kGrain = 1 << 14;  // numbers
  ParallelFor(rotation.count(), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, x.size(3))),
              [&](int64_t begin, int64_t end) { RotatePairsOf(rotation, begin, end); });
}

at::Tensor TurnTokens(const at::Tensor& x, const Turns& turns, int64_t block, bool back,
                      const at::Tensor& to = {});

// Returns a contiguous tensor. A large one uses memory that the thread reuses between calls,
// because fresh memory costs a page fault per 4 KiB, which takes longer than the rotation.
at::Tensor InKeptMemory(const at::Tensor& like) {
  constexpr int64_t kLarge = 1 << 13;
  if (like.numel() < kLarge) {
    return at::detail::empty_cpu(like.sizes(), like.scalar_type());
  }
  const int64_t floats = like.numel() * (like.scalar_type() == at::kDouble ? 2 : 1);
  auto buffer = std::make_shared<Buffer>(floats);
  float* const data = buffer->data();
  return at::from_blob(
      data, like.sizes(), [buffer = std::move(buffer)](void*) mutable { buffer.reset(); },
      like.options());
}

// Whether nothing else refers to a gradient, so that it can be rotated in place.
bool IsOwn(const at::Tensor& gradient) {
  return !at::GradMode::is_enabled() && !gradient.requires_grad() && gradient.use_count() == 1 &&
         gradient.has_storage() && gradient.storage().use_count() == 1 && gradient.is_contiguous();
}

// Rotates in the forward pass, and by the opposite angles in the backward pass. The gradient of the
// gradient is a rotation as well.
class TurnFunction : public torch::autograd::Function<TurnFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& /*x*/,
                               const Turns& turns, int64_t block, bool back,
                               const std::tuple<at::Tensor>& turned) {
    context->save_for_backward({turns.cosine, turns.sine});
    context->saved_data["block"] = block;
    context->saved_data["back"] = back;
    return {std::get<0>(turned)};
  }

  static variable_list backward(AutogradContext* context, const variable_list& d_turned) {
    const variable_list saved = context->get_saved_variables();
    const Turns turns{saved[0], saved[1]};
    const int64_t block = context->saved_data["block"].toInt();
    const bool back = !context->saved_data["back"].toBool();
    // Gradients that the kernel does not support are rotated with PyTorch operators.
    const at::Tensor d_x = TurnsInOnePass(d_turned[0], turns)
                               ? TurnTokens(d_turned[0], turns, block, back,
                                            IsOwn(d_turned[0]) ? d_turned[0] : at::Tensor())
                               : RotateComposed(d_turned[0], {turns, block}, back);
    return {d_x, {}, {}, {}, {}};
  }
};

// `block`: the number of columns whose two halves form pairs; 0 if pairs are adjacent. The result
// is `to`, if defined; `to` may be x.
at::Tensor TurnTokens(const at::Tensor& x, const Turns& turns, int64_t block, bool back,
                      const at::Tensor& to) {
  const at::Tensor turned = BelowAutograd([&] {
    at::Tensor result = to.defined() ? to : InKeptMemory(x);
    x.scalar_type() == at::kDouble ? RunRotation<double>(x, turns, block, back, result)
                                   : RunRotation<float>(x, turns, block, back, result);
    return result;
  });
  if (!RecordsGradients(std::array<bool, 1>{x.requires_grad()})) return turned;
  return ApplyFunction<TurnFunction>(x, turns, block, back, std::tuple(turned))[0];
}

// The kernels of the operator rotate_tokens, for q, k or both.
using RotatedTokens = std::tuple<at::Tensor, at::Tensor>;

RotatedTokens RotateTokensMeta(const OptionalTensor& q, const OptionalTensor& k,
                               const OptionalTensor& /*q_cosine*/, const OptionalTensor& /*q_sine*/,
                               const OptionalTensor& /*k_cosine*/, const OptionalTensor& /*k_sine*/,
                               int64_t /*block*/, bool /*back*/, at::ScalarType type) {
  const at::Tensor& like = q ? *q : *k;
  const at::TensorOptions options = like.options().dtype(type);
  const auto empty = [&](const OptionalTensor& tokens) {
    return tokens ? at::empty_symint(tokens->sym_sizes(), options) : at::empty({0}, options);
  };
  return {empty(q), empty(k)};
}

// On any device.
RotatedTokens RotateTokensComposed(const OptionalTensor& q, const OptionalTensor& k,
                                   const OptionalTensor& q_cosine, const OptionalTensor& q_sine,
                                   const OptionalTensor& k_cosine, const OptionalTensor& k_sine,
                                   int64_t block, bool back, at::ScalarType type) {
  const at::Tensor none = at::empty({0}, (q ? *q : *k).options().dtype(type));
  const auto rotated = [&](const OptionalTensor& tokens, const OptionalTensor& cosine,
                           const OptionalTensor& sine) {
    if (!tokens) return none;
    return RotateComposed(InType(*tokens, ComputingType(*tokens)), {{*cosine, *sine}, block}, back)
        .to(type);
  };
  return {rotated(q, q_cosine, q_sine), rotated(k, k_cosine, k_sine)};
}

RotatedTokens RotateTokensCuda(const OptionalTensor& q, const OptionalTensor& k,
                               const OptionalTensor& q_cosine, const OptionalTensor& q_sine,
                               const OptionalTensor& k_cosine, const OptionalTensor& k_sine,
                               int64_t block, bool back, at::ScalarType type) {
  if (!HasTokenMapKernel(type) || !HasTokenMapKernel((q ? *q : *k).scalar_type())) {
    return RotateTokensComposed(q, k, q_cosine, q_sine, k_cosine, k_sine, block, back, type);
  }
  RotatedTokens outputs =
      RotateTokensMeta(q, k, q_cosine, q_sine, k_cosine, k_sine, block, back, type);
  std::array<TokenMapTensors, 2> sides;
  if (q) sides[0] = {.tokens = *q, .rotation = {{*q_cosine, *q_sine}, block}};
  if (k) sides[1] = {.tokens = *k, .rotation = {{*k_cosine, *k_sine}, block}};
  sides[0].mapped = std::get<0>(outputs);
  sides[1].mapped = std::get<1>(outputs);
  MapTokensOnGpu(kRotateTokens, sides, std::nullopt, back);
  return outputs;
}

RotatedTokens CallRotateTokens(const OptionalTensor& q, const OptionalTensor& k,
                               const OptionalTensor& q_cosine, const OptionalTensor& q_sine,
                               const OptionalTensor& k_cosine, const OptionalTensor& k_sine,
                               int64_t block, bool back, at::ScalarType type) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gnomon::rotate_tokens", "")
                             .typed<decltype(RotateTokensCuda)>();
  return op.call(q, k, q_cosine, q_sine, k_cosine, k_sine, block, back, type);
}

// Whether the GPU kernels can read the turns.
bool AreReadable(const Turns& turns) {
  const auto fits = [](const at::Tensor& turn) {
    return turn.scalar_type() == at::kFloat && turn.dim() <= 4 && IsPlainTensor(turn) &&
           !HasTangent(turn);
  };
  return fits(turns.cosine) && fits(turns.sine);
}

// The kernels of the operator rotate_tokens_backward: the gradients of the tokens and the turns of
// q and k. Those of absent tokens are empty.
using RotationGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The gradients of one side.
struct SideGradients {
  at::Tensor tokens, cosine, sine;
};
RotationGradients GradientsOf(const SideGradients& q, const SideGradients& k) {
  return {q.tokens, k.tokens, q.cosine, q.sine, k.cosine, k.sine};
}

RotationGradients RotationBackwardMeta(const OptionalTensor& /*d_x*/, const OptionalTensor& /*d_y*/,
                                       const OptionalTensor& q, const OptionalTensor& k,
                                       const OptionalTensor& q_cosine, const OptionalTensor& q_sine,
                                       const OptionalTensor& k_cosine, const OptionalTensor& k_sine,
                                       int64_t /*block*/, bool /*back*/) {
  const at::Tensor& like = q ? *q : *k;
  const auto empty = [&](const OptionalTensor& of) {
    return of ? at::empty_symint(of->sym_sizes(), of->options()) : at::empty({0}, like.options());
  };
  return {empty(q), empty(k), empty(q_cosine), empty(q_sine), empty(k_cosine), empty(k_sine)};
}

// The first or second columns of the pairs, (B, heads, L, pairs).
at::Tensor ColumnsOfPairs(const at::Tensor& x, int64_t pairs, int64_t block, int64_t which) {
  const at::Tensor turned = x.narrow(3, 0, 2 * pairs);
  if (block == 0) return turned.unflatten(3, {pairs, 2}).select(4, which);
  return turned.unflatten(3, {2 * pairs / block, 2, block / 2}).select(4, which).flatten(3);
}

RotationGradients RotationBackwardComposed(const OptionalTensor& d_x, const OptionalTensor& d_y,
                                           const OptionalTensor& q, const OptionalTensor& k,
                                           const OptionalTensor& q_cosine,
                                           const OptionalTensor& q_sine,
                                           const OptionalTensor& k_cosine,
                                           const OptionalTensor& k_sine, int64_t block, bool back) {
  const auto none = [&] { return at::empty({0}, (q ? *q : *k).options()); };
  const auto gradients = [&](const OptionalTensor& d_raw, const OptionalTensor& tokens,
                             const OptionalTensor& cosine,
                             const OptionalTensor& sine) -> SideGradients {
    if (!tokens) return {none(), none(), none()};
    const at::Tensor x = InType(*tokens, ComputingType(*tokens));
    const at::Tensor d = d_raw ? InType(*d_raw, x.scalar_type()) : at::zeros_like(x);
    const int64_t pairs = SizeOf(*cosine, -1);
    const auto column = [&](const at::Tensor& of, int64_t which) {
      return ColumnsOfPairs(of, pairs, block, which);
    };
    const at::Tensor d_cosine = column(d, 0) * column(x, 0) + column(d, 1) * column(x, 1);
    const at::Tensor d_sine = column(d, 1) * column(x, 0) - column(d, 0) * column(x, 1);
    return {InType(RotateComposed(d, {{*cosine, *sine}, block}, !back), tokens->scalar_type()),
            d_cosine.sum_to_size_symint(cosine->sym_sizes()),
            (back ? -d_sine : d_sine).sum_to_size_symint(sine->sym_sizes())};
  };
  return GradientsOf(gradients(d_x, q, q_cosine, q_sine), gradients(d_y, k, k_cosine, k_sine));
}

RotationGradients RotationBackwardCuda(const OptionalTensor& d_x, const OptionalTensor& d_y,
                                       const OptionalTensor& q, const OptionalTensor& k,
                                       const OptionalTensor& q_cosine, const OptionalTensor& q_sine,
                                       const OptionalTensor& k_cosine, const OptionalTensor& k_sine,
                                       int64_t block, bool back) {
  const bool has_all = q.has_value() == d_x.has_value() && k.has_value() == d_y.has_value();
  if (!has_all || !HasTokenMapKernel((q ? *q : *k).scalar_type())) {
    return RotationBackwardComposed(d_x, d_y, q, k, q_cosine, q_sine, k_cosine, k_sine, block,
                                    back);
  }
  std::array<TokenMapTensors, 2> sides;
  const auto describe = [&](size_t n, const OptionalTensor& d, const OptionalTensor& tokens,
                            const OptionalTensor& cosine, const OptionalTensor& sine) {
    if (!tokens) return;
    const auto turns = [&] {
      return at::empty({tokens->size(0), tokens->size(1), tokens->size(2), cosine->size(-1)},
                       cosine->options());
    };
    sides[n] = {.tokens = *tokens,
                .rotation = {{*cosine, *sine}, block},
                .mapped = *d,
                .d_tokens = at::empty(tokens->sizes(), tokens->options()),
                .d_turns = {turns(), turns()}};
  };
  describe(0, d_x, q, q_cosine, q_sine);
  describe(1, d_y, k, k_cosine, k_sine);
  MapTokensBackwardOnGpu(kRotateTokens, sides, std::nullopt, back);
  // Sums over the tokens that share turns.
  const auto none = [&] { return at::empty({0}, (q ? *q : *k).options()); };
  const auto gradients = [&](size_t n, const OptionalTensor& cosine) -> SideGradients {
    const TokenMapTensors& side = sides[n];
    if (!side.tokens.defined()) return {none(), none(), none()};
    return {side.d_tokens, side.d_turns.cosine.sum_to_size(cosine->sizes()),
            side.d_turns.sine.sum_to_size(cosine->sizes())};
  };
  return GradientsOf(gradients(0, q_cosine), gradients(1, k_cosine));
}

RotationGradients CallRotationBackward(const OptionalTensor& d_x, const OptionalTensor& d_y,
                                       const OptionalTensor& q, const OptionalTensor& k,
                                       const OptionalTensor& q_cosine, const OptionalTensor& q_sine,
                                       const OptionalTensor& k_cosine, const OptionalTensor& k_sine,
                                       int64_t block, bool back) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gnomon::rotate_tokens_backward", "")
                             .typed<decltype(RotationBackwardCuda)>();
  return op.call(d_x, d_y, q, k, q_cosine, q_sine, k_cosine, k_sine, block, back);
}

// If the gradients are themselves differentiated, they are composed of PyTorch's operators.
RotationGradients RotationBackwardAutograd(const OptionalTensor& d_x, const OptionalTensor& d_y,
                                           const OptionalTensor& q, const OptionalTensor& k,
                                           const OptionalTensor& q_cosine,
                                           const OptionalTensor& q_sine,
                                           const OptionalTensor& k_cosine,
                                           const OptionalTensor& k_sine, int64_t block, bool back) {
  if (AreDifferentiated({&d_x, &d_y, &q, &k, &q_cosine, &q_sine, &k_cosine, &k_sine})) {
    return RotationBackwardComposed(d_x, d_y, q, k, q_cosine, q_sine, k_cosine, k_sine, block,
                                    back);
  }
  return BelowAutograd([&] {
    return CallRotationBackward(d_x, d_y, q, k, q_cosine, q_sine, k_cosine, k_sine, block, back);
  });
}

class RotateTokensFunction : public torch::autograd::Function<RotateTokensFunction> {
 public:
  // `learns`: whether turns need gradients, which depend on the tokens.
  static variable_list forward(AutogradContext* context, const OptionalTensor& q,
                               const OptionalTensor& k, const OptionalTensor& q_cosine,
                               const OptionalTensor& q_sine, const OptionalTensor& k_cosine,
                               const OptionalTensor& k_sine, int64_t block, bool back, bool learns,
                               const RotatedTokens& outputs) {
    const OptionalTensor none;
    variable_list saved;
    for (const OptionalTensor* tensor :
         {learns ? &q : &none, learns ? &k : &none, &q_cosine, &q_sine, &k_cosine, &k_sine}) {
      saved.push_back(OrUndefined(*tensor));
    }
    context->save_for_backward(saved);
    context->saved_data["block"] = block;
    context->saved_data["back"] = back;
    context->saved_data["learns"] = learns;
    context->saved_data["type"] = (q ? *q : *k).scalar_type();
    context->set_materialize_grads(false);
    return {std::get<0>(outputs), std::get<1>(outputs)};
  }

  // Rotates the gradients by the opposite angles. The gradient of the gradient is a rotation too.
  static variable_list backward(AutogradContext* context, const variable_list& d_outputs) {
    variable_list gradients(10);
    if (!d_outputs[0].defined() && !d_outputs[1].defined()) return gradients;
    std::vector<OptionalTensor> saved;
    for (const at::Tensor& tensor : context->get_saved_variables()) {
      saved.push_back(AsOptional(tensor));
    }
    const int64_t block = context->saved_data["block"].toInt();
    const bool back = context->saved_data["back"].toBool();
    const at::ScalarType type = context->saved_data["type"].toScalarType();
    const OptionalTensor d_x = AsOptional(d_outputs[0]);
    const OptionalTensor d_y = AsOptional(d_outputs[1]);
    const auto on_gpu = [](const OptionalTensor& d) { return !d || MapsOnGpu(*d); };
    const bool fused = on_gpu(d_x) && on_gpu(d_y);
    if (!context->saved_data["learns"].toBool()) {
      const auto [d_q, d_k] = (fused ? CallRotateTokens : RotateTokensComposed)(
          d_x, d_y, saved[2], saved[3], saved[4], saved[5], block, !back, type);
      if (d_x) gradients[0] = d_q;
      if (d_y) gradients[1] = d_k;
      return gradients;
    }
    const auto of_all = (fused ? CallRotationBackward : RotationBackwardComposed)(
        d_x, d_y, saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], block, back);
    const auto& [d_q, d_k, d_q_cosine, d_q_sine, d_k_cosine, d_k_sine] = of_all;
    if (saved[0]) {
      gradients[0] = d_q;
      gradients[2] = d_q_cosine;
      gradients[3] = d_q_sine;
    }
    if (saved[1]) {
      gradients[1] = d_k;
      gradients[4] = d_k_cosine;
      gradients[5] = d_k_sine;
    }
    return gradients;
  }
};

RotatedTokens RotateTokensAutograd(const OptionalTensor& q, const OptionalTensor& k,
                                   const OptionalTensor& q_cosine, const OptionalTensor& q_sine,
                                   const OptionalTensor& k_cosine, const OptionalTensor& k_sine,
                                   int64_t block, bool back, at::ScalarType type) {
  bool needs_tokens = false;
  bool learns = false;
  for (const OptionalTensor* tensor : {&q, &k, &q_cosine, &q_sine, &k_cosine, &k_sine}) {
    if (!*tensor) continue;
    // PyTorch's operators have derivatives of any order.
    if (HasTangent(**tensor)) {
      return RotateTokensComposed(q, k, q_cosine, q_sine, k_cosine, k_sine, block, back, type);
    }
    const bool is_token = tensor == &q || tensor == &k;
    (is_token ? needs_tokens : learns) |= (*tensor)->requires_grad();
  }
  const RotatedTokens outputs = BelowAutograd([&] {
    return CallRotateTokens(q, k, q_cosine, q_sine, k_cosine, k_sine, block, back, type);
  });
  if (!RecordsGradients(std::array<bool, 2>{needs_tokens, learns})) return outputs;
  const variable_list recorded = ApplyFunction<RotateTokensFunction>(
      q, k, q_cosine, q_sine, k_cosine, k_sine, block, back, learns, outputs);
  return {recorded[0], recorded[1]};
}

}  // namespace

bool AreDifferentiated(std::initializer_list<const OptionalTensor*> tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const OptionalTensor* tensor) {
    return *tensor &&
           (HasTangent(**tensor) || (at::GradMode::is_enabled() && (*tensor)->requires_grad()));
  });
}

bool MapsOnGpu(const at::Tensor& x) {
  if (!HasTokenMapKernel(x.scalar_type()) || !IsPlainTensor(x) || HasTangent(x)) return false;
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return false;
  }
  return x.is_cuda() || (x.is_cpu() && c10::impl::TorchDispatchModeTLS::any_modes_set());
}

at::Tensor RotateComposed(const at::Tensor& x, const PendingRotation& rotation, bool back) {
  const Turns& turns = rotation.turns;
  const bool half = rotation.block != 0;
  const int64_t dims = 2 * SizeOf(turns.cosine, -1);
  const int64_t block = half ? rotation.block : dims;
  std::vector<at::Tensor> parts;
  for (int64_t begin = 0; begin < dims; begin += block) {
    const at::Tensor part = x.narrow(3, begin, block);
    const at::Tensor cosine = turns.cosine.narrow(-1, begin / 2, block / 2);
    const at::Tensor own_sine = turns.sine.narrow(-1, begin / 2, block / 2);
    const at::Tensor sine = back ? -own_sine : own_sine;
    const at::Tensor first = half ? part.narrow(3, 0, block / 2) : part.slice(3, 0, block, 2);
    const at::Tensor second =
        half ? part.narrow(3, block / 2, block / 2) : part.slice(3, 1, block, 2);
    const at::Tensor turned_first = first * cosine - second * sine;
    const at::Tensor turned_second = second * cosine + first * sine;
    parts.push_back(half ? at::cat({turned_first, turned_second}, 3)
                         : at::stack({turned_first, turned_second}, 4).flatten(3));
  }
  parts.push_back(x.slice(3, dims));
  return at::cat(parts, 3);
}

at::Tensor RotatePairs(const at::Tensor& x, const Turns& turns, bool half, int64_t block,
                       const at::Tensor& to, PendingRotation* pending) {
  const PendingRotation rotation{turns, half ? block : 0};
  if (MapsOnGpu(x) && AreReadable(turns)) {
    if (pending == nullptr) return RotateTokens(x, rotation, {}, {}, x.scalar_type()).first;
    *pending = rotation;
    return x;
  }
  const at::Tensor wide = InType(x, ComputingType(x));
  if (TurnsInOnePass(wide, turns)) {
    return TurnTokens(wide, turns, rotation.block, /*back=*/false, to);
  }
  return RotateComposed(wide, rotation, /*back=*/false);
}

std::pair<at::Tensor, at::Tensor> RotateTokens(const at::Tensor& q, const PendingRotation& of_q,
                                               const at::Tensor& k, const PendingRotation& of_k,
                                               at::ScalarType type) {
  const auto rotate = [&](const at::Tensor& first, const PendingRotation& of_first,
                          const at::Tensor& second, const PendingRotation& of_second) {
    const auto [x, y] = CallRotateTokens(
        AsOptional(first), AsOptional(second), AsOptional(of_first.turns.cosine),
        AsOptional(of_first.turns.sine), AsOptional(of_second.turns.cosine),
        AsOptional(of_second.turns.sine), std::max(of_first.block, of_second.block),
        /*back=*/false, type);
    return std::pair(x, y);
  };
  // One launch needs tokens of the same dtype, and pairs of the same form.
  if (of_q.exists() && of_k.exists() && q.scalar_type() == k.scalar_type() &&
      of_q.block == of_k.block) {
    return rotate(q, of_q, k, of_k);
  }
  const auto alone = [&](const at::Tensor& x, const PendingRotation& rotation) {
    if (!x.defined()) return x;
    return rotation.exists() ? rotate(x, rotation, {}, {}).first : InType(x, type);
  };
  return {alone(q, of_q), alone(k, of_k)};
}

TORCH_LIBRARY_IMPL(gnomon, CPU, m) {
  m.impl("rotate_tokens", RotateTokensComposed);
  m.impl("rotate_tokens_backward", RotationBackwardComposed);
}

TORCH_LIBRARY_IMPL(gnomon, CUDA, m) {
  m.impl("rotate_tokens", RotateTokensCuda);
  m.impl("rotate_tokens_backward", RotationBackwardCuda);
}

TORCH_LIBRARY_IMPL(gnomon, Meta, m) {
  m.impl("rotate_tokens", RotateTokensMeta);
  m.impl("rotate_tokens_backward", RotationBackwardMeta);
}

TORCH_LIBRARY_IMPL(gnomon, Autograd, m) {
  m.impl("rotate_tokens", RotateTokensAutograd);
  m.impl("rotate_tokens_backward", RotationBackwardAutograd);
}

}  // namespace gnomon
