// The addends of scores and values: biases, relative keys, queries and values. Also dropout.
#if defined(GNOMON_SRC_CPU_ADDENDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_ADDENDS_INL_H_
#undef GNOMON_SRC_CPU_ADDENDS_INL_H_
#else
#define GNOMON_SRC_CPU_ADDENDS_INL_H_
#endif

#include <algorithm>
#include <optional>
#include <vector>

#include "base/dropout.h"
#include "base/visible_keys.h"
#include "cpu/dropout-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/mask-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/position_to_content-inl.h"
#include "cpu/row_products-inl.h"
#include "cpu/tables-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// The biases in log2 units, padded to whole panels. If a call has only a few biases, and they have
// a layout, they are expanded into rows in advance. Without this, a batch of small windows on a
// grid would look up the same short runs in every row of every head.
class BiasTable {
 public:
  explicit BiasTable(const AttentionInput<Real>& in)
      : bias_(in.bias),
        heads_(in.shape.heads),
        queries_(in.shape.queries),
        row_stride_(RoundUp(in.shape.keys, kWidth)) {
    if (!exists()) return;
    size_ = bias_.layout != nullptr ? bias_.layout->size() : in.shape.queries + in.shape.keys - 1;
    // Rows are read in whole panels, up to one panel past the last key.
    stride_ = size_ + kWidth;
    tables_ = bias_.batch_stride == 0 ? 1 : in.shape.batch;
    scaled_.Reset(tables_ * heads_ * stride_);
    masks_.assign(Size(tables_ * heads_), 0);
    constexpr int64_t kMostInRows = 1 << 20;
    has_rows_ = layout() != nullptr && !HasPositions(in) && in.query_offsets == nullptr &&
                tables_ * heads_ * queries_ * row_stride_ <= kMostInRows;
    if (!has_rows_) return;
    rows_.Reset(tables_ * heads_ * queries_ * row_stride_);
    for (int64_t i = 0; i < queries_; ++i) {
      layout()->AddRuns(QueryPosition(in, 0, i), 0, in.shape.keys, &runs_);
      end_of_runs_.push_back(runs_.size());
    }
  }

  bool exists() const { return bias_.table != nullptr; }
  // Whether a row's biases are stored contiguously, in column order.
  bool has_rows() const { return has_rows_; }
  const Real* Row(const TileRow& row) const {
    return rows_.data() + (Index(row.b, row.h) * queries_ + row.i) * row_stride_ + row.begin;
  }
  // Adds a row's gradients to the `stride()` entries of a table.
  void AddRow(const TileRow& row, const Real* from, Real* entries) const {
    const DF d;
    const size_t end = end_of_runs_[Size(row.i)];
    for (size_t n = row.i == 0 ? 0 : end_of_runs_[Size(row.i - 1)]; n < end; ++n) {
      const TableRun& run = runs_[n];
      const int64_t first = std::max(run.column, row.first);
      const int64_t count = std::min(run.column + run.count, row.last) - first;
      if (count <= 0) continue;
      const Real* HWY_RESTRICT at = from + (first - row.begin);
      Real* HWY_RESTRICT to = entries + run.entry + (first - run.column) * run.step;
      if (run.step == 0) {
        *to += Sum(count, [at](int64_t e) { return at[e]; });
        continue;
      }
      for (int64_t e = 0; e < count; e += kLaneCount) {
        const auto inside = hn::FirstN(d, Size(count - e));
        const VF added = hn::IfThenElseZero(inside, hn::LoadU(d, at + e));
        hn::StoreU(hn::LoadU(d, to + e) + added, d, to + e);
      }
    }
  }
  // The layout of the biases; null if they are indexed by offset.
  const TableLayout* layout() const { return bias_.layout; }
  int64_t size() const { return size_; }
  int64_t stride() const { return stride_; }
  int64_t tables() const { return exists() ? tables_ * heads_ : 0; }

  // Fills table n of tables().
  void Fill(int64_t n) {
    const Real* from = bias_.table + (n / heads_) * bias_.batch_stride + (n % heads_) * size_;
    Real* to = scaled_.data() + n * stride_;
    std::fill_n(to + size_, stride_ - size_, 0.0f);
    bool masks = false;
    for (int64_t e = 0; e < size_; ++e) {
      to[e] = BiasInLog2(from[e]);
      masks = masks || from[e] == -kInfinity;
    }
    masks_[Size(n)] = masks ? 1 : 0;
    size_t next = 0;
    for (int64_t i = 0; has_rows_ && i < queries_; ++i) {
      Real* row = rows_.data() + (n * queries_ + i) * row_stride_;
      std::fill_n(row, row_stride_, 0.0f);
      for (; next < end_of_runs_[Size(i)]; ++next) {
        const TableRun& run = runs_[next];
        for (int64_t e = 0; e < run.count; ++e) row[run.column + e] += to[run.entry + e * run.step];
      }
    }
  }

  // Whether a head's table masks anything with -inf.
  bool masks(int64_t b, int64_t h) const { return exists() && masks_[Size(Index(b, h))] != 0; }

  const Real* Table(int64_t b, int64_t h) const { return scaled_.data() + Index(b, h) * stride_; }

  // For biases indexed by offset, the entries of a row are contiguous; returns the first one.
  int64_t FirstEntry(const TileRow& row) const { return queries_ - 1 + row.begin - row.i; }

 private:
  int64_t Index(int64_t b, int64_t h) const {
    return (bias_.batch_stride == 0 ? 0 : b * heads_) + h;
  }

  Bias<const Real> bias_;
  int64_t heads_;
  int64_t queries_;
  int64_t size_ = 0;
  int64_t stride_ = 0;
  int64_t tables_ = 0;
  Buffer scaled_;
  std::vector<char> masks_;
  int64_t row_stride_;
  bool has_rows_ = false;
  Buffer rows_;
  std::vector<TableRun> runs_;  // of all rows, concatenated
  std::vector<size_t> end_of_runs_;
};

// The key biases, padded to whole panels. They are in log2 units unless rows first subtract a base.
class KeyBias {
 public:
  explicit KeyBias(const AttentionInput<Real>& in)
      : bias_(in.key_bias),
        low_(in.key_bias_low),
        base_(in.key_bias_base),
        queries_(in.shape.queries),
        keys_(in.shape.keys),
        stride_(RoundUp(in.shape.keys, kWidth)) {
    if (!exists()) return;
    rows_ = in.shape.batch * in.shape.heads;
    heads_ = in.shape.heads;
    scaled_.Reset(rows_ * stride_);
    if (has_base()) lows_.Reset(rows_ * stride_);
    masks_.assign(Size(rows_), 0);
  }

  bool exists() const { return bias_ != nullptr; }
  bool has_base() const { return base_ != nullptr; }
  int64_t rows() const { return rows_; }

  // Fills row n of rows(); the biases of keys outside the batch's range may have any value.
  void Fill(int64_t n, const Mask& mask) {
    const KeyRange keys = BatchKeys(mask, keys_, n / heads_);
    Real* to = scaled_.data() + n * stride_;
    std::fill_n(to, stride_, 0.0f);
    bool masks = false;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const Real bias = FiniteBias(bias_[n * keys_ + j]);
      to[j] = has_base() ? bias : bias * kLog2E;
      masks = masks || to[j] == -kInfinity;
    }
    masks_[Size(n)] = masks ? 1 : 0;
    if (!has_base()) return;
    Real* low = lows_.data() + n * stride_;
    std::fill_n(low, stride_, 0.0f);
    for (int64_t j = keys.begin; j < keys.end; ++j) low[j] = low_[n * keys_ + j];
  }

  bool masks(int64_t b, int64_t h) const { return exists() && masks_[Size(b * heads_ + h)] != 0; }
  const Real* Row(int64_t b, int64_t h) const {
    return scaled_.data() + (b * heads_ + h) * stride_;
  }

  // Adds the key biases to a row of a tile.
  void AddTo(const TileRow& row, Real* HWY_RESTRICT to) const {
    const Real* HWY_RESTRICT from = Row(row.b, row.h) + row.begin;
    if (!has_base()) {
      for (int64_t n = 0; n < row.count; ++n) to[n] += from[n];
      return;
    }
    const int64_t head = row.b * heads_ + row.h;
    const Real* HWY_RESTRICT low = lows_.data() + head * stride_ + row.begin;
    const Real base = base_[head * queries_ + row.i];
    for (int64_t n = 0; n < row.count; ++n) to[n] += ((from[n] - base) + low[n]) * kLog2E;
  }

 private:
  const Real* bias_;
  const Real* low_;
  const Real* base_;
  int64_t queries_;
  int64_t keys_;
  int64_t stride_;
  int64_t rows_ = 0;
  int64_t heads_ = 0;
  Buffer scaled_;
  Buffer lows_;
  std::vector<char> masks_;
};

// Destinations of a row's score gradients; null if not needed.
struct ScoreGradients {
  Real* bias = nullptr;      // a table of BiasTable::stride() floats
  Real* key_bias = nullptr;  // starting at the row's first column
  Real* pairs = nullptr;     // likewise; overwritten, not accumulated
  Real* of_keys = nullptr;   // likewise; for products with relative queries
  Real* relative = nullptr;  // the row's part of a TableWindow
  bool temperature = false;  // whether to compute the gradient of the row's temperature

  int count() const {
    return (bias != nullptr ? 1 : 0) + (key_bias != nullptr ? 1 : 0) + (pairs != nullptr ? 1 : 0) +
           (of_keys != nullptr ? 1 : 0) + (relative != nullptr ? 1 : 0) + (temperature ? 1 : 0);
  }
};

// All addends of scores and values, for one call of the operator.
class Addends {
 public:
  // `tile_columns` is the tile width of the pass. `keys` and `values` determine how the pass uses
  // relative keys and values, and `key_gradient` whether it computes the gradients of relative.key.
  Addends(const AttentionInput<Real>& in, int64_t tile_columns, RowTable::Uses keys,
          RowTable::Uses values, bool key_gradient)
      : in_(in),
        bias_(in),
        key_bias_(in),
        pair_mask_(in.mask, in.shape),
        bias_reader_(in, in.bias.table != nullptr ? in.bias.layout : nullptr),
        row_reader_(in, in.relative.layout),
        keys_(in.relative.layout != nullptr ? in.relative.keys : nullptr, in.relative.key_heads,
              in.shape, TableSize(in), in.relative.dim,
              {keys.multiply, keys.add_product, MultipliesInPlace(in.shape, /*pairs=*/false)}),
        values_(in.relative.layout != nullptr ? in.relative.values : nullptr,
                in.relative.value_heads, in.shape, TableSize(in), in.shape.value_dim, values),
        position_to_content_(in, key_gradient) {
    if (relative()) window_stride_ = row_reader_.WindowStride(kRowBlock, tile_columns);
  }

  const BiasTable& bias() const { return bias_; }
  const PairMask& pair_mask() const { return pair_mask_; }
  const RowTable& keys() const { return keys_; }
  const RowTable& values() const { return values_; }
  const PositionToContent& position_to_content() const { return position_to_content_; }

  // Whether scores have any addend.
  bool to_scores() const {
    return bias_.exists() || key_bias_.exists() || pair_bias() || keys_.exists() ||
           position_to_content_.exists();
  }
  bool relative() const { return keys_.exists() || values_.exists(); }
  bool drops() const { return in_.dropout.rate > 0; }
  bool caps() const { return in_.softcap != 0; }
  // Whether rows have a temperature, which multiplies their scores.
  bool has_temperature() const { return in_.temperature != nullptr; }
  Real Temperature(int64_t b, int64_t h, int64_t i) const {
    if (!has_temperature()) return 1.0f;
    return in_.temperature[(b * in_.shape.heads + h) * in_.shape.queries + i];
  }
  // Whether a bias of -inf may mask a key of this head.
  bool masks(int64_t b, int64_t h) const {
    return bias_.masks(b, h) || key_bias_.masks(b, h) || pair_bias();
  }

  int64_t tasks() const {
    return bias_.tables() + key_bias_.rows() + pair_mask_.tasks() + position_to_content_.tasks() +
           (keys_.exists() ? keys_.tasks() : 0) + (values_.exists() ? values_.tasks() : 0);
  }
  void Fill(int64_t task) {
    if (task < bias_.tables()) return bias_.Fill(task);
    task -= bias_.tables();
    if (task < key_bias_.rows()) return key_bias_.Fill(task, in_.mask);
    task -= key_bias_.rows();
    if (task < pair_mask_.tasks()) return pair_mask_.Fill(task);
    task -= pair_mask_.tasks();
    if (task < position_to_content_.tasks()) return position_to_content_.Fill(task);
    task -= position_to_content_.tasks();
    if (!keys_.exists()) return values_.Fill(task);
    if (task < keys_.tasks()) return keys_.Fill(task);
    values_.Fill(task - keys_.tasks());
  }

  // The number of floats in a window of kRowBlock rows.
  int64_t window_size() const { return kRowBlock * window_stride_; }

  // Creates, in `memory`, the window for `rows` queries starting at `query` and keys [begin, end).
  TableWindow Window(int64_t b, int64_t query, int64_t rows, int64_t begin, int64_t end,
                     Real* memory) const {
    if (!relative()) return {};
    return row_reader_.Window(b, query, rows, begin, end, window_stride_, memory);
  }

  // Multiplies `rows` queries, starting at `query`, by the relative keys of the window.
  void MultiplyKeys(int64_t b, int64_t h, int64_t query, int64_t rows,
                    const TableWindow& window) const {
    const View<const Real>& q = in_.relative.query;
    keys_.Multiply(h, rows, {q.row(b, h, query), Size(q.stride[2]), 1}, window);
  }

  // Returns the addends of a row's scores, in log2 units and multiplied by the row's
  // temperature; -inf where the user's mask hides a pair. If a single contiguous row contains them,
  // returns a pointer to it; otherwise sums them in `scratch`. `products` is the row's part of the
  // window of MultiplyKeys(), and `of_keys` its part of the position_to_content() terms; both are
  // null if only biases are needed. If `plain` is not null, it receives the terms without the
  // temperature.
  const Real* ScoreRow(const TileRow& row, const Real* products, const TableWindow& window,
                       const Real* of_keys, Real* scratch, std::vector<TableRun>* runs,
                       Real* plain = nullptr) const {
    const Real* const biases = BiasRow(row);
    const bool of_pairs = pair_bias() || row.paired;
    const bool as_it_is = !has_temperature() && !key_bias_.has_base();
    if (products == nullptr && of_keys == nullptr && !of_pairs && as_it_is &&
        bias_.exists() != key_bias_.exists()) {
      if (biases != nullptr) return biases;
      if (key_bias_.exists()) return key_bias_.Row(row.b, row.h) + row.begin;
    }
    if (biases != nullptr) {
      std::copy_n(biases, row.count, scratch);
    } else {
      std::fill_n(scratch, row.count, 0.0f);
      if (bias_.exists()) {
        bias_reader_.Read(row, bias_.Table(row.b, row.h), 0, {0, bias_.size()}, 1.0f, scratch,
                          runs);
      }
    }
    if (key_bias_.exists()) key_bias_.AddTo(row, scratch);
    if (products != nullptr) {
      row_reader_.Read(row, products, window.origin, window.range, in_.relative.factor * kLog2E,
                       scratch, runs);
    }
    if (of_keys != nullptr) {
      for (int64_t n = 0; n < row.count; ++n) scratch[n] += of_keys[n];
    }
    if (pair_bias()) {
      const Real* HWY_RESTRICT from = in_.pair_bias.row(row.b, row.h, row.i) + row.begin;
      AddPairBias(from, ColumnsOf(row), scratch);
    }
    if (plain != nullptr) std::copy_n(scratch, row.count, plain);
    if (has_temperature()) {
      for (int64_t n = 0; n < row.count; ++n) {
        // Masked scores remain masked at any temperature.
        scratch[n] = scratch[n] == -kInfinity ? -kInfinity : scratch[n] * row.temperature;
      }
    }
    if (row.paired) HidePairs(row, scratch);
    return scratch;
  }

  // Returns the array to which the gradients of a row's final scores (after the temperature) are
  // added, or null if no gradient needs them. If they have a single contiguous destination, this is
  // the destination; otherwise it is `scratch`, which is zeroed, and SpreadGradient() distributes
  // the sums.
  Real* GradientRow(const TileRow& row, const ScoreGradients& to, Real* scratch) const {
    if (to.count() == 0) return nullptr;
    if (to.count() == 1 && !has_temperature()) {
      if (to.key_bias != nullptr) return to.key_bias;
      if (Real* const written = to.pairs != nullptr ? to.pairs : to.of_keys) {
        std::fill_n(written, row.count, 0.0f);
        return written;
      }
      if (to.bias != nullptr) {
        if (const std::optional<int64_t> first = FirstBias(row)) return to.bias + *first;
      }
    }
    std::fill_n(scratch, row.count, 0.0f);
    return scratch;
  }
  void SpreadGradient(const TileRow& row, const ScoreGradients& to, const TableWindow& window,
                      Real* scratch, std::vector<TableRun>* runs) const {
    if (has_temperature()) {
      for (int64_t n = 0; n < row.count; ++n) scratch[n] *= row.temperature;
    }
    if (const std::optional<int64_t> first = to.bias != nullptr ? FirstBias(row) : std::nullopt) {
      Real* table = to.bias + *first;
      for (int64_t n = 0; n < row.count; ++n) table[n] += scratch[n];
    } else if (to.bias != nullptr && bias_.has_rows()) {
      bias_.AddRow(row, scratch, to.bias);
    } else if (to.bias != nullptr) {
      bias_reader_.Add(row, scratch, 1.0f, to.bias, 0, {0, bias_.size()}, runs);
    }
    if (to.key_bias != nullptr) {
      for (int64_t n = 0; n < row.count; ++n) to.key_bias[n] += scratch[n];
    }
    if (to.pairs != nullptr) std::copy_n(scratch, row.count, to.pairs);
    if (to.of_keys != nullptr) std::copy_n(scratch, row.count, to.of_keys);
    if (to.relative != nullptr) {
      row_reader_.Add(row, scratch, in_.relative.factor, to.relative, window.origin, window.range,
                      runs);
    }
  }

  // Adds a row's products of dO and relative values to its dP.
  void AddValueProducts(const TileRow& row, const Real* products, const TableWindow& window,
                        Real* to, std::vector<TableRun>* runs) const {
    row_reader_.Read(row, products, window.origin, window.range, 1.0f, to, runs);
  }
  // Adds a row's weights to their table entries.
  void AddWeights(const TileRow& row, const Real* weights, Real* entries, const TableWindow& window,
                  std::vector<TableRun>* runs) const {
    row_reader_.Add(row, weights, 1.0f, entries, window.origin, window.range, runs);
  }

  // Applies the soft cap to a row of scores in log2 units, and returns the largest capped score.
  // Hidden scores (-inf) remain hidden.
  Real CapScores(int64_t columns, Real* scores) const {
    const DF d;
    const VF hidden = hn::Set(d, -kInfinity);
    VF largest = hidden;
    for (int64_t n = 0; n < columns; n += kLaneCount) {
      const VF score = hn::LoadU(d, scores + n);
      const VF capped = hn::IfThenElse(score == hidden, hidden, Cap(score));
      largest = hn::Max(largest, capped);
      hn::StoreU(capped, d, scores + n);
    }
    return hn::GetLane(hn::MaxOfLanes(d, largest));
  }

  // Prepares a row for the backward functions, which add biases but do not apply the cap. `scores`
  // contains the uncapped scores; it receives biases that turn them into capped scores, including
  // `added` (the bias so far, or null). dP is modified so that dP - delta includes the slope of the
  // cap as a factor.
  void CapGradients(int64_t columns, const Real* added, Real delta, Real* scores,
                    Real* d_weights) const {
    const DF d;
    const VF hidden = hn::Set(d, -kInfinity);
    const VF least = hn::Set(d, delta);
    const VF one = hn::Set(d, 1.0f);
    // Uses 1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|), because the difference would lose
    // digits where the cap saturates.
    const VF rate = hn::Set(d, -2.0f * kLog2E / Softcap());
    for (int64_t n = 0; n < columns; n += kLaneCount) {
      const VF score = hn::LoadU(d, scores + n);
      const auto hides = score == hidden;
      const VF capped = Cap(score);
      const VF e = Exp2(hn::Abs(score) * rate);
      const VF slope = hn::IfThenZeroElse(hides, hn::Set(d, 4.0f) * e / ((one + e) * (one + e)));
      const VF d_weight = hn::LoadU(d, d_weights + n);
      hn::StoreU(hn::IfThenElse(hides, least, hn::MulAdd(slope, d_weight - least, least)), d,
                 d_weights + n);
      VF more = capped - score;
      if (added != nullptr) more = more + hn::LoadU(d, added + n);
      hn::StoreU(hn::IfThenElse(hides, hidden, more), d, scores + n);
    }
  }

  // Multiplies a row of weights, or of their gradients, by the dropout mask.
  void Drop(const TileRow& row, Real* weights) const {
    const DF d;
    const Dropper dropper(in_.dropout, row.b, row.h, row.i);
    for (int64_t n = 0; n < row.count; n += kLaneCount) {
      hn::StoreU(dropper.Drop(row.begin + n, hn::LoadU(d, weights + n)), d, weights + n);
    }
  }

  // The dropout factor of a pair's weight.
  Real Kept(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (!drops()) return 1.0f;
    const uint32_t hash = HashColumn(HashRow(in_.dropout.seed, b, h, i), static_cast<uint32_t>(j));
    return hash < DropoutThreshold(in_.dropout) ? 0.0f
                                                : static_cast<Real>(DropoutScale(in_.dropout));
  }

  // The entries of the relative tables that a pair reads.
  void FindEntries(int64_t b, int64_t i, int64_t j, std::vector<TableRun>* runs) const {
    row_reader_.FindRuns({b, 0, i, j, 1, j, j + 1, false, 1.0f}, runs);
  }

 private:
  // The soft cap in log2 units.
  Real Softcap() const { return static_cast<Real>(in_.softcap) * kLog2E; }
  HWY_INLINE VF Cap(VF score) const {
    const DF d;
    return hn::Set(d, Softcap()) * Tanh(score * hn::Set(d, 1.0f / Softcap()));
  }

  static int64_t TableSize(const AttentionInput<Real>& in) {
    return in.relative.layout != nullptr ? in.relative.layout->size() : 0;
  }

  bool pair_bias() const { return in_.pair_bias.data != nullptr; }
  // The number of columns in a row, without its padding to whole vectors.
  int64_t ColumnsOf(const TileRow& row) const {
    return std::min(row.count, in_.shape.keys - row.begin);
  }

  static void AddPairBias(const Real* from, int64_t columns, Real* HWY_RESTRICT scores) {
    const DF d;
    int64_t n = 0;
    for (; n + kLaneCount <= columns; n += kLaneCount) {
      hn::StoreU(hn::LoadU(d, scores + n) + BiasInLog2(hn::LoadU(d, from + n)), d, scores + n);
    }
    for (; n < columns; ++n) scores[n] += BiasInLog2(from[n]);
  }

  // Sets scores to -inf where the user's mask hides a pair.
  void HidePairs(const TileRow& row, Real* scores) const {
    const DF d;
    const uint8_t* seen = pair_mask_.Row(row.b, row.h, row.i) + row.begin;
    const int64_t columns = ColumnsOf(row);
    const VF hidden = hn::Set(d, -kInfinity);
    int64_t n = 0;
    for (; n + kLaneCount <= columns; n += kLaneCount) {
      const auto hides = hn::RebindMask(d, LoadInts(seen + n) == hn::Zero(DI()));
      hn::StoreU(hn::IfThenElse(hides, hidden, hn::LoadU(d, scores + n)), d, scores + n);
    }
    for (; n < columns; ++n) scores[n] = seen[n] != 0 ? scores[n] : -kInfinity;
  }

  // The biases of a row, if they are contiguous.
  const Real* BiasRow(const TileRow& row) const {
    if (bias_.has_rows()) return bias_.Row(row);
    const std::optional<int64_t> first = FirstBias(row);
    return first ? bias_.Table(row.b, row.h) + *first : nullptr;
  }
  // The first entry of a row in the bias table, if the row's entries are contiguous there.
  std::optional<int64_t> FirstBias(const TileRow& row) const {
    if (!bias_.exists()) return std::nullopt;
    if (bias_.layout() == nullptr) return bias_.FirstEntry(row);
    const PlacedEntries& placed = bias_reader_.placed();
    if (!placed.exists()) return std::nullopt;
    return placed.FirstEntry(row.b, row.i, row.begin, row.count, row.last - row.begin, bias_.size(),
                             bias_.stride());
  }

  const AttentionInput<Real>& in_;
  BiasTable bias_;
  KeyBias key_bias_;
  PairMask pair_mask_;
  TableReader bias_reader_;
  TableReader row_reader_;  // relative keys and values
  RowTable keys_;
  RowTable values_;
  PositionToContent position_to_content_;
  int64_t window_stride_ = 0;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
