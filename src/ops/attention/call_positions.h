// The positions of a call's tokens.
#ifndef GNOMON_OPS_ATTENTION_CALL_POSITIONS_H_
#define GNOMON_OPS_ATTENTION_CALL_POSITIONS_H_

#include <ATen/ATen.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <vector>

#include "ops/attention/call.h"
#include "ops/coordinates/offset_range.h"
#include "ops/coordinates/token_positions.h"

namespace gnomon {

// Whether the effect of a position term depends on the tokens' positions.
bool DependsOnPositions(const ResolvedPosition& position);

// The position of the first query if tokens are consecutive, otherwise 0. Throws c10::ValueError if
// a call requires query_offset but does not set it. has_position: whether some term depends on
// positions.
c10::SymInt QueryOffset(const at::Tensor& q, const at::Tensor& k, bool has_position,
                        const CallArguments& arguments);

// Positions with several axes, (1 or B, L, axes). Only RoPE uses them; masks use the order of the
// tokens.
class Coordinates {
 public:
  static std::optional<Coordinates> Find(const at::Tensor& q, const at::Tensor& k,
                                         const std::vector<ResolvedPosition>& positions,
                                         const CallArguments& arguments);

  TokenPositions Of(bool keys) const;

 private:
  at::Tensor queries_;
  at::Tensor keys_;
};

// Positions given by the caller, one integer per token.
class CallPositions {
 public:
  // nullopt if tokens are consecutive or have coordinates.
  static std::optional<CallPositions> Find(const at::Tensor& q, const at::Tensor& k,
                                           const CallArguments& arguments);
  // The positions of consecutive tokens.
  static CallPositions Consecutive(const at::Tensor& q, const OffsetRange& range);

  // (B, Lq) and (B, Lk), int64.
  const at::Tensor& queries() const { return queries_; }
  const at::Tensor& keys() const { return keys_; }

  TokenPositions Of(bool keys) const;

 private:
  at::Tensor queries_;
  at::Tensor keys_;
};

// The keys of a call ordered by segment and then by position; keys that no query can see come last.
class KeyOrder {
 public:
  KeyOrder(const CallPositions& positions, const OptionalTensor& query_segments,
           const OptionalTensor& key_segments, const OptionalTensor& key_starts,
           const OptionalTensor& key_lengths);

  // (B, Lk): the columns of the keys in this order.
  const at::Tensor& columns() const { return order_; }
  // (B, Lk), if there are key segments: for each key, the index in this order of the first key of
  // its segment.
  const std::optional<at::Tensor>& segment_begin() const { return segment_begin_; }
  // (B, Lq): for each query, the number of keys of its segment up to its position.
  at::Tensor Seen() const { return last_ - first_; }
  // (B, Lq): for each query, the number of keys of its segment.
  at::Tensor All() const { return past_ - first_; }
  // (B, Lq): for each query, the column of the last key that Seen() counts; arbitrary if there is
  // none.
  at::Tensor Own() const;

 private:
  at::Tensor order_;
  std::optional<at::Tensor> segment_begin_;
  at::Tensor last_;
  at::Tensor first_;
  at::Tensor past_;
};

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_CALL_POSITIONS_H_
