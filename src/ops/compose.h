// Attention as a composition: positions rotate tokens and add biases, the similarity maps tokens,
// and the operator does the rest. Both languages, and modules, come here.
#ifndef GNOMON_OPS_COMPOSE_H_
#define GNOMON_OPS_COMPOSE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/operators.h"
#include "ops/registry.h"

namespace gnomon {

struct ResolvedSimilarity {
  const SimilarityEntry* entry;
  Component component;
  at::Tensor gamma;  // (H,), in the dtype of q; undefined for dot
};

struct ResolvedPosition {
  const PositionEntry* entry;
  Component component;
  std::vector<at::Tensor> tensors;  // those of the entry, in the dtype of q
};

struct CallArguments {
  bool causal = false;
  OptionalSymInt left;
  OptionalSymInt right;
  OptionalTensor key_starts;
  OptionalTensor key_lengths;
  OptionalSymInt query_offset;
  std::optional<double> scale;
};

// Throws c10::ValueError, c10::TypeError or c10::NotImplementedError unless q, k and v are what
// attention takes.
void CheckTokens(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// A number in every head, as q needs it.
at::Tensor HeadNumber(const at::Tensor& q, double number);

// Tokens checked by CheckTokens. Returns o and lse.
std::tuple<at::Tensor, at::Tensor> Compose(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v,
                                           const ResolvedSimilarity& similarity,
                                           const std::vector<ResolvedPosition>& positions,
                                           const CallArguments& arguments);

}  // namespace gnomon

#endif  // GNOMON_OPS_COMPOSE_H_
