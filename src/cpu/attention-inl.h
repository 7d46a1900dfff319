// The fused operator, forward and backward, for one pair function and one instruction set.
//
// Keys are packed once for each head as transposed panels of kPanel columns, so that one
// microkernel serves every product. A tile is a block of query rows by a block of keys: its scores
// are made by one product, turned into weights while they are in cache, and used up by the next
// products. Queries are independent tasks forward; backward, keys are, and what they add to queries
// goes to one partial sum for each chunk of keys. Tasks are cut by shape alone and sums over tasks
// run in fixed order: results do not depend on the number of workers.
#if defined(GNOMON_SRC_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_ATTENTION_INL_H_
#undef GNOMON_SRC_CPU_ATTENTION_INL_H_
#else
#define GNOMON_SRC_CPU_ATTENTION_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/parallel.h"
#include "core/visible_keys.h"
#include "cpu/gemm-inl.h"
#include "cpu/mask-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/terms-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {

template <class Definition>
constexpr bool kHasProduct = Definition::kInput != PairInput::kNone;
template <class Definition>
constexpr bool kIsDistance = Definition::kInput == PairInput::kSquaredDistance;

// f's derivatives; arrays of one where the definition has none.
template <class Definition>
struct VectorDerivative {
  VF g;
  VF a[Definition::kRowScalars + 1];
  VF b[Definition::kColumnScalars + 1];
  VF t[Definition::kHeadScalars + 1];
};

// The column scalars of each key head and, for a distance, the squared norms of its keys behind
// them; padded to whole panels, zeros outside the batch's keys.
template <class Definition>
class ColumnScalars {
 public:
  static constexpr int kCount = Definition::kColumnScalars + (kIsDistance<Definition> ? 1 : 0);
  using Pointers = std::array<const float*, Definition::kColumnScalars + 1>;

  explicit ColumnScalars(const AttentionInput<float>& in)
      : in_(in), padded_(RoundUp(in.shape.keys, kWidth)) {
    if (kCount > 0) data_.Reset(kCount * in.shape.batch * in.shape.key_heads * padded_);
  }

  void Fill(int64_t b, int64_t h, int64_t p, KeyRange keys) const {
    const int64_t head = b * in_.shape.key_heads + h;
    const int64_t heads = in_.shape.batch * in_.shape.key_heads;
    for (int s = 0; s < kCount; ++s) {
      float* to = data_.data() + (head * kCount + s) * padded_;
      for (int64_t j = p * kWidth; j < (p + 1) * kWidth; ++j) {
        if (j < keys.begin || j >= keys.end) {
          to[j] = 0.0f;
        } else if (s < Definition::kColumnScalars) {
          to[j] = in_.column_scalars[(s * heads + head) * in_.shape.keys + j];
        } else {
          to[j] = SquaredNorm(in_.y.row(b, h, j), in_.shape.dim);
        }
      }
    }
  }

  // Scalar s of keys from `begin` on; last, their squared norms.
  Pointers At(int64_t b, int64_t h, int64_t begin) const {
    Pointers at{};
    for (int s = 0; s < kCount; ++s) {
      at[s] = data_.data() + ((b * in_.shape.key_heads + h) * kCount + s) * padded_ + begin;
    }
    return at;
  }

 private:
  const AttentionInput<float>& in_;
  int64_t padded_;
  Buffer data_;
};

// What one row brings to its pairs: its scalars as vectors and, for a distance, its token.
template <class Definition>
struct RowVectors {
  VF a[Definition::kRowScalars + 1];
  VF t[Definition::kHeadScalars + 1];
  VF norm;
  const float* x = nullptr;
  const float* y = nullptr;  // of the first column
  int64_t y_stride = 0;
  int64_t dim = 0;
};

// norm is the squared norm of the row's token, for a distance.
template <class Definition>
HWY_INLINE RowVectors<Definition> LoadRow(const AttentionInput<float>& in, int64_t b, int64_t h,
                                          int64_t key_head, int64_t i, int64_t first_column,
                                          float norm) {
  const DF d;
  const AttentionShape& n = in.shape;
  RowVectors<Definition> row;
  for (int s = 0; s < Definition::kRowScalars; ++s) {
    row.a[s] = hn::Set(d, in.row_scalars[((s * n.batch + b) * n.heads + h) * n.queries + i]);
  }
  for (int s = 0; s < Definition::kHeadScalars; ++s) {
    row.t[s] = hn::Set(d, in.head_scalars[s * n.heads + h]);
  }
  if constexpr (kIsDistance<Definition>) {
    row.x = in.x.row(b, h, i);
    row.y = in.y.row(b, key_head, first_column);
    row.y_stride = in.y.stride[2];
    row.dim = n.dim;
    row.norm = hn::Set(d, norm);
  }
  return row;
}

// Squared distances below this share of the sum of the squared norms are computed anew from
// differences: cancellation has left them four digits or fewer.
constexpr float kNear = 1e-3f;

// Replaces squared distances in s that are below `limit`; y is the token of lane 0.
template <class Definition>
HWY_NOINLINE void NearDistances(const RowVectors<Definition>& row, const float* y,
                                const float* limit, float* s) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (!(s[lane] < limit[lane])) continue;
    const float* key = y + static_cast<int64_t>(lane) * row.y_stride;
    s[lane] = Sum(row.dim, [x = row.x, key](int64_t e) {
      const float difference = x[e] - key[e];
      return difference * difference;
    });
  }
}

// g of columns [j, j + kLanes) of a row, from its inner products.
template <class Definition>
HWY_INLINE VF LoadInput(const float* HWY_RESTRICT products, int64_t j,
                        const RowVectors<Definition>& row, const float* const* column_scalars) {
  const DF d;
  if constexpr (!kHasProduct<Definition>) return hn::Zero(d);
  const VF product = hn::Load(d, products + j);
  if constexpr (!kIsDistance<Definition>) return product;
  if constexpr (kIsDistance<Definition>) {
    const VF norms = row.norm + hn::LoadU(d, column_scalars[Definition::kColumnScalars] + j);
    VF s = norms - (product + product);
    const VF limit = norms * hn::Set(d, kNear);
    if (HWY_UNLIKELY(!hn::AllFalse(d, s < limit))) {
      HWY_ALIGN float near[kLanes];
      HWY_ALIGN float limits[kLanes];
      hn::Store(s, d, near);
      hn::Store(limit, d, limits);
      NearDistances(row, row.y + j * row.y_stride, limits, near);
      s = hn::Load(d, near);
    }
    return s;
  }
}

// Lanes of columns [j, j + kLanes) that the row sees.
HWY_INLINE auto Visible(const RowView& view, int64_t j) {
  const DI di;
  const VI lane = hn::Iota(di, static_cast<int32_t>(j));
  const auto in_span = hn::And(lane > hn::Set(di, static_cast<int32_t>(view.span.begin - 1)),
                               lane < hn::Set(di, static_cast<int32_t>(view.span.end)));
  if (view.segments == nullptr) return in_span;
  return hn::And(in_span, hn::LoadU(di, view.segments + j) == hn::Set(di, view.segment));
}

HWY_INLINE VF Masked(VF value, VF hidden, const RowView& view, int64_t j) {
  const DF d;
  return hn::IfThenElse(hn::RebindMask(d, Visible(view, j)), value, hidden);
}

// Inner products -> scores in units of log2, in place; returns the largest. `columns` is a multiple
// of the vector length.
template <class Definition, bool kBias, bool kMasked>
HWY_INLINE float RowScores(float* HWY_RESTRICT tile, int64_t columns,
                           const RowVectors<Definition>& row, const float* const* column_scalars,
                           float factor, const float* HWY_RESTRICT bias, const RowView& view) {
  const DF d;
  const VF c = hn::Set(d, factor);
  const VF hidden = hn::Set(d, -kInfinity);
  VF largest = hidden;
  for (int64_t j = 0; j < columns; j += kLanes) {
    VF b[Definition::kColumnScalars + 1];
    for (int s = 0; s < Definition::kColumnScalars; ++s) {
      b[s] = hn::LoadU(d, column_scalars[s] + j);
    }
    const VF g = LoadInput(tile, j, row, column_scalars);
    const VF f = Definition::Value(g, row.a, b, row.t);
    VF score;
    if constexpr (kBias) {
      const VF beta = hn::LoadU(d, bias + j);
      score = hn::MulAdd(f, c, beta);
      // A bias of -inf hides whatever f is, NaN included.
      if constexpr (kMasked) score = hn::IfThenElse(beta == hidden, hidden, score);
    } else {
      score = f * c;
    }
    if constexpr (kMasked) score = Masked(score, hidden, view, j);
    largest = hn::Max(largest, score);
    hn::Store(score, d, tile + j);
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// Scores -> weights 2^(score - largest), in place; returns their sum.
HWY_INLINE float RowWeights(float* HWY_RESTRICT tile, int64_t columns, float largest) {
  const DF d;
  const VF shift = hn::Set(d, largest);
  VF sum = hn::Zero(d);
  for (int64_t j = 0; j < columns; j += kLanes) {
    const VF weight = Exp2(hn::Load(d, tile + j) - shift);
    sum = sum + weight;
    hn::Store(weight, d, tile + j);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

HWY_INLINE void ScaleRow(float* row, int64_t columns, float factor) {
  const DF d;
  const VF f = hn::Set(d, factor);
  for (int64_t j = 0; j < columns; j += kLanes) hn::StoreU(hn::LoadU(d, row + j) * f, d, row + j);
}

// Whether some number of rows [begin, end) of one head is not finite.
inline bool HasNonFinite(View<const float> view, int64_t b, int64_t h, int64_t begin, int64_t end,
                         int64_t columns) {
  float sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    // 0 for finite numbers, else NaN.
    sum += Sum(columns, [row = view.row(b, h, i)](int64_t e) { return row[e] * 0.0f; });
  }
  return sum != 0.0f;
}

template <class Definition>
class ForwardPass {
 public:
  ForwardPass(const AttentionInput<float>& in, const AttentionOutput<float>& out,
              const Executor& executor)
      : in_(in),
        out_(out),
        executor_(executor),
        n_(in.shape),
        group_(n_.heads / std::max<int64_t>(1, n_.key_heads)),
        value_columns_(PaddedRows::Padded(n_.value_dim)),
        keys_(in.y, n_.batch, n_.key_heads, kHasProduct<Definition> ? n_.keys : 0, n_.dim),
        values_(in.v, n_.batch, n_.key_heads, n_.keys, n_.value_dim),
        scalars_(in),
        terms_(in, kForwardColumns),
        segments_(in.mask, n_) {}

  void Run() {
    Pack();
    const int64_t blocks = DivideUp(n_.queries, kRowBlock);
    const int64_t tasks = n_.batch * n_.heads * blocks;
    const int64_t scratch =
        kRowBlock * (kForwardColumns + value_columns_) + kForwardColumns + 2 * terms_.window_size();
    const Buffer memory(scratch * WorkersFor(executor_, tasks));
    ParallelTasks(executor_, tasks, [&](int64_t task, int worker) {
      const int64_t head = task / blocks;
      // The last rows first: under a causal mask they see most.
      QueryBlock(head / n_.heads, head % n_.heads, (blocks - 1 - task % blocks) * kRowBlock,
                 memory.data() + worker * scratch);
    });
  }

 private:
  void Pack() {
    const int64_t panels = DivideUp(n_.keys, kWidth);
    // A hidden value is multiplied by a weight of 0, which NaN and inf survive.
    const bool hides = in_.mask.left != kUnbounded || in_.mask.right != kUnbounded ||
                       in_.mask.chunks.size > 0 || terms_.to_scores() || segments_.exists();
    if (hides) {
      non_finite_.assign(static_cast<size_t>(n_.batch * n_.key_heads * panels), 0);
    }
    const int64_t tasks = n_.batch * n_.key_heads * panels;
    ParallelTasks(executor_, tasks + terms_.tasks(), [&](int64_t task, int) {
      if (task >= tasks) return terms_.Fill(task - tasks);
      const int64_t p = task % panels;
      const int64_t h = task / panels % n_.key_heads;
      const int64_t b = task / panels / n_.key_heads;
      const KeyRange keys = BatchKeys(in_.mask, n_.keys, b);
      const int64_t begin = std::max(keys.begin, p * kWidth);
      const int64_t end = std::min(keys.end, (p + 1) * kWidth);
      if (kHasProduct<Definition>) keys_.Fill(b, h, p, keys);
      scalars_.Fill(b, h, p, keys);
      values_.Fill(b, h, begin, end);
      if (hides) {
        non_finite_[static_cast<size_t>(task)] =
            HasNonFinite(in_.v, b, h, begin, end, n_.value_dim) ? 1 : 0;
      }
    });
  }

  // A block of queries and what its rows have added up so far.
  struct Block {
    int64_t b;
    int64_t h;
    int64_t first_row;
    int64_t rows;
    float* tile;           // kRowBlock x kForwardColumns
    float* sum;            // kRowBlock x value_columns_: weights times values
    float* added;          // scratch of one row: what is added to its scores
    float* key_products;   // window of products with relative keys
    float* entry_weights;  // window of weights, summed by entries of the relative values
    std::vector<TableRun> runs;
    float largest[kRowBlock];  // score, in units of log2
    float weight[kRowBlock];   // sum of 2^(score - largest)
    float norm[kRowBlock];     // squared norm of the query, for a distance
  };

  void QueryBlock(int64_t b, int64_t h, int64_t first_row, float* scratch) const {
    Block block{};
    block.b = b;
    block.h = h;
    block.first_row = first_row;
    block.rows = std::min(kRowBlock, n_.queries - first_row);
    block.tile = scratch;
    block.sum = block.tile + kRowBlock * kForwardColumns;
    block.added = block.sum + kRowBlock * value_columns_;
    block.key_products = block.added + kForwardColumns;
    block.entry_weights = block.key_products + terms_.window_size();
    std::fill_n(block.largest, block.rows, -kInfinity);
    std::fill_n(block.sum, block.rows * value_columns_, 0.0f);

    const KeyRange batch = BatchKeys(in_.mask, n_.keys, b);
    const int64_t position = QueryOffset(in_, b) + first_row;
    for (int64_t r = 0; kIsDistance<Definition> && r < block.rows; ++r) {
      block.norm[r] = SquaredNorm(in_.x.row(b, h, first_row + r), n_.dim);
    }
    TileMask seen;
    seen.Set(in_.mask, batch, position, block.rows, 0, n_.keys);
    for (int64_t first = seen.begin / kWidth * kWidth; first < seen.end; first += kForwardColumns) {
      TileMask mask;
      mask.Set(in_.mask, batch, position, block.rows, first,
               std::min(kForwardColumns, n_.keys - first));
      mask.SetSegments(segments_, b, first_row, block.rows, first);
      if (mask.end <= mask.begin) continue;
      // Rows that see different keys go in small groups, each as far as it sees.
      const int64_t step = mask.partial ? static_cast<int64_t>(kMicroRows) : block.rows;
      for (int64_t r = 0; r < block.rows; r += step) {
        AddKeys(block, mask, r, std::min(r + step, block.rows), first);
      }
    }
    Finish(block);
  }

  // Adds a tile's keys, from `first` on, to rows [first_row, last_row) of a block.
  void AddKeys(Block& block, const TileMask& mask, int64_t first_row, int64_t last_row,
               int64_t first) const {
    const RowSpan seen = mask.Seen(first_row, last_row);
    if (seen.end <= seen.begin) return;
    const int64_t key_head = block.h / group_;
    const int64_t query = block.first_row + first_row;
    const size_t rows = Size(last_row - first_row);
    float* tile = block.tile + first_row * kForwardColumns;
    float* sum = block.sum + first_row * value_columns_;
    if (kHasProduct<Definition>) {
      for (int64_t c = seen.begin / kWidth * kWidth; c < seen.end; c += kWidth) {
        Multiply(rows, Vectors(seen.end - c), Size(n_.dim),
                 {in_.x.row(block.b, block.h, query), Size(in_.x.stride[2]), 1},
                 keys_.panel(block.b, key_head, (first + c) / kWidth), kPanel, tile + c,
                 Size(kForwardColumns));
      }
    }
    // Whole vectors.
    const RowSpan span{seen.begin / kLaneCount * kLaneCount, RoundUp(seen.end, kLaneCount)};
    const bool masked = mask.HidesWithin(span, first_row, last_row) || mask.segmented ||
                        terms_.masks(block.b, block.h);
    TableWindow products = terms_.Window(block.b, query, last_row - first_row, first + seen.begin,
                                         first + seen.end, block.key_products);
    if (terms_.keys().exists()) {
      terms_.MultiplyKeys(block.b, block.h, query, last_row - first_row, products);
    }
    TableWindow weights = products;
    weights.data = block.entry_weights;
    for (int64_t r = first_row; r < last_row; ++r) {
      const TileRow row{block.b,
                        block.h,
                        query + r - first_row,
                        first + span.begin,
                        span.end - span.begin,
                        first + seen.begin,
                        first + seen.end};
      AddWeights(block, r, row, masked, mask.rows[r], span.begin,
                 terms_.keys().exists() ? products.Row(r - first_row) : nullptr, products.origin);
      if (terms_.drops()) terms_.Drop(row, block.tile + r * kForwardColumns + span.begin);
      if (terms_.values().exists()) {
        weights.ClearRow(r - first_row);
        terms_.AddWeights(row, block.tile + r * kForwardColumns + span.begin,
                          weights.Row(r - first_row), weights.origin, &block.runs);
      }
    }
    if (terms_.values().exists()) {
      terms_.values().AddProduct(block.h, last_row - first_row, weights, sum);
    }
    if (masked && AnyNonFinite(block.b, key_head, first + seen.begin, first + seen.end)) {
      return AddVisibleValues(block, mask, first_row, last_row, first);
    }
    const Rows values = values_.Head(block.b, key_head);
    MultiplyAdd(rows, Size(value_columns_) / kLanes, Size(seen.end - seen.begin),
                {tile + seen.begin, Size(kForwardColumns), 1}, values.row(first + seen.begin),
                Size(values.stride), sum, Size(value_columns_));
  }

  // Row r of a block: its inner products from column `begin` of the tile on become weights.
  void AddWeights(Block& block, int64_t r, const TileRow& at, bool masked, RowSpan visible,
                  int64_t begin, const float* key_products, int64_t origin) const {
    const int64_t columns = at.count;
    float* tile = block.tile + r * kForwardColumns + begin;
    const int64_t key_head = block.h / group_;
    const RowVectors<Definition> row =
        LoadRow<Definition>(in_, block.b, block.h, key_head, at.i, at.begin, block.norm[r]);
    const auto scalars = scalars_.At(block.b, key_head, at.begin);
    const float factor = in_.factor[block.h] * kLog2E;
    const RowView view{{visible.begin - begin, visible.end - begin},
                       segments_.Keys(block.b, at.begin),
                       segments_.Query(block.b, at.i)};
    float top;
    if (terms_.to_scores()) {
      const float* bias = terms_.ScoreRow(at, key_products, origin, block.added, &block.runs);
      top = masked ? RowScores<Definition, true, true>(tile, columns, row, scalars.data(), factor,
                                                       bias, view)
                   : RowScores<Definition, true, false>(tile, columns, row, scalars.data(), factor,
                                                        bias, view);
    } else {
      top = masked ? RowScores<Definition, false, true>(tile, columns, row, scalars.data(), factor,
                                                        nullptr, view)
                   : RowScores<Definition, false, false>(tile, columns, row, scalars.data(), factor,
                                                         nullptr, view);
    }
    if (top > block.largest[r]) {
      // The first time the sums are 0, and 2^-inf is 0 as well.
      const float shrink = std::exp2(block.largest[r] - top);
      block.weight[r] *= shrink;
      ScaleRow(block.sum + r * value_columns_, value_columns_, shrink);
      block.largest[r] = top;
    }
    // All scores so far are -inf (or NaN): any finite shift gives weights of 0 (or NaN).
    const float shift = block.largest[r] == -kInfinity ? 0.0f : block.largest[r];
    block.weight[r] += RowWeights(tile, columns, shift);
  }

  void Finish(const Block& block) const {
    for (int64_t r = 0; r < block.rows; ++r) {
      const float weight = block.weight[r];
      const float scale = weight == 0.0f ? 0.0f : 1.0f / weight;
      const float* sum = block.sum + r * value_columns_;
      float* o = out_.o.row(block.b, block.h, block.first_row + r);
      for (int64_t e = 0; e < n_.value_dim; ++e) o[e] = sum[e] * scale;
      out_.lse[(block.b * n_.heads + block.h) * n_.queries + block.first_row + r] =
          weight == 0.0f ? -kInfinity : (block.largest[r] + std::log2(weight)) * kLn2;
    }
  }

  // Whether a panel of values with one of keys [begin, end) has a number that is not finite.
  bool AnyNonFinite(int64_t b, int64_t key_head, int64_t begin, int64_t end) const {
    if (non_finite_.empty()) return false;
    const char* flags =
        non_finite_.data() + (b * n_.key_heads + key_head) * DivideUp(n_.keys, kWidth);
    return std::any_of(flags + begin / kWidth, flags + DivideUp(end, kWidth),
                       [](char flag) { return flag != 0; });
  }

  // Weights times values over the pairs that are visible alone.
  void AddVisibleValues(Block& block, const TileMask& mask, int64_t first_row, int64_t last_row,
                        int64_t first) const {
    for (int64_t r = first_row; r < last_row; ++r) {
      const RowSpan span = mask.rows[r];
      const float* weights = block.tile + r * kForwardColumns;
      float* sum = block.sum + r * value_columns_;
      const TileRow row{block.b,  block.h, block.first_row + r, first,
                        span.end, first,   first + span.end};
      const float* bias = terms_.masks(block.b, block.h)
                              ? terms_.ScoreRow(row, nullptr, 0, block.added, &block.runs)
                              : nullptr;
      const int32_t* segments = segments_.Keys(block.b, first);
      const int32_t segment = segments_.Query(block.b, block.first_row + r);
      for (int64_t j = span.begin; j < span.end; ++j) {
        if (bias != nullptr && bias[j] == -kInfinity) continue;
        if (segments != nullptr && segments[j] != segment) continue;
        const float* v = in_.v.row(block.b, block.h / group_, first + j);
        for (int64_t e = 0; e < n_.value_dim; ++e) sum[e] += weights[j] * v[e];
      }
    }
  }

  const AttentionInput<float>& in_;
  const AttentionOutput<float>& out_;
  const Executor& executor_;
  const AttentionShape& n_;
  int64_t group_;
  int64_t value_columns_;
  Panels keys_;
  PaddedRows values_;
  ColumnScalars<Definition> scalars_;
  Terms terms_;
  Segments segments_;
  std::vector<char> non_finite_;  // for each panel of values
};

// What the backward pass adds up over one row of a tile, besides the tiles themselves.
template <class Definition>
struct RowSums {
  float factor = 0;
  float norm = 0;  // by the squared norm of a distance
  float a[Definition::kRowScalars + 1] = {};
  float t[Definition::kHeadScalars + 1] = {};
};

// One row of the backward pass. In: inner products in `tile`, dP in `gradient`. Out: weights p in
// `tile`, the inner products' gradients in `gradient`; those of the column scalars, and last of the
// squared norms of a distance, are added to `d_columns`, dS to `d_bias` where it is not null.
template <class Definition, bool kBias, bool kMasked>
HWY_INLINE RowSums<Definition> RowGradient(float* HWY_RESTRICT tile, float* HWY_RESTRICT gradient,
                                           int64_t columns, const RowVectors<Definition>& row,
                                           const float* const* column_scalars,
                                           float* const* d_columns, float factor,
                                           const float* HWY_RESTRICT bias, float* d_bias, float lse,
                                           float delta, const RowView& view) {
  const DF d;
  const VF zero = hn::Zero(d);
  const VF c = hn::Set(d, factor);
  const VF c2 = hn::Set(d, factor * kLog2E);
  const VF shift = hn::Set(d, lse);
  const VF mean = hn::Set(d, delta);
  VF sum_factor = zero;
  VF sum_norm = zero;
  VF sum_a[Definition::kRowScalars + 1];
  VF sum_t[Definition::kHeadScalars + 1];
  for (int s = 0; s < Definition::kRowScalars; ++s) sum_a[s] = zero;
  for (int s = 0; s < Definition::kHeadScalars; ++s) sum_t[s] = zero;
  for (int64_t j = 0; j < columns; j += kLanes) {
    VF b[Definition::kColumnScalars + 1];
    for (int s = 0; s < Definition::kColumnScalars; ++s) {
      b[s] = hn::LoadU(d, column_scalars[s] + j);
    }
    const VF g = LoadInput(tile, j, row, column_scalars);
    VectorDerivative<Definition> slope;
    const VF f = Definition::Gradient(g, row.a, b, row.t, slope);
    VF exponent = hn::MulSub(f, c2, shift);
    if constexpr (kBias) exponent = exponent + hn::LoadU(d, bias + j);
    if constexpr (kMasked) exponent = Masked(exponent, hn::Set(d, -kInfinity), view, j);
    const VF p = Exp2(exponent);
    const VF ds = p * (hn::Load(d, gradient + j) - mean);
    hn::Store(p, d, tile + j);
    if constexpr (kBias) {
      if (d_bias != nullptr) hn::StoreU(hn::LoadU(d, d_bias + j) + ds, d, d_bias + j);
    }
    sum_factor = hn::MulAdd(ds, f, sum_factor);
    const VF df = c * ds;
    const VF dg = df * slope.g;
    if constexpr (kIsDistance<Definition>) {
      // |x - y|^2 = |x|^2 + |y|^2 - 2 x.y
      hn::Store(dg * hn::Set(d, -2.0f), d, gradient + j);
      sum_norm = sum_norm + dg;
      float* to = d_columns[Definition::kColumnScalars] + j;
      hn::StoreU(hn::LoadU(d, to) + dg, d, to);
    } else {
      hn::Store(dg, d, gradient + j);
    }
    for (int s = 0; s < Definition::kRowScalars; ++s) {
      sum_a[s] = hn::MulAdd(df, slope.a[s], sum_a[s]);
    }
    for (int s = 0; s < Definition::kHeadScalars; ++s) {
      sum_t[s] = hn::MulAdd(df, slope.t[s], sum_t[s]);
    }
    for (int s = 0; s < Definition::kColumnScalars; ++s) {
      float* to = d_columns[s] + j;
      hn::StoreU(hn::MulAdd(df, slope.b[s], hn::LoadU(d, to)), d, to);
    }
  }
  RowSums<Definition> sums;
  sums.factor = hn::GetLane(hn::SumOfLanes(d, sum_factor));
  if (kIsDistance<Definition>) sums.norm = hn::GetLane(hn::SumOfLanes(d, sum_norm));
  for (int s = 0; s < Definition::kRowScalars; ++s) {
    sums.a[s] = hn::GetLane(hn::SumOfLanes(d, sum_a[s]));
  }
  for (int s = 0; s < Definition::kHeadScalars; ++s) {
    sums.t[s] = hn::GetLane(hn::SumOfLanes(d, sum_t[s]));
  }
  return sums;
}

template <class Definition>
class BackwardPass {
 public:
  BackwardPass(const AttentionInput<float>& in, const AttentionBackwardInput<float>& saved,
               const AttentionGradient<float>& grad, const Executor& executor)
      : in_(in),
        saved_(saved),
        grad_(grad),
        executor_(executor),
        n_(in.shape),
        group_(n_.heads / std::max<int64_t>(1, n_.key_heads)),
        dim_(kHasProduct<Definition> ? n_.dim : 0),
        padded_dim_(PaddedRows::Padded(dim_)),
        padded_value_dim_(PaddedRows::Padded(n_.value_dim)),
        blocks_(DivideUp(n_.keys, kBackwardColumns)),
        chunks_(Chunks(n_, blocks_)),
        head_rows_(n_.batch * n_.heads * n_.queries),
        key_panels_(in.y, n_.batch, n_.key_heads, dim_ > 0 ? n_.keys : 0, dim_),
        value_panels_(in.v, n_.batch, n_.key_heads, n_.keys, n_.value_dim),
        keys_(in.y, n_.batch, n_.key_heads, dim_ > 0 ? n_.keys : 0, dim_),
        queries_(in.x, n_.batch, n_.heads, dim_ > 0 ? n_.queries : 0, dim_),
        d_o_(saved.d_o, n_.batch, n_.heads, n_.queries, n_.value_dim),
        scalars_(in),
        terms_(in, kBackwardColumns),
        segments_(in.mask, n_),
        relative_queries_(in.relative.query, n_.batch, n_.heads,
                          terms_.keys().exists() ? n_.queries : 0, in.relative.dim),
        d_relative_keys_(terms_.keys(), grad.relative_keys, TableParts(terms_.keys())),
        d_relative_values_(terms_.values(), grad.relative_values, TableParts(terms_.values())),
        lse_(head_rows_),
        delta_(head_rows_),
        d_head_(static_cast<size_t>(n_.batch * n_.heads * chunks_)) {
    if (grad.x.data != nullptr && dim_ > 0) d_queries_.Reset(chunks_ * head_rows_ * padded_dim_);
    if (kIsDistance<Definition>) norms_.Reset(head_rows_);
    if (kRowSums > 0) d_rows_.Reset(chunks_ * kRowSums * head_rows_);
    if (grad.bias.table != nullptr) {
      d_bias_.Reset(n_.batch * n_.heads * chunks_ * terms_.bias().stride());
    }
    if (grad.relative_query.data != nullptr) {
      d_relative_queries_.Reset(chunks_ * head_rows_ * terms_.keys().padded());
    }
  }

  void Run() {
    Prepare();
    const int64_t tasks = n_.batch * n_.key_heads * chunks_;
    const int64_t scratch =
        kBackwardColumns * (padded_dim_ + padded_value_dim_ + kColumnSums + 2 * kRowBlock + 3) +
        2 * terms_.window_size();
    const Buffer memory(scratch * WorkersFor(executor_, tasks));
    ParallelTasks(executor_, tasks, [&](int64_t task, int worker) {
      const int64_t head = task / chunks_;
      Chunk(head / n_.key_heads, head % n_.key_heads, task % chunks_,
            memory.data() + worker * scratch);
    });
    Merge();
  }

 private:
  // Sums over keys that every query has, and over queries that every key has: its scalars'
  // gradients and, last, its squared norm's.
  static constexpr int kRowSums = Definition::kRowScalars + (kIsDistance<Definition> ? 1 : 0);
  static constexpr int kColumnSums = ColumnScalars<Definition>::kCount;

  // Enough tasks to share out, few enough that the partial sums stay small beside the inputs.
  static int64_t Chunks(const AttentionShape& n, int64_t blocks) {
    constexpr int64_t kTasks = 16;
    const int64_t heads = std::max<int64_t>(1, n.batch * n.key_heads);
    return std::clamp<int64_t>(DivideUp(kTasks, heads), 1, std::max<int64_t>(1, blocks));
  }

  // Packs keys and values, scales the bias, and makes each row's lse and delta.
  void Prepare() {
    const int64_t panels = DivideUp(n_.keys, kWidth);
    const int64_t row_blocks = DivideUp(n_.queries, kRowBlock);
    const int64_t key_tasks = n_.batch * n_.key_heads * panels;
    const int64_t row_tasks = n_.batch * n_.heads * row_blocks;
    ParallelTasks(executor_, key_tasks + row_tasks + terms_.tasks(), [&](int64_t task, int) {
      if (task < key_tasks) {
        const int64_t p = task % panels;
        PrepareKeys(task / panels / n_.key_heads, task / panels % n_.key_heads, p);
      } else if (task < key_tasks + row_tasks) {
        const int64_t head = (task - key_tasks) / row_blocks;
        const int64_t first = (task - key_tasks) % row_blocks * kRowBlock;
        PrepareRows(head / n_.heads, head % n_.heads, first,
                    std::min(first + kRowBlock, n_.queries));
      } else {
        terms_.Fill(task - key_tasks - row_tasks);
      }
    });
  }

  void PrepareKeys(int64_t b, int64_t h, int64_t p) const {
    const KeyRange keys = BatchKeys(in_.mask, n_.keys, b);
    value_panels_.Fill(b, h, p, keys);
    scalars_.Fill(b, h, p, keys);
    if (dim_ == 0) return;
    key_panels_.Fill(b, h, p, keys);
    keys_.Fill(b, h, std::max(keys.begin, p * kWidth), std::min(keys.end, (p + 1) * kWidth));
  }

  void PrepareRows(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    d_o_.Fill(b, h, begin, end);
    if (dim_ > 0) queries_.Fill(b, h, begin, end);
    if (terms_.keys().exists()) relative_queries_.Fill(b, h, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = (b * n_.heads + h) * n_.queries + i;
      if (norms_) norms_.data()[row] = SquaredNorm(in_.x.row(b, h, i), dim_);
      if (saved_.lse[row] == -kInfinity) {
        // 2^(s - inf) = 0: a row without keys has no weights and no gradients.
        lse_.data()[row] = kInfinity;
        delta_.data()[row] = 0;
        continue;
      }
      const float* o = saved_.o.row(b, h, i);
      const float* d_o = saved_.d_o.row(b, h, i);
      const float sum = Sum(n_.value_dim, [o, d_o](int64_t e) { return o[e] * d_o[e]; });
      lse_.data()[row] = saved_.lse[row] * kLog2E;
      delta_.data()[row] = sum - (saved_.d_lse != nullptr ? saved_.d_lse[row] : 0.0f);
    }
  }

  // Every chunk-th block of keys of one key head, against all queries of its group.
  void Chunk(int64_t b, int64_t key_head, int64_t chunk, float* scratch) {
    for (int64_t h = key_head * group_; h < (key_head + 1) * group_; ++h) {
      const int64_t head = b * n_.heads + h;
      d_head_[static_cast<size_t>(head * chunks_ + chunk)] = {};
      if (d_queries_) {
        std::fill_n(QueryGradient(chunk, head, 0), n_.queries * padded_dim_, 0.0f);
      }
      for (int s = 0; s < kRowSums; ++s) {
        std::fill_n(RowSum(chunk, s, head), n_.queries, 0.0f);
      }
      if (d_bias_) std::fill_n(BiasGradient(chunk, head), terms_.bias().stride(), 0.0f);
      if (d_relative_queries_) {
        std::fill_n(RelativeQueryGradient(chunk, head, 0), n_.queries * terms_.keys().padded(),
                    0.0f);
      }
      d_relative_keys_.ClearPart(TablePart(terms_.keys(), b, h, chunk));
      d_relative_values_.ClearPart(TablePart(terms_.values(), b, h, chunk));
    }
    const KeyRange batch = BatchKeys(in_.mask, n_.keys, b);
    for (int64_t block = chunk; block < blocks_; block += chunks_) {
      KeyBlock(b, key_head, chunk, block * kBackwardColumns, batch, scratch);
    }
  }

  // What a block of keys works on and adds up.
  struct Block {
    int64_t b;
    int64_t chunk;
    int64_t first;        // of the keys
    float* tile;          // kRowBlock x kBackwardColumns: inner products, then weights
    float* gradient;      // the same of dP, then of the inner products' gradients
    float* d_keys;        // kBackwardColumns x padded_dim_
    float* d_values;      // kBackwardColumns x padded_value_dim_
    float* d_columns;     // kColumnSums x kBackwardColumns
    float* d_key_bias;    // kBackwardColumns
    float* added;         // scratch of one row: what is added to its scores
    float* d_added;       // and its gradient
    float* key_window;    // kRowBlock rows: products with relative keys, then their gradients
    float* value_window;  // of dO with relative values, then their weights
    std::vector<TableRun> runs;
  };

  void KeyBlock(int64_t b, int64_t key_head, int64_t chunk, int64_t first, KeyRange batch,
                float* scratch) {
    const int64_t columns = std::min(kBackwardColumns, n_.keys - first);
    Block block{};
    block.b = b;
    block.chunk = chunk;
    block.first = first;
    block.tile = scratch;
    block.gradient = block.tile + kRowBlock * kBackwardColumns;
    block.d_keys = block.gradient + kRowBlock * kBackwardColumns;
    block.d_values = block.d_keys + kBackwardColumns * padded_dim_;
    block.d_columns = block.d_values + kBackwardColumns * padded_value_dim_;
    block.d_key_bias = block.d_columns + kBackwardColumns * kColumnSums;
    block.added = block.d_key_bias + kBackwardColumns;
    block.d_added = block.added + kBackwardColumns;
    block.key_window = block.d_added + kBackwardColumns;
    block.value_window = block.key_window + terms_.window_size();
    std::fill_n(block.d_keys, kBackwardColumns * (padded_dim_ + padded_value_dim_ + kColumnSums),
                0.0f);
    for (int64_t h = key_head * group_; h < (key_head + 1) * group_; ++h) {
      std::fill_n(block.d_key_bias, kBackwardColumns, 0.0f);
      for (int64_t row = 0; row < n_.queries; row += kRowBlock) Tile(block, h, row, batch);
      if (grad_.key_bias != nullptr) {
        std::copy_n(block.d_key_bias, columns,
                    grad_.key_bias + (b * n_.heads + h) * n_.keys + first);
      }
    }
    const float* d_keys = block.d_keys;
    const float* d_values = block.d_values;
    const float* d_columns = block.d_columns;
    for (int64_t j = 0; j < columns; ++j) {
      if (grad_.y.data != nullptr && dim_ > 0) {
        float* d_y = grad_.y.row(b, key_head, first + j);
        std::copy_n(d_keys + j * padded_dim_, dim_, d_y);
        if constexpr (kIsDistance<Definition>) {
          // 0 too for a key that nothing sees: what it holds then does not matter.
          const float d_norm = d_columns[Definition::kColumnScalars * kBackwardColumns + j];
          if (d_norm != 0) AddNormGradient(d_norm, in_.y.row(b, key_head, first + j), d_y);
        }
      }
      if (grad_.v.data != nullptr) {
        std::copy_n(d_values + j * padded_value_dim_, n_.value_dim,
                    grad_.v.row(b, key_head, first + j));
      }
    }
    for (int s = 0; grad_.column_scalars != nullptr && s < Definition::kColumnScalars; ++s) {
      std::copy_n(
          d_columns + s * kBackwardColumns, columns,
          grad_.column_scalars + ((s * n_.batch + b) * n_.key_heads + key_head) * n_.keys + first);
    }
  }

  void Tile(Block& block, int64_t h, int64_t first_row, KeyRange batch) {
    const int64_t b = block.b;
    const int64_t first = block.first;
    const int64_t key_head = h / group_;
    const int64_t head = b * n_.heads + h;
    const int64_t rows = std::min(kRowBlock, n_.queries - first_row);
    float* HWY_RESTRICT tile = block.tile;
    float* HWY_RESTRICT gradient = block.gradient;
    TileMask mask;
    mask.Set(in_.mask, batch, QueryOffset(in_, b) + first_row, rows, first,
             std::min(kBackwardColumns, n_.keys - first));
    mask.SetSegments(segments_, b, first_row, rows, first);
    if (mask.end <= mask.begin) return;
    const Rows d_o = d_o_.Head(b, h);
    for (int64_t c = mask.begin / kWidth * kWidth; c < mask.end; c += kWidth) {
      if (dim_ > 0) {
        Multiply(Size(rows), Vectors(mask.end - c), Size(dim_),
                 {in_.x.row(b, h, first_row), Size(in_.x.stride[2]), 1},
                 key_panels_.panel(b, key_head, (first + c) / kWidth), kPanel, tile + c,
                 kBackwardColumns);
      }
      Multiply(Size(rows), Vectors(mask.end - c), Size(n_.value_dim),
               {saved_.d_o.row(b, h, first_row), Size(saved_.d_o.stride[2]), 1},
               value_panels_.panel(b, key_head, (first + c) / kWidth), kPanel, gradient + c,
               kBackwardColumns);
    }
    const TableWindow keys_window =
        terms_.Window(b, first_row, rows, first + mask.begin, first + mask.end, block.key_window);
    TableWindow values_window = keys_window;
    values_window.data = block.value_window;
    if (terms_.keys().exists()) terms_.MultiplyKeys(b, h, first_row, rows, keys_window);
    if (terms_.values().exists()) {
      terms_.values().Multiply(
          h, rows, {saved_.d_o.row(b, h, first_row), Size(saved_.d_o.stride[2]), 1}, values_window);
    }
    RowGradients(block, h, first_row, rows, mask, keys_window, values_window);
    RelativeGradients(block, h, first_row, rows, keys_window, values_window);
    const size_t seen = Size(mask.end - mask.begin);
    if (grad_.v.data != nullptr) {
      MultiplyAdd(seen, Size(padded_value_dim_) / kLanes, Size(rows),
                  {tile + mask.begin, 1, Size(kBackwardColumns)}, d_o.row(first_row),
                  Size(d_o.stride), block.d_values + mask.begin * padded_value_dim_,
                  Size(padded_value_dim_));
    }
    if (dim_ == 0) return;
    if (grad_.y.data != nullptr) {
      const Rows queries = queries_.Head(b, h);
      MultiplyAdd(seen, Size(padded_dim_) / kLanes, Size(rows),
                  {gradient + mask.begin, 1, Size(kBackwardColumns)}, queries.row(first_row),
                  Size(queries.stride), block.d_keys + mask.begin * padded_dim_, Size(padded_dim_));
    }
    if (d_queries_) {
      const Rows keys = keys_.Head(b, key_head);
      MultiplyAdd(Size(rows), Size(padded_dim_) / kLanes, seen,
                  {gradient + mask.begin, Size(kBackwardColumns), 1}, keys.row(first + mask.begin),
                  Size(keys.stride), QueryGradient(block.chunk, head, first_row),
                  Size(padded_dim_));
    }
  }

  // Turns a tile's products into weights and gradients of the scores, and the windows' products
  // into what each entry of the tables gets of them.
  void RowGradients(Block& block, int64_t h, int64_t first_row, int64_t rows, const TileMask& mask,
                    const TableWindow& keys_window, const TableWindow& values_window) {
    const int64_t b = block.b;
    const int64_t first = block.first;
    const int64_t head = b * n_.heads + h;
    // Whole vectors that some row sees.
    const int64_t begin = mask.begin / kLaneCount * kLaneCount;
    const int64_t end = RoundUp(mask.end, kLaneCount);
    const bool masked = mask.HidesWithin({begin, end}, 0, rows) || mask.segmented;
    const auto scalars = scalars_.At(b, h / group_, first + begin);
    std::array<float*, Definition::kColumnScalars + 1> d_scalars{};
    for (int s = 0; s < kColumnSums; ++s) {
      d_scalars[s] = block.d_columns + s * kBackwardColumns + begin;
    }
    RowSums<Definition>& totals = d_head_[Size(head * chunks_ + block.chunk)];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = first_row + r;
      const TileRow at{b, h, i, first + begin, end - begin, first + mask.begin, first + mask.end};
      const RowVectors<Definition> row =
          LoadRow<Definition>(in_, b, h, h / group_, i, first + begin,
                              norms_ ? norms_.data()[head * n_.queries + i] : 0);
      const RowView view{{mask.rows[r].begin - begin, mask.rows[r].end - begin},
                         segments_.Keys(b, first + begin),
                         segments_.Query(b, i)};
      float* const weights = block.tile + r * kBackwardColumns + begin;
      float* const d_scores = block.gradient + r * kBackwardColumns + begin;
      const float lse = lse_.data()[head * n_.queries + i];
      const float delta = delta_.data()[head * n_.queries + i];
      const float factor = in_.factor[h];
      if (terms_.values().exists()) {
        terms_.AddValueProducts(at, values_window.Row(r), values_window.origin, d_scores,
                                &block.runs);
      }
      if (terms_.drops()) terms_.Drop(at, d_scores);
      RowSums<Definition> sums;
      if (terms_.to_scores()) {
        const float* products = terms_.keys().exists() ? keys_window.Row(r) : nullptr;
        const float* added =
            terms_.ScoreRow(at, products, keys_window.origin, block.added, &block.runs);
        ScoreGradients to;
        if (d_bias_) to.bias = BiasGradient(block.chunk, head);
        if (grad_.key_bias != nullptr) to.key_bias = block.d_key_bias + begin;
        if (d_relative_queries_ || d_relative_keys_.wanted()) to.relative = keys_window.Row(r);
        float* d_added = terms_.GradientRow(at, to, block.d_added);
        sums = masked
                   ? RowGradient<Definition, true, true>(weights, d_scores, at.count, row,
                                                         scalars.data(), d_scalars.data(), factor,
                                                         added, d_added, lse, delta, view)
                   : RowGradient<Definition, true, false>(weights, d_scores, at.count, row,
                                                          scalars.data(), d_scalars.data(), factor,
                                                          added, d_added, lse, delta, view);
        if (to.relative != nullptr) keys_window.ClearRow(r);
        if (d_added == block.d_added) {
          terms_.SpreadGradient(at, to, keys_window.origin, d_added, &block.runs);
        }
      } else {
        sums = masked
                   ? RowGradient<Definition, false, true>(weights, d_scores, at.count, row,
                                                          scalars.data(), d_scalars.data(), factor,
                                                          nullptr, nullptr, lse, delta, view)
                   : RowGradient<Definition, false, false>(weights, d_scores, at.count, row,
                                                           scalars.data(), d_scalars.data(), factor,
                                                           nullptr, nullptr, lse, delta, view);
      }
      if (terms_.drops()) terms_.Drop(at, weights);
      if (terms_.values().exists()) {
        values_window.ClearRow(r);
        terms_.AddWeights(at, weights, values_window.Row(r), values_window.origin, &block.runs);
      }
      totals.factor += sums.factor;
      for (int s = 0; s < Definition::kHeadScalars; ++s) totals.t[s] += sums.t[s];
      for (int s = 0; s < Definition::kRowScalars; ++s) {
        RowSum(block.chunk, s, head)[i] += sums.a[s];
      }
      if (kIsDistance<Definition>) {
        RowSum(block.chunk, Definition::kRowScalars, head)[i] += sums.norm;
      }
    }
  }

  // From the windows' entries to the tables and to the queries of the relative keys.
  void RelativeGradients(const Block& block, int64_t h, int64_t first_row, int64_t rows,
                         const TableWindow& keys_window, const TableWindow& values_window) const {
    const int64_t head = block.b * n_.heads + h;
    if (d_relative_queries_) {
      terms_.keys().AddProduct(h, rows, keys_window,
                               RelativeQueryGradient(block.chunk, head, first_row));
    }
    if (d_relative_keys_.wanted()) {
      d_relative_keys_.Add(TablePart(terms_.keys(), block.b, h, block.chunk), rows, keys_window,
                           relative_queries_.Head(block.b, h), first_row);
    }
    if (d_relative_values_.wanted()) {
      d_relative_values_.Add(TablePart(terms_.values(), block.b, h, block.chunk), rows,
                             values_window, d_o_.Head(block.b, h), first_row);
    }
  }

  // Adds up what the chunks gave, in order.
  void Merge() {
    const int64_t row_tasks = d_queries_ || d_relative_queries_ ? n_.batch * n_.heads : 0;
    ParallelTasks(executor_, row_tasks, [&](int64_t head, int) {
      const int64_t b = head / n_.heads;
      const int64_t h = head % n_.heads;
      for (int64_t i = 0; i < n_.queries; ++i) {
        if (d_relative_queries_) {
          MergeChunks(RelativeQueryGradient(0, head, i), head_rows_ * terms_.keys().padded(),
                      in_.relative.dim, grad_.relative_query.row(b, h, i));
        }
        if (!d_queries_) continue;
        float* to = grad_.x.row(b, h, i);
        MergeChunks(QueryGradient(0, head, i), head_rows_ * padded_dim_, dim_, to);
        if (!kIsDistance<Definition>) continue;
        float d_norm = 0;
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
          d_norm += RowSum(chunk, Definition::kRowScalars, head)[i];
        }
        if (d_norm != 0) {
          AddNormGradient(d_norm, in_.x.row(b, h, i), to);
        }
      }
    });
    for (int s = 0; grad_.row_scalars != nullptr && s < Definition::kRowScalars; ++s) {
      MergeChunks(RowSum(0, s, 0), kRowSums * head_rows_, head_rows_,
                  grad_.row_scalars + s * head_rows_);
    }
    for (int64_t h = 0; h < n_.heads; ++h) {
      RowSums<Definition> sums;
      for (int64_t b = 0; b < n_.batch; ++b) {
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
          const RowSums<Definition>& part =
              d_head_[static_cast<size_t>((b * n_.heads + h) * chunks_ + chunk)];
          sums.factor += part.factor;
          for (int s = 0; s < Definition::kHeadScalars; ++s) sums.t[s] += part.t[s];
        }
      }
      if (grad_.factor != nullptr) grad_.factor[h] = sums.factor;
      for (int s = 0; grad_.head_scalars != nullptr && s < Definition::kHeadScalars; ++s) {
        grad_.head_scalars[s * n_.heads + h] = sums.t[s];
      }
    }
    MergeTables(terms_.keys(), d_relative_keys_);
    MergeTables(terms_.values(), d_relative_values_);
    if (!d_bias_) return;
    const BiasTable& bias = terms_.bias();
    ParallelTasks(executor_, n_.heads, [&](int64_t h, int) {
      // A table that the batch shares is there even if the batch is empty.
      for (int64_t n = 0; n < bias.tables() / n_.heads; ++n) {
        std::fill_n(grad_.bias.table + n * grad_.bias.batch_stride + h * bias.size(), bias.size(),
                    0.0f);
      }
      for (int64_t b = 0; b < n_.batch; ++b) {
        float* to = grad_.bias.table + b * grad_.bias.batch_stride + h * bias.size();
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
          const float* from = BiasGradient(chunk, b * n_.heads + h);
          for (int64_t e = 0; e < bias.size(); ++e) to[e] += from[e];
        }
      }
    });
  }

  // to = the sum of what the chunks have, each `stride` behind the last.
  void MergeChunks(const float* from, int64_t stride, int64_t count, float* to) const {
    std::copy_n(from, count, to);
    for (int64_t chunk = 1; chunk < chunks_; ++chunk) {
      from += stride;
      for (int64_t e = 0; e < count; ++e) to[e] += from[e];
    }
  }

  // A part of a table's gradient for each chunk of a head, or of a key head if heads share it.
  int64_t TableHeads(const RowTable& table) const {
    return table.heads() ? n_.heads : n_.key_heads;
  }
  int64_t TableParts(const RowTable& table) const { return n_.batch * TableHeads(table) * chunks_; }
  int64_t TablePart(const RowTable& table, int64_t b, int64_t h, int64_t chunk) const {
    const int64_t head = table.heads() ? h : h / group_;
    return (b * TableHeads(table) + head) * chunks_ + chunk;
  }
  void MergeTables(const RowTable& table, const RowTableGradient& gradient) const {
    if (!gradient.wanted()) return;
    ParallelTasks(executor_, table.tables(), [&](int64_t h, int) {
      gradient.Merge(
          h, [&](int64_t part) { return !table.heads() || part / chunks_ % n_.heads == h; });
    });
  }

  float* RelativeQueryGradient(int64_t chunk, int64_t head, int64_t i) const {
    return d_relative_queries_.data() +
           (chunk * head_rows_ + head * n_.queries + i) * terms_.keys().padded();
  }
  float* QueryGradient(int64_t chunk, int64_t head, int64_t i) const {
    return d_queries_.data() + (chunk * head_rows_ + head * n_.queries + i) * padded_dim_;
  }
  float* RowSum(int64_t chunk, int s, int64_t head) const {
    return d_rows_.data() + (chunk * kRowSums + s) * head_rows_ + head * n_.queries;
  }
  // d|x|^2/dx = 2x.
  void AddNormGradient(float d_norm, const float* x, float* d_x) const {
    for (int64_t e = 0; e < dim_; ++e) d_x[e] += 2 * d_norm * x[e];
  }
  float* BiasGradient(int64_t chunk, int64_t head) const {
    return d_bias_.data() + (head * chunks_ + chunk) * terms_.bias().stride();
  }

  const AttentionInput<float>& in_;
  const AttentionBackwardInput<float>& saved_;
  const AttentionGradient<float>& grad_;
  const Executor& executor_;
  const AttentionShape& n_;
  int64_t group_;
  int64_t dim_;
  int64_t padded_dim_;
  int64_t padded_value_dim_;
  int64_t blocks_;
  int64_t chunks_;
  int64_t head_rows_;
  Panels key_panels_;
  Panels value_panels_;
  PaddedRows keys_;
  PaddedRows queries_;
  PaddedRows d_o_;
  ColumnScalars<Definition> scalars_;
  Terms terms_;
  Segments segments_;
  PaddedRows relative_queries_;
  RowTableGradient d_relative_keys_;
  RowTableGradient d_relative_values_;
  Buffer lse_;    // in units of log2
  Buffer delta_;  // sum_j p_ij dP_ij - dlse_i
  Buffer norms_;  // squared norms of the queries, for a distance
  std::vector<RowSums<Definition>> d_head_;
  Buffer d_queries_;
  Buffer d_rows_;
  Buffer d_bias_;
  Buffer d_relative_queries_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
