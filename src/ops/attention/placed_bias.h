// Offset biases for tokens with call positions. The range of offsets depends on data, and
// shapes in a traced call cannot, so the operator receives the parameters of the biases and builds
// their table itself.
#ifndef GNOMON_OPS_ATTENTION_PLACED_BIAS_H_
#define GNOMON_OPS_ATTENTION_PLACED_BIAS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/grammar/component.h"

namespace gnomon {

// A sum of biases in the form that the operator accepts.
class PackedBiases {
 public:
  // Adds a bias with its tensors.
  void Add(const PositionEntry& entry, const Component& component,
           const std::vector<at::Tensor>& tensors);

  bool empty() const { return terms_.empty(); }
  const std::string& terms() const { return terms_; }
  // For each tensor, its rank followed by its sizes.
  const std::vector<c10::SymInt>& shapes() const { return shapes_; }
  // The values of all tensors, concatenated, with the dtype and device of the bias.
  at::Tensor Parameters(const at::TensorOptions& options) const;

 private:
  std::string terms_;
  std::vector<c10::SymInt> shapes_;
  std::vector<at::Tensor> flat_;
};

// The offsets p_j - p_i of a call, from `first` to `last`.
struct OffsetSpan {
  int64_t first;
  int64_t last;
};

// The table of the sum, (1, H, last - first + 1), where entry n belongs to p_j - p_i = first + n,
// and the gradient of its parameters. Both throw c10::ValueError.
at::Tensor PlacedBiasTable(std::string_view terms, at::IntArrayRef shapes,
                           const at::Tensor& parameters, int64_t heads, OffsetSpan span);
at::Tensor PlacedBiasGradient(std::string_view terms, at::IntArrayRef shapes,
                              const at::Tensor& parameters, OffsetSpan span,
                              const at::Tensor& d_table);
// Forward-mode derivatives of both in the direction `tangent` of the parameters, the second for a
// constant d_table.
at::Tensor PlacedBiasTangent(std::string_view terms, at::IntArrayRef shapes,
                             const at::Tensor& parameters, int64_t heads, OffsetSpan span,
                             const at::Tensor& tangent);
at::Tensor PlacedBiasGradientTangent(std::string_view terms, at::IntArrayRef shapes,
                                     const at::Tensor& parameters, OffsetSpan span,
                                     const at::Tensor& d_table, const at::Tensor& tangent);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_PLACED_BIAS_H_
