#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <vector>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace forget {
namespace {

// The log of a closed gate. -inf would make any sum -inf, and -1e30 would erase all digits of a
// sum; this value is enough to make all earlier weights 0.
constexpr double kClosed = -1e6;

// Uses the product of all gates up to a key instead of the product of the gates between the key and
// the query. The two differ by a factor that all keys of a row share. float64 preserves the
// differences of long sums.
at::Tensor Bias(const Component& /*component*/, const std::vector<at::Tensor>& tensors,
                const KeyBiasCall& call) {
  const at::Tensor gates = tensors[0].clamp_min(kClosed);
  if (!call.key_order) return -at::cumsum(gates, 2, at::kDouble);
  // With segments or call positions, accumulates each segment separately, in order of position.
  const at::Tensor& order = *call.key_order;
  const std::vector<c10::SymInt> sizes = {order.sym_size(0), gates.sym_size(1), order.sym_size(1)};
  const auto over_heads = [&](const at::Tensor& columns) {
    return columns.unsqueeze(1).expand_symint(sizes);
  };
  const at::Tensor in_order = gates.expand_symint(sizes).gather(2, over_heads(order));
  at::Tensor sums = at::cumsum(in_order, 2, at::kDouble);
  if (call.segment_begin) {
    const at::Tensor begin = over_heads(*call.segment_begin);
    sums = sums - (sums.gather(2, begin) - in_order.gather(2, begin));
  }
  return -sums.gather(2, over_heads(order.argsort(int64_t{1})));
}

int64_t OneColumn(const Component& /*component*/, const ModuleShape& /*n*/) { return 1; }

// With constant gates, the biases decay like those of ALiBi: log f = -slope, where f = sigmoid(b).
at::Tensor BiasStart(int64_t heads) { return -alibi_slopes(heads).expm1().log(); }

// The input is made contiguous, because compiled graphs assume a contiguous gradient of
// log_sigmoid.
at::Tensor LogGate(const at::Tensor& product) {
  return at::log_sigmoid(product.contiguous()).squeeze(3);
}

constexpr TokenProjection kGate = {
    .of_keys = true, .columns = OneColumn, .bias_start = BiasStart, .finish = LogGate};

const RegisterPosition forget({
    .catalogue =
        {.name = "forget",
         .title = "forget gate",
         .formula = "-(log f[h, 0] + ... + log f[h, j]); with a causal mask, this multiplies the "
                    "weight of each key by the gates f of all later keys, up to the query's "
                    "position",
         .latex = R"(-\sum_{l \le j} \log f_{h l})",
         .note = "f is the gate. With a causal mask, this multiplies the weight of each key by the "
                 "gates of all later keys, up to the query's position",
         .details =
             "The sum stays accurate for long sequences: it is computed in float64, and the "
             "kernels subtract the sum at the query's own position (lse and sinks use the full "
             "sum). The gates of keys hidden by key_starts or key_lengths are treated as 1. With "
             "segments, the sum runs only over the key's own segment. The log gates are summed in "
             "order of position. A module computes the gates from its tokens as f = sigmoid(w_h x "
             "+ b_h). The initial values match ALiBi: w_h is 0, and b_h makes log f equal to minus "
             "ALiBi's slope.",
         .source = "Lin et al. 2025, Forgetting Transformer: Softmax Attention with a "
                   "Forget Gate",
         .role = CatalogueEntry::Role::kKeyBias,
         .cost = "3 + 0",
         .sums_over_keys = true,
         .class_name = "Forget"},
    .parameters =
        {Table("log_forget", Index::kKeyEntries, {.projection = kGate})
             .Means(
                 "(1 or B, 1 or H, Lk), the logarithm of each key's gate, at most 0; for example, "
                 "logsigmoid of a projection of the key's token. Values below -1e6, including "
                 "-inf, are clamped to -1e6: keys before such a gate then have no weight relative "
                 "to keys after it")},
    .key_bias = Bias,
});

}  // namespace
}  // namespace forget
}  // namespace gnomon
