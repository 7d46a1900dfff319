// A call of the kernel for derivatives of dense attention, and its blocks of query rows.
#if defined(GNOMON_SRC_CPU_DUAL_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_BLOCK_INL_H_
#undef GNOMON_SRC_CPU_DUAL_BLOCK_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_BLOCK_INL_H_
#endif

#include <algorithm>
#include <vector>

#include "base/visible_keys.h"
#include "cpu/derivatives.h"
#include "cpu/dual_addends-inl.h"
#include "cpu/dual_call-inl.h"
#include "cpu/dual_columns-inl.h"
#include "cpu/dual_content-inl.h"
#include "cpu/dual_relative-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// The maximum number of scalars of a pair, each of which has its own array.
constexpr int64_t kScalarArrays = 3 * kMostScalars;

// Scratch memory of a block. Rows that are operands of the same matrix product are adjacent.
struct DualScratch {
  Real* weights;  // tangents of the rows' weights, then the weights
  // Tangents of the scores' gradients, then the gradients; before, position-to-content terms.
  Real* gradients;
  Real* x;             // [x' x] per row
  Real* scaled;        // rows of c x, then rows of (c x)'
  Real* d_o;           // [d_o' d_o] per row
  Real* stacked_d_o;   // rows of d_o, then rows of d_o'
  Real* sums;          // tangents of rows' sums, then the sums
  Real* bias;          // biases of a row, in log2 units
  Real* bias_tangent;  // tangents of the biases of a row
  Real* d_bias;        // gradients per offset; then their tangents
  Real* d_key_bias;    // gradients per key; then their tangents
  Real* g;             // tangents of the pair function's argument, then the argument
  Real* pairs;         // scalars of pairs, one array each; then their tangents
  Real* slopes;        // slopes of pairs, one array each; then their tangents
  Real* d_columns;     // gradients of column scalars and squared norms; then their tangents
  Real* norms;         // squared norms of the block's keys; then their tangents
  Real* plain;         // tangents of the scores before temperature and cap, then the scores
  // Windows of the relative tables, with their tangents. key_window holds products with relative
  // keys, and later gradients of scores. value_window holds gradients of outputs times relative
  // values, and later weights.
  Real* key_window;
  Real* value_window;
  Real* table_rows;  // a window; later gradients of relative.query and their tangents
  Real* content;     // scratch memory of DualContent
};

// A pair of nearly equal tokens: the query of row r and the key of column j. Their gradients are
// multiples of the difference of the tokens; adding the two tokens to separate sums would lose
// digits of that difference.
struct NearDual {
  int64_t r;
  int64_t j;
  Real d_distance;
  Real d_distance_tangent;
};

// Rows [begin, end) of a query head, and the range of keys to which they attend.
struct DualBlock : DualScratch {
  explicit DualBlock(const DualScratch& scratch) : DualScratch(scratch) {}

  int64_t rows() const { return end - begin; }
  size_t row_count() const { return Size(end - begin); }
  // The number of columns, rounded up to whole vectors.
  int64_t columns() const { return RoundUp(keys.end - first, kLaneCount); }
  // Row r of an array of this block in which the tangents come first.
  DualRow Row(Real* array, int64_t r) const {
    Real* const of_row = array + r * stride;
    return {of_row + rows() * stride, of_row};
  }
  DualNumbers Query(int64_t r) const { return {x + (2 * r + 1) * dim, x + 2 * r * dim}; }
  // Writes the rows of a padded array to a view.
  void Write(const View<Real>& view, const Real* from, int64_t padded, int64_t count) const {
    for (int64_t r = 0; view.data != nullptr && r < rows(); ++r) {
      std::copy_n(from + r * padded, count, view.row(b, h, begin + r));
    }
  }
  void Clear(const View<Real>& view, int64_t count) const {
    for (int64_t i = begin; view.data != nullptr && i < end; ++i) {
      std::fill_n(view.row(b, h, i), count, 0.0f);
    }
  }
  DualAddends::Row AddendRow(int64_t r, const Columns& of_row) const {
    return {b, h, begin + r, first, of_row};
  }

  int64_t b;
  int64_t h;
  int64_t key_head;
  int64_t head;          // h, counted across the batch
  int64_t head_of_keys;  // key_head, counted across the batch
  int64_t begin;
  int64_t end;
  KeyRange keys;
  int64_t first;   // key of column 0
  int64_t number;  // index among the blocks of the query head
  int64_t turn;    // index among the blocks of the key head
  int64_t stride;  // stride of rows of scores
  int64_t dim;     // columns of x
  Real c;
  Real dc;
  // Per row: the columns that are visible to it; the column of the largest score, or -1; the sum of
  // the gradients of scores before temperature and cap; the squared norm and its tangent; the
  // gradient of the squared norm and its tangent.
  Columns seen[kRowBlock];
  int64_t top[kRowBlock];
  DualNumber sum[kRowBlock];
  Real norm[kRowBlock];
  Real norm_tangent[kRowBlock];
  Real d_norm[kRowBlock];
  Real d_norm_tangent[kRowBlock];
  std::vector<NearDual> near;
  DualWindow keys_window;
  DualWindow values_window;
  std::vector<TableRun> runs;
};

// A call that is computed in blocks of rows: the terms of its scores, the results that it needs,
// and sizes.
struct DualAttention : DualCall<AttentionDerivatives<Real>> {
  explicit DualAttention(const AttentionDerivatives<Real>& call)
      : DualCall(call),
        addends(in, tangent),
        group(n.heads / std::max<int64_t>(1, n.key_heads)),
        dim(has_product() ? n.dim : 0),
        padded_dim(PaddedColumns(dim)),
        padded_value_dim(PaddedColumns(n.value_dim)),
        stride(RoundUp(LongestRow(), kWidth) + kLaneCount),
        block_rows(std::clamp<int64_t>(kScores / stride / kStep * kStep, kStep, kRowBlock)),
        row_blocks(DivideUp(n.queries, block_rows)),
        relative(in, tangent, block_rows, stride),
        content(in, tangent) {}

  // Returns block `index` of a key head, which is counted across the batch.
  DualBlock Block(int64_t head, int64_t index, const DualScratch& scratch) const {
    DualBlock block(scratch);
    block.b = head / n.key_heads;
    block.key_head = head % n.key_heads;
    // Heads that share gradients of pair biases add to them in turn, so the tasks of all heads of a
    // block of rows are consecutive.
    block.number = shares_pairs ? index / group : index % row_blocks;
    block.h = block.key_head * group + (shares_pairs ? index % group : index / row_blocks);
    block.head = block.b * n.heads + block.h;
    block.head_of_keys = head;
    block.begin = block.number * block_rows;
    block.end = std::min(block.begin + block_rows, n.queries);
    block.keys = KeysOfRows(block.b, block.begin, block.end);
    block.first = block.keys.begin / kWidth * kWidth;
    block.turn = index;
    // Padding makes rows map to different cache sets.
    block.stride = RoundUp(block.keys.end - block.first, kWidth) + kLaneCount;
    block.dim = dim;
    block.c = in.factor[block.h];
    block.dc = tangent.factor != nullptr ? tangent.factor[block.h] : 0.0f;
    return block;
  }

  DualScratch Scratch(ScratchParts& parts) const {
    const int64_t scores = 2 * block_rows * stride;
    const int64_t values = wants_any ? 2 * block_rows : 0;
    const int64_t scalars = function != nullptr ? 2 * stride : 0;
    const int64_t window = 2 * block_rows * relative.stride();
    return {.weights = parts.Take(scores),
            .gradients = parts.Take(wants_scores || content.exists() ? scores : 0),
            .x = parts.Take(2 * block_rows * dim),
            .scaled = parts.Take(wants_scores ? 2 * block_rows * padded_dim : 0),
            .d_o = parts.Take(values * n.value_dim),
            .stacked_d_o = parts.Take(values * padded_value_dim),
            .sums = parts.Take(2 * block_rows * std::max(padded_dim, padded_value_dim)),
            .bias = parts.Take(has_bias() ? stride : 0),
            .bias_tangent = parts.Take(has_bias_tangent() ? stride : 0),
            .d_bias = parts.Take(wants_bias && !addends.has_layout() ? 2 * offsets() : 0),
            .d_key_bias = parts.Take(wants_key_bias ? 2 * stride : 0),
            .g = parts.Take(function != nullptr ? scores : 0),
            .pairs = parts.Take(scalars * kScalarArrays),
            .slopes = parts.Take(scalars * (kScalarArrays + 1)),
            .d_columns = parts.Take(scalars * (kMostScalars + 1)),
            .norms = parts.Take(is_distance() ? 2 * stride : 0),
            .plain = parts.Take(has_temper() ? scores : 0),
            .key_window = parts.Take(relative.keys().exists() ? window : 0),
            .value_window = parts.Take(relative.values().exists() ? window : 0),
            .table_rows = parts.Take(
                block_rows * std::max(relative.stride(), 2 * relative.keys().values().padded())),
            .content = parts.Take(content.scratch_size())};
  }

  bool has_temper() const { return in.temperature != nullptr || in.softcap != 0; }
  bool drops() const { return in.dropout.rate != 0; }
  bool has_bias() const {
    return addends.has_values() || relative.keys().exists() || content.exists();
  }
  bool has_bias_tangent() const {
    return addends.has_tangents() || (relative.keys().exists() && relative.has_key_tangents()) ||
           (content.exists() && content.has_tangents());
  }
  // The number of offsets between the rows and the columns of a block.
  int64_t offsets() const { return stride + block_rows; }
  int64_t panels() const { return DivideUp(n.keys, kWidth); }

  // The index of a row in arrays over (B, H, Lq).
  int64_t RowAt(const DualBlock& block, int64_t r) const {
    return block.head * n.queries + block.begin + r;
  }
  Dropper DropperOf(const DualBlock& block, int64_t r) const {
    return {in.dropout, block.b, block.h, block.begin + r};
  }
  Temper TemperOf(const DualBlock& block, int64_t r) const {
    const int64_t row = RowAt(block, r);
    return {in.temperature != nullptr ? in.temperature[row] : 1.0f,
            tangent.temperature != nullptr ? tangent.temperature[row] : 0.0f,
            static_cast<Real>(in.softcap)};
  }
  // Scalar s of the keys of a key head, or of the queries of a query head. Heads are counted across
  // the batch.
  template <class T>
  T* ColumnScalar(T* scalars, int s, int64_t head) const {
    return scalars + (s * n.batch * n.key_heads + head) * n.keys;
  }
  template <class T>
  T* RowScalar(T* scalars, int s, int64_t head) const {
    return scalars + (s * n.batch * n.heads + head) * n.queries;
  }

  const DualAddends addends;
  const int64_t group;
  const int64_t dim;
  const int64_t padded_dim;
  const int64_t padded_value_dim;
  const int64_t stride;      // at least that of every block
  const int64_t block_rows;  // rows per block
  const int64_t row_blocks;
  const DualRelative relative;
  const DualContent content;

  using To = AttentionGradient<Real>;
  const bool has_x = tangent.x.data != nullptr;
  const bool has_y = tangent.y.data != nullptr;
  const bool has_v = tangent.v.data != nullptr;
  const bool has_d_o = of.d_o_tangent.data != nullptr;
  // Whether a gradient, or its tangent, is needed.
  const bool wants_factor = Wants(&To::factor);
  const bool wants_x = wants_factor || Wants(&To::x);
  const bool wants_y = Wants(&To::y);
  const bool wants_v = Wants(&To::v);
  const bool wants_bias = Wants(&To::bias);
  const bool wants_key_bias = Wants(&To::key_bias);
  const bool wants_pair_bias = Wants(&To::pair_bias);
  const bool wants_relative_query = Wants(&To::relative_query);
  const bool wants_relative_values = Wants(&To::relative_values);
  const bool wants_relative_queries = Wants(&To::relative_queries);
  const bool wants_content = wants_relative_queries || Wants(&To::relative_key);
  const bool wants_scores = wants_x || wants_y || wants_bias || wants_key_bias || wants_pair_bias ||
                            wants_relative_query || wants_content ||
                            Wants(&To::row_scalars, &To::column_scalars, &To::head_scalars,
                                  &To::temperature, &To::relative_keys);
  const bool wants_any = wants_scores || wants_v || wants_relative_values;
  // Whether several heads add to the same gradients of pair biases.
  const bool shares_pairs = SharesPairs(of.gradient) || SharesPairs(of.gradient_tangent);

 private:
  // The number of rows in a block (a multiple of kStep), chosen so that a block has about kScores
  // scores.
  static constexpr int64_t kScores = int64_t{1} << 19;
  static constexpr auto kStep = static_cast<int64_t>(kMicroRows);

  // A range that contains all keys to which rows [begin, end) attend.
  KeyRange KeysOfRows(int64_t b, int64_t begin, int64_t end) const {
    KeyRange all{n.keys, 0};
    for (int64_t i = begin; i < end; ++i) {
      const KeyRange seen = addends.Keys(b, i);
      if (seen.empty()) continue;
      all = {std::min(all.begin, seen.begin), std::max(all.end, seen.end)};
    }
    return all;
  }
  // An upper bound on the number of columns of a block of rows.
  int64_t LongestRow() const {
    int64_t longest = 0;
    for (int64_t b = 0; b < n.batch; ++b) {
      for (int64_t begin = 0; begin < n.queries; begin += kRowBlock) {
        const int64_t end = std::min(begin + 2 * kRowBlock, n.queries);
        const KeyRange keys = KeysOfRows(b, begin, end);
        longest = std::max(longest, keys.end - keys.begin / kWidth * kWidth);
      }
    }
    return longest;
  }
  bool SharesPairs(const To& gradient) const {
    const View<Real>& pairs = gradient.pair_bias;
    return pairs.data != nullptr &&
           ((pairs.stride[0] == 0 && n.batch > 1) || (pairs.stride[1] == 0 && n.heads > 1));
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
