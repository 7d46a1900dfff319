#include "ops/attention/call_positions.h"

#include <ATen/ATen.h>

#include <limits>

#include "ops/attention/call_checks.h"
#include "ops/operators/attention_operators.h"

namespace gnomon {
namespace {

// Whether the call's positions have several axes.
bool HasCoordinates(const CallArguments& arguments) {
  return arguments.positions && arguments.positions->dim() == 3;
}

at::Tensor CheckedCoordinates(const char* name, const at::Tensor& given, const at::Tensor& q,
                              const c10::SymInt& length) {
  CheckIntegerType(OperatorArguments::kOperation, name, given, q);
  TORCH_CHECK_VALUE((given.sym_size(0) == 1 || given.sym_size(0) == q.sym_size(0)) &&
                        given.sym_size(1) == length && given.sym_size(2) >= 1,
                    OperatorArguments::kOperation, ": ", name, " has shape ", given.sym_sizes(),
                    "; expected (1 or B, length, axes) with B = ", q.sym_size(0),
                    " and length = ", length);
  return given.to(at::kLong);
}

TokenPositions PositionsOf(const at::Tensor& queries, const at::Tensor& keys, bool of_keys) {
  return of_keys ? TokenPositions{keys, queries} : TokenPositions{queries, keys};
}

// Without key_positions, the keys have the positions of the queries, so the lengths must be equal.
void CheckKeyPositions(const at::Tensor& q, const at::Tensor& k, const CallArguments& arguments) {
  TORCH_CHECK_VALUE(arguments.key_positions || q.sym_size(2) == k.sym_size(2),
                    OperatorArguments::kOperation,
                    ": key_positions is None, but Lq = ", q.sym_size(2),
                    " and Lk = ", k.sym_size(2), " differ; pass the positions of the keys");
}

}  // namespace

bool DependsOnPositions(const ResolvedPosition& position) {
  switch (position.entry->role()) {
    case PositionEntry::Role::kNone:
    case PositionEntry::Role::kKeyBias:
    case PositionEntry::Role::kPairBias:
    case PositionEntry::Role::kNorm:
    case PositionEntry::Role::kSink:
    case PositionEntry::Role::kGate:
      return false;
    default:
      return true;
  }
}

c10::SymInt QueryOffset(const at::Tensor& q, const at::Tensor& k, bool has_position,
                        const CallArguments& arguments) {
  if (arguments.query_offsets || (arguments.positions && !HasCoordinates(arguments))) return 0;
  if (arguments.query_offset) {
    // Positions beyond this limit are not exact in float64.
    constexpr int64_t kLargestExact = int64_t{1} << 53;
    const std::optional<int64_t> offset = arguments.query_offset->maybe_as_int();
    TORCH_CHECK_VALUE(!offset || (*offset >= -kLargestExact && *offset <= kLargestExact),
                      "gnomon.attention: query_offset is ", *arguments.query_offset,
                      "; expected a value from -2^53 to 2^53");
    return *arguments.query_offset;
  }
  if (q.sym_size(2) != k.sym_size(2)) {
    const char* needs_it = has_position                        ? "a position"
                           : arguments.left || arguments.right ? "a window"
                           : arguments.chunks                  ? "chunks"
                           : arguments.causal                  ? "causal"
                                                               : nullptr;
    TORCH_CHECK_VALUE(needs_it == nullptr,
                      "gnomon.attention: query_offset is None, but Lq = ", q.sym_size(2),
                      " and Lk = ", k.sym_size(2), " differ; ", needs_it ? needs_it : "",
                      " requires query_offset, the position of the first query");
  }
  return 0;
}

std::optional<Coordinates> Coordinates::Find(const at::Tensor& q, const at::Tensor& k,
                                             const std::vector<ResolvedPosition>& positions,
                                             const CallArguments& arguments) {
  if (!HasCoordinates(arguments)) return std::nullopt;
  for (const ResolvedPosition& position : positions) {
    TORCH_CHECK_VALUE(
        !DependsOnPositions(position) || position.entry->role() == PositionEntry::Role::kRotation,
        OperatorArguments::kOperation, ": positions have several axes, which ",
        position.component->name(), " does not support; pass positions of shape (B, Lq)");
  }
  CheckKeyPositions(q, k, arguments);
  Coordinates coordinates;
  coordinates.queries_ = CheckedCoordinates("positions", *arguments.positions, q, q.sym_size(2));
  coordinates.keys_ = coordinates.queries_;
  if (arguments.key_positions) {
    const at::Tensor& given = *arguments.key_positions;
    TORCH_CHECK_VALUE(given.dim() == 3 && given.sym_size(2) == coordinates.queries_.sym_size(2),
                      OperatorArguments::kOperation, ": key_positions has shape ",
                      given.sym_sizes(),
                      "; expected (B, Lk, axes) with as many axes as positions, ",
                      coordinates.queries_.sym_size(2));
    coordinates.keys_ = CheckedCoordinates("key_positions", given, q, k.sym_size(2));
  }
  return coordinates;
}

TokenPositions Coordinates::Of(bool keys) const { return PositionsOf(queries_, keys_, keys); }

std::optional<CallPositions> CallPositions::Find(const at::Tensor& q, const at::Tensor& k,
                                                 const CallArguments& arguments) {
  if (HasCoordinates(arguments)) return std::nullopt;
  if (!arguments.positions) {
    TORCH_CHECK_VALUE(!arguments.key_positions, OperatorArguments::kOperation,
                      ": key_positions is given without positions; expected both");
    return std::nullopt;
  }
  TORCH_CHECK_VALUE(!arguments.query_offset && !arguments.query_offsets,
                    OperatorArguments::kOperation,
                    ": positions and query_offset are both given; pass only one of them");
  CheckKeyPositions(q, k, arguments);
  CallPositions positions;
  positions.queries_ = *CheckIntegers(OperatorArguments::kOperation, "positions",
                                      arguments.positions, q, q.sym_size(2));
  positions.keys_ = arguments.key_positions
                        ? *CheckIntegers(OperatorArguments::kOperation, "key_positions",
                                         arguments.key_positions, q, k.sym_size(2))
                        : positions.queries_;
  return positions;
}

CallPositions CallPositions::Consecutive(const at::Tensor& q, const OffsetRange& range) {
  const c10::SymInt batch = q.sym_size(0);
  CallPositions positions;
  positions.queries_ = range.QueryPositions(q.options()).expand_symint({batch, range.queries});
  positions.keys_ =
      at::arange(range.keys, q.options().dtype(at::kLong)).expand_symint({batch, range.keys});
  return positions;
}

TokenPositions CallPositions::Of(bool keys) const { return PositionsOf(queries_, keys_, keys); }

KeyOrder::KeyOrder(const CallPositions& positions, const OptionalTensor& query_segments,
                   const OptionalTensor& key_segments, const OptionalTensor& key_starts,
                   const OptionalTensor& key_lengths) {
  const at::Tensor& keys = positions.keys();
  const at::Tensor seen =
      WithoutHidden(at::ones_like(keys).unsqueeze(1).unsqueeze(3), key_starts, key_lengths)
          .squeeze(3)
          .squeeze(1) != 0;
  // A segment and a position are packed into one 64-bit integer.
  constexpr int64_t kApart = int64_t{1} << 32;
  const at::Tensor first = positions.queries().sym_size(1) == 0
                               ? keys.slice(1, 0, 1)
                               : positions.queries().amin({1}, /*keepdim=*/true);
  const auto code = [&](const at::Tensor& tokens, const OptionalTensor& segments) {
    const at::Tensor offset = (tokens - first).clamp(-kApart / 2, kApart / 2 - 1);
    return segments ? *segments * kApart + offset : offset;
  };
  const auto [sorted, order] =
      at::where(seen, code(keys, key_segments), std::numeric_limits<int64_t>::max())
          .sort(/*stable=*/true, /*dim=*/1, /*descending=*/false);
  order_ = order;
  if (key_segments) {
    const at::Tensor of_sorted = key_segments->expand_symint(order.sym_sizes()).gather(1, order);
    segment_begin_ = at::searchsorted(sorted, of_sorted * kApart - kApart / 2);
  }
  last_ = at::searchsorted(sorted, code(positions.queries(), query_segments), /*out_int32=*/false,
                           /*right=*/true);
  const at::Tensor segments =
      query_segments ? *query_segments * kApart : at::zeros_like(positions.queries());
  first_ = at::searchsorted(sorted, segments - kApart / 2);
  past_ = at::searchsorted(sorted, segments + kApart / 2);
}

at::Tensor KeyOrder::Own() const { return order_.gather(1, (last_ - 1).clamp_min(0)); }

}  // namespace gnomon
