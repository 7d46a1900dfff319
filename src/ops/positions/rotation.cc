#include "ops/positions/rotation.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/rotation.h"
#include "cpu/workspace.h"
#include "ops/operators/autograd.h"
#include "ops/operators/executor.h"
#include "ops/operators/kernel_arguments.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

// The user-visible name, such as "RoPE".
const std::string& NameOf(const Component& component) {
  // Not FindPosition(), which would check the component's options again.
  return FindPositionEntry(component.name())->shown_name();
}

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
class RotationFunction : public torch::autograd::Function<RotationFunction> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& /*x*/, const Turns& turns,
                                                int64_t block, bool back,
                                                const std::tuple<at::Tensor>& turned) {
    context->save_for_backward({turns.cosine, turns.sine});
    context->saved_data["block"] = block;
    context->saved_data["back"] = back;
    return {std::get<0>(turned)};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& d_turned) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const Turns turns{saved[0], saved[1]};
    const int64_t block = context->saved_data["block"].toInt();
    const bool back = !context->saved_data["back"].toBool();
    // Gradients that the kernel does not support are rotated with PyTorch operators.
    const at::Tensor d_x =
        TurnsInOnePass(d_turned[0], turns)
            ? TurnTokens(d_turned[0], turns, block, back,
                         IsOwn(d_turned[0]) ? d_turned[0] : at::Tensor())
            : RotatePairs(d_turned[0], {turns.cosine, back ? -turns.sine : turns.sine}, block != 0,
                          block != 0 ? block : 2 * turns.cosine.size(-1));
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
  return ApplyFunction<RotationFunction>(x, turns, block, back, std::tuple(turned))[0];
}

}  // namespace

std::vector<at::Tensor> CoordinatesOf(const Component& component, const RotationCall& call,
                                      const std::optional<TokenGrid>& grid) {
  const std::string what = "gnomon.attention: " + NameOf(component);
  TORCH_CHECK_VALUE(!grid || !call.firsts, what, " uses the grid ", grid ? grid->Text() : "",
                    ", but query_offset is a tensor; pass an integer or None");
  const at::TensorOptions options = call.x.options().dtype(at::kDouble);
  std::vector<at::Tensor> coordinates;
  if (grid) {
    TORCH_CHECK_VALUE(!call.positions || call.positions->of_tokens.dim() == 2, what,
                      " uses the grid ", grid->Text(),
                      ", so positions cannot have several axes; pass one index per token");
    coordinates = call.positions
                      ? grid->CoordinatesAt(what.c_str(), call.positions->of_tokens.unsqueeze(1))
                      : grid->Coordinates(what.c_str(), call.position, call.x.sym_size(2), options);
    for (at::Tensor& coordinate : coordinates) coordinate = coordinate.to(at::kDouble);
  } else if (call.positions) {
    const at::Tensor positions = call.positions->of_tokens.to(at::kDouble);
    if (positions.dim() == 2) return {positions.unsqueeze(1)};
    for (int64_t axis = 0; axis < SizeOf(positions, 2); ++axis) {
      coordinates.push_back(positions.select(2, axis).unsqueeze(1));
    }
  } else {
    const at::Tensor positions =
        at::arange(call.position, call.position + call.x.sym_size(2), options);
    coordinates.push_back(call.firsts ? positions + call.firsts->to(at::kDouble).reshape({-1, 1, 1})
                                      : positions);
  }
  return coordinates;
}

int64_t FreeColumns(const RotationCall& call) {
  return SizeOf(call.x, 3) - (call.last_is_height ? 1 : 0);
}

void CheckColumns(const Component& component, int64_t dims, int64_t axes,
                  const RotationCall& call) {
  const int64_t step = 2 * axes;
  const int64_t free = FreeColumns(call);
  TORCH_CHECK_VALUE(
      dims >= 0 && dims % step == 0 && dims <= free, call.operation, ": ", NameOf(component),
      " has dims = ", dims, "; expected ",
      axes > 1 ? "a multiple of 2 * axes = " + std::to_string(step) : std::string("an even number"),
      ", at most ", free, call.last_is_height ? " (the last coordinate is a height)" : "");
}

Turns TurnsOf(const at::Tensor& angles, at::ScalarType type, double factor) {
  return {(angles.cos() * factor).to(type), (angles.sin() * factor).to(type)};
}

at::Tensor RotatePairs(const at::Tensor& x, const Turns& turns, bool half, int64_t block,
                       const at::Tensor& to) {
  if (TurnsInOnePass(x, turns)) {
    return TurnTokens(x, turns, half ? block : 0, /*back=*/false, to);
  }
  const int64_t dims = 2 * SizeOf(turns.cosine, -1);
  std::vector<at::Tensor> parts;
  for (int64_t begin = 0; begin < dims; begin += block) {
    const at::Tensor part = x.narrow(3, begin, block);
    const at::Tensor cosine = turns.cosine.narrow(-1, begin / 2, block / 2);
    const at::Tensor sine = turns.sine.narrow(-1, begin / 2, block / 2);
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

at::Tensor RotateFirst(const Component& component, const RotationCall& call,
                       const at::Tensor& angles, bool half) {
  const int64_t dims = 2 * SizeOf(angles, 3);
  CheckColumns(component, dims, 1, call);
  const int64_t heads = SizeOf(angles, 1);
  const int64_t own = SizeOf(call.x, 1);
  at::Tensor x = call.x;
  at::Tensor turns = angles;
  if (heads > own) x = x.repeat_interleave(heads / own, 1);
  if (heads > 1 && heads < own) turns = turns.repeat_interleave(own / heads, 1);
  return dims == 0 ? x : RotatePairs(x, TurnsOf(turns, x.scalar_type()), half, dims);
}

}  // namespace gnomon
