#include "ops/attention/outputs.h"

#include <ATen/ATen.h>

#include <limits>
#include <numbers>

#include "ops/geometry/geometry.h"
#include "ops/operators/attention_operators.h"

namespace gnomon {

std::tuple<at::Tensor, at::Tensor> AddSink(const at::Tensor& o, const at::Tensor& lse,
                                           const at::Tensor& sink) {
  TORCH_CHECK_VALUE(sink.dim() == 0 || (sink.dim() == 1 && sink.sym_size(0) == lse.sym_size(1)) ||
                        (sink.dim() == 3 && sink.sym_sizes() == lse.sym_sizes()),
                    OperatorArguments::kOperation, ": sink has shape ", sink.sym_sizes(),
                    "; expected (), (H,) = (", lse.sym_size(1),
                    ",) or (B, H, Lq) = ", lse.sym_sizes());
  const at::Tensor score = (sink.dim() == 1 ? sink.unsqueeze(1) : sink).expand_as(lse);
  // lse is -inf for rows whose keys are all masked, and sink = -inf means no sink; subtracting the
  // two would give NaN, also in the gradient.
  constexpr double kNothing = -1e30;
  const at::Tensor finite = lse.clamp_min(kNothing);
  // With e = exp(-|lse - sink|), the weight of the keys is 1 or e, divided by 1 + e. Unlike those
  // of sigmoid, log_sigmoid and logaddexp, second derivatives of these functions keep their digits.
  const at::Tensor margin = finite - score;
  const at::Tensor is_below = margin >= 0;  // whether the sink is below lse
  const at::Tensor e = at::where(is_below, -margin, margin).exp();
  const at::Tensor keys = at::where(is_below, 1.0, e) / (1 + e);
  const at::Tensor total = at::where(is_below, finite, score) + e.log1p();
  return {(o * keys.unsqueeze(3)).to(o.scalar_type()),
          at::where(total <= kNothing, -std::numeric_limits<double>::infinity(), total)};
}

void AddRowBias(at::Tensor& o, at::Tensor& lse, at::Tensor& statistics, const at::Tensor& row_bias,
                const OptionalTensor& temperature, bool wants_lse) {
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  const at::Tensor sees_nothing = (row_bias == kNothing).logical_or(lse == kNothing);
  const at::Tensor bias = at::where(sees_nothing, 0.0, row_bias);
  // A bias of NaN or +inf makes the whole row NaN.
  o = (o + 0 * bias.unsqueeze(3)).masked_fill(sees_nothing.unsqueeze(3), 0);
  if (!wants_lse) return;
  const at::Tensor added = temperature ? bias * *temperature : bias;
  lse = (lse + added).masked_fill(sees_nothing, kNothing);
  const at::Tensor largest = statistics.slice(0, 0, 1) + added.detach() * std::numbers::log2e;
  statistics =
      at::cat({largest.masked_fill(sees_nothing, kNothing),
               statistics.slice(0, 1, 2).masked_fill(sees_nothing, 0), statistics.slice(0, 2)});
}

at::Tensor LorentzCentroid(const at::Tensor& o, const ResolvedSimilarity& similarity) {
  const at::Tensor points = OntoHyperboloid(o);
  if (similarity.entry->curvature == nullptr) return points;
  const at::Tensor root = OverRows(similarity.entry->curvature(similarity.others).sqrt());
  return (points * OverColumns(root.unsqueeze(0))).to(o.scalar_type());
}

}  // namespace gnomon
