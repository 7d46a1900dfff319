#include "launched_kernels.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/attention.h"
#include "cuda/backend.h"
#include "cuda/token_map.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"

namespace gnomon::testing {
namespace {

class Recorder final : public cuda::Backend {
 public:
  explicit Recorder(bool is_hopper) : is_hopper_(is_hopper) {}

  bool IsHopper() const override { return is_hopper_; }
  void Launch(const cuda::KernelName& name, const cuda::LaunchShape& shape,
              const void* /*parameters*/, size_t /*bytes*/) override {
    const auto is_known = [&](const LaunchedKernel& kernel) { return kernel.name == name; };
    if (std::ranges::none_of(kernels_, is_known)) kernels_.push_back({name, shape});
  }
  void* Scratch(size_t /*bytes*/) override { return Memory<void>(); }

  // Returns an aligned address, which is never read.
  template <class T>
  static T* Memory() {
    return reinterpret_cast<T*>(uintptr_t{1} << 16);
  }
  const std::vector<LaunchedKernel>& kernels() const { return kernels_; }

 private:
  bool is_hopper_;
  std::vector<LaunchedKernel> kernels_;
};

}  // namespace

std::vector<LaunchedKernel> KernelsOf(const PairFunction& function, const Form& form,
                                      Passes passes) {
  constexpr int64_t kLength = 4096;
  const auto strides = [&] {
    return std::array<int64_t, 3>{form.heads * kLength * form.dim, kLength * form.dim, form.dim};
  };
  const Tokens tokens{Recorder::Memory<void>(), strides(), form.element};
  const cuda::Tensor gradients{Recorder::Memory<void>(), strides()};
  auto* const numbers = Recorder::Memory<float>();
  const OffsetLayout layout(16, 16, OffsetLayout::Far::kClip);
  cuda::Input in;
  cuda::Gradient gradient;
  in.shape = {1, form.heads, 1, kLength, kLength, form.dim, form.dim};
  in.x = in.y = in.v = tokens;
  gradient.x = gradient.y = gradient.v = gradients;
  in.row_scalars = in.column_scalars = in.head_scalars = in.factor = numbers;
  gradient.row_scalars = gradient.column_scalars = numbers;
  if (form.factor) gradient.head_scalars = gradient.factor = numbers;
  in.mask.right = 0;
  if (form.bias) {
    in.bias.table = numbers;
    gradient.bias.table = numbers;
  }
  if (form.mask) {
    in.mask.query_segments = in.mask.key_segments = Recorder::Memory<int32_t>();
    in.mask.pairs = {Recorder::Memory<uint8_t>(), {0, 0, kLength}};
    in.dropout = {0.1, 1};
  }
  if (form.biases) {
    in.key_bias = in.key_bias_low = in.key_bias_base = numbers;
    gradient.key_bias = numbers;
    in.pair_bias = {numbers, {0, kLength * kLength, kLength}};
    gradient.pair_bias = {numbers, {0, kLength * kLength, kLength}};
  }
  if (form.tables) {
    in.bias = {numbers, 0, &layout};
    gradient.bias = {numbers, 0, &layout};
    in.relative.layout = &layout;
    in.relative_query = tokens;
    in.relative.dim = form.dim;
    in.relative.keys = in.relative.values = numbers;
    gradient.relative_query = gradients;
    gradient.relative_keys = gradient.relative_values = numbers;
    in.relative_key = tokens;
    in.relative.key_dim = form.dim;
    in.relative.queries = numbers;
    gradient.relative_key = gradients;
    gradient.relative_queries = numbers;
  }
  if (form.temperature) {
    in.softcap = 30;
    in.temperature = numbers;
    gradient.temperature = numbers;
  }
  if (form.pages) in.pages = {Recorder::Memory<int64_t>(), kLength, 16};
  Recorder backend(form.hopper);
  float* const exact_o = form.exact ? numbers : nullptr;
  const cuda::Saved saved{tokens, exact_o, tokens, numbers, numbers, form.exact};
  if (passes == Passes::kTangents) {
    ForwardTangents(function, in, in, saved, {numbers, numbers}, backend);
    BackwardTangents(function, in, in, saved, {tokens, numbers}, gradient, backend);
    return backend.kernels();
  }
  if (passes != Passes::kBackward) {
    Forward(function, in, {gradients, exact_o, numbers, numbers, form.exact}, backend);
  }
  if (passes != Passes::kForward) {
    Backward(function, in, saved, gradient, backend);
  }
  return backend.kernels();
}

int64_t ConstantOf(const cuda::KernelName& name, std::string_view constant) {
  for (const auto& [key, value] : name.constants) {
    if (key == constant) return value;
  }
  throw std::runtime_error("no constant " + std::string(constant));
}

std::vector<LaunchedKernel> KernelsOfTokenMaps() {
  using Call = cuda::TokenMapCall;
  struct MapForm {
    cuda::Element tokens, mapped;
    std::optional<ConeMap> cone;
    Call::Turns turns;
    int columns;
  };
  constexpr auto kUmbral = ConeMap::Function::kUmbral;
  constexpr auto kPenumbral = ConeMap::Function::kPenumbral;
  constexpr auto kFloat = cuda::Element::kFloat32;
  constexpr auto kBFloat = cuda::Element::kBFloat16;
  constexpr auto kHalf = cuda::Element::kFloat16;
  // Rows of 63 columns are not aligned.
  const MapForm forms[] = {
      {kBFloat, kBFloat, ConeMap{kUmbral, false, 1, 30}, Call::Turns::kNone, 64},
      {kFloat, kBFloat, ConeMap{kUmbral, true, 1, 30}, Call::Turns::kHalves, 64},
      {kHalf, kHalf, ConeMap{kPenumbral, false, 1, 30}, Call::Turns::kAdjacent, 128},
      {kFloat, kFloat, ConeMap{kPenumbral, true, 1, 30}, Call::Turns::kHalves, 63},
      {kBFloat, kBFloat, std::nullopt, Call::Turns::kHalves, 128},
      {kHalf, kFloat, std::nullopt, Call::Turns::kAdjacent, 63},
  };
  Recorder backend(/*is_hopper=*/false);
  for (const MapForm& form : forms) {
    Call call;
    call.batch = 1;
    call.tokens = form.tokens;
    call.mapped = form.mapped;
    call.cone = form.cone;
    call.turns = form.turns;
    for (cuda::TokenMapSide& side : call.map.sides) {
      side.heads = 2;
      side.rows = 64;
      side.columns = side.width = form.columns;
      side.tokens = {Recorder::Memory<void>(), {0, 0, form.columns}};
      side.mapped = side.d_tokens = side.cosines = side.sines = side.tokens;
    }
    cuda::MapTokens(call, backend);
    cuda::MapTokensBackward(call, backend);
  }
  return backend.kernels();
}

}  // namespace gnomon::testing
