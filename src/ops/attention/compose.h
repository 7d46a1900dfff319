// Attention as a composition: positions rotate tokens and add biases, the similarity maps tokens,
// and the operator does the rest. Both languages, and modules, come here.
#ifndef GNOMON_OPS_ATTENTION_COMPOSE_H_
#define GNOMON_OPS_ATTENTION_COMPOSE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/attention/operators.h"
#include "ops/catalogue/registry.h"

namespace gnomon {

struct ResolvedSimilarity {
  const SimilarityEntry* entry;
  Component component;
  // (H,), in the computing type: the entry's head parameter, undefined where it has none.
  at::Tensor head_parameter;
  std::vector<at::Tensor> others = {};  // (H,), the entry's other head parameters
};

struct ResolvedPosition {
  const PositionEntry* entry;
  Component component;
  std::vector<at::Tensor> tensors;  // those of the entry, in the computing type
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
// third axis, coordinates, are what RoPE turns by, and nothing else.
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
  ARGUMENT(OptionalTensor, positions, {}, kInteger, "B Q")               \
  ARGUMENT(OptionalTensor, key_positions, {}, kInteger, "B K")           \
  ARGUMENT(std::optional<std::vector<int64_t>>, chunks, {}, kOption, "") \
  ARGUMENT(std::optional<double>, scale, {}, kOption, "")                \
  ARGUMENT(double, dropout, 0, kOption, "")                              \
  ARGUMENT(OptionalTensor, seed, {}, kInteger, "1")                      \
  ARGUMENT(std::string, aggregation, "mean", kOption, "")                \
  ARGUMENT(OptionalTensor, sink, {}, kDifferentiable, "")                \
  ARGUMENT(OptionalTensor, mask, {}, kBoolean, "")                       \
  ARGUMENT(OptionalTensor, temperature, {}, kDifferentiable, "")         \
  ARGUMENT(double, tolerance, kDefaultTolerance, kOption, "")

struct CallArguments {
  GNOMON_ARGUMENTS(GNOMON_CALL_ARGUMENTS)
};

// Throws c10::ValueError, c10::TypeError or c10::NotImplementedError unless q, k and v are what
// attention takes. The messages begin with `operation`.
void CheckTokens(const char* operation, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& v);

// What holds of q, k and v in any operator: a floating-point dtype, a device that there are kernels
// for, and both as in q.
void CheckTokenType(const char* operation, const char* name, const at::Tensor& tensor,
                    const at::Tensor& q);

// Throws c10::TypeError unless the tensor has integers, on the device of q.
void CheckIntegerType(const char* operation, const char* name, const at::Tensor& tensor,
                      const at::Tensor& q);

// An integer tensor of q's batch, (B,) or (B, length), as int64. Without the axis of the batch it
// holds for all of it.
OptionalTensor CheckIntegers(const char* operation, const char* name, const OptionalTensor& tensor,
                             const at::Tensor& q, const OptionalSymInt& length = std::nullopt);

// k (B, Hkv, Lk, D) with zeros where no query may look: NaN there would come back in the gradient
// of a token map.
at::Tensor WithoutHidden(const at::Tensor& k, const OptionalTensor& key_starts,
                         const OptionalTensor& key_lengths);

// What a call computes in, its parameters and its lse: q's dtype, or float32 for a lower one.
at::ScalarType ComputingType(const at::Tensor& q);

// A parameter in the computing type. It comes in that or in q's dtype, else c10::TypeError; `what`
// begins the message.
at::Tensor AsParameter(const at::Tensor& tensor, const at::Tensor& q, const std::string& what);

// A number in every head, in the computing type.
at::Tensor HeadNumber(const at::Tensor& q, double number);

// The last argument of the similarity's token map. Checks the scale, and the columns of q (B, H,
// Lq, D).
at::Tensor HeadFactor(const char* operation, const ResolvedSimilarity& similarity,
                      const at::Tensor& q, std::optional<double> scale);

// o (B, H, Lq, Dv) and lse (B, H, Lq) with one more score in each row, whose key has the value 0.
std::tuple<at::Tensor, at::Tensor> AddSink(const at::Tensor& o, const at::Tensor& lse,
                                           const at::Tensor& sink);

// The sums o (B, H, Lq, Dv) of points of hyperboloids, times first, back on them: of all points
// those that have the least sum of squared Lorentzian distances from what was summed up (Law et al.
// 2019). 0 stays 0.
at::Tensor LorentzCentroid(const at::Tensor& o, const ResolvedSimilarity& similarity);

// Tokens checked by CheckTokens. Returns o, in q's dtype, and lse and statistics, in the computing
// type and empty unless asked for.
Outputs Compose(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const ResolvedSimilarity& similarity,
                const std::vector<ResolvedPosition>& positions, const CallArguments& arguments,
                bool returns_lse = false);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_COMPOSE_H_
