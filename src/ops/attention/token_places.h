// Where the tokens of a call stand.
#ifndef GNOMON_OPS_ATTENTION_TOKEN_PLACES_H_
#define GNOMON_OPS_ATTENTION_TOKEN_PLACES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <vector>

#include "ops/attention/call.h"
#include "ops/coordinates/offset_range.h"
#include "ops/coordinates/token_positions.h"

namespace gnomon {

// Whether what a position does depends on where tokens stand.
bool DependsOnPlaces(const ResolvedPosition& position);

// The position of the first query where tokens stand one after the other, else 0. Throws
// c10::ValueError where a call needs one and has none; has_position: some term depends on places.
c10::SymInt QueryOffset(const at::Tensor& q, const at::Tensor& k, bool has_position,
                        const CallArguments& arguments);

// Positions of several axes, (1 or B, L, axes). RoPE turns by them; what a query sees goes by the
// order of tokens, as without them.
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

// Positions that the caller gives, one number a token.
class Places {
 public:
  // Nullopt where tokens stand one after the other, or have coordinates.
  static std::optional<Places> Find(const at::Tensor& q, const at::Tensor& k,
                                    const CallArguments& arguments);
  // Those of tokens that stand one after the other.
  static Places Consecutive(const at::Tensor& q, const OffsetRange& range);

  // (B, Lq) and (B, Lk), int64.
  const at::Tensor& queries() const { return queries_; }
  const at::Tensor& keys() const { return keys_; }

  TokenPositions Of(bool keys) const;

 private:
  at::Tensor queries_;
  at::Tensor keys_;
};

// The keys of a call in the order of their segments and, within these, of their positions; keys
// that no query may see come last.
class KeyOrder {
 public:
  KeyOrder(const Places& places, const OptionalTensor& query_segments,
           const OptionalTensor& key_segments, const OptionalTensor& key_starts,
           const OptionalTensor& key_lengths);

  // (B, Lk): the columns.
  const at::Tensor& columns() const { return order_; }
  // (B, Lk), with segments of keys: the place in that order of the first key of each one's segment.
  const std::optional<at::Tensor>& segment_begin() const { return segment_begin_; }
  // (B, Lq): how many keys of its segment stand up to a query's position.
  at::Tensor Seen() const { return last_ - first_; }
  // (B, Lq): how many keys of its segment there are.
  at::Tensor All() const { return past_ - first_; }
  // (B, Lq): the column of the last of them; any where there is none.
  at::Tensor Own() const;

 private:
  at::Tensor order_;
  std::optional<at::Tensor> segment_begin_;
  at::Tensor last_;
  at::Tensor first_;
  at::Tensor past_;
};

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_TOKEN_PLACES_H_
