// Attention as a composition: positions rotate tokens and add biases, the similarity maps tokens,
// and the operator computes the rest. All calls, from C++, Python and modules, end here.
#ifndef GNOMON_OPS_ATTENTION_COMPOSE_H_
#define GNOMON_OPS_ATTENTION_COMPOSE_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "ops/attention/call.h"
#include "ops/attention/pages.h"

namespace gnomon {

// The per-head factor for the similarity's token map. Checks the scale and the columns of q (B, H,
// Lq, D).
at::Tensor HeadFactor(const char* operation, const ResolvedSimilarity& similarity,
                      const at::Tensor& q, std::optional<double> scale);

// Computes attention; the tokens must have been checked by CheckTokens. Returns o in the dtype of
// q, and lse and statistics in the computing type. The latter two are undefined unless requested.
// `arguments` must not contain a page_table.
Outputs Compose(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const ResolvedSimilarity& similarity,
                const std::vector<ResolvedPosition>& positions, const CallArguments& arguments,
                bool returns_lse = false);

// The same for checked pages. Kernels read them through the table if nothing else reads keys or
// values, and if no derivatives are recorded. Otherwise, keys and values are gathered first.
Outputs ComposePages(const at::Tensor& q, const Pages& pages, const ResolvedSimilarity& similarity,
                     const std::vector<ResolvedPosition>& positions, const CallArguments& arguments,
                     bool returns_lse);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_COMPOSE_H_
