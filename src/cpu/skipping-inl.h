// Certified skipping: finds tiles that a row can skip because its weights there provably sum to
// less than the fraction AttentionInput::tolerance of the row's total.
//
// The upper bound on a tile's scores is computed from the norms and scalars of its keys, the
// definition's bounds on f (src/definitions/README.md), and the largest bias of the tile's offsets
// and keys. The row's running sum is a lower bound on its total. A row skips tiles whose bound is
// below a threshold, which is chosen so that all skipped tiles together stay below the tolerance.
//
// The tiles that a row skips depend only on the row itself, the keys that it attends to, and offset
// biases; partially visible tiles are always computed. A row's result is therefore bitwise
// independent of hidden tokens. Non-finite keys and values are never skipped, and a non-finite row
// skips nothing, so NaN and infinity propagate as they would without skipping.
#if defined(GNOMON_SRC_CPU_SKIPPING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_SKIPPING_INL_H_
#undef GNOMON_SRC_CPU_SKIPPING_INL_H_
#else
#define GNOMON_SRC_CPU_SKIPPING_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/visible_keys.h"
#include "cpu/packing-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Safety margins for rounding errors in comparisons with a bound: one relative to the summed
// numbers, and one in log2 units.
constexpr Real kBoundShare = 1.0f / 65536;
constexpr Real kBoundSlack = 1.0f / 64;
// Offset biases must fall below their maximum by more than this minus log2(tolerance). Otherwise
// hardly any tile could be skipped, so no bounds are computed.
constexpr Real kLeastFall = -8.0f;
// Calls in double precision need full accuracy, so they skip nothing.
constexpr bool kSkips = sizeof(Real) == 4;

// The largest bias in cells [first, end), given that of each cell; +inf if only some are -inf.
inline Real LargestCell(const Real* cells, int64_t first, int64_t end) {
  Real most = -kInfinity;
  Real least = kInfinity;
  for (int64_t c = first; c < end; ++c) {
    most = std::max(most, cells[c]);
    least = std::min(least, cells[c]);
  }
  return least == -kInfinity && most != -kInfinity ? kInfinity : most;
}

// The largest bias in each cell (kCell entries) of the tables of offset biases, in log2 units.
class LargestBias {
 public:
  LargestBias(const AttentionInput<Real>& in, bool wanted)
      : in_(in),
        heads_(in.shape.heads),
        size_(in.shape.queries + in.shape.keys - 1),
        exists_(wanted && in.bias.table != nullptr) {
    if (!exists()) return;
    cells_ = DivideUp(size_, kCell);
    tables_ = (in.bias.batch_stride == 0 ? 1 : in.shape.batch) * heads_;
    largest_.Reset(tables_ * cells_);
    fall_.assign(Size(tables_), 0.0f);
  }

  bool exists() const { return exists_; }
  int64_t tasks() const { return exists() ? tables_ : 0; }
  void Fill(int64_t n) {
    const Real* table = in_.bias.table + n / heads_ * in_.bias.batch_stride + n % heads_ * size_;
    Real* to = largest_.data() + n * cells_;
    Real most = -kInfinity;
    Real least = kInfinity;
    for (int64_t c = 0; c < cells_; ++c) {
      const int64_t begin = c * kCell;
      to[c] = OfCell(table + begin, std::min(kCell, size_ - begin));
      if (!std::isfinite(to[c])) continue;
      most = std::max(most, to[c]);
      least = std::min(least, to[c]);
    }
    fall_[Size(n)] = most > least ? most - least : 0.0f;
  }

  // The difference between the largest and the smallest cell of a head's table, ignoring cells with
  // masked entries.
  Real Fall(int64_t b, int64_t h) const { return exists() ? fall_[Size(Table(b, h))] : 0.0f; }

  // An upper bound on entries [begin, end): -inf if all are -inf; +inf if only some are, or if
  // there is no bound.
  Real Most(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    return LargestCell(largest_.data() + Table(b, h) * cells_, begin / kCell, DivideUp(end, kCell));
  }

 private:
  static constexpr int64_t kCell = 16;

  static Real OfCell(const Real* entries, int64_t count) {
    if (count == kCell) {
      const DF d;
      VF most = hn::LoadU(d, entries);
      VF zeros = most * hn::Zero(d);
      for (int64_t n = kLaneCount; n < kCell; n += kLaneCount) {
        const VF more = hn::LoadU(d, entries + n);
        most = Max(most, more);
        zeros = zeros + more * hn::Zero(d);
      }
      // A lane of `zeros` is NaN if any of its entries is not finite.
      if (hn::AllTrue(d, zeros == hn::Zero(d))) {
        return BiasInLog2(hn::GetLane(hn::MaxOfLanes(d, most)));
      }
    }
    Real most = -kInfinity;
    bool some = false;
    bool any = false;
    for (int64_t n = 0; n < count; ++n) {
      const bool hides = entries[n] == -kInfinity;
      some = some || !hides;
      any = any || hides || !(entries[n] < kInfinity);
      most = std::max(most, entries[n]);
    }
    if (!some) return -kInfinity;
    return any ? kInfinity : BiasInLog2(most);
  }

  int64_t Table(int64_t b, int64_t h) const {
    return (in_.bias.batch_stride == 0 ? 0 : b * heads_) + h;
  }

  const AttentionInput<Real>& in_;
  int64_t heads_;
  int64_t size_;
  bool exists_;
  int64_t cells_ = 0;
  int64_t tables_ = 0;
  Buffer largest_;
  std::vector<Real> fall_;
};

// Bounds for the keys of a tile: the ranges of their norms and scalars, and whether these and the
// values are finite.
struct KeyBounds {
  Real least_norm = kInfinity;
  Real most_norm = 0;  // +inf if any number is non-finite
  Real least[kMostScalars];
  Real most[kMostScalars];

  KeyBounds() {
    std::fill_n(least, kMostScalars, kInfinity);
    std::fill_n(most, kMostScalars, -kInfinity);
  }
  bool finite() const { return most_norm < kInfinity; }

  void AddNorm(Real norm) {
    least_norm = std::min(least_norm, norm);
    // NaN also fails this comparison.
    most_norm = norm < kInfinity ? std::max(most_norm, norm) : kInfinity;
  }
  void AddScalar(int s, Real scalar) {
    if (!std::isfinite(scalar)) most_norm = kInfinity;
    least[s] = std::min(least[s], scalar);
    most[s] = std::max(most[s], scalar);
  }
  void Add(const KeyBounds& other) {
    least_norm = std::min(least_norm, other.least_norm);
    most_norm = std::max(most_norm, other.most_norm);
    for (int s = 0; s < kMostScalars; ++s) {
      least[s] = std::min(least[s], other.least[s]);
      most[s] = std::max(most[s], other.most[s]);
    }
  }
};

// The rows of a block: queries [i, i + queries) of each of the heads [h, h + heads).
struct BlockRows {
  int64_t b;
  int64_t h;
  int64_t heads;
  int64_t i;
  int64_t queries;
  int64_t rows() const { return heads * queries; }
};

// Per-row inputs of the bounds.
struct RowBounds {
  BlockRows range;
  HWY_ALIGN Real norm[kRowBlock];
  HWY_ALIGN Real a[kMostScalars][kRowBlock];
  HWY_ALIGN Real t[kMostScalars][kRowBlock];
  HWY_ALIGN Real factor[kRowBlock];  // in log2 units
  HWY_ALIGN Real temperature[kRowBlock];
  HWY_ALIGN Real own[kRowBlock];    // upper bound of the row's own terms: relative keys, bias base
  HWY_ALIGN Real doubt[kRowBlock];  // NaN if the row skips nothing, otherwise 0
  HWY_ALIGN Real limit[kRowBlock];  // tiles with bounds up to this are skipped
};

class Skipping {
 public:
  // The number of keys that share bounds. Tiles of the forward pass start and end at multiples of
  // this number.
  static constexpr int64_t kCell = 64;
  static_assert(kForwardColumns % kCell == 0 && kCell % kWidth == 0);

  using Keys = KeyBounds;
  using Rows = RowBounds;

  Skipping(const AttentionInput<Real>& in, const PairTable& table)
      : in_(in),
        table_(table),
        n_(in.shape),
        dim_(table.has_product() ? n_.dim : 0),
        active_(kSkips && Active(in, table)),
        bias_(in, active_) {
    if (!active_) return;
    tolerance_ = static_cast<Real>(std::log2(in.tolerance));
    cells_ = DivideUp(n_.keys, kCell);
    key_tasks_ = DivideUp(cells_, kTaskCells);
    const int64_t heads = n_.batch * n_.key_heads;
    keys_.resize(Size(heads * cells_));
    looked_at_.reset(new std::once_flag[Size(heads * key_tasks_)]);
    if (in.key_bias != nullptr) key_bias_.assign(Size(n_.batch * n_.heads * cells_), 0.0f);
    relative_norm_.assign(Size(in.relative.keys == nullptr ? 0 : RelativeTables()), 0.0f);
  }

  // Whether any tile of the call may be skipped.
  bool active() const { return kSkips && active_; }
  // Whether any tile of a head may be skipped. Without key biases, this requires that its offset
  // biases decrease enough.
  bool Active(int64_t b, int64_t h) const {
    return active() && (in_.key_bias != nullptr || bias_.Fall(b, h) > kLeastFall - tolerance_);
  }
  bool Active(const BlockRows& range) const {
    bool active = false;
    for (int64_t h = 0; h < range.heads; ++h) active = active || Active(range.b, range.h + h);
    return active;
  }

  // The number of tasks that compute bounds of biases and relative keys.
  int64_t tasks() const {
    if (!active_) return 0;
    return bias_.tasks() + KeyBiasRows() + static_cast<int64_t>(relative_norm_.size());
  }
  void Fill(int64_t task) {
    if (task < bias_.tasks()) return bias_.Fill(task);
    task -= bias_.tasks();
    if (task < KeyBiasRows()) return FillKeyBias(task);
    task -= KeyBiasRows();
    FillRelative(task);
  }

  // Bounds of the cells that hold keys [first, end). They are computed on first use by one task,
  // for which concurrent callers wait.
  Keys KeysOf(int64_t b, int64_t key_head, int64_t first, int64_t end) const {
    const int64_t head = b * n_.key_heads + key_head;
    Keys keys;
    for (int64_t c = first / kCell; c * kCell < end; ++c) {
      std::call_once(looked_at_[Size(head * key_tasks_ + c / kTaskCells)],
                     [&] { BoundCells(head, c / kTaskCells * kTaskCells); });
      keys.Add(keys_[Size(head * cells_ + c)]);
    }
    return keys;
  }
  // Computes bounds from the keys. If `values` is true, also checks that their values are finite.
  Keys BoundKeys(int64_t b, int64_t key_head, KeyRange range, bool values) const {
    Keys keys;
    const int64_t head = b * n_.key_heads + key_head;
    RowReader keys_of_head(in_.y, dim_);
    RowReader values_of_head(in_.v, values ? n_.value_dim : 0);
    for (int64_t j = range.begin; j < range.end; ++j) {
      keys.AddNorm(dim_ > 0 ? Norm(keys_of_head.Row(b, key_head, j), dim_) : 0.0f);
      if (values && !(Norm(values_of_head.Row(b, key_head, j), n_.value_dim) < kInfinity)) {
        keys.most_norm = kInfinity;
      }
    }
    for (int s = 0; s < table_.column_scalars; ++s) {
      const Real* scalars = in_.column_scalars + (s * n_.batch * n_.key_heads + head) * n_.keys;
      for (int64_t j = range.begin; j < range.end; ++j) keys.AddScalar(s, scalars[j]);
    }
    return keys;
  }

  // Sets the inputs of rows. Initially, rows skip nothing.
  void SetRows(const BlockRows& range, Rows* rows) const {
    rows->range = range;
    RowReader queries(in_.x, dim_);
    for (int64_t r = 0; r < range.rows(); ++r) SetRow(range, r, queries, rows);
    for (int64_t r = range.rows(); r < RoundUp(range.rows(), kLaneCount); ++r) {
      rows->norm[r] = rows->factor[r] = rows->temperature[r] = rows->own[r] = 0;
      for (int s = 0; s < table_.row_scalars; ++s) rows->a[s][r] = 0;
      for (int s = 0; s < table_.head_scalars; ++s) rows->t[s][r] = 0;
      rows->doubt[r] = rows->limit[r] = kNan;
    }
  }

  // The largest offset bias between a head's rows and keys [first, end).
  Real OffsetBias(const BlockRows& range, int64_t head, int64_t first, int64_t end) const {
    if (!bias_.exists()) return 0.0f;
    const int64_t entry = n_.queries - 1 + first - (range.i + range.queries - 1);
    return bias_.Most(range.b, range.h + head, entry, entry + range.queries - 1 + end - first);
  }

  // Returns a bound on biases: rows of one head can skip a tile of keys only if its biases are
  // below this bound. Returns +inf if biases alone are not decisive.
  //
  // The upper bound on the pair function's contribution is at least 0. Therefore, if a tile's
  // biases alone exceed the tolerance for every row, no row skips the tile, and its keys need not
  // be examined.
  Real Gate(const BlockRows& range, const Real* least_sums) const {
    if (in_.temperature != nullptr || in_.relative.keys != nullptr) return kInfinity;
    Real most = -kInfinity;
    for (int64_t r = 0; r < range.rows(); ++r) {
      Real sum = least_sums[r];
      if (in_.key_bias_base != nullptr) {
        const int64_t head = range.b * n_.heads + range.h + r / range.queries;
        sum += in_.key_bias_base[head * n_.queries + range.i + r % range.queries] * kLog2E;
      }
      most = std::max(most, sum);
    }
    return most + tolerance_;
  }
  // Whether a tile's biases are below the gate of its rows.
  bool PassesGate(const BlockRows& range, Real gate, int64_t first, int64_t end) const {
    if (gate == kInfinity) return true;
    for (int64_t h = 0; h < range.heads; ++h) {
      Real bias = OffsetBias(range, h, first, end);
      if (in_.key_bias != nullptr) {
        bias += LargestKeyBias(range.b, range.h + h, first, end);
      }
      // A bias of -inf, which masks the whole tile, also passes.
      if (!(bias > gate - std::log2(static_cast<Real>(end - first)))) return true;
    }
    return false;
  }

  // Computes log2 of the rows' weight sums from their largest scores and sums of 2^(score -
  // largest). `empty` is the value for rows without weights.
  static void SumsOf(const Real* largest, const Real* weight, int64_t rows, Real empty,
                     Real* sums) {
    const DF d;
    for (int64_t r = 0; r < rows; r += kLaneCount) {
      const VF w = hn::LoadU(d, weight + r);
      const VF sum = hn::LoadU(d, largest + r) + Log(w) * hn::Set(d, kLog2E);
      hn::StoreU(Select(w == hn::Zero(d), hn::Set(d, empty), sum), d, sums + r);
    }
  }

  // Computes upper bounds on log2 of each row's weight sum over keys [first, end), for whole
  // vectors of rows; NaN or +inf if there is no bound. `top` contains the largest offset bias of
  // each head's rows. Tiles whose largest bias is close to it are not bounded, because they could
  // not be skipped.
  void Bound(const Rows& rows, const Keys& keys, int64_t first, int64_t end, const Real* top,
             Real* bound) const {
    if (table_.bounds != nullptr) BoundRows(rows, keys, first, end, top, bound);
  }

  // Whether any row may skip keys [first, end); false if their biases alone are too large. Callers
  // check this before they examine the keys.
  bool MayLeaveOut(const Rows& rows, int64_t first, int64_t end) const {
    const BlockRows& range = rows.range;
    const Real log_count = std::log2(static_cast<Real>(end - first));
    for (int64_t r = 0; r < range.rows(); ++r) {
      const int64_t h = r / range.queries;
      const Real key =
          in_.key_bias == nullptr ? 0.0f : LargestKeyBias(range.b, range.h + h, first, end);
      const Real sum = OffsetBias(range, h, first, end) + key + rows.own[r];
      if (sum * rows.temperature[r] + log_count <= rows.limit[r] || sum == -kInfinity) return true;
    }
    return false;
  }

  // Sets the rows' thresholds. The weights of row r sum to at least 2^least[r]. There are `tiles`
  // tiles, with bounds at bounds + n * kRowBlock. Those with the smallest bounds are skipped, as
  // long as their total stays within the tolerance. Tiles that were skipped earlier stay skipped.
  HWY_FLATTEN void SetLimits(const Real* bounds, int64_t tiles, const Real* least_sums,
                             Rows* rows) const {
    // The threshold is the tolerance times 2^-k, for the first k in this list for which all bounds
    // below the threshold sum to at most the tolerance. k = `last` always satisfies this condition.
    constexpr int kChoices = 6;
    constexpr Real kFractions[kChoices] = {0, 1, 2, 3, 4, 6};
    const Real last = std::ceil(std::log2(static_cast<Real>(std::max<int64_t>(2, tiles))));
    const DF d;
    const VF zero = hn::Zero(d);
    const VF one = hn::Set(d, 1.0f);
    // Bounds below this value are rounded up to it.
    const VF least = hn::Set(d, -24.0f);
    const VF least_weight = hn::Set(d, 1.0f / (1 << 24));
    for (int64_t r = 0; r < rows->range.rows(); r += kLaneCount) {
      const VF limit = hn::Load(d, least_sums + r) + hn::Load(d, rows->doubt + r) +
                       hn::Set(d, tolerance_ - kBoundSlack);
      VF sum[kChoices];
      for (VF& s : sum) s = zero;
      for (int64_t n = 0; n < tiles; ++n) {
        const VF z = hn::LoadU(d, bounds + n * kRowBlock + r) - limit;
        const auto counts = z <= zero;
        if (hn::AllFalse(d, counts)) continue;
        if (hn::AllTrue(d, z < least)) {
          for (VF& s : sum) s = s + least_weight;
          continue;
        }
        const VF weight = Exp2(Max(least, z));
        for (int k = 0; k < kChoices; ++k) {
          sum[k] = sum[k] + hn::IfThenElseZero(z <= hn::Set(d, -kFractions[k]), weight);
        }
      }
      VF fraction = hn::Set(d, last);
      for (int k = kChoices - 1; k >= 0; --k) {
        const VF choice = hn::Set(d, kFractions[k]);
        fraction = Select(sum[k] <= one, Min(choice, fraction), fraction);
      }
      const VF before = hn::Load(d, rows->limit + r);
      const VF now = limit - fraction;
      hn::Store(Select(now < before, before, now), d, rows->limit + r);
    }
  }

  // Sets the rows' thresholds if the bounds of the `tiles` tiles are unknown: each tile may use an
  // equal fraction of the tolerance.
  void SetEqualLimits(int64_t tiles, const Real* least_sums, Rows* rows) const {
    const Real share =
        tolerance_ - kBoundSlack - std::log2(static_cast<Real>(std::max<int64_t>(1, tiles)));
    for (int64_t r = 0; r < rows->range.rows(); ++r) {
      rows->limit[r] = least_sums[r] + rows->doubt[r] + share;
    }
  }

  // Returns a mask whose bit r is set if row r skips a tile with these bounds.
  static uint64_t LeftOut(const Rows& rows, const Real* bound) {
    const DF d;
    uint64_t bits = 0;
    for (int64_t r = 0; r < rows.range.rows(); r += kLaneCount) {
      uint8_t lanes[8] = {};
      hn::StoreMaskBits(d, hn::LoadU(d, bound + r) <= hn::Load(d, rows.limit + r), lanes);
      uint64_t of_vector = 0;
      for (int64_t n = 0; n < DivideUp(kLaneCount, 8); ++n) {
        of_vector |= uint64_t{lanes[n]} << (8 * n);
      }
      bits |= of_vector << r;
    }
    return bits & AllRows(rows.range);
  }
  static uint64_t AllRows(const BlockRows& range) { return (uint64_t{1} << range.rows()) - 1; }

 private:
  static constexpr int64_t kTaskCells = 16;

  static bool Active(const AttentionInput<Real>& in, const PairTable& table) {
    const bool bounded = table.bounds != nullptr && in.pair_bias.data == nullptr &&
                         (in.bias.table == nullptr || in.bias.layout == nullptr) &&
                         in.relative.queries == nullptr &&
                         (in.relative.layout == nullptr || in.relative.keys == nullptr ||
                          in.relative.layout->MostEntries() > 0);
    // Skipping requires consecutive tokens, and biases that can make a tile negligible.
    const bool falls =
        (in.bias.table != nullptr || in.key_bias != nullptr) && in.query_positions == nullptr;
    return bounded && falls && in.softcap == 0 && in.tolerance > 0 &&
           in.shape.keys > kForwardColumns;
  }

  HWY_FLATTEN void BoundRows(const Rows& rows, const Keys& keys, int64_t first, int64_t end,
                             const Real* top, Real* bound) const {
    const DF d;
    HWY_ALIGN Real added[kRowBlock];
    HWY_ALIGN Real size[kRowBlock];
    const BlockRows& range = rows.range;
    const Real log_count = std::log2(static_cast<Real>(end - first)) + kBoundSlack;
    bool any = false;
    for (int64_t h = 0; h < range.heads; ++h) {
      const Real offset = OffsetBias(range, h, first, end);
      Real key = 0;
      Real sum = offset;
      if (in_.key_bias != nullptr) {
        key = LargestKeyBias(range.b, range.h + h, first, end);
        sum = offset == -kInfinity || key == -kInfinity ? -kInfinity : offset + key;
      } else if (top[h] - offset < kLeastFall - tolerance_) {
        sum = kInfinity;
      }
      if (!keys.finite()) sum = kInfinity;
      any = any || sum < kInfinity;
      std::fill_n(added + h * range.queries, range.queries, sum);
      std::fill_n(size + h * range.queries, range.queries, std::fabs(offset) + std::fabs(key));
    }
    const int64_t count = RoundUp(range.rows(), kLaneCount);
    if (!any) {
      std::fill_n(bound, count, kInfinity);
      return;
    }
    std::fill(added + range.rows(), added + count, kInfinity);
    std::fill(size + range.rows(), size + count, 0.0f);
    HWY_ALIGN Real g_least[kRowBlock];
    HWY_ALIGN Real g_most[kRowBlock];
    HWY_ALIGN Real f_least[kRowBlock];
    HWY_ALIGN Real f_most[kRowBlock];
    for (int64_t r = 0; r < count; r += kLaneCount) {
      const VectorRange g = InputOf(hn::Load(d, rows.norm + r), keys);
      hn::Store(g.least, d, g_least + r);
      hn::Store(g.most, d, g_most + r);
    }
    table_.bounds({g_least, g_most, rows.a[0], rows.t[0], kRowBlock, keys.least, keys.most}, count,
                  f_least, f_most);
    const VF zero = hn::Zero(d);
    for (int64_t r = 0; r < count; r += kLaneCount) {
      const VF c = hn::Load(d, rows.factor + r);
      const VF f = Select(c < zero, hn::Load(d, f_least + r), hn::Load(d, f_most + r));
      const VF content = Max(zero, c * f);
      const VF own = hn::Load(d, rows.own + r);
      const VF sum = hn::Load(d, added + r);
      const VF numbers = hn::Abs(content) + (hn::Abs(own) + hn::Load(d, size + r));
      const VF temperature = hn::Load(d, rows.temperature + r);
      const VF score = hn::MulAdd(numbers, hn::Set(d, kBoundShare), content + (own + sum));
      const VF weights = hn::MulAdd(temperature, score, hn::Set(d, log_count));
      // A masked key has no weight, regardless of its other terms.
      const VF hidden = hn::Set(d, -kInfinity);
      hn::StoreU(Select(sum == hidden, hidden, weights), d, bound + r);
    }
  }

  static Real Norm(const Real* HWY_RESTRICT row, int64_t columns) {
    return std::sqrt(Sum(columns, [row](int64_t e) { return row[e] * row[e]; }));
  }

  // The range of g for rows and keys with the given norms.
  VectorRange InputOf(VF norm, const Keys& keys) const {
    const DF d;
    const VF zero = hn::Zero(d);
    if (!table_.has_product()) return {zero, zero};
    const VF most = hn::Set(d, keys.most_norm);
    if (table_.is_distance()) {
      const VF sum = norm + most;
      // The distance is at least the gap between the spheres of the row and of the keys, minus the
      // rounding error of the norms.
      const VF gap = Max(hn::Set(d, keys.least_norm) - norm, norm - most);
      const VF near = Max(zero, hn::NegMulAdd(sum, hn::Set(d, kBoundShare), gap));
      return {near * near * hn::Set(d, 1.0f - 1.0f / 256),
              sum * sum * hn::Set(d, 1.0f + kBoundShare)};
    }
    const VF product = norm * most * hn::Set(d, 1.0f + kBoundShare);
    return {zero - product, product};
  }

  void SetRow(const BlockRows& range, int64_t r, RowReader& queries, Rows* rows) const {
    const int64_t b = range.b;
    const int64_t h = range.h + r / range.queries;
    const int64_t i = range.i + r % range.queries;
    const int64_t row = (b * n_.heads + h) * n_.queries + i;
    Real sum = 0;  // NaN if anything is non-finite
    const auto take = [&sum](Real number) {
      sum += number * 0.0f;
      return number;
    };
    rows->norm[r] = take(dim_ > 0 ? Norm(queries.Row(b, h, i), dim_) : 0.0f);
    for (int s = 0; s < table_.row_scalars; ++s) {
      rows->a[s][r] = take(in_.row_scalars[s * n_.batch * n_.heads * n_.queries + row]);
    }
    for (int s = 0; s < table_.head_scalars; ++s) {
      rows->t[s][r] = take(in_.head_scalars[s * n_.heads + h]);
    }
    rows->factor[r] = take(in_.factor[h]) * kLog2E;
    const Real temperature = in_.temperature == nullptr ? 1.0f : take(in_.temperature[row]);
    rows->temperature[r] = temperature;
    Real own = in_.key_bias_base == nullptr ? 0.0f : -take(in_.key_bias_base[row]);
    if (in_.relative.keys != nullptr) {
      const Real norm = Norm(in_.relative.query.row(b, h, i), in_.relative.dim);
      own += take(norm * relative_norm_[Size(in_.relative.key_heads ? h : 0)]) *
             std::fabs(in_.relative.factor);
    }
    rows->own[r] = own * kLog2E;
    // A negative temperature would turn upper bounds into lower bounds.
    const bool bounded = sum == 0.0f && temperature >= 0.0f;
    rows->doubt[r] = bounded ? 0.0f : kNan;
    rows->limit[r] = bounded ? -kInfinity : kNan;
  }

  int64_t KeyBiasRows() const { return in_.key_bias == nullptr ? 0 : n_.batch * n_.heads; }
  void FillKeyBias(int64_t row) {
    const Real* bias = in_.key_bias + row * n_.keys;
    const Real* low = in_.key_bias_low == nullptr ? nullptr : in_.key_bias_low + row * n_.keys;
    const KeyRange batch = BatchKeys(in_.mask, n_.keys, row / n_.heads);
    for (int64_t c = 0; c < cells_; ++c) {
      Real most = -kInfinity;
      Real least = kInfinity;
      bool bounded = true;
      const int64_t end = std::min(batch.end, (c + 1) * kCell);
      for (int64_t j = std::max(batch.begin, c * kCell); j < end; ++j) {
        const Real sum = low == nullptr ? bias[j] : bias[j] + low[j];
        bounded = bounded && sum < kInfinity;
        most = std::max(most, sum);
        least = std::min(least, sum);
      }
      // A cell in which only some keys are hidden is never skipped.
      if (!bounded || (least == -kInfinity && most > least)) most = kInfinity;
      key_bias_[Size(row * cells_ + c)] = BiasInLog2(most);
    }
  }
  Real LargestKeyBias(int64_t b, int64_t h, int64_t first, int64_t end) const {
    return LargestCell(key_bias_.data() + (b * n_.heads + h) * cells_, first / kCell,
                       DivideUp(end, kCell));
  }

  void BoundCells(int64_t head, int64_t first) const {
    const int64_t b = head / n_.key_heads;
    const KeyRange batch = BatchKeys(in_.mask, n_.keys, b);
    for (int64_t c = first; c < std::min(first + kTaskCells, cells_); ++c) {
      const KeyRange keys{std::max(batch.begin, c * kCell), std::min(batch.end, (c + 1) * kCell)};
      keys_[Size(head * cells_ + c)] = BoundKeys(b, head % n_.key_heads, keys, /*values=*/true);
    }
  }

  int64_t RelativeTables() const { return in_.relative.key_heads ? n_.heads : 1; }
  void FillRelative(int64_t table) {
    const int64_t size = in_.relative.layout->size();
    Real most = 0;
    for (int64_t e = 0; e < size; ++e) {
      const Real norm =
          Norm(in_.relative.keys + (table * size + e) * in_.relative.dim, in_.relative.dim);
      most = norm < kInfinity ? std::max(most, norm) : kInfinity;
    }
    relative_norm_[Size(table)] = most * static_cast<Real>(in_.relative.layout->MostEntries());
  }

  const AttentionInput<Real>& in_;
  const PairTable& table_;
  const AttentionShape& n_;
  int64_t dim_;
  bool active_;
  LargestBias bias_;
  Real tolerance_ = 0;  // in log2 units
  int64_t cells_ = 0;   // per head
  int64_t key_tasks_ = 0;
  mutable std::vector<Keys> keys_;  // per cell
  mutable std::unique_ptr<std::once_flag[]> looked_at_;
  std::vector<Real> key_bias_;
  std::vector<Real> relative_norm_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
