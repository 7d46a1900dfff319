// The backward pass of graph attention. A first pass over chunks of rows stores the weights and the
// gradients of g (the inner product or the squared distance) per edge and head. A second pass over
// chunks of the transposed graph computes the sums over keys. Chunks depend only on the graph, and
// their sums are added in a fixed order, so results do not depend on the number of workers.
#if defined(GNOMON_SRC_CPU_GRAPH_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_GRAPH_BACKWARD_INL_H_
#undef GNOMON_SRC_CPU_GRAPH_BACKWARD_INL_H_
#else
#define GNOMON_SRC_CPU_GRAPH_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/edge_chunks.h"
#include "base/parallel.h"
#include "cpu/columns-inl.h"
#include "cpu/graph_pairs-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/graph.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {

// Adds up the partial sums of rows that span several chunks, with `width` numbers per row.
class RowTotals {
 public:
  RowTotals(const EdgeChunks& chunks, int64_t width)
      : chunks_(chunks), width_(width), slots_(chunks.slots() * width) {}

  int64_t width() const { return width_; }

  // Stores the sum of a part of a row that spans several chunks.
  void Keep(int64_t slot, const float* sum) const {
    std::copy_n(sum, width_, slots_.data() + slot * width_);
  }

  // Calls finish(row, total) for the rows that span several chunks.
  template <class Finish>
  void Merge(const Executor& executor, const Finish& finish) const {
    ParallelTasks(executor, chunks_.count(), [&](int64_t chunk, int) {
      chunks_.ForCutRow(chunk, [&](int64_t row, const std::vector<int64_t>& slots) {
        float* total = slots_.data() + slots[0] * width_;
        for (size_t n = 1; n < slots.size(); ++n) {
          AddNumbers(slots_.data() + slots[n] * width_, width_, total);
        }
        finish(row, total);
      });
    });
  }

 private:
  const EdgeChunks& chunks_;
  int64_t width_;
  Buffer slots_;
};

class GraphBackwardPass {
 public:
  GraphBackwardPass(const PairTable& table, const GraphInput<float>& in,
                    const GraphBackwardInput<float>& saved, const GraphGradient<float>& grad,
                    const Executor& executor)
      : table_(table),
        in_(in),
        saved_(saved),
        grad_(grad),
        executor_(executor),
        n_(in.shape),
        dim_(table.has_product() ? n_.dim : 0),
        d_x_(table.has_product() && grad.x.data != nullptr),
        d_y_(table.has_product() && grad.y.data != nullptr),
        d_row_(table_.row_scalars > 0 && grad.row_scalars != nullptr),
        d_column_(table_.column_scalars > 0 && grad.column_scalars != nullptr),
        centres_tokens_(d_x_ && table_.is_distance()),
        chunks_(in.indptr, n_.queries, EdgesOfChunk(n_)),
        pairs_(table, in),
        rows_(chunks_, n_.heads * ((d_x_ ? dim_ : 0) + (d_row_ ? table_.row_scalars : 0) +
                                   (centres_tokens_ ? 1 : 0))),
        largest_(n_.queries * n_.heads),
        inverse_sum_(n_.queries * n_.heads),
        delta_(n_.queries * n_.heads),
        d_head_(static_cast<size_t>(chunks_.count() * head_sums() * n_.heads)) {
    const int64_t numbers = n_.edges * n_.heads;
    if (grad.factor != nullptr) top_f_.Reset(n_.queries * n_.heads);
    if (centres()) {
      top_edges_.Reset(n_.queries * n_.heads);
      top_slopes_.Reset((1 + table_.row_scalars) * n_.queries * n_.heads);
      ones_.Reset(pairs_.stride());
      std::fill_n(ones_.data(), pairs_.stride(), 1.0f);
    }
    if (centres_tokens_) top_distances_.Reset(n_.queries * n_.heads);
    if (grad.v.data != nullptr) weights_.Reset(numbers);
    if (d_y_) d_products_.Reset(numbers);
    if (d_column_) d_columns_.Reset(table_.column_scalars * numbers);
  }

  void Run() {
    pairs_.Pack(executor_);
    PrepareRows();
    const int64_t scratch = all_arrays() * pairs_.stride() + RoundUp(rows_.width(), kLaneCount);
    const Buffer memory(scratch * WorkersFor(executor_, chunks_.count()));
    ParallelTasks(executor_, chunks_.count(), [&](int64_t chunk, int worker) {
      chunks_.ForCutRow(chunk, [&](int64_t row, const std::vector<int64_t>&) {
        CutRowDelta(row, memory.data() + worker * scratch);
      });
    });
    ParallelTasks(executor_, chunks_.count(), [&](int64_t chunk, int worker) {
      Chunk(chunk, memory.data() + worker * scratch);
    });
    rows_.Merge(executor_, [&](int64_t row, const float* sums) { FinishRow(row, sums); });
    SumHeads();
    if (!table_.has_product()) {
      Clear(grad_.x, n_.heads, n_.queries);
      Clear(grad_.y, n_.key_heads, n_.keys);
    }
    if (grad_.v.data != nullptr || d_y_ || d_column_) Keys();
  }

 private:
  using Part = EdgeChunks::Part;
  int head_sums() const { return 1 + table_.head_scalars; }  // factor, head scalars
  // The input arrays are g, a, b, dP, the row's largest score, delta and inverse sum. PairWeights
  // overwrites the largest score with the weight, and the inverse sum with f. The output arrays, in
  // the same order, are dg, da, db, the weight and the gradient of the factor, followed by the
  // gradients of the head scalars.
  int weight_array() const { return 1 + table_.row_scalars + table_.column_scalars; }
  int factor_array() const { return weight_array() + 1; }
  int delta_array() const { return weight_array() + 2; }
  int inverse_array() const { return weight_array() + 3; }
  int head_arrays() const { return weight_array() + 4; }
  // If sums over a row's edges are relative to its top edge's slopes, one more array holds the
  // slopes with respect to g, and later flags for edges whose gradient uses the top edge's token.
  int slope_array() const { return head_arrays() + table_.head_scalars; }
  int all_arrays() const { return slope_array() + (centres() ? 1 : 0); }
  // Whether gradients of rows are sums relative to the slopes of their top edges (see RowSoftmax).
  bool centres() const { return centres_tokens_ || d_row_; }

  float* Array(float* arrays, int n) const { return arrays + n * pairs_.stride(); }

  // Computes each row's largest score and inverse sum, which turn its scores into weights.
  void PrepareRows() const {
    constexpr int64_t kNodes = 256;
    const int64_t rows = n_.queries * n_.heads;
    ParallelTasks(executor_, DivideUp(n_.queries, kNodes), [&](int64_t task, int) {
      const int64_t end = std::min((task + 1) * kNodes, n_.queries);
      for (int64_t row = task * kNodes * n_.heads; row < end * n_.heads; ++row) {
        const float sum = saved_.statistics[rows + row];
        // 2^(s - inf) = 0: a row without edges has no weights and no gradients.
        const bool none = sum == 0.0f;
        largest_.data()[row] = none ? kInfinity : saved_.statistics[row];
        inverse_sum_.data()[row] = none ? 0.0f : 1.0f / sum;
      }
    });
  }

  // Like SetDelta, for a row that spans several chunks. Uses all edges of the row, or o if the
  // edges do not fit into one chunk.
  void CutRowDelta(int64_t i, float* arrays) const {
    const Part all{i, in_.indptr[i], in_.indptr[i + 1], -1};
    if (all.end - all.begin <= chunks_.size()) {
      FillWeights(all, arrays);
      SetDelta(all, 0, arrays);
      if (!centres()) return;
      PairSlopes(arrays, (all.end - all.begin) * n_.heads);
      return SetTop(all, 0, arrays);
    }
    const int64_t rows = n_.queries * n_.heads;
    for (int64_t h = 0; h < n_.heads; ++h) {
      const int64_t row = i * n_.heads + h;
      const float sum = saved_.statistics[rows + row];
      const auto top = static_cast<int64_t>(saved_.statistics[2 * rows + row]);
      delta_.data()[row] = sum == 0.0f ? 0.0f : Delta(i, h, sum, top) - DLse(row);
      if (top_f_) top_f_.data()[row] = 0;
      if (centres()) ClearTop(row);
      if (top < 0 || !(top_f_ || centres())) continue;
      FillWeights({i, all.begin + top, all.begin + top + 1, -1}, arrays);
      if (top_f_) top_f_.data()[row] = Array(arrays, inverse_array())[h];
      if (!centres()) continue;
      top_edges_.data()[row] = static_cast<float>(top);
      PairSlopes(arrays, n_.heads);
      SetTop(row, h, arrays);
    }
  }

  // The slopes of the top edges of all rows and heads: one array for the slopes with respect to g
  // (s = 0), then one for each row scalar.
  float* TopSlopes(int s) const { return top_slopes_.data() + s * n_.queries * n_.heads; }
  void ClearTop(int64_t row) const {
    top_edges_.data()[row] = 0;
    if (centres_tokens_) top_distances_.data()[row] = 0;
    for (int s = 0; s <= table_.row_scalars; ++s) TopSlopes(s)[row] = 0;
  }
  // Sets the top slopes of a row from g and the slopes of pair q.
  void SetTop(int64_t row, int64_t q, const float* arrays) const {
    const auto finite = [&](float slope) {
      return inverse_sum_.data()[row] != 0 && std::isfinite(slope) ? slope : 0.0f;
    };
    if (centres_tokens_) {
      top_distances_.data()[row] = arrays[q];
      TopSlopes(0)[row] = finite(arrays[slope_array() * pairs_.stride() + q]);
    }
    for (int s = 1; s <= table_.row_scalars; ++s) {
      TopSlopes(s)[row] = finite(arrays[s * pairs_.stride() + q]);
    }
  }
  void SetTop(const Part& part, int64_t offset, const float* arrays) const {
    for (int64_t h = 0; h < n_.heads; ++h) {
      const int64_t row = part.row * n_.heads + h;
      if (part.begin == part.end) {
        ClearTop(row);
      } else {
        SetTop(row, offset + TopEdge(row) * n_.heads + h, arrays);
      }
    }
  }
  int64_t TopEdge(int64_t row) const { return static_cast<int64_t>(top_edges_.data()[row]); }
  const float* TopKey(int64_t i, int64_t h) const {
    const int64_t edge = in_.indptr[i] + TopEdge(i * n_.heads + h);
    return in_.y.row(0, h / pairs_.group(), in_.indices[edge]);
  }
  // Computes the weights of a part's pairs.
  void FillWeights(const Part& part, float* arrays) const {
    pairs_.Fill(part, 0, arrays);
    FillValueGradients(part, 0, arrays);
    const int64_t count = (part.end - part.begin) * n_.heads;
    PairWeights(arrays, part.begin, count);
  }

  // Computes delta = sum_e p_e dP_e - dlse for each head, given the weights and dP of all edges of
  // a row. Also finds the edge with the largest weight and its f. If a few edges dominate, dP -
  // delta nearly cancels for them, and rounding errors must cancel as well. Therefore, the sums use
  // dP relative to the dP of the edge with the largest weight.
  void SetDelta(const Part& part, int64_t offset, const float* arrays) const {
    const int64_t heads = n_.heads;
    const int64_t edges = part.end - part.begin;
    const float* weights = arrays + factor_array() * pairs_.stride() + offset;
    const float* d_weights = arrays + weight_array() * pairs_.stride() + offset;
    const float* values = arrays + inverse_array() * pairs_.stride() + offset;
    const float* d_lse = saved_.d_lse != nullptr ? saved_.d_lse + part.row * heads : nullptr;
    float* to_delta = delta_.data() + part.row * heads;
    float* to_top_f = top_f_ ? top_f_.data() + part.row * heads : nullptr;
    float* to_top = centres() ? top_edges_.data() + part.row * heads : nullptr;
    ForVectors(heads, [=](auto d, int64_t h) HWY_ATTR {
      auto most = hn::Zero(d);
      auto top = hn::Zero(d);
      auto top_f = hn::Zero(d);
      auto edge = hn::Zero(d);
      auto top_edge = hn::Zero(d);
      for (int64_t e = h; e < edges * heads; e += heads, edge = edge + hn::Set(d, 1.0f)) {
        const auto weight = hn::LoadU(d, weights + e);
        const auto larger = weight > most;
        most = hn::IfThenElse(larger, weight, most);
        top_edge = hn::IfThenElse(larger, edge, top_edge);
        top = hn::IfThenElse(larger, hn::LoadU(d, d_weights + e), top);
        top_f = hn::IfThenElse(larger, hn::LoadU(d, values + e), top_f);
      }
      auto others = hn::Zero(d);
      for (int64_t e = h; e < edges * heads; e += heads) {
        others = hn::MulAdd(hn::LoadU(d, weights + e), hn::LoadU(d, d_weights + e) - top, others);
      }
      auto delta = top + others;
      // The second pass corrects the rounding error of the first; its own error is negligible.
      auto rest = hn::Zero(d);
      for (int64_t e = h; e < edges * heads; e += heads) {
        rest = hn::MulAdd(hn::LoadU(d, weights + e), hn::LoadU(d, d_weights + e) - delta, rest);
      }
      delta = delta + rest;
      if (d_lse != nullptr) delta = delta - hn::LoadU(d, d_lse + h);
      hn::StoreU(hn::IfThenZeroElse(most == hn::Zero(d), delta), d, to_delta + h);
      if (to_top_f != nullptr) hn::StoreU(top_f, d, to_top_f + h);
      if (to_top != nullptr) hn::StoreU(top_edge, d, to_top + h);
    });
  }

  // Returns sum_e p_e dP_e. If one edge outweighs all others, the sum is computed relative to that
  // edge's dP (see BackwardPass::Delta). `top` is the edge with the row's largest score, or -1 if
  // unknown.
  float Delta(int64_t i, int64_t h, float sum, int64_t top) const {
    const float* d_o = saved_.d_o.row(0, h, i);
    const float* o = saved_.o.row(0, h, i);
    if (top < 0 || sum >= 2.0f) return SumOfProducts<false>(o, d_o, n_.value_dim);
    const int64_t edge = in_.indptr[i] + top;
    const float* v = in_.v.row(0, h / pairs_.group(), in_.indices[edge]);
    const float kept = pairs_.Kept(h, i, edge);
    const float product = kept * SumOfProducts<false>(d_o, v, n_.value_dim);
    if (sum == 1.0f) return product;
    return product + Sum(n_.value_dim,
                         [kept, o, d_o, v](int64_t e) { return d_o[e] * (o[e] - kept * v[e]); });
  }

  void Chunk(int64_t chunk, float* arrays) {
    const int64_t first = chunks_.FirstEdge(chunk);
    int64_t count = 0;
    chunks_.ForRows(chunk, [&](const Part& part) {
      pairs_.Fill(part, count, arrays);
      FillValueGradients(part, count, arrays);
      count += (part.end - part.begin) * n_.heads;
    });
    PairWeights(arrays, first, count);
    chunks_.ForRows(chunk, [&](const Part& part) {
      const int64_t offset = (part.begin - first) * n_.heads;
      if (part.slot < 0) SetDelta(part, offset, arrays);
      CopyToEdges(delta_, part, Array(arrays, delta_array()) + offset);
      if (top_f_) SubtractTop(part, Array(arrays, inverse_array()) + offset);
    });
    const int64_t offset = first * n_.heads;
    PairGradients(arrays, count, grad_.edge_bias == nullptr ? nullptr : grad_.edge_bias + offset);
    chunks_.ForRows(chunk, [&](const Part& part) {
      if (centres() && part.slot < 0) SetTop(part, (part.begin - first) * n_.heads, arrays);
    });

    float* sums = arrays + all_arrays() * pairs_.stride();
    std::vector<const float*> top_keys(static_cast<size_t>(n_.heads));
    chunks_.ForRows(chunk, [&](const Part& part) {
      SumPart(part, (part.begin - first) * n_.heads, arrays, sums, top_keys);
      if (part.slot < 0) {
        FinishRow(part.row, sums);
      } else {
        rows_.Keep(part.slot, sums);
      }
    });
    if (weights_) {
      CopyNumbers(Array(arrays, weight_array()), count, weights_.data() + offset);
      chunks_.ForRows(chunk, [&](const Part& part) {
        if (pairs_.drops()) pairs_.Drop(part, weights_.data() + part.begin * n_.heads);
      });
    }
    if (d_products_) CopyNumbers(arrays, count, d_products_.data() + offset);
    for (int s = 0; d_columns_ && s < table_.column_scalars; ++s) {
      CopyNumbers(Array(arrays, 1 + table_.row_scalars + s), count,
                  d_columns_.data() + s * n_.edges * n_.heads + offset);
    }

    float* d_head = d_head_.data() + chunk * head_sums() * n_.heads;
    for (int s = 0; s < head_sums(); ++s) {
      const float* from = Array(arrays, s == 0 ? factor_array() : head_arrays() + s - 1);
      for (int64_t q = 0; q < count; q += n_.heads) {
        AddNumbers(from + q, n_.heads, d_head + s * n_.heads);
      }
    }
  }

  // Fills the arrays of dP = m dO . v (m is the dropout factor), the row's largest score and its
  // inverse sum.
  void FillValueGradients(const Part& part, int64_t offset, float* arrays) const {
    CopyToEdges(largest_, part, Array(arrays, factor_array()) + offset);
    CopyToEdges(inverse_sum_, part, Array(arrays, inverse_array()) + offset);
    float* const d_weights = Array(arrays, weight_array()) + offset;
    for (int64_t e = part.begin; e < part.end; ++e, offset += n_.heads) {
      HeadProducts<false>(n_.key_heads, pairs_.group(), saved_.d_o.row(0, 0, part.row),
                          saved_.d_o.stride[1], in_.v.row(0, 0, in_.indices[e]), in_.v.stride[1],
                          n_.value_dim, Array(arrays, weight_array()) + offset);
    }
    if (pairs_.drops()) pairs_.Drop(part, d_weights);
  }

  // Copies a per-head number of a part's row to each of its edges.
  void CopyToEdges(const Buffer& of_rows, const Part& part, float* to) const {
    const float* from = of_rows.data() + part.row * n_.heads;
    for (int64_t e = part.begin; e < part.end; ++e, to += n_.heads) CopyNumbers(from, n_.heads, to);
  }

  // Subtracts f at the row's largest score from the f of a part's edges, so that the sum of ds (f -
  // top_f) has no large terms even if f is large.
  void SubtractTop(const Part& part, float* values) const {
    const float* top_f = top_f_.data() + part.row * n_.heads;
    for (int64_t e = part.begin; e < part.end; ++e, values += n_.heads) {
      for (int64_t h = 0; h < n_.heads; ++h) values[h] -= top_f[h];
    }
  }

  void PairWeights(float* arrays, int64_t first_edge, int64_t count) const {
    const DF d;
    // The delta array is not in use yet and can hold f.
    float* const values = Array(arrays, delta_array());
    table_.values(pairs_.Arrays(arrays), count, values);
    float* const weights = Array(arrays, factor_array());
    float* const sums = Array(arrays, inverse_array());
    for (int64_t q = 0; q < count; q += kLaneCount) {
      const VF score = pairs_.Score(first_edge, q, count, hn::Load(d, values + q));
      const VF weight = Exp2(score - hn::Load(d, weights + q)) * hn::Load(d, sums + q);
      hn::Store(weight, d, weights + q);
      hn::Store(hn::Load(d, values + q), d, sums + q);
    }
  }

  void PairGradients(float* arrays, int64_t count, float* d_bias) const {
    const DF d;
    float* const weights = Array(arrays, weight_array());
    float* const factors = Array(arrays, factor_array());
    float* const deltas = Array(arrays, delta_array());
    const float* const values = Array(arrays, inverse_array());
    for (int64_t q = 0; q < count; q += kLaneCount) {
      const VF weight = hn::Load(d, factors + q);
      const VF d_score = weight * (hn::Load(d, weights + q) - hn::Load(d, deltas + q));
      hn::Store(weight, d, weights + q);
      if (d_bias != nullptr) {
        if (count - q >= kLaneCount) {
          hn::StoreU(d_score, d, d_bias + q);
        } else {
          HWY_ALIGN float rest[kLaneCount];
          hn::Store(d_score, d, rest);
          std::copy_n(rest, count - q, d_bias + q);
        }
      }
      hn::Store(d_score * hn::Load(d, values + q), d, factors + q);
      hn::Store(hn::Load(d, pairs_.factor() + q) * d_score, d, deltas + q);
    }
    if (centres()) {
      PairSlopes(arrays, count);
      if (!centres_tokens_ && table_.has_product()) {
        std::copy_n(Array(arrays, slope_array()), count, arrays);
        MultiplyNumbers(deltas, count, arrays);
      }
      for (int s = 0; d_column_ && s < table_.column_scalars; ++s) {
        MultiplyNumbers(deltas, count, Array(arrays, 1 + table_.row_scalars + s));
      }
      for (int s = 0; s < table_.head_scalars; ++s) {
        MultiplyNumbers(deltas, count, Array(arrays, head_arrays() + s));
      }
    } else {
      table_.slopes(pairs_.Arrays(arrays), count, deltas, Slopes(arrays, arrays));
    }
    // d|x - y|^2/dx = 2 (x - y).
    for (int64_t q = 0; !centres_tokens_ && table_.is_distance() && q < count; q += kLaneCount) {
      const VF d_g = hn::Load(d, arrays + q);
      hn::Store(d_g + d_g, d, arrays + q);
    }
  }
  SlopeArrays Slopes(float* arrays, float* by_g) const {
    return {by_g, Array(arrays, 1), Array(arrays, 1 + table_.row_scalars),
            Array(arrays, head_arrays())};
  }
  // Computes the slopes of f, without modifying g.
  void PairSlopes(float* arrays, int64_t count) const {
    table_.slopes(pairs_.Arrays(arrays), count, ones_.data(),
                  Slopes(arrays, Array(arrays, slope_array())));
  }
  // Computes `numbers *= factors`.
  static void MultiplyNumbers(const float* factors, int64_t count, float* numbers) {
    const DF d;
    for (int64_t q = 0; q < count; q += kLaneCount) {
      hn::Store(hn::Load(d, factors + q) * hn::Load(d, numbers + q), d, numbers + q);
    }
  }

  // For each edge of a part, multiplies df by the difference between the edge's slopes and those of
  // the row's top edge. Adds the products to the gradients of the row's scalars and to `beyond`.
  // The full sum of df * slope is this sum plus the top slope times the sum of df, which is factor
  // * dlse. The edge's contribution to the gradient of the row's token becomes 2 df * slope *
  // (y_top - y_e); FinishRow adds the common part, a multiple of x - y_top. Edges that are much
  // nearer than the top edge use x - y_e instead.
  void CentrePart(const Part& part, int64_t offset, float* arrays, float* d_scalars,
                  float* beyond) const {
    const int64_t heads = n_.heads;
    const int64_t end = offset + (part.end - part.begin) * heads;
    const int64_t row = part.row * heads;
    const float* d_values = Array(arrays, delta_array());
    for (int s = 1; d_row_ && s <= table_.row_scalars; ++s) {
      const float* slopes = Array(arrays, s);
      const float* top_slopes = TopSlopes(s) + row;
      float* to = d_scalars + (s - 1) * heads;
      ForVectors(heads, [=](auto d, int64_t h) HWY_ATTR {
        const auto top = hn::LoadU(d, top_slopes + h);
        auto sum = hn::Zero(d);
        for (int64_t q = offset + h; q < end; q += heads) {
          sum = hn::MulAdd(hn::LoadU(d, d_values + q), hn::LoadU(d, slopes + q) - top, sum);
        }
        hn::StoreU(sum, d, to + h);
      });
    }
    if (!centres_tokens_) return;
    float* slopes = Array(arrays, slope_array());
    const float* top_slopes = TopSlopes(0) + row;
    const float* top_distances = top_distances_.data() + row;
    ForVectors(heads, [=](auto d, int64_t h) HWY_ATTR {
      const auto zero = hn::Zero(d);
      const auto top = hn::LoadU(d, top_slopes + h);
      const auto least = hn::LoadU(d, top_distances + h) * hn::Set(d, 1.0f / 16);
      auto sum = zero;
      for (int64_t q = offset + h; q < end; q += heads) {
        const auto df = hn::LoadU(d, d_values + q);
        const auto slope = hn::LoadU(d, slopes + q);
        const auto near = hn::LoadU(d, arrays + q) < least;
        sum = hn::MulAdd(df, hn::IfThenElse(near, zero, slope) - top, sum);
        hn::StoreU(hn::IfThenElse(near, zero, hn::Set(d, 1.0f)), d, slopes + q);
        // d|x - y|^2/dx = 2 (x - y).
        const auto d_g = df * slope;
        hn::StoreU(d_g + d_g, d, arrays + q);
      }
      hn::StoreU(sum, d, beyond + h);
    });
  }

  // Sums a part's contribution to the gradients of its row's token and scalars.
  void SumPart(const Part& part, int64_t offset, float* arrays, float* sums,
               std::vector<const float*>& top_keys) const {
    std::fill_n(sums, rows_.width(), 0.0f);
    float* d_scalars = sums + (d_x_ ? n_.heads * dim_ : 0);
    float* beyond = d_scalars + (d_row_ ? table_.row_scalars * n_.heads : 0);
    if (centres()) CentrePart(part, offset, arrays, d_scalars, beyond);
    if (!d_x_ || part.begin == part.end) return;
    for (int64_t h = 0; centres_tokens_ && h < n_.heads; ++h) {
      top_keys[static_cast<size_t>(h)] = TopKey(part.row, h);
    }
    const float* by_top = Array(arrays, slope_array());
    for (int64_t e = part.begin; e < part.end; ++e, offset += n_.heads) {
      const float* d_g = arrays + offset;
      for (int64_t key_head = 0; key_head < n_.key_heads; ++key_head) {
        const float* y = in_.y.row(0, key_head, in_.indices[e]);
        for (int64_t g = 0; g < pairs_.group(); ++g) {
          const int64_t h = key_head * pairs_.group() + g;
          const float* self = in_.x.row(0, h, part.row);
          if (centres_tokens_ && by_top[offset + h] != 0) self = top_keys[static_cast<size_t>(h)];
          AddTokenGradient(d_g[h], y, self, sums + h * dim_);
        }
      }
    }
  }

  // Adds d_g times the other token or, for distances, d_g times the difference of the tokens (d_g
  // then already contains the factor 2).
  HWY_INLINE void AddTokenGradient(float d_g, const float* other, const float* self,
                                   float* to) const {
    if (table_.is_distance()) {
      AddScaledDifference(d_g, self, other, dim_, to);
    } else {
      AddScaled(d_g, other, dim_, to);
    }
  }

  void FinishRow(int64_t i, const float* sums) const {
    const float* d_scalars = sums + (d_x_ ? n_.heads * dim_ : 0);
    const float* beyond = d_scalars + (d_row_ ? table_.row_scalars * n_.heads : 0);
    for (int64_t h = 0; h < n_.heads; ++h) {
      const int64_t row = i * n_.heads + h;
      const float df = DLse(row) * in_.factor[h];
      if (d_x_) {
        float* const to = grad_.x.row(0, h, i);
        std::copy_n(sums + h * dim_, dim_, to);
        if (centres_tokens_ && HasEdges(i)) {
          const float common = beyond[h] + (df != 0 ? df * TopSlopes(0)[row] : 0.0f);
          AddScaledDifference(2 * common, in_.x.row(0, h, i), TopKey(i, h), dim_, to);
        }
      }
      for (int s = 0; d_row_ && s < table_.row_scalars; ++s) {
        float* const to = grad_.row_scalars + (s * n_.heads + h) * n_.queries + i;
        *to = d_scalars[s * n_.heads + h];
        if (df != 0 && HasEdges(i)) *to += df * TopSlopes(s + 1)[row];
      }
    }
  }
  bool HasEdges(int64_t i) const { return in_.indptr[i] < in_.indptr[i + 1]; }

  void SumHeads() const {
    for (int s = 0; s < head_sums(); ++s) {
      float* to = s == 0                          ? grad_.factor
                  : grad_.head_scalars == nullptr ? nullptr
                                                  : grad_.head_scalars + (s - 1) * n_.heads;
      if (to == nullptr) continue;
      for (int64_t h = 0; h < n_.heads; ++h) {
        double sum = 0;
        for (int64_t chunk = 0; chunk < chunks_.count(); ++chunk) {
          sum += d_head_[static_cast<size_t>((chunk * head_sums() + s) * n_.heads + h)];
        }
        // A row's ds sum to its dlse (see BackwardPass::Balance).
        for (int64_t i = 0; s == 0 && i < n_.queries; ++i) {
          const int64_t row = i * n_.heads + h;
          sum += static_cast<double>(top_f_.data()[row]) * DLse(row);
        }
        to[h] = static_cast<float>(sum);
      }
    }
  }

  float DLse(int64_t row) const { return saved_.d_lse != nullptr ? saved_.d_lse[row] : 0.0f; }

  // Clears the gradient of tokens that the pair function does not use.
  void Clear(View<float> view, int64_t heads, int64_t nodes) const {
    for (int64_t i = 0; view.data != nullptr && i < nodes; ++i) {
      for (int64_t h = 0; h < heads; ++h) std::fill_n(view.row(0, h, i), n_.dim, 0.0f);
    }
  }

  // Computes the gradients of keys, values and column scalars, which are sums over each key's
  // edges.
  void Keys() const {
    const TransposedGraph graph(in_.indptr, in_.indices, n_.queries, n_.keys);
    const EdgeChunks chunks(graph.indptr.data(), n_.keys, EdgesOfChunk(n_));
    const int64_t key_dim = d_y_ ? dim_ : 0;
    const int64_t value_dim = weights_ ? n_.value_dim : 0;
    const int64_t scalars = d_column_ ? table_.column_scalars : 0;
    const RowTotals totals(chunks, n_.key_heads * (key_dim + value_dim + scalars));
    const auto finish = [&](int64_t j, const float* sums) {
      for (int64_t h = 0; h < n_.key_heads; ++h) {
        if (d_y_) std::copy_n(sums + h * dim_, dim_, grad_.y.row(0, h, j));
        if (weights_) {
          std::copy_n(sums + n_.key_heads * key_dim + h * value_dim, value_dim,
                      grad_.v.row(0, h, j));
        }
      }
      sums += n_.key_heads * (key_dim + value_dim);
      for (int64_t s = 0; s < scalars * n_.key_heads; ++s) {
        grad_.column_scalars[s * n_.keys + j] = sums[s];
      }
    };
    const Buffer memory(totals.width() * WorkersFor(executor_, chunks.count()));
    ParallelTasks(executor_, chunks.count(), [&](int64_t chunk, int worker) {
      float* sums = memory.data() + worker * totals.width();
      chunks.ForRows(chunk, [&](const Part& part) {
        SumKey(graph, part, key_dim, value_dim, sums, totals.width());
        if (part.slot < 0) {
          finish(part.row, sums);
        } else {
          totals.Keep(part.slot, sums);
        }
      });
    });
    totals.Merge(executor_, finish);
  }

  void SumKey(const TransposedGraph& graph, const Part& part, int64_t key_dim, int64_t value_dim,
              float* sums, int64_t width) const {
    std::fill_n(sums, width, 0.0f);
    float* d_values = sums + n_.key_heads * key_dim;
    float* d_scalars = d_values + n_.key_heads * value_dim;
    const int64_t group = pairs_.group();
    for (int64_t t = part.begin; t < part.end; ++t) {
      const int64_t i = graph.rows[static_cast<size_t>(t)];
      const int64_t pair = graph.edges[static_cast<size_t>(t)] * n_.heads;
      if (weights_) {
        AddScaledHeads(n_.key_heads, group, weights_.data() + pair, saved_.d_o.row(0, 0, i),
                       QuerySteps(saved_.d_o.stride[1]), value_dim, d_values, KeySteps(value_dim));
      }
      for (int64_t h = 0; d_y_ && h < n_.heads; ++h) {
        AddTokenGradient(d_products_.data()[pair + h], in_.x.row(0, h, i),
                         in_.y.row(0, h / group, part.row), sums + h / group * dim_);
      }
      for (int s = 0; d_column_ && s < table_.column_scalars; ++s) {
        const float* from = d_columns_.data() + s * n_.edges * n_.heads + pair;
        float* to = d_scalars + s * n_.key_heads;
        if (group == 1) {
          AddNumbers(from, n_.heads, to);
        } else {
          for (int64_t h = 0; h < n_.heads; ++h) to[h / group] += from[h];
        }
      }
    }
  }

  const PairTable& table_;
  const GraphInput<float>& in_;
  const GraphBackwardInput<float>& saved_;
  const GraphGradient<float>& grad_;
  const Executor& executor_;
  const GraphShape& n_;
  int64_t dim_;
  bool d_x_;
  bool d_y_;
  bool d_row_;
  bool d_column_;
  bool centres_tokens_;  // whether centres() applies to the tokens' gradients
  EdgeChunks chunks_;
  GraphPairs pairs_;
  // The sums for the gradients of each row's token and scalars.
  RowTotals rows_;
  Buffer largest_;
  Buffer inverse_sum_;
  Buffer delta_;
  Buffer top_f_;  // f of the largest score, if the factor needs a gradient
  // If centres(): the edge with the largest score of each row and head, its squared distance and
  // its slopes.
  Buffer top_edges_;
  Buffer top_distances_;
  Buffer top_slopes_;
  Buffer ones_;
  std::vector<float> d_head_;  // per chunk: the gradients of the factor and head scalars
  // The terms of the sums over a key's edges, per edge and head.
  Buffer weights_;
  Buffer d_products_;
  Buffer d_columns_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
