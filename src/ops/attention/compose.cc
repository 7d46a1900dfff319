#include "ops/attention/compose.h"

#include <ATen/ATen.h>

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "base/kept.h"
#include "ops/attention/attention_cuda.h"
#include "ops/attention/grid_bias.h"
#include "ops/attention/kept_tensor.h"
#include "ops/attention/placed_bias.h"
#include "ops/coordinates/token_grid.h"
#include "ops/geometry/geometry.h"

namespace gnomon {
namespace {

constexpr const char* kOperation = "gnomon.attention";

bool IsLow(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

// Whether its positions have several axes.
bool HasCoordinates(const CallArguments& arguments) {
  return arguments.positions && arguments.positions->dim() == 3;
}

c10::SymInt QueryOffset(const at::Tensor& q, const at::Tensor& k, bool has_position,
                        const CallArguments& arguments) {
  if (arguments.query_offsets || (arguments.positions && !HasCoordinates(arguments))) return 0;
  if (arguments.query_offset) {
    // Beyond this, positions in float64 are no longer exact.
    constexpr int64_t kLargestExact = int64_t{1} << 53;
    const std::optional<int64_t> offset = arguments.query_offset->maybe_as_int();
    TORCH_CHECK_VALUE(!offset || (*offset >= -kLargestExact && *offset <= kLargestExact),
                      "gnomon.attention: query_offset is ", *arguments.query_offset,
                      "; expected -2^53 to 2^53");
    return *arguments.query_offset;
  }
  if (q.sym_size(2) != k.sym_size(2)) {
    const char* needs_it = has_position                        ? "a position"
                           : arguments.left || arguments.right ? "a window"
                           : arguments.chunks                  ? "chunks"
                           : arguments.causal                  ? "causal"
                                                               : nullptr;
    TORCH_CHECK_VALUE(needs_it == nullptr,
                      "gnomon.attention: query_offset is None, Lq = ", q.sym_size(2),
                      " and Lk = ", k.sym_size(2), "; ", needs_it ? needs_it : "",
                      " needs query_offset, the position of the first query");
  }
  return 0;
}

}  // namespace

void CheckTokenType(const char* operation, const char* name, const at::Tensor& tensor,
                    const at::Tensor& q) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.is_cpu() || tensor.is_cuda() || tensor.is_meta(), operation,
                              ": ", name, " is on ", tensor.device(),
                              "; expected the CPU or a CUDA device");
  CheckCudaIsOn(operation, name, tensor);
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, operation, ": ", name, " has layout ",
                   tensor.layout(), "; expected a strided tensor");
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble || IsLow(dtype), operation, ": ",
                   name, " has dtype ", dtype, "; expected bfloat16, float16, float32 or float64");
  TORCH_CHECK_TYPE(dtype == q.scalar_type(), operation, ": ", name, " has dtype ", dtype, " and q ",
                   q.scalar_type(), "; expected the same");
  TORCH_CHECK_TYPE(tensor.device() == q.device(), operation, ": ", name, " is on ", tensor.device(),
                   " and q on ", q.device(), "; expected the same");
}

void CheckIntegerType(const char* operation, const char* name, const at::Tensor& tensor,
                      const at::Tensor& q) {
  TORCH_CHECK_TYPE(at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false), operation, ": ",
                   name, " has dtype ", tensor.scalar_type(), "; expected integers");
  TORCH_CHECK_TYPE(tensor.device() == q.device(), operation, ": ", name, " is on ", tensor.device(),
                   " and q on ", q.device(), "; expected the same");
}

OptionalTensor CheckIntegers(const char* operation, const char* name, const OptionalTensor& tensor,
                             const at::Tensor& q, const OptionalSymInt& length) {
  if (!tensor) return std::nullopt;
  CheckIntegerType(operation, name, *tensor, q);
  std::vector<c10::SymInt> sizes = {q.sym_size(0)};
  if (length) sizes.push_back(*length);
  // Without the axis of the batch they are for all of it.
  const size_t absent = tensor->dim() + 1 == static_cast<int64_t>(sizes.size()) ? 1 : 0;
  const auto expected = c10::SymIntArrayRef(sizes).slice(absent);
  TORCH_CHECK_VALUE(length || tensor->sym_sizes() == expected, operation, ": ", name, " has shape ",
                    tensor->sym_sizes(), "; expected (B,) = (", q.sym_size(0),
                    ",), or () for all batches");
  TORCH_CHECK_VALUE(!length || tensor->sym_sizes() == expected, operation, ": ", name,
                    " has shape ", tensor->sym_sizes(), "; expected (B, length) = (", q.sym_size(0),
                    ", ", length.value_or(0), "), or (length,) for all batches");
  const at::Tensor integers = tensor->to(at::kLong);
  return absent == 0 ? integers : integers.expand_symint(sizes).contiguous();
}

void CheckTokens(const char* operation, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& v) {
  for (const auto& [name, tensor] : {std::pair("q", &q), std::pair("k", &k), std::pair("v", &v)}) {
    CheckTokenType(operation, name, *tensor, q);
    TORCH_CHECK_VALUE(tensor->dim() == 4, operation, ": ", name, " has shape ", tensor->sym_sizes(),
                      "; expected four axes, (batch, heads, length, columns)");
    TORCH_CHECK_VALUE(tensor->sym_size(3) >= 1, operation, ": ", name, " has shape ",
                      tensor->sym_sizes(), "; expected at least one column");
  }
  TORCH_CHECK_VALUE(k.sym_size(0) == q.sym_size(0) && k.sym_size(3) == q.sym_size(3), operation,
                    ": k has shape ", k.sym_sizes(),
                    "; expected (B, Hkv, Lk, D) with B = ", q.sym_size(0),
                    " and D = ", q.sym_size(3), " as in q ", q.sym_sizes());
  TORCH_CHECK_VALUE(v.sym_size(0) == k.sym_size(0) && v.sym_size(1) == k.sym_size(1) &&
                        v.sym_size(2) == k.sym_size(2),
                    operation, ": v has shape ", v.sym_sizes(),
                    "; expected (B, Hkv, Lk, Dv) as in k ", k.sym_sizes());
  TORCH_CHECK_VALUE(k.sym_size(1) >= 1 && q.sym_size(1) % k.sym_size(1) == 0, operation, ": q has ",
                    q.sym_size(1), " heads and k ", k.sym_size(1), "; expected a multiple");
}

at::Tensor WithoutHidden(const at::Tensor& k, const OptionalTensor& key_starts,
                         const OptionalTensor& key_lengths) {
  if (!key_starts && !key_lengths) return k;
  const at::Tensor columns = at::arange(k.sym_size(2), k.options().dtype(at::kLong)).unsqueeze(0);
  at::Tensor visible = columns >= 0;
  if (key_starts) visible = visible.logical_and(columns >= key_starts->unsqueeze(1));
  if (key_lengths) visible = visible.logical_and(columns < key_lengths->unsqueeze(1));
  return at::where(visible.unsqueeze(1).unsqueeze(3), k, 0.0);
}

namespace {

bool IsBias(const ResolvedPosition& position) {
  return position.entry->role() == PositionEntry::Role::kBias ||
         position.entry->role() == PositionEntry::Role::kGridBias;
}

bool IsContent(const ResolvedPosition& position) {
  return position.entry->role() == PositionEntry::Role::kContent;
}

// Whether what it does depends on where tokens stand.
bool DependsOnPlaces(const ResolvedPosition& position) {
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

// The one position of that role, or null.
const ResolvedPosition* FindOne(const std::vector<ResolvedPosition>& positions,
                                PositionEntry::Role role, const char* what) {
  const ResolvedPosition* found = nullptr;
  for (const ResolvedPosition& position : positions) {
    if (position.entry->role() != role) continue;
    TORCH_CHECK_VALUE(found == nullptr, "gnomon.attention: position has two ", what,
                      "; expected one");
    found = &position;
  }
  return found;
}

// One past the farthest position. Offsets of batches are data, which shapes cannot depend on: what
// goes by the length then has that of the keys.
c10::SymInt LengthOf(const at::Tensor& q, const at::Tensor& k, const c10::SymInt& query_offset,
                     const OptionalTensor& query_offsets) {
  const c10::SymInt queries = q.sym_size(2) + query_offset;
  return query_offsets ? k.sym_size(2) : queries.max(k.sym_size(2));
}

// weights (H, D) times each key (B, Hkv, Lk, D) of their head: (B, H, Lk).
at::Tensor KeyProducts(const at::Tensor& weights, const at::Tensor& k) {
  const at::Tensor by_key_head = weights.unflatten(0, {SizeOf(k, 1), -1}).transpose(1, 2);
  return at::matmul(k, by_key_head).transpose(2, 3).flatten(1, 2);
}

// log gamma of values (B, Hkv, Lk, Dv) of the Klein ball for each query head, (B, H, Lk): weighted
// by gamma, their mean is the Einstein midpoint (Gulcehre et al. 2019, section 3.3).
at::Tensor LogLorentzFactor(const at::Tensor& v, int64_t heads) {
  const at::Tensor log = -0.5 * (-SquaredNorm(v)).log1p();
  return log.repeat_interleave(heads / SizeOf(v, 1), 1);
}

// A bias of the keys as the operator takes it. In float64, where scores are computed in float32, it
// goes in two parts, and each row takes off that of the key at its own position first: a sum over a
// long past has too many digits otherwise.
struct KeyBias {
  at::Tensor bias;
  OptionalTensor low = {};
  OptionalTensor base = {};
};

// Positions of several axes, (1 or B, L, axes). RoPE turns by them; what a query sees goes by the
// order of tokens, as without them.
class Coordinates {
 public:
  static std::optional<Coordinates> Find(const at::Tensor& q, const at::Tensor& k,
                                         const std::vector<ResolvedPosition>& positions,
                                         const CallArguments& arguments) {
    if (!HasCoordinates(arguments)) return std::nullopt;
    for (const ResolvedPosition& position : positions) {
      TORCH_CHECK_VALUE(
          !DependsOnPlaces(position) || position.entry->role() == PositionEntry::Role::kRotation,
          kOperation, ": positions have several axes, which ", position.component.name(),
          " does not take; expected (B, Lq)");
    }
    TORCH_CHECK_VALUE(arguments.key_positions || q.sym_size(2) == k.sym_size(2), kOperation,
                      ": key_positions is None, Lq = ", q.sym_size(2), " and Lk = ", k.sym_size(2),
                      "; expected the positions of the keys");
    Coordinates coordinates;
    coordinates.queries_ = Checked("positions", *arguments.positions, q, q.sym_size(2));
    coordinates.keys_ = coordinates.queries_;
    if (arguments.key_positions) {
      const at::Tensor& given = *arguments.key_positions;
      TORCH_CHECK_VALUE(given.dim() == 3 && given.sym_size(2) == coordinates.queries_.sym_size(2),
                        kOperation, ": key_positions has shape ", given.sym_sizes(),
                        "; expected as many axes as positions, ", coordinates.queries_.sym_size(2));
      coordinates.keys_ = Checked("key_positions", given, q, k.sym_size(2));
    }
    return coordinates;
  }

  TokenPositions Of(bool keys) const {
    at::Tensor all = at::cat({queries_.reshape({-1}), keys_.reshape({-1})});
    if (all.sym_numel() == 0) all = at::zeros({1}, all.options());
    return {keys ? keys_ : queries_, all.min(), all.max()};
  }

 private:
  static at::Tensor Checked(const char* name, const at::Tensor& given, const at::Tensor& q,
                            const c10::SymInt& length) {
    CheckIntegerType(kOperation, name, given, q);
    TORCH_CHECK_VALUE((given.sym_size(0) == 1 || given.sym_size(0) == q.sym_size(0)) &&
                          given.sym_size(1) == length && given.sym_size(2) >= 1,
                      kOperation, ": ", name, " has shape ", given.sym_sizes(),
                      "; expected (1 or B, length, axes) with B = ", q.sym_size(0),
                      " and a length of ", length);
    return given.to(at::kLong);
  }

  at::Tensor queries_;
  at::Tensor keys_;
};

// Where the tokens of a call stand whose caller says so.
class Places {
 public:
  // Nullopt where they stand one after the other, or have coordinates.
  static std::optional<Places> Find(const at::Tensor& q, const at::Tensor& k,
                                    const CallArguments& arguments) {
    if (HasCoordinates(arguments)) return std::nullopt;
    if (!arguments.positions) {
      TORCH_CHECK_VALUE(!arguments.key_positions, kOperation,
                        ": key_positions is given without positions; expected both");
      return std::nullopt;
    }
    TORCH_CHECK_VALUE(!arguments.query_offset && !arguments.query_offsets, kOperation,
                      ": positions and query_offset are both given; expected one of them");
    TORCH_CHECK_VALUE(arguments.key_positions || q.sym_size(2) == k.sym_size(2), kOperation,
                      ": key_positions is None, Lq = ", q.sym_size(2), " and Lk = ", k.sym_size(2),
                      "; expected the positions of the keys");
    Places places;
    places.queries_ =
        *CheckIntegers(kOperation, "positions", arguments.positions, q, q.sym_size(2));
    places.keys_ =
        arguments.key_positions
            ? *CheckIntegers(kOperation, "key_positions", arguments.key_positions, q, k.sym_size(2))
            : places.queries_;
    return places;
  }

  // (B, Lq) and (B, Lk), int64.
  const at::Tensor& queries() const { return queries_; }
  const at::Tensor& keys() const { return keys_; }

  TokenPositions Of(bool keys) const {
    at::Tensor all = at::cat({queries_.reshape({-1}), keys_.reshape({-1})});
    if (all.sym_numel() == 0) all = at::zeros({1}, all.options());
    return {keys ? keys_ : queries_, all.min(), all.max()};
  }

 private:
  at::Tensor queries_;
  at::Tensor keys_;
};

// The keys of such a call in the order of their segments and, in these, of their positions; keys
// that no query may see come last.
class KeyOrder {
 public:
  KeyOrder(const Places& places, const OptionalTensor& query_segments,
           const OptionalTensor& key_segments, const OptionalTensor& key_starts,
           const OptionalTensor& key_lengths) {
    const at::Tensor& keys = places.keys();
    const at::Tensor seen =
        WithoutHidden(at::ones_like(keys).unsqueeze(1).unsqueeze(3), key_starts, key_lengths)
            .squeeze(3)
            .squeeze(1) != 0;
    // A segment and a position are one number of 64 bits.
    constexpr int64_t kApart = int64_t{1} << 32;
    const at::Tensor first = places.queries().sym_size(1) == 0
                                 ? keys.slice(1, 0, 1)
                                 : places.queries().amin({1}, /*keepdim=*/true);
    const auto code = [&](const at::Tensor& positions, const OptionalTensor& segments) {
      const at::Tensor offset = (positions - first).clamp(-kApart / 2, kApart / 2 - 1);
      return segments ? *segments * kApart + offset : offset;
    };
    const auto [sorted, order] =
        at::where(seen, code(keys, key_segments), std::numeric_limits<int64_t>::max())
            .sort(/*stable=*/true, /*dim=*/1, /*descending=*/false);
    order_ = order;
    last_ = at::searchsorted(sorted, code(places.queries(), query_segments), /*out_int32=*/false,
                             /*right=*/true);
    first_ =
        at::searchsorted(sorted, query_segments ? *query_segments * kApart - kApart / 2
                                                : at::full_like(places.queries(), -kApart / 2));
  }

  // (B, Lk): the columns.
  const at::Tensor& columns() const { return order_; }
  // (B, Lq): how many keys of its segment stand up to a query's position.
  at::Tensor Seen() const { return last_ - first_; }
  // (B, Lq): the column of the last of them; any where there is none.
  at::Tensor Own() const { return order_.gather(1, (last_ - 1).clamp_min(0)); }

 private:
  at::Tensor order_;
  at::Tensor last_;
  at::Tensor first_;
};

KeyBias SplitKeyBias(const at::Tensor& bias, at::ScalarType computing, const OffsetRange& range,
                     const std::optional<KeyOrder>& order) {
  if (bias.scalar_type() == computing || bias.sym_size(2) == 0) return {bias.to(computing)};
  KeyBias split{bias.to(computing)};
  const at::Tensor high = split.bias.detach();
  // -inf masks a key, and has no digits.
  const at::Tensor finite = high.isfinite();
  split.low = at::where(finite, bias.detach() - high, 0.0).to(computing);
  const at::TensorOptions integers = bias.options().dtype(at::kLong);
  at::Tensor columns = at::arange(range.queries, integers);
  if (order) {
    columns = order->Own();
  } else if (range.query_offsets) {
    columns = columns + range.query_offsets->unsqueeze(1);
  } else {
    columns = columns.unsqueeze(0) + range.query_offset;
  }
  const at::Tensor own = columns.clamp(0, bias.sym_size(2) - 1).unsqueeze(1);
  split.base =
      at::where(finite, high, 0.0)
          .gather(2, own.expand_symint({high.sym_size(0), high.sym_size(1), range.queries}));
  return split;
}

// Where the rows stand, and how many keys are at hand up to there.
TemperatureCall RowsOf(const CallArguments& arguments, const OptionalTensor& key_lengths,
                       const OffsetRange& range, const at::TensorOptions& options,
                       const std::optional<Places>& places, const std::optional<KeyOrder>& order) {
  const at::TensorOptions integers = options.dtype(at::kLong);
  at::Tensor positions = at::arange(range.queries, integers);
  if (places) {
    positions = places->queries().unsqueeze(1);
  } else if (range.query_offsets) {
    positions = positions + range.query_offsets->unsqueeze(1).unsqueeze(2);
  } else {
    positions = positions + range.query_offset;
  }
  const at::Tensor keys = key_lengths ? key_lengths->unsqueeze(1).unsqueeze(2)
                                      : at::full_symint({}, range.keys, integers);
  const bool causal = arguments.causal || (arguments.right && *arguments.right == 0);
  const at::Tensor seen = !causal ? keys + positions * 0
                          : order ? order->Seen().unsqueeze(1)
                                  : at::minimum(positions + 1, keys);
  return {positions.to(at::kDouble), seen.clamp_min(1).to(at::kDouble)};
}

// The sum of the positions of that role; undefined if there is none.
template <class Term>
at::Tensor SumOf(const std::vector<ResolvedPosition>& positions, PositionEntry::Role role,
                 const Term& term) {
  at::Tensor sum;
  for (const ResolvedPosition& position : positions) {
    if (position.entry->role() != role) continue;
    const at::Tensor one = term(position);
    sum = sum.defined() ? sum + one : one;
  }
  return sum;
}

// A tensor that broadcasts to the first axes of the sizes, all of them; without copies. Where it
// has fewer axes, or one entry in place of them, batch and heads stay shared.
at::Tensor Broadcast(const char* name, const char* expected, const at::Tensor& tensor,
                     std::vector<c10::SymInt> sizes) {
  const auto axes = static_cast<int64_t>(sizes.size());
  bool fits = tensor.dim() <= axes;
  for (int64_t axis = -1; fits && axis >= -tensor.dim(); --axis) {
    const c10::SymInt& length = sizes[static_cast<size_t>(axes + axis)];
    fits = tensor.sym_size(axis) == length || tensor.sym_size(axis) == 1;
  }
  TORCH_CHECK_VALUE(fits, kOperation, ": ", name, " has shape ", tensor.sym_sizes(), "; expected ",
                    expected, " = ", c10::SymIntArrayRef(sizes), ", or what broadcasts to it");
  return tensor.expand_symint(sizes);
}

// The same of pairs of a query and a key, (1 or B, 1 or H, Lq, Lk).
at::Tensor BroadcastPairs(const char* name, const at::Tensor& pairs, const at::Tensor& q,
                          const at::Tensor& k) {
  std::vector<c10::SymInt> sizes = {q.sym_size(0), q.sym_size(1), q.sym_size(2), k.sym_size(2)};
  Broadcast(name, "(B, H, Lq, Lk)", pairs, sizes);
  // What they share is not repeated.
  for (int64_t axis = 0; axis < 2; ++axis) {
    if (pairs.dim() < 4 - axis || pairs.sym_size(axis - 4) == 1)
      sizes[static_cast<size_t>(axis)] = 1;
  }
  return pairs.expand_symint(sizes);
}

void CheckDropout(const CallArguments& arguments) {
  TORCH_CHECK_VALUE(arguments.dropout >= 0 && arguments.dropout <= 1,
                    "gnomon.attention: dropout is ", arguments.dropout, "; expected 0 to 1");
  if (!arguments.seed) return;
  TORCH_CHECK_TYPE(arguments.seed->scalar_type() == at::kLong, "gnomon.attention: seed has dtype ",
                   arguments.seed->scalar_type(), "; expected int64");
  TORCH_CHECK_VALUE(arguments.seed->numel() == 1, "gnomon.attention: seed has shape ",
                    arguments.seed->sizes(), "; expected one number");
}

void CheckTolerance(double tolerance) {
  TORCH_CHECK_VALUE(tolerance >= 0 && tolerance < 1, kOperation, ": tolerance is ", tolerance,
                    "; expected at least 0, and less than 1");
}

void CheckChunks(const std::optional<std::vector<int64_t>>& chunks) {
  if (!chunks) return;
  constexpr int64_t kMost = int64_t{1} << 30;
  const std::vector<int64_t>& n = *chunks;
  bool right = n.size() == 3 && n[0] >= 1;
  for (const int64_t number : n) right = right && number >= 0 && number < kMost;
  TORCH_CHECK_VALUE(right, "gnomon.attention: chunks is ", at::IntArrayRef(n),
                    "; expected (size, before, after), size at least 1, the others at least 0");
}

// The grid that all biases, and relative keys on a grid, lie on; nullopt where biases read the
// sequence.
std::optional<TokenGrid> FindGrid(const at::Tensor& q, const at::Tensor& k,
                                  const std::vector<ResolvedPosition>& positions,
                                  const CallArguments& arguments) {
  const ResolvedPosition* first = nullptr;
  std::optional<TokenGrid> grid;
  const auto place = [](const ResolvedPosition& position, const std::optional<TokenGrid>& on) {
    return position.component.name() + (on ? " on the grid " + on->Text() : " in the sequence");
  };
  for (const ResolvedPosition& position : positions) {
    if (!IsBias(position) && !(IsContent(position) && position.component.Find("shape"))) continue;
    const std::optional<TokenGrid> on =
        GridOfBias(*position.entry, position.component, position.tensors);
    if (first == nullptr) {
      first = &position;
      grid = on;
    }
    TORCH_CHECK_VALUE(on == grid, "gnomon.attention: position has ", place(*first, grid), " and ",
                      place(position, on), "; biases add up in the sequence or on one grid");
  }
  if (!grid) return std::nullopt;
  // With positions of the caller's, these are the places.
  if (arguments.positions) return grid;
  TORCH_CHECK_VALUE(q.sym_size(2) == grid->tokens() && k.sym_size(2) == grid->tokens(),
                    "gnomon.attention: position has ", place(*first, grid),
                    " and Lq = ", q.sym_size(2), ", Lk = ", k.sym_size(2), "; expected its ",
                    grid->tokens(), " tokens in both");
  TORCH_CHECK_VALUE(!arguments.query_offset || *arguments.query_offset == 0,
                    "gnomon.attention: query_offset is ", arguments.query_offset.value_or(0),
                    " and position has ", place(*first, grid), "; expected None or 0");
  TORCH_CHECK_VALUE(!arguments.query_offsets, "gnomon.attention: query_offset is a tensor and ",
                    "position has ", place(*first, grid), "; expected None or 0");
  return grid;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> AddSink(const at::Tensor& o, const at::Tensor& lse,
                                           const at::Tensor& sink) {
  TORCH_CHECK_VALUE(sink.dim() == 0 || (sink.dim() == 1 && sink.sym_size(0) == lse.sym_size(1)) ||
                        (sink.dim() == 3 && sink.sym_sizes() == lse.sym_sizes()),
                    kOperation, ": sink has shape ", sink.sym_sizes(), "; expected (), (H,) = (",
                    lse.sym_size(1), ",) or (B, H, Lq) = ", lse.sym_sizes());
  const at::Tensor score = (sink.dim() == 1 ? sink.unsqueeze(1) : sink).expand_as(lse);
  // A row that sees no key has lse = -inf, and a sink of -inf is none: differences of these are no
  // numbers, nor are their gradients.
  constexpr double kNothing = -1e30;
  const at::Tensor finite = lse.clamp_min(kNothing);
  const at::Tensor total = at::logaddexp(finite, score);
  return {(o * at::sigmoid(finite - score).unsqueeze(3)).to(o.scalar_type()),
          at::where(total <= kNothing, -std::numeric_limits<double>::infinity(), total)};
}

at::Tensor LorentzCentroid(const at::Tensor& o, const ResolvedSimilarity& similarity) {
  const at::Tensor points = OntoHyperboloid(o);
  if (similarity.entry->curvature == nullptr) return points;
  const at::Tensor root = OverRows(similarity.entry->curvature(similarity.others).sqrt());
  return (points * OverColumns(root.unsqueeze(0))).to(o.scalar_type());
}

at::ScalarType ComputingType(const at::Tensor& q) {
  return IsLow(q.scalar_type()) ? at::kFloat : q.scalar_type();
}

at::Tensor AsParameter(const at::Tensor& tensor, const at::Tensor& q, const std::string& what) {
  const at::ScalarType computing = ComputingType(q);
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == computing || dtype == q.scalar_type(), what, " has dtype ", dtype,
                   " and q ", q.scalar_type(), "; expected ", computing,
                   computing == q.scalar_type() ? "" : " or that of q");
  return tensor.to(computing);
}

at::Tensor KeptTensor(const std::string& key, const at::Tensor& q,
                      const std::function<at::Tensor()>& make) {
  // Where a call is traced or transformed, its tensors are its own.
  if (!HasNumbers(q)) return make();
  static Kept<std::tuple<std::string, at::ScalarType, c10::DeviceType, c10::DeviceIndex>,
              at::Tensor>
      known;
  return known.Get({key, ComputingType(q), q.device().type(), q.device().index()}, [&] {
    // A tensor of inference mode would not serve a later call that records gradients.
    const c10::InferenceMode outside(false);
    const at::NoGradGuard no_grad;
    return make();
  });
}

at::Tensor HeadNumber(const at::Tensor& q, double number) {
  const auto make = [&] {
    return at::full_symint({q.sym_size(1)}, number, q.options().dtype(ComputingType(q)));
  };
  if (!HasNumbers(q)) return make();
  return KeptTensor(NumberText(number) + "|" + std::to_string(SizeOf(q, 1)), q, make);
}

at::Tensor HeadFactor(const char* operation, const ResolvedSimilarity& similarity,
                      const at::Tensor& q, std::optional<double> scale) {
  const SimilarityEntry& entry = *similarity.entry;
  const int64_t head_dim = Concrete(q.sym_size(3));
  entry.CheckColumns(similarity.component, head_dim, std::string(operation) + ": q has D = ");
  TORCH_CHECK_VALUE(!scale || std::isfinite(*scale), operation, ": scale is ", scale.value_or(0),
                    "; expected a finite number");
  TORCH_CHECK_VALUE(!scale || entry.catalogue.takes_scale, operation,
                    ": scale goes with dot, not with ", entry.catalogue.name);
  if (entry.head_parameter() != nullptr) return similarity.head_parameter;
  const double root = std::sqrt(static_cast<double>(head_dim));
  return HeadNumber(q, entry.catalogue.takes_scale ? scale.value_or(1.0 / root) : 1.0);
}

// q or k as the norms leave them.
at::Tensor Normed(const at::Tensor& x, const std::vector<ResolvedPosition>& positions,
                  bool of_keys) {
  at::Tensor normed = x;
  for (const ResolvedPosition& position : positions) {
    if (position.entry->norm == nullptr) continue;
    normed = position.entry->norm(position.component, position.tensors,
                                  normed.to(ComputingType(normed)), of_keys);
  }
  return normed;
}

Outputs Compose(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                const ResolvedSimilarity& similarity,
                const std::vector<ResolvedPosition>& positions, const CallArguments& arguments,
                bool returns_lse) {
  // Tokens of low precision go to the kernels as they are, which round where they multiply such
  // numbers themselves (gnomon/attention.h). What is made of them is made in float32, and rounded
  // only for kernels that want all tokens of one type.
  const at::ScalarType computing = ComputingType(q_in);
  const auto as_token = [&](const at::Tensor& token) {
    return WantsOneType(q_in) ? token.to(q_in.scalar_type()) : token;
  };
  const at::Tensor q = Normed(q_in, positions, /*of_keys=*/false);
  const at::Tensor k = Normed(k_in, positions, /*of_keys=*/true);
  const at::Tensor& v = v_in;
  const SimilarityEntry& entry = *similarity.entry;
  const bool has_height = entry.HasHeight(similarity.component);
  const int64_t head_dim = Concrete(q.sym_size(3));
  const ResolvedPosition* content =
      FindOne(positions, PositionEntry::Role::kContent, "content terms");
  // A content term takes the scale, too, whatever the similarity.
  const bool is_for_content = content != nullptr && !entry.catalogue.takes_scale;
  const at::Tensor factor =
      HeadFactor(kOperation, similarity, q, is_for_content ? std::nullopt : arguments.scale);
  const double scale = arguments.scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
  TORCH_CHECK_VALUE(std::isfinite(scale), "gnomon.attention: scale is ", scale,
                    "; expected a finite number");
  CheckDropout(arguments);
  CheckTolerance(arguments.tolerance);
  CheckChunks(arguments.chunks);
  for (const auto& [name, side] :
       {std::pair("left", &arguments.left), std::pair("right", &arguments.right)}) {
    TORCH_CHECK_VALUE(!*side || **side >= 0, "gnomon.attention: window has ", name, " = ", **side,
                      "; expected at least 0, or None for unbounded");
  }
  const OptionalTensor key_starts =
      CheckIntegers(kOperation, "key_starts", arguments.key_starts, q);
  const OptionalTensor key_lengths =
      CheckIntegers(kOperation, "key_lengths", arguments.key_lengths, q);
  TORCH_CHECK_VALUE(
      arguments.query_segments.has_value() == arguments.key_segments.has_value(),
      "gnomon.attention: ", arguments.query_segments ? "key_segments" : "query_segments",
      " is None; expected both query_segments and key_segments, or neither");
  const OptionalTensor query_segments =
      CheckIntegers(kOperation, "query_segments", arguments.query_segments, q, q.sym_size(2));
  const OptionalTensor key_segments =
      CheckIntegers(kOperation, "key_segments", arguments.key_segments, q, k.sym_size(2));
  const OptionalTensor query_offsets =
      CheckIntegers(kOperation, "query_offset", arguments.query_offsets, q);
  TORCH_CHECK_VALUE(!query_offsets || !arguments.query_offset,
                    "gnomon.attention: query_offset and query_offsets are both given");
  const std::optional<Places> places = Places::Find(q, k, arguments);
  const std::optional<Coordinates> coordinates = Coordinates::Find(q, k, positions, arguments);

  const std::optional<TokenGrid> grid = FindGrid(q, k, positions, arguments);
  const ResolvedPosition* rotation = FindOne(positions, PositionEntry::Role::kRotation, "RoPE");
  const bool has_position =
      !coordinates && std::any_of(positions.begin(), positions.end(), DependsOnPlaces);
  const c10::SymInt query_offset = QueryOffset(q, k, has_position, arguments);

  at::Tensor query = entry.WithHeightLast(similarity.component, q);
  at::Tensor key = entry.WithHeightLast(similarity.component, k);
  OptionalTensor bias;
  OffsetRange range{q.sym_size(2), k.sym_size(2), query_offset, Concrete(q.sym_size(1)),
                    query_offsets};
  // What asks in which order keys stand.
  const bool asks_for_order =
      std::any_of(positions.begin(), positions.end(), [](const ResolvedPosition& position) {
        return position.entry->role() == PositionEntry::Role::kKeyBias ||
               position.entry->role() == PositionEntry::Role::kTemperature;
      });
  std::optional<KeyOrder> order;
  if (places && asks_for_order) {
    order.emplace(*places, query_segments, key_segments, key_starts, key_lengths);
    range.key_order = order->columns();
  }
  PackedBiases packed;
  for (const ResolvedPosition& position : positions) {
    if (!IsBias(position)) continue;
    if (places && !grid) {
      packed.Add(position.component, position.tensors);
      continue;
    }
    const at::Tensor term =
        grid ? GridTable(*position.entry, position.component, position.tensors, *grid, range.heads)
             : position.entry->bias(position.component, position.tensors, range);
    bias = bias ? *bias + term : term;
  }
  if (bias && grid) bias = FlatGridTable(*bias, *grid);
  if (bias && bias->dim() == 2) bias = bias->unsqueeze(0);
  if (rotation) {
    RotationCall rotated{.x = query.to(computing),
                         .position = query_offset,
                         .firsts = query_offsets,
                         .length = LengthOf(q, k, query_offset, query_offsets),
                         .of_keys = false,
                         .is_product = entry.catalogue.takes_scale,
                         .last_is_height = has_height,
                         .heads = range.heads,
                         .key_heads = SizeOf(k, 1)};
    if (places) rotated.positions = places->Of(/*keys=*/false);
    if (coordinates) rotated.positions = coordinates->Of(/*keys=*/false);
    query = rotation->entry->rotate(rotation->component, rotation->tensors, rotated);
    rotated.x = key.to(computing);
    rotated.position = 0;
    rotated.firsts = std::nullopt;
    rotated.of_keys = true;
    if (places) rotated.positions = places->Of(/*keys=*/true);
    if (coordinates) rotated.positions = coordinates->Of(/*keys=*/true);
    key = rotation->entry->rotate(rotation->component, rotation->tensors, rotated);
  }

  OperatorArguments call;
  ContentTerm term;
  if (content != nullptr) {
    const bool causal = arguments.causal || (arguments.right && *arguments.right == 0);
    term = content->entry->content(content->component, content->tensors,
                                   {q.to(computing), range.heads, head_dim, Concrete(v.sym_size(3)),
                                    causal, entry.catalogue.takes_scale});
    if (term.key_weights.defined()) {
      call.key_bias =
          KeyProducts(term.key_weights, WithoutHidden(k.to(computing), key_starts, key_lengths)) *
          scale;
    }
    if (!term.takes_scale) {
      TORCH_CHECK_VALUE(!arguments.scale || entry.catalogue.takes_scale, kOperation,
                        ": scale goes with dot and with products of q, of which there are none");
    }
    call.relative_query = std::move(term.query);
    call.relative_keys = std::move(term.keys);
    if (term.values.defined()) call.relative_values = std::move(term.values);
    call.relative_layout = term.layout;
    call.relative_factor = term.takes_scale ? scale : 1;
  }
  const at::Tensor key_bias =
      SumOf(positions, PositionEntry::Role::kKeyBias, [&](const ResolvedPosition& position) {
        const at::Tensor& given = position.tensors[0];
        TORCH_CHECK_VALUE(given.dim() == 3 &&
                              (given.sym_size(0) == 1 || given.sym_size(0) == q.sym_size(0)) &&
                              (given.sym_size(1) == 1 || given.sym_size(1) == range.heads) &&
                              given.sym_size(2) == range.keys,
                          kOperation, ": the tensor of ", position.component.name(), " has shape ",
                          given.sym_sizes(), "; expected (1 or B, 1 or H, Lk) = (", q.sym_size(0),
                          ", ", range.heads, ", ", range.keys, ")");
        // What lies outside may be anything, and sums go over it.
        const at::Tensor seen =
            WithoutHidden(given.unsqueeze(3), key_starts, key_lengths).squeeze(3);
        return position.entry->bias(position.component, {seen}, range);
      });
  if (key_bias.defined()) {
    const at::Tensor sum = call.key_bias ? *call.key_bias + key_bias : key_bias;
    KeyBias split = SplitKeyBias(sum.expand_symint({q.sym_size(0), q.sym_size(1), k.sym_size(2)}),
                                 computing, range, order);
    call.key_bias = std::move(split.bias);
    call.key_bias_low = std::move(split.low);
    call.key_bias_base = std::move(split.base);
  }
  const at::Tensor pair_bias =
      SumOf(positions, PositionEntry::Role::kPairBias, [&](const ResolvedPosition& position) {
        return BroadcastPairs(("the tensor of " + position.component.name()).c_str(),
                              position.entry->bias(position.component, position.tensors, range), q,
                              k);
      });
  if (pair_bias.defined()) call.pair_bias = pair_bias;
  if (arguments.mask) {
    TORCH_CHECK_TYPE(arguments.mask->scalar_type() == at::kBool, kOperation, ": mask has dtype ",
                     arguments.mask->scalar_type(),
                     "; expected bool, or numbers to be added to the scores as position.PairBias");
    TORCH_CHECK_TYPE(arguments.mask->device() == q.device(), kOperation, ": mask is on ",
                     arguments.mask->device(), " and q on ", q.device(), "; expected the same");
    call.mask = BroadcastPairs("mask", *arguments.mask, q, k);
  }
  if (arguments.temperature) {
    call.temperature =
        Broadcast("temperature", "(B, H, Lq)",
                  AsParameter(*arguments.temperature, q_in, "gnomon.attention: temperature"),
                  {q.sym_size(0), q.sym_size(1), q.sym_size(2)});
  }
  for (const ResolvedPosition& position : positions) {
    if (position.entry->temperature == nullptr) continue;
    const at::Tensor own =
        position.entry
            ->temperature(position.component, position.tensors,
                          RowsOf(arguments, key_lengths, range, q.options(), places, order))
            .to(computing)
            .expand_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2)});
    call.temperature = call.temperature ? *call.temperature * own : own;
  }
  at::Tensor value = v;
  const bool is_centroid = arguments.aggregation == "lorentz_centroid";
  // A temperature multiplies scores, and the factors of midpoints are no part of them: the values
  // have these then, and their own sum in one more column.
  const bool weighs_values =
      call.temperature.has_value() && arguments.aggregation == "einstein_midpoint";
  if (arguments.aggregation == "einstein_midpoint") {
    value = InUnitBall(WithoutHidden(v.to(computing), key_starts, key_lengths));
    if (weighs_values) {
      TORCH_CHECK_NOT_IMPLEMENTED(arguments.dropout == 0, kOperation,
                                  ": dropout with temperature and aggregation = einstein_midpoint");
      TORCH_CHECK_NOT_IMPLEMENTED(
          !call.relative_values, kOperation,
          ": relative values with temperature and aggregation = einstein_midpoint");
      const at::Tensor factor_of_value = (1 - SquaredNorm(value)).rsqrt().unsqueeze(3);
      value = at::cat({value * factor_of_value, factor_of_value}, 3);
    } else {
      const at::Tensor log_factor = LogLorentzFactor(value, range.heads);
      call.key_bias = call.key_bias ? *call.key_bias + log_factor : log_factor;
    }
  } else {
    TORCH_CHECK_VALUE(arguments.aggregation == "mean" || is_centroid,
                      "gnomon.attention: aggregation is \"", arguments.aggregation,
                      "\"; expected mean, einstein_midpoint or lorentz_centroid");
  }
  // The dot product, whose tokens are not mapped, takes the keys as they are.
  if (!entry.catalogue.takes_scale) key = WithoutHidden(key, key_starts, key_lengths);
  if (!entry.keeps_tokens || query.scalar_type() != key.scalar_type()) {
    query = query.to(computing);
    key = key.to(computing);
  }
  const MappedTokens tokens =
      entry.map(similarity.component, query, key, {factor, similarity.others});
  // Query heads that see the same keys differently have keys of their own.
  if (SizeOf(tokens.y, 1) != SizeOf(value, 1)) {
    value = value.repeat_interleave(SizeOf(tokens.y, 1) / SizeOf(value, 1), 1);
  }
  call.x = as_token(tokens.x);
  call.y = as_token(tokens.y);
  call.v = as_token(value);
  if (call.relative_query) call.relative_query = as_token(*call.relative_query);
  call.row_scalars = AsOptional(tokens.row_scalars);
  call.column_scalars = AsOptional(tokens.column_scalars);
  call.head_scalars = AsOptional(tokens.head_scalars);
  call.factor = tokens.factor;
  call.bias = bias;
  call.key_starts = key_starts;
  call.key_lengths = key_lengths;
  call.query_offsets = query_offsets;
  if (places) {
    call.query_positions = places->queries();
    call.key_positions = places->keys();
  }
  if (!packed.empty()) {
    call.bias_parameters = packed.Parameters();
    call.bias_terms = packed.terms();
    call.bias_shapes = at::OptionalSymIntArrayRef(packed.shapes());
  }
  call.query_segments = query_segments;
  call.key_segments = key_segments;
  call.function = tokens.function;
  call.query_offset = query_offset;
  call.tolerance = arguments.tolerance;
  call.left = arguments.left;
  call.right = arguments.causal ? c10::SymInt(0) : arguments.right;
  std::vector<c10::SymInt> chunks;
  if (arguments.chunks) {
    chunks.assign(arguments.chunks->begin(), arguments.chunks->end());
    call.chunks = at::OptionalSymIntArrayRef(chunks);
  }
  std::vector<c10::SymInt> axes;
  if (grid) {
    axes.push_back(grid->prefix());
    axes.insert(axes.end(), grid->shape().begin(), grid->shape().end());
    call.grid = at::OptionalSymIntArrayRef(axes);
  }
  if (arguments.dropout > 0) {
    call.dropout = arguments.dropout;
    // Without axes, so that a compiled graph takes one of the CPU beside tensors of a GPU.
    call.seed = arguments.seed ? arguments.seed->reshape({})
                               : at::randint(std::numeric_limits<int64_t>::max(), {},
                                             at::TensorOptions().dtype(at::kLong));
  }
  auto [o, lse, statistics] = AttentionOperator::CallForward(call);
  if (weighs_values) {
    const c10::SymInt columns = v.sym_size(3);
    const at::Tensor sum = o.select_symint(3, columns);
    const at::Tensor known = at::where(sum > 0, sum, 1.0);
    o = o.narrow_symint(3, 0, columns) / known.unsqueeze(3);
    lse = lse + known.log();
    // Of these the second is the sum of a row's weights.
    statistics =
        at::cat({statistics.slice(0, 0, 1), statistics.slice(0, 1, 2) * known.detach().unsqueeze(0),
                 statistics.slice(0, 2)});
  }
  const ResolvedPosition* named_sink = FindOne(positions, PositionEntry::Role::kSink, "sinks");
  TORCH_CHECK_VALUE(named_sink == nullptr || !arguments.sink, kOperation,
                    ": sink is given, and position has one; expected one of them");
  OptionalTensor sink = arguments.sink;
  if (sink) sink = AsParameter(*sink, q_in, "gnomon.attention: sink");
  if (named_sink != nullptr) sink = named_sink->tensors[0];
  if (sink || returns_lse) {
    const auto tempered = [&](const at::Tensor& numbers) {
      return call.temperature ? numbers * *call.temperature : numbers;
    };
    if (call.key_bias_base) lse = lse + tempered(*call.key_bias_base);
    if (tokens.row_constant) lse = lse + tempered(tokens.row_constant());
  }
  if (sink) std::tie(o, lse) = AddSink(o, lse, *sink);
  if (is_centroid) o = LorentzCentroid(o, similarity);
  for (const ResolvedPosition& position : positions) {
    // Weights are asked for without it.
    if (position.entry->role() != PositionEntry::Role::kGate || position.tensors.empty()) continue;
    const at::Tensor& gate = position.tensors[0];
    TORCH_CHECK_VALUE(gate.sym_sizes() == o.sym_sizes(), kOperation, ": the tensor of ",
                      position.component.name(), " has shape ", gate.sym_sizes(),
                      "; expected (B, H, Lq, Dv) = ", o.sym_sizes());
    o = o * gate;
  }
  if (!returns_lse) {
    const at::Tensor empty = at::empty({0}, o.options());
    return {o.to(q_in.scalar_type()), empty, empty};
  }
  return {o.to(q_in.scalar_type()), lse, statistics};
}

}  // namespace gnomon
