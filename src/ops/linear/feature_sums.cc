// Random features are exponentials, exp(a_if) for queries and exp(b_jf) for keys, and are stored as
// exponents. Let n_i be the largest a_if + b_jf of query i over the visible keys and the features
// f. Then exp(a_if + b_jf - n_i) is computed as exp(a_if + m_f - n_i) exp(b_jf - m_f), where m_f is
// the largest b_jf of a subset of the visible keys. These factors never overflow, terms that
// underflow are negligible, and the ratio of the numerator and the denominator is unchanged. Causal
// sums process keys in blocks that end before their queries begin. Within chunks, queries in the
// right half of each block of 2, 4, 8 ... rows attend to keys in the left half. Then each chunk
// attends to all previous chunks.
//
// Tracing these sums and their gradients would record thousands of operators. torch.compile
// therefore sees one operator, whose backward pass computes the sums again.
#include "ops/linear/feature_sums.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "ops/catalogue/registry.h"
#include "ops/linear/causal_sums.h"
#include "ops/operators/autograd.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// (B, H, n, rows, F) to (B, Hkv, n, H / Hkv * rows, F): the query heads of a key head become
// adjacent rows.
at::Tensor Group(const at::Tensor& x, int64_t key_heads) {
  const int64_t group = key_heads == 0 ? 1 : Concrete(x.sym_size(1)) / key_heads;
  if (group == 1) return x;
  const at::Tensor split = x.unflatten_symint(1, {key_heads, group}).transpose(2, 3);
  return split.reshape_symint(
      {x.sym_size(0), key_heads, x.sym_size(2), group * x.sym_size(3), x.sym_size(4)});
}

// The inverse of Group.
at::Tensor Ungroup(const at::Tensor& x, int64_t heads) {
  const int64_t key_heads = Concrete(x.sym_size(1));
  const int64_t group = key_heads == 0 ? 1 : heads / key_heads;
  if (group == 1) return x;
  const c10::SymInt rows = x.sym_size(3) / group;
  return x.unflatten_symint(3, {group, rows})
      .transpose(2, 3)
      .reshape_symint({x.sym_size(0), heads, x.sym_size(2), rows, x.sym_size(4)});
}

// Splits (B, H, L, F) into n blocks, (B, H, n, rows, F), and joins them.
at::Tensor Split(const at::Tensor& x, const c10::SymInt& n, const c10::SymInt& rows) {
  return x.unflatten_symint(2, {n, rows});
}
at::Tensor Join(const at::Tensor& x) { return x.flatten(2, 3); }

// For every block, the sum of (query . key) value over the keys of the block.
at::Tensor BlockSums(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const int64_t heads = Concrete(query.sym_size(1));
  const at::Tensor state = key.transpose(3, 4).matmul(value);
  return Ungroup(Group(query, Concrete(key.sym_size(1))).matmul(state), heads);
}

// Computes the same sums from the products of queries and keys.
at::Tensor BlockProducts(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const int64_t heads = Concrete(query.sym_size(1));
  const at::Tensor products = Group(query, Concrete(key.sym_size(1))).matmul(key.transpose(3, 4));
  return Ungroup(products.matmul(value), heads);
}

// Sums whose exponents are reduced by m: (B, Hkv, n, 1, F) and (B, Hkv, n, F, E).
struct ScaledSums {
  at::Tensor m;
  at::Tensor sum;
};

ScaledSums Add(const ScaledSums& a, const ScaledSums& b) {
  const at::Tensor m = at::maximum(a.m, b.m);
  const auto scaled = [&](const ScaledSums& s) { return s.sum * (s.m - m).exp().transpose(3, 4); };
  return {m, scaled(a) + scaled(b)};
}

ScaledSums Every(const ScaledSums& s, int64_t first, int64_t step) {
  return {s.m.slice(2, first, std::nullopt, step), s.sum.slice(2, first, std::nullopt, step)};
}

// Inclusive running sums in O(n), by recursion on the sums of pairs; n is a power of two.
ScaledSums RunningSums(const ScaledSums& s, int64_t n) {
  if (n == 1) return s;
  const ScaledSums even = Every(s, 0, 2);
  const ScaledSums odd = RunningSums(Add(even, Every(s, 1, 2)), n / 2);
  ScaledSums later = {odd.m.narrow(2, 0, n / 2 - 1), odd.sum.narrow(2, 0, n / 2 - 1)};
  later = Add(later, Every(even, 1, 1));
  const auto weave = [&](const at::Tensor& first, const at::Tensor& rest, const at::Tensor& odds) {
    return at::stack({at::cat({first.narrow(2, 0, 1), rest}, 2), odds}, 3).flatten(2, 3);
  };
  return {weave(even.m, later.m, odd.m), weave(even.sum, later.sum, odd.sum)};
}

ScaledSums ScaledSumsBefore(const ScaledSums& s) {
  const c10::SymInt n = s.m.sym_size(2);
  int64_t power = 1;
  while (n > power) power *= 2;
  const ScaledSums running =
      RunningSums({PadRows(s.m, power - n, kNothing), PadRows(s.sum, power - n)}, power);
  const auto shifted = [&](const at::Tensor& x, double first) {
    return at::cat({at::full_like(x.narrow(2, 0, 1), first), x.narrow_symint(2, 0, n - 1)}, 2);
  };
  return {shifted(running.m, kNothing), shifted(running.sum, 0)};
}

// The number of rows of a causal chunk: the smallest power of two from kLeast to kMost that is at
// least the number of value columns, or kMost if there is none.
int64_t ChunkRows(const at::Tensor& value) {
  constexpr int64_t kLeast = 64;
  constexpr int64_t kMost = 512;
  int64_t rows = kLeast;
  while (rows < kMost && rows < Concrete(value.sym_size(3))) rows *= 2;
  return rows;
}

}  // namespace

at::Tensor Rotation::From(const c10::SymInt& position, const at::Tensor& x, bool of_keys) const {
  if (!rope) return x;
  const Component component = Component::Parse(*rope);
  return FindPosition(component).rotate(component, {},
                                        {.x = x,
                                         .position = position,
                                         .firsts = std::nullopt,
                                         .length = length,
                                         .of_keys = of_keys,
                                         .is_product = false,
                                         .last_is_height = false,
                                         .operation = kLinearAttention});
}

// Uses cat, because torch.compile assumes wrong strides for the gradient of constant_pad_nd.
at::Tensor PadRows(const at::Tensor& x, const c10::SymInt& rows, double value) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes[2] = rows;
  return at::cat({x, at::full_symint(sizes, value, x.options())}, 2);
}

at::Tensor FeatureSums(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       bool causal) {
  if (causal) return CallCausalSums(query, key, value, /*reverse=*/false);
  const auto block = [](const at::Tensor& x) { return x.unsqueeze(2); };
  return BlockSums(block(query), block(key), block(value)).squeeze(2);
}

namespace {

// Repeats m, which belongs to key heads, for the query heads of each group: (B, Hkv, ...) to (B, H,
// ...).
at::Tensor ForQueries(const at::Tensor& m, int64_t heads) {
  const int64_t key_heads = Concrete(m.sym_size(1));
  return heads == key_heads ? m : m.repeat_interleave(heads / key_heads, 1);
}

// The largest exponent of each feature over the rows, or of all features if a rotation mixes them.
at::Tensor Largest(const at::Tensor& exponents, const Rotation& rotation) {
  const at::Tensor largest = exponents.detach().amax(-2, /*keepdim=*/true);
  if (!rotation.rope) return largest;
  return largest.amax(-1, /*keepdim=*/true).expand_as(largest);
}

// ExponentSums over the keys up to each query.
at::Tensor CausalExponentSums(const at::Tensor& query_in, const at::Tensor& key_in,
                              const at::Tensor& value_in, const at::Tensor& largest_met,
                              const Rotation& rotation) {
  const int64_t heads = Concrete(query_in.sym_size(1));
  const c10::SymInt length = query_in.sym_size(2);
  const int64_t rows = ChunkRows(value_in);
  const c10::SymInt chunks = (length + (rows - 1)) / rows;
  const c10::SymInt added = chunks * rows - length;
  const at::Tensor query = PadRows(query_in - largest_met, added);
  const at::Tensor key = PadRows(key_in, added, kNothing);
  const at::Tensor value = PadRows(value_in, added);

  // The product of each query with its own key, which a rotation does not change.
  at::Tensor sums =
      (query + ForQueries(key, heads)).exp().sum(3, /*keepdim=*/true) * ForQueries(value, heads);
  // In each block of 2 * half rows, queries in the right half attend to keys in the left half.
  for (int64_t half = 1; half < rows; half *= 2) {
    const c10::SymInt blocks = chunks * (rows / (2 * half));
    const auto side = [&](const at::Tensor& x, int64_t which) {
      return x.unflatten_symint(2, {blocks, 2, half}).select(3, which);
    };
    const auto with_zeros = [&](const at::Tensor& x, int64_t which) {
      const at::Tensor zeros = at::zeros_like(x);
      return at::stack({which == 0 ? x : zeros, which == 0 ? zeros : x}, 3).flatten(2, 4);
    };
    at::Tensor k = side(key, 0);
    const at::Tensor m = Largest(k, rotation);
    at::Tensor q = (side(query, 1) + ForQueries(m, heads)).exp();
    k = (k - m).exp();
    if (rotation.rope) {
      q = side(rotation.Query(with_zeros(q, 1)), 1);
      k = side(rotation.Key(with_zeros(k, 0)), 0);
    }
    sums = sums + with_zeros(BlockProducts(q, k, side(value, 0)), 1);
  }
  // The sums over the previous chunks.
  const at::Tensor chunked_key = Split(key, chunks, rows);
  const at::Tensor m = Largest(chunked_key, rotation);
  const at::Tensor features = rotation.Key(Join((chunked_key - m).exp()));
  const ScaledSums before = ScaledSumsBefore(
      {m, Split(features, chunks, rows).transpose(3, 4).matmul(Split(value, chunks, rows))});
  const at::Tensor chunked_query = (Split(query, chunks, rows) + ForQueries(before.m, heads)).exp();
  const at::Tensor q = Split(rotation.Query(Join(chunked_query)), chunks, rows);
  const at::Tensor earlier = Ungroup(Group(q, Concrete(key.sym_size(1))).matmul(before.sum), heads);
  return (sums + Join(earlier)).narrow_symint(2, 0, length);
}

// Whether torch.compile or make_fx records this call, outside of torch.func transforms and without
// tangents, for which the single operator has no rules.
bool IsTraced(const std::array<at::Tensor, 4>& tensors) {
  using c10::impl::TorchDispatchModeKey;
  constexpr c10::DispatchKeySet kTransforms(
      {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  for (const at::Tensor& x : tensors) {
    if (x.key_set().has_any(kTransforms) || HasTangent(x)) return false;
  }
  for (const auto mode : {TorchDispatchModeKey::FAKE, TorchDispatchModeKey::PROXY,
                          TorchDispatchModeKey::FUNCTIONAL}) {
    if (c10::impl::TorchDispatchModeTLS::get_mode(mode)) return true;
  }
  return false;
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

at::Tensor CallSums(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const at::Tensor& largest_met, std::optional<std::string_view> rope) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("gnomon::causal_exponent_sums", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, std::optional<std::string_view>)>();
  return op.call(query, key, value, largest_met, rope);
}

Gradients CallSumsBackward(const at::Tensor& d, const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value, const at::Tensor& largest_met,
                           std::optional<std::string_view> rope) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("gnomon::causal_exponent_sums_backward", "")
          .typed<Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const at::Tensor&,
                           std::optional<std::string_view>)>();
  return op.call(d, query, key, value, largest_met, rope);
}

at::Tensor Compute(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const at::Tensor& largest_met, std::optional<std::string_view> rope) {
  const WithoutAutocast guard;
  Rotation rotation{std::nullopt, 0, query.sym_size(2)};
  if (rope) rotation.rope = std::string(*rope);
  // The meta kernels promise contiguous outputs.
  return CausalExponentSums(query, key, value, largest_met, rotation).contiguous();
}

Gradients ComputeBackward(const at::Tensor& d, const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const at::Tensor& largest_met,
                          std::optional<std::string_view> rope) {
  const AboveAutograd guard;
  const WithoutAutocast no_autocast;
  const auto leaf = [](const at::Tensor& x) { return x.detach().requires_grad_(); };
  const variable_list leaves = {leaf(query), leaf(key), leaf(value)};
  const at::Tensor sums = Compute(leaves[0], leaves[1], leaves[2], largest_met, rope);
  const variable_list gradients = torch::autograd::grad({sums}, leaves, {d});
  const auto plain = [](const at::Tensor& x) { return x.detach().contiguous(); };
  return {plain(gradients[0]), plain(gradients[1]), plain(gradients[2])};
}

at::Tensor SumsOnMeta(const at::Tensor& query, const at::Tensor& /*key*/, const at::Tensor& value,
                      const at::Tensor& /*largest_met*/, std::optional<std::string_view> /*rope*/) {
  return at::empty_symint(
      {query.sym_size(0), query.sym_size(1), query.sym_size(2), value.sym_size(3)},
      query.options());
}

Gradients BackwardOnMeta(const at::Tensor& /*d*/, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const at::Tensor& /*largest_met*/,
                         std::optional<std::string_view> /*rope*/) {
  const auto like = [](const at::Tensor& x) {
    return at::empty_symint(x.sym_sizes(), x.options());
  };
  return {like(query), like(key), like(value)};
}

class ExponentSumsFunction : public torch::autograd::Function<ExponentSumsFunction> {
 public:
  // `call`: the output, and the arguments.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*query*/,
                            const at::Tensor& /*key*/, const at::Tensor& /*value*/,
                            std::optional<std::string> rope,
                            const std::tuple<at::Tensor, variable_list>& call) {
    context->save_for_backward(std::get<1>(call));
    context->saved_data["rope"] = std::move(rope);
    return std::get<0>(call);
  }

  static variable_list backward(AutogradContext* context, const variable_list& d_outputs) {
    const variable_list saved = context->get_saved_variables();
    const auto rope = context->saved_data["rope"].toOptional<std::string>();
    if (at::GradMode::is_enabled()) return RecordedGradients(context, saved, rope, d_outputs[0]);
    const auto [d_query, d_key, d_value] =
        CallSumsBackward(d_outputs[0], saved[0], saved[1], saved[2], saved[3], rope);
    return {d_query, d_key, d_value, {}, {}};
  }

 private:
  // Gradients that have gradients, from the composition.
  static variable_list RecordedGradients(AutogradContext* context, const variable_list& saved,
                                         std::optional<std::string_view> rope,
                                         const at::Tensor& d) {
    const WithoutAutocast guard;
    const at::Tensor sums = Compute(saved[0], saved[1], saved[2], saved[3], rope);
    variable_list inputs;
    for (size_t n = 0; n < 3; ++n) {
      if (context->needs_input_grad(n)) inputs.push_back(saved[n]);
    }
    const variable_list found = torch::autograd::grad({sums}, inputs, {d}, std::nullopt,
                                                      /*create_graph=*/true);
    variable_list gradients(5);
    for (size_t n = 0, at = 0; n < 3; ++n) {
      if (context->needs_input_grad(n)) gradients[n] = found[at++];
    }
    return gradients;
  }
};

at::Tensor SumsAboveAutograd(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const at::Tensor& largest_met,
                             std::optional<std::string_view> rope) {
  const at::Tensor output =
      BelowAutograd([&] { return CallSums(query, key, value, largest_met, rope); });
  if (!RecordsGradients(
          std::array{query.requires_grad(), key.requires_grad(), value.requires_grad()})) {
    return output;
  }
  // The tuple hides the output from autograd, which would otherwise treat it as an input.
  return ApplyFunction<ExponentSumsFunction>(
      query, key, value, rope ? std::optional<std::string>(*rope) : std::nullopt,
      std::tuple(output, variable_list{query, key, value, largest_met}));
}

TORCH_LIBRARY_IMPL(gnomon, CompositeExplicitAutograd, m) {
  m.impl("causal_exponent_sums", Compute);
  m.impl("causal_exponent_sums_backward", ComputeBackward);
}

TORCH_LIBRARY_IMPL(gnomon, Meta, m) {
  m.impl("causal_exponent_sums", SumsOnMeta);
  m.impl("causal_exponent_sums_backward", BackwardOnMeta);
}

TORCH_LIBRARY_IMPL(gnomon, Autograd, m) {
  m.impl("causal_exponent_sums", SumsAboveAutograd);
  m.impl("causal_exponent_sums_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

at::Tensor ExponentSums(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const at::Tensor& largest_met, bool causal, const Rotation& rotation) {
  if (causal) {
    if (!IsTraced({query, key, value, largest_met})) {
      return CausalExponentSums(query, key, value, largest_met, rotation);
    }
    return CallSums(query, key, value, largest_met, rotation.rope);
  }
  const at::Tensor m = Largest(key, rotation);
  const at::Tensor features =
      (query + ForQueries(m, Concrete(query.sym_size(1))) - largest_met).exp();
  return FeatureSums(rotation.Query(features), rotation.Key((key - m).exp()), value,
                     /*causal=*/false);
}

at::Tensor LargestMet(const at::Tensor& query, const at::Tensor& key, bool causal) {
  const at::Tensor b = key.detach();
  const at::Tensor largest = causal ? std::get<0>(b.cummax(2)) : b.amax(2, /*keepdim=*/true);
  return (query.detach() + ForQueries(largest, Concrete(query.sym_size(1)))).amax(3, true);
}

}  // namespace gnomon
