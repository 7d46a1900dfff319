// The parts of an attention call other than its tokens: its terms and arguments.
#ifndef GNOMON_OPS_ATTENTION_CALL_H_
#define GNOMON_OPS_ATTENTION_CALL_H_

#include <ATen/core/Tensor.h>
#include <gnomon/attention.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/operators/argument_list.h"

namespace gnomon {

struct ResolvedSimilarity {
  const SimilarityEntry* entry;
  std::shared_ptr<const Component> component;
  // (H,), in the computing type: the entry's head parameter; undefined if it has none.
  at::Tensor head_parameter;
  std::vector<at::Tensor> others = {};  // (H,), the entry's other head parameters
};

struct ResolvedPosition {
  const PositionEntry* entry;
  std::shared_ptr<const Component> component;
  std::vector<at::Tensor> tensors;  // the entry's tensors, in the computing type
  bool of_module = false;
  bool of_turned_keys = false;    // k has already been rotated
  bool of_weights_alone = false;  // skip its contributions to values and output
};

// The arguments of attention calls other than tokens and terms, in the order of the operators'
// schemas: visible keys, positions, and transformations of scores and weights.
//
//   left, right: the window.
//   query_offsets: (B,), replaces query_offset.
//   positions, key_positions: replace the offsets; key_positions defaults to positions. Only RoPE
//     reads positions with a third axis, the coordinates.
//   chunks: the chunk size, and the numbers of visible chunks before and after the query's own.
//   seed: () or (1,), int64; drawn from PyTorch's generator if absent.
//   aggregation: "mean", "einstein_midpoint" of values in the Klein ball, or "lorentz_centroid" of
//     values on the hyperboloid.
//   sink: (), (H,) or (B, H, Lq), an additional score per row, for a key without a value.
//   mask: marks visible pairs; broadcasts to (B, H, Lq, Lk).
//   temperature: multiplies scores; broadcasts to (B, H, Lq).
//   score_softcap: caps the scores after the temperature.
//   tolerance: the fraction of a row's total weight that may be skipped.
//   page_table: k and v are pages (N, Hkv, size, columns), and key j of batch element b is row
//     j % size of page page_table[b, j / size].
//
// The axes Q and K determine how an argument is sliced when a subset of rows or keys is computed.
// Broadcast axes (of size 1) are not sliced, except in integer tensors.
#define GNOMON_CALL_ARGUMENTS(ARGUMENT)                                  \
  ARGUMENT(bool, causal, false, kOption, "")                             \
  ARGUMENT(OptionalSymInt, left, {}, kOption, "")                        \
  ARGUMENT(OptionalSymInt, right, {}, kOption, "")                       \
  ARGUMENT(OptionalTensor, key_starts, {}, kInteger, "B")                \
  ARGUMENT(OptionalTensor, key_lengths, {}, kInteger, "B")               \
  ARGUMENT(OptionalTensor, query_segments, {}, kInteger, "B Q")          \
  ARGUMENT(OptionalTensor, key_segments, {}, kInteger, "B K")            \
  ARGUMENT(OptionalSymInt, query_offset, {}, kOption, "")                \
  ARGUMENT(OptionalTensor, query_offsets, {}, kInteger, "B")             \
  ARGUMENT(OptionalTensor, positions, {}, kInteger, "B Q or B Q A")      \
  ARGUMENT(OptionalTensor, key_positions, {}, kInteger, "B K or B K A")  \
  ARGUMENT(std::optional<std::vector<int64_t>>, chunks, {}, kOption, "") \
  ARGUMENT(std::optional<double>, scale, {}, kOption, "")                \
  ARGUMENT(double, dropout, 0, kOption, "")                              \
  ARGUMENT(OptionalTensor, seed, {}, kInteger, "1")                      \
  ARGUMENT(std::string, aggregation, "mean", kOption, "")                \
  ARGUMENT(OptionalTensor, sink, {}, kDifferentiable, "B H Q or H")      \
  ARGUMENT(OptionalTensor, mask, {}, kBoolean, "B H Q K")                \
  ARGUMENT(OptionalTensor, temperature, {}, kDifferentiable, "B H Q")    \
  ARGUMENT(std::optional<double>, score_softcap, {}, kOption, "")        \
  ARGUMENT(double, tolerance, kDefaultTolerance, kOption, "")            \
  ARGUMENT(OptionalTensor, page_table, {}, kInteger, "B T")

struct CallArguments {
  GNOMON_ARGUMENTS(GNOMON_CALL_ARGUMENTS)
};

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_CALL_H_
