// Linear attention as a composition of PyTorch operators: the numerator and the denominator are
// sums over the keys (feature_sums.h).
#include "ops/linear/linear_attention.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gnomon/torch/linear_attention.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>

#include "ops/attention/call_checks.h"
#include "ops/catalogue/registry.h"
#include "ops/linear/causal_sums.h"
#include "ops/linear/feature_sums.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

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
    const Component rope = Component::Parse(*arguments.rope);
    const PositionEntry& entry = FindPosition(rope);
    TORCH_CHECK_VALUE(entry.rotate != nullptr && entry.Tensors(rope).empty(), kLinearAttention,
                      ": rope is ", rope.Text(), "; expected RoPE without tensor arguments");
    rotation.rope = rope.Text();
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
    numerator = FeatureSums(rotation.Query(query), rotation.Key(key), value, causal);
    if (rotation.rope) denominator = FeatureSums(query, key, one, causal);
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
