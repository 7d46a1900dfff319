// Operations that are applied to o and lse after the kernels.
#ifndef GNOMON_OPS_ATTENTION_OUTPUTS_H_
#define GNOMON_OPS_ATTENTION_OUTPUTS_H_

#include <ATen/core/Tensor.h>

#include <tuple>

#include "ops/attention/call.h"

namespace gnomon {

// Adds one more score to each row of o (B, H, Lq, Dv) and lse (B, H, Lq), for a key with value 0.
std::tuple<at::Tensor, at::Tensor> AddSink(const at::Tensor& o, const at::Tensor& lse,
                                           const at::Tensor& sink);

// Adds a row bias, (1 or B, 1 or H, 1 or Lq), multiplied by `temperature`, to the scores. A bias
// that all keys share only shifts lse, and masks the row if it is -inf. The statistics include the
// bias as well, because they are used to merge results for parts of the keys. lse and the
// statistics are updated only if requested.
void AddRowBias(at::Tensor& o, at::Tensor& lse, at::Tensor& statistics, const at::Tensor& row_bias,
                const OptionalTensor& temperature, bool wants_lse);

// Projects the sums o (B, H, Lq, Dv) of hyperboloid points, time first, back onto the hyperboloid.
// The results are the points with the smallest weighted sum of squared Lorentzian distances (Law et
// al. 2019). A sum of 0 remains 0.
at::Tensor LorentzCentroid(const at::Tensor& o, const ResolvedSimilarity& similarity);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_OUTPUTS_H_
