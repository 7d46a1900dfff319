#include <gnomon/torch/measurement.h>

#include <tuple>

#include "base/pair_count.h"
#include "core/peak.h"
#include "ops/catalogue/registry.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/executor.h"

namespace gnomon {

double MeasurePeakFlops(double seconds) { return MeasurePeakFlops(seconds, TorchExecutor()); }

PairCounts CountPairs(const std::function<void()>& run) {
  // Ends the count even if `run` throws.
  struct Counting {
    explicit Counting(PairCount* count) { CountPairs(count); }
    ~Counting() { CountPairs(nullptr); }
  };
  PairCount count;
  {
    const Counting counting(&count);
    run();
  }
  return {count.seen, count.computed};
}

MappedAttention::MappedAttention(const std::string& similarity, const torch::Tensor& q,
                                 const torch::Tensor& k, const torch::Tensor& v,
                                 const torch::Tensor& gamma) {
  const Component component = Component::Parse(similarity);
  const MappedTokens tokens = FindSimilarity(component).map(component, q, k, {gamma, {}});
  function_ = tokens.function;
  factor_ = tokens.factor.detach().clone();
  has_row_scalars_ = tokens.row_scalars.defined();
  has_column_scalars_ = tokens.column_scalars.defined();
  for (const torch::Tensor& tensor :
       {tokens.x, tokens.y, v, tokens.row_scalars, tokens.column_scalars}) {
    if (tensor.defined()) inputs_.push_back(tensor.detach().clone().requires_grad_(true));
  }
}

torch::Tensor MappedAttention::operator()(bool causal) const {
  OperatorArguments call;
  call.x = inputs_[0];
  call.y = inputs_[1];
  call.v = inputs_[2];
  if (has_row_scalars_) call.row_scalars = inputs_[3];
  if (has_column_scalars_) call.column_scalars = inputs_.back();
  call.factor = factor_;
  call.function = function_;
  if (causal) call.right = 0;
  return std::get<0>(AttentionOperator::CallForward(call));
}

}  // namespace gnomon
