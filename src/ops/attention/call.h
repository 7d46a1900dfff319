// What a call of attention is, besides its tokens: its terms, and what it says of the rest.
#ifndef GNOMON_OPS_ATTENTION_CALL_H_
#define GNOMON_OPS_ATTENTION_CALL_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/operators/attention_operators.h"

namespace gnomon {

struct ResolvedSimilarity {
  const SimilarityEntry* entry;
  std::shared_ptr<const Component> component;
  // (H,), in the computing type: the entry's head parameter, undefined where it has none.
  at::Tensor head_parameter;
  std::vector<at::Tensor> others = {};  // (H,), the entry's other head parameters
};

struct ResolvedPosition {
  const PositionEntry* entry;
  std::shared_ptr<const Component> component;
  std::vector<at::Tensor> tensors;  // those of the entry, in the computing type
  bool of_module = false;
  bool of_turned_keys = false;    // k comes as this rotation leaves it
  bool of_weights_alone = false;  // what it adds to values or makes of the output is not asked for
};

// What calls of attention say besides tokens and terms, in the order of the operators' schemas:
// which keys a query sees, where it stands, and what becomes of the scores and weights.
//
// left and right are the window; chunks the size of chunks, and how many a query sees before and
// after its own; query_offsets (B,) goes instead of query_offset, and positions and key_positions
// go instead of both, where these are positions unless they are given; seed () or (1,) int64 is
// drawn by Torch's generator where it is absent; aggregation is "mean", "einstein_midpoint" of
// values in the Klein ball, or "lorentz_centroid" of values on the hyperboloid; sink (), (H,) or
// (B, H, Lq) is one more score of each row, whose key has no value; mask says which pairs are seen,
// and broadcasts to (B, H, Lq, Lk); temperature multiplies scores, and broadcasts to (B, H, Lq);
// tolerance is what tiles that are left out may add to a row's sum of weights. Positions with a
// third axis, coordinates, are what RoPE turns by, and nothing else. Where some rows or keys of a
// call are computed by themselves, the axes Q and K say what is cut; an axis of one number that is
// for all stays, but of integers.
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
  ARGUMENT(double, tolerance, kDefaultTolerance, kOption, "")

struct CallArguments {
  GNOMON_ARGUMENTS(GNOMON_CALL_ARGUMENTS)
};

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_CALL_H_
