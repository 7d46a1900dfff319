// What becomes of o and lse once the operator has computed them.
#ifndef GNOMON_OPS_ATTENTION_OUTPUTS_H_
#define GNOMON_OPS_ATTENTION_OUTPUTS_H_

#include <ATen/core/Tensor.h>

#include <tuple>

#include "ops/attention/call.h"

namespace gnomon {

// o (B, H, Lq, Dv) and lse (B, H, Lq) with one more score in each row, whose key has the value 0.
std::tuple<at::Tensor, at::Tensor> AddSink(const at::Tensor& o, const at::Tensor& lse,
                                           const at::Tensor& sink);

// Adds a bias of the rows, (1 or B, 1 or H, 1 or Lq), to their scores, which `temperature`
// multiplies. What all keys share adds to lse alone, and hides whole rows where it is -inf. The
// statistics have it, too: parts of the keys are merged by these, and one key of many has a bias of
// its own. lse and the statistics stay as they are unless wanted.
void AddRowBias(at::Tensor& o, at::Tensor& lse, at::Tensor& statistics, const at::Tensor& row_bias,
                const OptionalTensor& temperature, bool wants_lse);

// The sums o (B, H, Lq, Dv) of points of hyperboloids, times first, back on them: of all points
// those that have the least sum of squared Lorentzian distances from what was summed up (Law et al.
// 2019). 0 stays 0.
at::Tensor LorentzCentroid(const at::Tensor& o, const ResolvedSimilarity& similarity);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_OUTPUTS_H_
