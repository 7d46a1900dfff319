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
  // (H,), in the computing type: the entry's head parameter, undefined where it has none.
  at::Tensor head_parameter;
};

struct ResolvedPosition {
  const PositionEntry* entry;
  Component component;
  std::vector<at::Tensor> tensors;  // those of the entry, in the computing type
};

struct CallArguments {
  bool causal = false;
  OptionalSymInt left;
  OptionalSymInt right;
  OptionalTensor key_starts;
  OptionalTensor key_lengths;
  OptionalTensor query_segments;
  OptionalTensor key_segments;
  OptionalSymInt query_offset;
  OptionalTensor query_offsets;  // (B,), instead of query_offset
  std::optional<double> scale;
};

// Throws c10::ValueError, c10::TypeError or c10::NotImplementedError unless q, k and v are what
// attention takes.
void CheckTokens(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// What a call computes in, its parameters and its lse: q's dtype, or float32 for a lower one.
at::ScalarType ComputingType(const at::Tensor& q);

// A parameter in the computing type. It comes in that or in q's dtype, else c10::TypeError; `what`
// begins the message.
at::Tensor AsParameter(const at::Tensor& tensor, const at::Tensor& q, const std::string& what);

// A number in every head, in the computing type.
at::Tensor HeadNumber(const at::Tensor& q, double number);

// Tokens checked by CheckTokens. Returns o, in q's dtype, and lse, in the computing type.
std::tuple<at::Tensor, at::Tensor> Compose(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v,
                                           const ResolvedSimilarity& similarity,
                                           const std::vector<ResolvedPosition>& positions,
                                           const CallArguments& arguments);

}  // namespace gnomon

#endif  // GNOMON_OPS_COMPOSE_H_
