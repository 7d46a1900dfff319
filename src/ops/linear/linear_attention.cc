// Linear attention as a composition of PyTorch operators.
//
// The numerator and the denominator are sums over the keys of phi(q_i).phi(k_j) times a value; for
// the denominator, the value is 1, or 0 for a hidden key. Causal sums are separate operators
// (causal_sums.h), for which autograd saves only arguments and outputs.
//
// Random features are exponentials, exp(a_if) for queries and exp(b_jf) for keys, and are stored as
// exponents. Let n_i be the largest a_if + b_jf of query i over the visible keys and the features
// f. Then exp(a_if + b_jf - n_i) is computed as exp(a_if + m_f - n_i) exp(b_jf - m_f), where m_f is
// the largest b_jf of a subset of the visible keys. These factors never overflow, terms that
// underflow are negligible, and the ratio of the numerator and the denominator is unchanged. Causal
// sums process keys in blocks that end before their queries begin. Within chunks, queries in the
// right half of each block of 2, 4, 8 ... rows attend to keys in the left half. Then each chunk
// attends to all previous chunks.
#include "ops/linear/linear_attention.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gnomon/torch/linear_attention.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "ops/attention/call_checks.h"
#include "ops/catalogue/registry.h"
#include "ops/linear/causal_sums.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

// The exponent of absent entries: its exp is 0 and, unlike for -inf, differences are not NaN.
constexpr double kNothing = -1e30;

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

// Appends rows or chunks filled with zeros or a given number. Uses cat, because torch.compile
// assumes wrong strides for the gradient of constant_pad_nd.
at::Tensor PadRows(const at::Tensor& x, const c10::SymInt& rows, double value = 0) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes[2] = rows;
  return at::cat({x, at::full_symint(sizes, value, x.options())}, 2);
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

// The rotation of queries and keys by their positions; without a component, they stay unchanged.
struct Rotation {
  std::optional<Component> rope;
  c10::SymInt query_offset;

  c10::SymInt length;  // one past the farthest position

  at::Tensor Query(const at::Tensor& x) const { return From(query_offset, x, /*of_keys=*/false); }
  at::Tensor Key(const at::Tensor& x) const { return From(0, x, /*of_keys=*/true); }

 private:
  at::Tensor From(const c10::SymInt& position, const at::Tensor& x, bool of_keys) const {
    if (!rope) return x;
    return FindPosition(*rope).rotate(*rope, {},
                                      {.x = x,
                                       .position = position,
                                       .firsts = std::nullopt,
                                       .length = length,
                                       .of_keys = of_keys,
                                       .is_product = false,
                                       .last_is_height = false,
                                       .operation = kLinearAttention});
  }
};

// sum_j phi(q_i).phi(k_j) v_j of features (B, H, Lq, F) and (B, Hkv, Lk, F).
at::Tensor Sums(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                bool causal) {
  if (causal) return CallCausalSums(query, key, value, /*reverse=*/false);
  const auto block = [](const at::Tensor& x) { return x.unsqueeze(2); };
  return BlockSums(block(query), block(key), block(value)).squeeze(2);
}

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

// n_i, the largest exponent for a query: (B, H, Lq, 1).
at::Tensor LargestMet(const at::Tensor& query, const at::Tensor& key, bool causal) {
  const at::Tensor b = key.detach();
  const at::Tensor largest = causal ? std::get<0>(b.cummax(2)) : b.amax(2, /*keepdim=*/true);
  return (query.detach() + ForQueries(largest, Concrete(query.sym_size(1)))).amax(3, true);
}

// exp(-n_i) sum_j phi(q_i).phi(k_j) v_j, computed from the exponents of the features.
at::Tensor ExponentSums(const at::Tensor& query_in, const at::Tensor& key_in,
                        const at::Tensor& value_in, const at::Tensor& largest_met, bool causal,
                        const Rotation& rotation) {
  const int64_t heads = Concrete(query_in.sym_size(1));
  if (!causal) {
    const at::Tensor m = Largest(key_in, rotation);
    return Sums(rotation.Query((query_in + ForQueries(m, heads) - largest_met).exp()),
                rotation.Key((key_in - m).exp()), value_in, /*causal=*/false);
  }
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

// The exponents of positive random features (Choromanski et al. 2021, lemma 1), without the factor
// 1/sqrt(features), which cancels in the ratio.
at::Tensor FavorExponents(const at::Tensor& x, const at::Tensor& projection) {
  const double head_dim = static_cast<double>(Concrete(x.sym_size(3)));
  const at::Tensor scaled = x * std::pow(head_dim, -0.25);
  return scaled.matmul(projection.t()) - scaled.square().sum(3, /*keepdim=*/true) * 0.5;
}

at::Tensor CallFavorProjection(const at::Tensor& like, int64_t num_features, int64_t seed) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gnomon::favor_projection", "")
                             .typed<at::Tensor(const at::Tensor&, int64_t, int64_t)>();
  return op.call(like, num_features, seed);
}

at::Tensor Projection(const at::Tensor& q, const LinearArguments& arguments) {
  const int64_t head_dim = Concrete(q.sym_size(3));
  if (arguments.projection) {
    const at::Tensor& projection = *arguments.projection;
    TORCH_CHECK_TYPE(projection.device() == q.device(), kLinearAttention, ": projection is on ",
                     projection.device(), ", but q is on ", q.device(),
                     "; expected the same device");
    TORCH_CHECK_VALUE(
        projection.dim() == 2 && projection.sym_size(1) == head_dim && projection.sym_size(0) >= 1,
        kLinearAttention, ": projection has shape ", projection.sym_sizes(),
        "; expected (features, D) with D = ", head_dim);
    TORCH_CHECK_VALUE(!arguments.num_features && !arguments.seed, kLinearAttention,
                      ": projection and ", arguments.num_features ? "num_features" : "seed",
                      " are both given; pass only one of them");
    return AsParameter(projection, q, kLinearAttention, ": projection");
  }
  const double size = static_cast<double>(head_dim);
  const int64_t few =
      std::max<int64_t>(2, 2 * static_cast<int64_t>(std::ceil(size * std::log(size) / 2)));
  const int64_t features = arguments.num_features.value_or(few);
  TORCH_CHECK_VALUE(features >= 1, kLinearAttention, ": num_features is ", features,
                    "; expected at least 1");
  return CallFavorProjection(q.detach(), features, arguments.seed.value_or(0)).to(ComputingType(q));
}

void CheckArguments(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const LinearArguments& arguments) {
  CheckTokens(kLinearAttention, q, k, v);
  const bool is_favor = arguments.feature == "favor";
  TORCH_CHECK_VALUE(is_favor || arguments.feature == "elu" || arguments.feature == "relu",
                    kLinearAttention, ": feature is \"", arguments.feature,
                    "\"; expected elu, relu or favor");
  for (const auto& [name, is_given] :
       {std::pair("num_features", arguments.num_features.has_value()),
        std::pair("seed", arguments.seed.has_value()),
        std::pair("projection", arguments.projection.has_value())}) {
    TORCH_CHECK_VALUE(is_favor || !is_given, kLinearAttention, ": ", name,
                      " applies only to feature=\"favor\", but feature is \"", arguments.feature,
                      "\"; leave it out");
  }
  TORCH_CHECK_VALUE(!arguments.causal || q.sym_size(2) == k.sym_size(2), kLinearAttention,
                    ": causal is True, but Lq = ", q.sym_size(2), " and Lk = ", k.sym_size(2),
                    " differ; pass as many queries as keys");
  TORCH_CHECK_VALUE(!arguments.rope || arguments.query_offset || q.sym_size(2) == k.sym_size(2),
                    kLinearAttention, ": query_offset is None, but Lq = ", q.sym_size(2),
                    " and Lk = ", k.sym_size(2),
                    " differ; with rope, pass query_offset, the position of the first query");
  TORCH_CHECK_VALUE(!arguments.causal || !arguments.query_offset || *arguments.query_offset == 0,
                    kLinearAttention, ": query_offset is ", arguments.query_offset.value_or(0),
                    ", but causal is True; expected None or 0");
}

}  // namespace

at::Tensor LinearAttention(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                           const LinearArguments& arguments) {
  const WithoutAutocast guard;
  CheckArguments(q_in, k_in, v_in, arguments);
  const OptionalTensor key_lengths =
      CheckIntegers(kLinearAttention, "key_lengths", arguments.key_lengths, q_in);
  // Traced tensors have no values to check.
  if (key_lengths && !key_lengths->is_meta() && !at::isTensorSubclassLike(*key_lengths) &&
      key_lengths->numel() > 0) {
    const int64_t keys = SizeOf(k_in, 2);
    const at::Tensor outside = key_lengths->lt(0).logical_or(key_lengths->gt(keys));
    if (outside.any().item<bool>()) {
      const auto b = outside.to(at::kInt).argmax().item<int64_t>();
      TORCH_CHECK_VALUE(false, kLinearAttention, ": key_lengths[", b, "] is ",
                        key_lengths->flatten()[b].item<int64_t>(),
                        "; expected a value from 0 to Lk = ", keys);
    }
  }
  const c10::SymInt offset = arguments.query_offset.value_or(0);
  Rotation rotation{std::nullopt, offset, (q_in.sym_size(2) + offset).max(k_in.sym_size(2))};
  if (arguments.rope) {
    rotation.rope = Component::Parse(*arguments.rope);
    const PositionEntry& entry = FindPosition(*rotation.rope);
    TORCH_CHECK_VALUE(entry.rotate != nullptr && entry.Tensors(*rotation.rope).empty(),
                      kLinearAttention, ": rope is ", rotation.rope->Text(),
                      "; expected RoPE without tensor arguments");
  }
  // Low-precision tokens are processed in float32; only the outputs are rounded.
  const at::ScalarType computing = ComputingType(q_in);
  const at::Tensor q = q_in.to(computing);
  at::Tensor k = WithoutHidden(k_in.to(computing), std::nullopt, key_lengths);
  at::Tensor v = WithoutHidden(v_in.to(computing), std::nullopt, key_lengths);
  at::Tensor one = WithoutHidden(at::ones_like(k.narrow(3, 0, 1)), std::nullopt, key_lengths);
  if (k.sym_size(2) == 0) {
    k = PadRows(k, 1);
    v = PadRows(v, 1);
    one = PadRows(one, 1);
  }

  const bool is_favor = arguments.feature == "favor";
  const at::Tensor projection = is_favor ? Projection(q, arguments) : at::Tensor();

  // Without queries there are no chunks.
  const bool causal = arguments.causal && q.sym_size(2) != 0;
  if (causal && !is_favor && !rotation.rope && !key_lengths) {
    return std::get<0>(CallCausalLinear(q, k, v, arguments.feature)).to(q_in.scalar_type());
  }
  // The rotation applies only to the numerator. Without one, a single sum computes both the
  // numerator and the denominator.
  const Rotation none{std::nullopt, 0, 0};
  const at::Tensor value = rotation.rope ? v : at::cat({v, one}, 3);
  at::Tensor numerator;
  at::Tensor denominator;
  if (is_favor) {
    const at::Tensor query = FavorExponents(q, projection);
    const at::Tensor key =
        at::where(one > 0, FavorExponents(k, projection), at::scalar_tensor(kNothing, k.options()));
    const at::Tensor met = LargestMet(query, key, causal);
    numerator = ExponentSums(query, key, value, met, causal, rotation);
    if (rotation.rope) {
      denominator = ExponentSums(query, key, one, met, causal, none);
    }
  } else {
    const at::Tensor query = Features(q, arguments.feature);
    const at::Tensor key = Features(k, arguments.feature);
    numerator = Sums(rotation.Query(query), rotation.Key(key), value, causal);
    if (rotation.rope) denominator = Sums(query, key, one, causal);
  }
  if (!denominator.defined()) {
    denominator = numerator.narrow_symint(3, v.sym_size(3), 1);
    numerator = numerator.narrow_symint(3, 0, v.sym_size(3));
  }
  const at::Tensor none_seen = denominator == 0;
  const at::Tensor o =
      at::where(none_seen, 0.0, numerator / at::where(none_seen, 1.0, denominator));
  return o.to(q_in.scalar_type());
}

torch::Tensor linear_attention(const torch::Tensor& q, const torch::Tensor& k,
                               const torch::Tensor& v, const LinearAttentionOptions& options) {
  LinearArguments arguments;
  arguments.feature = options.feature();
  if (options.rope()) arguments.rope = options.rope()->spec;
  arguments.causal = options.causal();
  arguments.key_lengths = options.key_lengths();
  arguments.query_offset = options.query_offset();
  arguments.num_features = options.num_features();
  arguments.seed = options.seed();
  arguments.projection = options.projection();
  return LinearAttention(q, k, v, arguments);
}

torch::Tensor favor_projection(int64_t num_features, int64_t head_dim, int64_t seed) {
  TORCH_CHECK_VALUE(head_dim >= 1, "gnomon.favor_projection: head_dim is ", head_dim,
                    "; expected at least 1");
  return CallFavorProjection(at::empty({head_dim}), num_features, seed);
}

}  // namespace gnomon
