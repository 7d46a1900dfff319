// What is added to the scores besides the similarity, and to the values: biases, relative keys and
// values, and dropout.
#if defined(GNOMON_SRC_CPU_TERMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_TERMS_INL_H_
#undef GNOMON_SRC_CPU_TERMS_INL_H_
#else
#define GNOMON_SRC_CPU_TERMS_INL_H_
#endif

#include <algorithm>
#include <optional>
#include <vector>

#include "base/dropout.h"
#include "base/visible_keys.h"
#include "cpu/gemm-inl.h"
#include "cpu/mask-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/positions-inl.h"
#include "cpu/row_products-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {

// Columns [begin, begin + count) of one row of a tile, whole vectors, of which tables are read for
// keys [first, last) alone: a window holds no more.
struct TileRow {
  int64_t b;
  int64_t h;
  int64_t i;
  int64_t begin;
  int64_t count;
  int64_t first;
  int64_t last;
  bool paired;  // whether the caller's mask of pairs hides some
  float temperature;
  bool placed = false;  // or the position of some
};

// to[column - first] += factor * the entries that the runs name; entry e is entries[e - origin].
inline void Gather(const std::vector<TableRun>& runs, const float* HWY_RESTRICT entries,
                   int64_t origin, float factor, int64_t first, float* HWY_RESTRICT to) {
  for (const TableRun& run : runs) {
    const float* HWY_RESTRICT from = entries + (run.entry - origin);
    float* HWY_RESTRICT at = to + (run.column - first);
    if (run.step == 0) {
      const float term = factor * *from;
      for (int64_t n = 0; n < run.count; ++n) at[n] += term;
    } else {
      for (int64_t n = 0; n < run.count; ++n) at[n] += factor * from[n];
    }
  }
}

// The transpose of Gather: adds factor * from[column - first] to the entries.
inline void Scatter(const std::vector<TableRun>& runs, const float* HWY_RESTRICT from,
                    int64_t first, float factor, float* HWY_RESTRICT entries, int64_t origin) {
  for (const TableRun& run : runs) {
    const float* HWY_RESTRICT at = from + (run.column - first);
    float* HWY_RESTRICT to = entries + (run.entry - origin);
    if (run.step == 0) {
      *to += factor * Sum(run.count, [at](int64_t n) { return at[n]; });
    } else {
      for (int64_t n = 0; n < run.count; ++n) to[n] += factor * at[n];
    }
  }
}

// The biases in units of log2, with room to read whole panels.
class BiasTable {
 public:
  explicit BiasTable(const AttentionInput<float>& in)
      : bias_(in.bias), heads_(in.shape.heads), queries_(in.shape.queries) {
    if (!exists()) return;
    size_ = bias_.layout != nullptr ? bias_.layout->size() : in.shape.queries + in.shape.keys - 1;
    // Rows are read in whole panels: up to one past the last key.
    stride_ = size_ + kWidth;
    tables_ = bias_.batch_stride == 0 ? 1 : in.shape.batch;
    scaled_.Reset(tables_ * heads_ * stride_);
    masks_.assign(Size(tables_ * heads_), 0);
  }

  bool exists() const { return bias_.table != nullptr; }
  // By offset, if null.
  const TableLayout* layout() const { return bias_.layout; }
  int64_t size() const { return size_; }
  int64_t stride() const { return stride_; }
  int64_t tables() const { return exists() ? tables_ * heads_ : 0; }

  // Table n of tables().
  void Fill(int64_t n) {
    const float* from = bias_.table + (n / heads_) * bias_.batch_stride + (n % heads_) * size_;
    float* to = scaled_.data() + n * stride_;
    std::fill_n(to + size_, stride_ - size_, 0.0f);
    bool masks = false;
    for (int64_t e = 0; e < size_; ++e) {
      to[e] = from[e] * kLog2E;
      masks = masks || from[e] == -kInfinity;
    }
    masks_[Size(n)] = masks ? 1 : 0;
  }

  // Whether the table of a head masks anything by -inf.
  bool masks(int64_t b, int64_t h) const { return exists() && masks_[Size(Index(b, h))] != 0; }

  const float* Table(int64_t b, int64_t h) const { return scaled_.data() + Index(b, h) * stride_; }

  // By offset, entries of a row follow one another: where in a table those of the row begin.
  int64_t FirstEntry(const TileRow& row) const { return queries_ - 1 + row.begin - row.i; }

 private:
  int64_t Index(int64_t b, int64_t h) const {
    return (bias_.batch_stride == 0 ? 0 : b * heads_) + h;
  }

  Bias<const float> bias_;
  int64_t heads_;
  int64_t queries_;
  int64_t size_ = 0;
  int64_t stride_ = 0;
  int64_t tables_ = 0;
  Buffer scaled_;
  std::vector<char> masks_;
};

// The keys' biases in units of log2, or as they are where rows take a base off them first, with
// room to read whole panels.
class KeyBias {
 public:
  explicit KeyBias(const AttentionInput<float>& in)
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

  // Row n of rows(); keys outside the batch's range may hold anything.
  void Fill(int64_t n, const Mask& mask) {
    const KeyRange keys = BatchKeys(mask, keys_, n / heads_);
    float* to = scaled_.data() + n * stride_;
    std::fill_n(to, stride_, 0.0f);
    bool masks = false;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      to[j] = bias_[n * keys_ + j] * (has_base() ? 1.0f : kLog2E);
      masks = masks || to[j] == -kInfinity;
    }
    masks_[Size(n)] = masks ? 1 : 0;
    if (!has_base()) return;
    float* low = lows_.data() + n * stride_;
    std::fill_n(low, stride_, 0.0f);
    for (int64_t j = keys.begin; j < keys.end; ++j) low[j] = low_[n * keys_ + j];
  }

  bool masks(int64_t b, int64_t h) const { return exists() && masks_[Size(b * heads_ + h)] != 0; }
  const float* Row(int64_t b, int64_t h) const {
    return scaled_.data() + (b * heads_ + h) * stride_;
  }

  // Adds those of a row of a tile.
  void AddTo(const TileRow& row, float* HWY_RESTRICT to) const {
    const float* HWY_RESTRICT from = Row(row.b, row.h) + row.begin;
    if (!has_base()) {
      for (int64_t n = 0; n < row.count; ++n) to[n] += from[n];
      return;
    }
    const int64_t head = row.b * heads_ + row.h;
    const float* HWY_RESTRICT low = lows_.data() + head * stride_ + row.begin;
    const float base = base_[head * queries_ + row.i];
    for (int64_t n = 0; n < row.count; ++n) to[n] += ((from[n] - base) + low[n]) * kLog2E;
  }

 private:
  const float* bias_;
  const float* low_;
  const float* base_;
  int64_t queries_;
  int64_t keys_;
  int64_t stride_;
  int64_t rows_ = 0;
  int64_t heads_ = 0;
  Buffer scaled_;
  Buffer lows_;
  std::vector<char> masks_;
};

// For each row of a tile, a number for each entry of a table that the tile may read.
struct TableWindow {
  TableRange range{0, 0};
  int64_t origin = 0;  // the entry of column 0, first of a vector
  int64_t stride = 0;
  float* data = nullptr;

  float* Row(int64_t r) const { return data + r * stride; }
  void ClearRow(int64_t r) const { std::fill_n(Row(r), range.end - origin, 0.0f); }
  // The entries of the range as a left operand, by rows or transposed.
  Strided Entries() const { return {data + (range.begin - origin), Size(stride), 1}; }
  Strided Transposed() const { return {data + (range.begin - origin), 1, Size(stride)}; }
};

// A table of rows, (1 or H, size, columns): packed for Multiply, unless it multiplies rows where
// they lie, and padded for AddProduct, where those are wanted.
class RowTable {
 public:
  struct Uses {
    bool multiply;
    bool add_product;
    bool in_place = false;
  };

  RowTable(const float* table, bool heads, const AttentionShape& n, int64_t size, int64_t columns,
           Uses uses)
      : heads_(heads),
        size_(table != nullptr ? size : 0),
        tables_(heads ? n.heads : 1),
        uses_(uses),
        table_(table),
        panels_({table, {0, size * columns, columns}}, 1, tables_, packs() ? size_ : 0, columns),
        rows_({table, {0, size * columns, columns}}, 1, tables_, uses.add_product ? size_ : 0,
              columns),
        columns_(columns),
        padded_(PaddedColumns(columns)),
        exists_(table != nullptr) {}

  bool exists() const { return exists_; }
  bool heads() const { return heads_; }
  int64_t size() const { return size_; }
  int64_t columns() const { return columns_; }
  int64_t padded() const { return padded_; }
  int64_t tables() const { return tables_; }
  int64_t Index(int64_t h) const { return heads_ ? h : 0; }

  int64_t tasks() const { return tables_ * DivideUp(size_, kWidth); }
  void Fill(int64_t task) const {
    const int64_t h = task / DivideUp(size_, kWidth);
    const int64_t p = task % DivideUp(size_, kWidth);
    if (packs()) panels_.Fill(0, h, p, {0, size_});
    if (uses_.add_product) rows_.Fill(0, h, p * kWidth, std::min((p + 1) * kWidth, size_));
  }

  // window = a (rows x columns) times the entries' rows.
  void Multiply(int64_t h, int64_t rows, Strided a, const TableWindow& window) const {
    if (uses_.in_place) return MultiplyInPlace(h, rows, a, window);
    for (int64_t e = window.origin; e < window.range.end;) {
      const int64_t within = e % kWidth;
      const size_t vectors =
          std::min(Vectors(window.range.end - e), kMicroVectors - Size(within) / kLanes);
      HWY_NAMESPACE::Multiply(Size(rows), vectors, Size(columns_), a,
                              panels_.panel(0, Index(h), e / kWidth) + within, kPanel,
                              window.data + (e - window.origin), Size(window.stride));
      e += static_cast<int64_t>(vectors) * kLaneCount;
    }
  }

  // to (rows x padded()) += the window times the entries' rows.
  void AddProduct(int64_t h, int64_t rows, const TableWindow& window, float* to) const {
    const Rows table = rows_.Head(0, Index(h));
    MultiplyAdd(Size(rows), Size(padded_) / kLanes, Size(window.range.end - window.range.begin),
                window.Entries(), table.row(window.range.begin), Size(table.stride), to,
                Size(padded_));
  }

 private:
  bool packs() const { return uses_.multiply && !uses_.in_place; }

  // With 0 for what the window has before and behind its range.
  void MultiplyInPlace(int64_t h, int64_t rows, Strided a, const TableWindow& window) const {
    if (window.range.end <= window.origin) return;
    const Tokens table(View<const float>{table_, {0, size_ * columns_, columns_}});
    HWY_NAMESPACE::MultiplyKeys(
        table, 0, Index(h), {window.range.begin, window.range.end}, columns_,
        /*pairs=*/false, window.origin, 0, RoundUp(window.range.end - window.origin, kLaneCount),
        Size(rows), a.data, a.row, window.data, Size(window.stride));
  }

  bool heads_;
  int64_t size_;
  int64_t tables_;
  Uses uses_;
  const float* table_;
  Panels panels_;
  PaddedRows rows_;
  int64_t columns_;
  int64_t padded_;
  bool exists_;
};

// Partial gradients of a RowTable, one for each part of the work, and of their sum.
class RowTableGradient {
 public:
  RowTableGradient(const RowTable& table, float* to, int64_t parts)
      : table_(table), to_(to), parts_(parts) {
    if (to != nullptr) partial_.Reset(parts * table.size() * table.padded());
  }

  bool wanted() const { return to_ != nullptr; }
  float* Part(int64_t part) const {
    return partial_.data() + part * table_.size() * table_.padded();
  }
  void ClearPart(int64_t part) const {
    if (wanted()) std::fill_n(Part(part), table_.size() * table_.padded(), 0.0f);
  }
  // A part += the transposed window times rows of `padded` columns.
  void Add(int64_t part, int64_t rows, const TableWindow& window, Rows right,
           int64_t first_row) const {
    MultiplyAdd(Size(window.range.end - window.range.begin), Size(table_.padded()) / kLanes,
                Size(rows), window.Transposed(), right.row(first_row), Size(right.stride),
                Part(part) + window.range.begin * table_.padded(), Size(table_.padded()));
  }
  // Adds parts up, in order; `belongs` says whether a part is of table h. Calls of different h may
  // run at the same time.
  template <class Belongs>
  void Merge(int64_t h, const Belongs& belongs) const {
    const int64_t columns = table_.columns();
    float* to = to_ + h * table_.size() * columns;
    std::fill_n(to, table_.size() * columns, 0.0f);
    for (int64_t part = 0; part < parts_; ++part) {
      if (!belongs(part)) continue;
      const float* from = Part(part);
      for (int64_t e = 0; e < table_.size(); ++e) {
        for (int64_t d = 0; d < columns; ++d) {
          to[e * columns + d] += from[e * table_.padded() + d];
        }
      }
    }
  }

 private:
  const RowTable& table_;
  float* to_;
  int64_t parts_;
  Buffer partial_;
};

// Where the gradients of a row's scores go; null where they are not wanted.
struct ScoreGradients {
  float* bias = nullptr;      // a table of BiasTable::stride() floats
  float* key_bias = nullptr;  // of the row's first column on
  float* pairs = nullptr;     // likewise, written and not added to
  float* relative = nullptr;  // the row of a TableWindow
  bool temperature = false;   // whether that of the row's temperature is wanted

  int count() const {
    return (bias != nullptr ? 1 : 0) + (key_bias != nullptr ? 1 : 0) + (pairs != nullptr ? 1 : 0) +
           (relative != nullptr ? 1 : 0) + (temperature ? 1 : 0);
  }
};

// All that is added to scores and values, for one call of the operator.
class Terms {
 public:
  // Of a pass with tiles of so many columns, and what it does with the relative keys and values.
  Terms(const AttentionInput<float>& in, int64_t tile_columns, RowTable::Uses keys,
        RowTable::Uses values)
      : in_(in),
        bias_(in),
        key_bias_(in),
        pair_mask_(in.mask, in.shape),
        placed_biases_(in, in.bias.table != nullptr ? in.bias.layout : nullptr),
        placed_rows_(in, in.relative.layout),
        keys_(in.relative.layout != nullptr ? in.relative.keys : nullptr, in.relative.key_heads,
              in.shape, TableSize(in), in.relative.dim,
              {keys.multiply, keys.add_product, MultipliesInPlace(in.shape, /*pairs=*/false)}),
        values_(in.relative.layout != nullptr ? in.relative.values : nullptr,
                in.relative.value_heads, in.shape, TableSize(in), in.shape.value_dim, values) {
    if (relative() && HasPositions(in)) {
      window_stride_ = RoundUp(in.relative.layout->size(), kLaneCount) + 2 * kLaneCount;
    } else if (relative()) {
      // A vector before the range's first entry and one past its last.
      window_stride_ =
          RoundUp(in.relative.layout->LargestWindow(kRowBlock, tile_columns), kLaneCount) +
          2 * kLaneCount;
    }
  }

  const BiasTable& bias() const { return bias_; }
  const PairMask& pair_mask() const { return pair_mask_; }
  const RowTable& keys() const { return keys_; }
  const RowTable& values() const { return values_; }

  // Whether anything is added to scores.
  bool to_scores() const {
    return bias_.exists() || key_bias_.exists() || pair_bias() || keys_.exists();
  }
  bool relative() const { return keys_.exists() || values_.exists(); }
  bool drops() const { return in_.dropout.rate > 0; }
  // What multiplies the scores of a row.
  bool has_temperature() const { return in_.temperature != nullptr; }
  float Temperature(int64_t b, int64_t h, int64_t i) const {
    if (!has_temperature()) return 1.0f;
    return in_.temperature[(b * in_.shape.heads + h) * in_.shape.queries + i];
  }
  // Whether a bias of -inf may mask a key of this head.
  bool masks(int64_t b, int64_t h) const {
    return bias_.masks(b, h) || key_bias_.masks(b, h) || pair_bias();
  }

  int64_t tasks() const {
    return bias_.tables() + key_bias_.rows() + pair_mask_.tasks() +
           (keys_.exists() ? keys_.tasks() : 0) + (values_.exists() ? values_.tasks() : 0);
  }
  void Fill(int64_t task) {
    if (task < bias_.tables()) return bias_.Fill(task);
    task -= bias_.tables();
    if (task < key_bias_.rows()) return key_bias_.Fill(task, in_.mask);
    task -= key_bias_.rows();
    if (task < pair_mask_.tasks()) return pair_mask_.Fill(task);
    task -= pair_mask_.tasks();
    if (!keys_.exists()) return values_.Fill(task);
    if (task < keys_.tasks()) return keys_.Fill(task);
    values_.Fill(task - keys_.tasks());
  }

  // Floats of one window of kRowBlock rows.
  int64_t window_size() const { return kRowBlock * window_stride_; }

  // The window of `rows` queries from `query` on with keys [begin, end), in `memory`.
  TableWindow Window(int64_t b, int64_t query, int64_t rows, int64_t begin, int64_t end,
                     float* memory) const {
    TableWindow window;
    if (!relative()) return window;
    const TableLayout& layout = *in_.relative.layout;
    if (placed_rows_.exists()) {
      window.range = placed_rows_.Window(b, query, rows, begin, end, layout.size());
    } else if (HasPositions(in_)) {
      window.range = {0, layout.size()};
    } else {
      const int64_t p = QueryOffset(in_, b) + query;
      window.range = layout.Window(p, p + rows, begin, end);
    }
    window.origin = window.range.begin / kLaneCount * kLaneCount;
    window.stride = window_stride_;
    window.data = memory;
    return window;
  }

  // The products of `rows` queries from `query` on with the relative keys of the window.
  void MultiplyKeys(int64_t b, int64_t h, int64_t query, int64_t rows,
                    const TableWindow& window) const {
    const View<const float>& q = in_.relative.query;
    keys_.Multiply(h, rows, {q.row(b, h, query), Size(q.stride[2]), 1}, window);
  }

  // What a row's scores take, in units of log2 and with the row's temperature, -inf where the
  // caller's mask hides a pair: in place if it lies in one row of memory, else added up in
  // `scratch`. `products` is the row's in the window of MultiplyKeys, null for the biases alone.
  // `plain` takes it without the temperature, where that is wanted.
  const float* ScoreRow(const TileRow& row, const float* products, const TableWindow& window,
                        float* scratch, std::vector<TableRun>* runs, float* plain = nullptr) const {
    const std::optional<int64_t> first_bias = FirstBias(row);
    const bool of_pairs = pair_bias() || row.paired;
    const bool as_it_is = !has_temperature() && !key_bias_.has_base();
    if (products == nullptr && !of_pairs && as_it_is && bias_.exists() != key_bias_.exists()) {
      if (first_bias) return bias_.Table(row.b, row.h) + *first_bias;
      if (key_bias_.exists()) return key_bias_.Row(row.b, row.h) + row.begin;
    }
    if (first_bias) {
      std::copy_n(bias_.Table(row.b, row.h) + *first_bias, row.count, scratch);
    } else {
      std::fill_n(scratch, row.count, 0.0f);
      if (bias_.exists()) {
        ReadEntries(*bias_.layout(), placed_biases_, row, bias_.Table(row.b, row.h), 0,
                    {0, bias_.size()}, 1.0f, scratch, runs);
      }
    }
    if (key_bias_.exists()) key_bias_.AddTo(row, scratch);
    if (products != nullptr) {
      ReadEntries(*in_.relative.layout, placed_rows_, row, products, window.origin, window.range,
                  in_.relative.factor * kLog2E, scratch, runs);
    }
    if (pair_bias()) {
      const float* HWY_RESTRICT from = in_.pair_bias.row(row.b, row.h, row.i) + row.begin;
      for (int64_t n = 0; n < ColumnsOf(row); ++n) scratch[n] += from[n] * kLog2E;
    }
    if (plain != nullptr) std::copy_n(scratch, row.count, plain);
    if (has_temperature()) {
      for (int64_t n = 0; n < row.count; ++n) {
        // What is masked stays so at any temperature.
        scratch[n] = scratch[n] == -kInfinity ? -kInfinity : scratch[n] * row.temperature;
      }
    }
    if (row.paired) HidePairs(row, scratch);
    return scratch;
  }

  // Where a row's gradients of its scores, temperature included, are to be added: in place if they
  // are wanted in one row of memory, else in zeroed `scratch`, from which SpreadGradient takes
  // them; null if nowhere.
  float* GradientRow(const TileRow& row, const ScoreGradients& to, float* scratch) const {
    if (to.count() == 0) return nullptr;
    if (to.count() == 1 && !has_temperature()) {
      if (to.key_bias != nullptr) return to.key_bias;
      if (to.pairs != nullptr) {
        std::fill_n(to.pairs, row.count, 0.0f);
        return to.pairs;
      }
      if (to.bias != nullptr) {
        if (const std::optional<int64_t> first = FirstBias(row)) return to.bias + *first;
      }
    }
    std::fill_n(scratch, row.count, 0.0f);
    return scratch;
  }
  void SpreadGradient(const TileRow& row, const ScoreGradients& to, const TableWindow& window,
                      float* scratch, std::vector<TableRun>* runs) const {
    if (has_temperature()) {
      for (int64_t n = 0; n < row.count; ++n) scratch[n] *= row.temperature;
    }
    if (const std::optional<int64_t> first = to.bias != nullptr ? FirstBias(row) : std::nullopt) {
      float* table = to.bias + *first;
      for (int64_t n = 0; n < row.count; ++n) table[n] += scratch[n];
    } else if (to.bias != nullptr) {
      AddToEntries(*bias_.layout(), placed_biases_, row, scratch, 1.0f, to.bias, 0,
                   {0, bias_.size()}, runs);
    }
    if (to.key_bias != nullptr) {
      for (int64_t n = 0; n < row.count; ++n) to.key_bias[n] += scratch[n];
    }
    if (to.pairs != nullptr) std::copy_n(scratch, row.count, to.pairs);
    if (to.relative != nullptr) {
      AddToEntries(*in_.relative.layout, placed_rows_, row, scratch, in_.relative.factor,
                   to.relative, window.origin, window.range, runs);
    }
  }

  // Adds a row of products with relative values to its products with values.
  void AddValueProducts(const TileRow& row, const float* products, const TableWindow& window,
                        float* to, std::vector<TableRun>* runs) const {
    ReadEntries(*in_.relative.layout, placed_rows_, row, products, window.origin, window.range,
                1.0f, to, runs);
  }
  // Adds up a row's weights for each entry.
  void AddWeights(const TileRow& row, const float* weights, float* entries,
                  const TableWindow& window, std::vector<TableRun>* runs) const {
    AddToEntries(*in_.relative.layout, placed_rows_, row, weights, 1.0f, entries, window.origin,
                 window.range, runs);
  }

  // Multiplies a row of weights, or of their gradients, by dropout's mask.
  void Drop(const TileRow& row, float* weights) const {
    const DF d;
    const DU du;
    const DropoutRow keys = HashRow(in_.dropout.seed, row.b, row.h, row.i);
    const VF scale = hn::Set(d, static_cast<float>(DropoutScale(in_.dropout)));
    const auto threshold = hn::Set(du, DropoutThreshold(in_.dropout));
    const auto first = hn::Set(du, kDropoutFirst);
    for (int64_t n = 0; n < row.count; n += kLaneCount) {
      // HashColumn of many columns.
      auto x = hn::Iota(du, static_cast<uint32_t>(row.begin + n)) + hn::Set(du, keys.first);
      x = hn::Xor(x, hn::ShiftRight<16>(x)) * first;
      x = (hn::Xor(x, hn::ShiftRight<15>(x)) + hn::Set(du, keys.second)) *
          hn::Set(du, kDropoutSecond);
      x = hn::Xor(x, hn::ShiftRight<16>(x)) * first;
      x = hn::Xor(x, hn::ShiftRight<15>(x));
      const auto dropped = hn::RebindMask(d, hn::Lt(x, threshold));
      const VF weight = hn::LoadU(d, weights + n);
      hn::StoreU(hn::IfThenZeroElse(dropped, weight * scale), d, weights + n);
    }
  }

  // What dropout multiplies the weight of a pair by.
  float Kept(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (!drops()) return 1.0f;
    const uint32_t hash = HashColumn(HashRow(in_.dropout.seed, b, h, i), static_cast<uint32_t>(j));
    return hash < DropoutThreshold(in_.dropout) ? 0.0f
                                                : static_cast<float>(DropoutScale(in_.dropout));
  }

  // The entries of the relative tables that a pair reads.
  void FindEntries(int64_t b, int64_t i, int64_t j, std::vector<TableRun>* runs) const {
    FindRuns(*in_.relative.layout, {b, 0, i, j, 1, j, j + 1, false, 1.0f}, runs);
  }

 private:
  static int64_t TableSize(const AttentionInput<float>& in) {
    return in.relative.layout != nullptr ? in.relative.layout->size() : 0;
  }

  bool pair_bias() const { return in_.pair_bias.data != nullptr; }
  // Of a row of whole vectors, the columns that there are.
  int64_t ColumnsOf(const TileRow& row) const {
    return std::min(row.count, in_.shape.keys - row.begin);
  }

  // Puts -inf where the caller's mask hides a pair.
  void HidePairs(const TileRow& row, float* scores) const {
    const DF d;
    const hn::Rebind<uint8_t, DF> bytes;
    const uint8_t* seen = pair_mask_.Row(row.b, row.h, row.i) + row.begin;
    const int64_t columns = ColumnsOf(row);
    const VF hidden = hn::Set(d, -kInfinity);
    int64_t n = 0;
    for (; n + kLaneCount <= columns; n += kLaneCount) {
      const VI sees = hn::PromoteTo(DI(), hn::LoadU(bytes, seen + n));
      const auto hides = hn::RebindMask(d, sees == hn::Zero(DI()));
      hn::StoreU(hn::IfThenElse(hides, hidden, hn::LoadU(d, scores + n)), d, scores + n);
    }
    for (; n < columns; ++n) scores[n] = seen[n] != 0 ? scores[n] : -kInfinity;
  }

  // Where in the table of biases those of a row begin, if they follow one another there.
  std::optional<int64_t> FirstBias(const TileRow& row) const {
    if (!bias_.exists()) return std::nullopt;
    if (bias_.layout() == nullptr) return bias_.FirstEntry(row);
    if (!placed_biases_.exists()) return std::nullopt;
    return placed_biases_.FirstEntry(row.b, row.i, row.begin, row.count, row.last - row.begin,
                                     bias_.size(), bias_.stride());
  }

  // to[n] += factor * the entries that a row's columns read; there are those of the window alone.
  void ReadEntries(const TableLayout& layout, const PlacedEntries& placed, const TileRow& row,
                   const float* entries, int64_t origin, TableRange window, float factor, float* to,
                   std::vector<TableRun>* runs) const {
    if (placed.exists()) {
      return placed.Gather(row.b, row.i, row.begin, row.count, entries, origin, window, factor, to);
    }
    FindRuns(layout, row, runs);
    Gather(*runs, entries, origin, factor, row.begin, to);
  }
  // The transpose.
  void AddToEntries(const TableLayout& layout, const PlacedEntries& placed, const TileRow& row,
                    const float* from, float factor, float* entries, int64_t origin,
                    TableRange window, std::vector<TableRun>* runs) const {
    if (placed.exists()) {
      return placed.Scatter(row.b, row.i, row.begin, row.count, from, factor, entries, origin,
                            window);
    }
    FindRuns(layout, row, runs);
    Scatter(*runs, from, row.begin, factor, entries, origin);
  }

  void FindRuns(const TableLayout& layout, const TileRow& row, std::vector<TableRun>* runs) const {
    runs->clear();
    const int64_t p = QueryPosition(in_, row.b, row.i);
    if (!HasPositions(in_)) return layout.AddRuns(p, row.first, row.last, runs);
    // Runs of positions are those of columns elsewhere.
    const int64_t* keys = in_.key_positions + row.b * in_.shape.keys;
    for (int64_t begin = row.first; begin < row.last;) {
      int64_t end = begin + 1;
      while (end < row.last && keys[end] == keys[end - 1] + 1) ++end;
      const size_t known = runs->size();
      layout.AddRuns(p, keys[begin], keys[begin] + end - begin, runs);
      for (size_t n = known; n < runs->size(); ++n) (*runs)[n].column += begin - keys[begin];
      begin = end;
    }
  }

  const AttentionInput<float>& in_;
  BiasTable bias_;
  KeyBias key_bias_;
  PairMask pair_mask_;
  PlacedEntries placed_biases_;
  PlacedEntries placed_rows_;  // of relative keys and values
  RowTable keys_;
  RowTable values_;
  int64_t window_stride_ = 0;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
