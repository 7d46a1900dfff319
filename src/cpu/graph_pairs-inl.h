// Pairs of an edge and a head, shared by the forward and backward passes of graph attention, for
// one instruction set.
//
// Sums over columns are vectorised along the columns. Elementwise work on pairs is vectorised over
// all pairs of a chunk of edges, so that rows with few edges or a single head still fill the
// vectors.
#if defined(GNOMON_SRC_CPU_GRAPH_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_GRAPH_PAIRS_INL_H_
#undef GNOMON_SRC_CPU_GRAPH_PAIRS_INL_H_
#else
#define GNOMON_SRC_CPU_GRAPH_PAIRS_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "base/dropout.h"
#include "base/edge_chunks.h"
#include "base/parallel.h"
#include "cpu/columns-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/graph.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {

// The number of edges per chunk. It is small enough that scratch memory stays in cache, and that
// rows with very many edges are summed in parts, which reduces rounding errors. It is large enough
// that partial sums need little memory compared with the edges.
inline int64_t EdgesOfChunk(const GraphShape& n) {
  constexpr int64_t kPairs = 2048;
  constexpr int64_t kEdges = 256;
  const int64_t edges = std::min(kEdges, kPairs / std::max<int64_t>(1, n.heads));
  return std::max({edges, n.dim, n.value_dim, int64_t{32}});
}

// Pairs of an edge and a head. The values of a chunk's pairs are stored in arrays of stride()
// numbers; the values of edge e start at index (e - first edge) * heads.
class GraphPairs {
 public:
  GraphPairs(const PairTable& table, const GraphInput<float>& in)
      : table_(table),
        in_(in),
        n_(in.shape),
        group_(n_.heads / std::max<int64_t>(1, n_.key_heads)),
        stride_(RoundUp(EdgesOfChunk(n_) * n_.heads, kLaneCount)),
        rows_(table_.row_scalars * n_.heads * n_.queries),
        columns_(table_.column_scalars * n_.heads * n_.keys),
        heads_((1 + table_.head_scalars) * stride_) {}

  int64_t group() const { return group_; }
  int64_t stride() const { return stride_; }

  // Packs scalars in the order in which edges read them: node, scalar, query head.
  void Pack(const Executor& executor) {
    constexpr int64_t kNodes = 256;
    const int64_t row_tasks = table_.row_scalars > 0 ? DivideUp(n_.queries, kNodes) : 0;
    const int64_t column_tasks = table_.column_scalars > 0 ? DivideUp(n_.keys, kNodes) : 0;
    ParallelTasks(executor, row_tasks + column_tasks, [&](int64_t task, int) {
      if (task < row_tasks) {
        PackScalars(in_.row_scalars, table_.row_scalars, n_.queries, n_.heads, 1, task * kNodes,
                    std::min((task + 1) * kNodes, n_.queries), rows_.data());
      } else {
        const int64_t first = (task - row_tasks) * kNodes;
        PackScalars(in_.column_scalars, table_.column_scalars, n_.keys, n_.key_heads, group_, first,
                    std::min(first + kNodes, n_.keys), columns_.data());
      }
    });
    for (int64_t q = 0; q < stride_; ++q) {
      const int64_t h = n_.heads > 0 ? q % n_.heads : 0;
      heads_.data()[q] = n_.heads > 0 ? in_.factor[h] : 0.0f;
      for (int s = 0; s < table_.head_scalars; ++s) {
        heads_.data()[(1 + s) * stride_ + q] =
            n_.heads > 0 ? in_.head_scalars[s * n_.heads + h] : 0.0f;
      }
    }
  }

  // Fills arrays 0, 1, ... with g, a and b of the edges of a part, starting at index `offset` of
  // each array.
  void Fill(const EdgeChunks::Part& part, int64_t offset, float* HWY_RESTRICT arrays) const {
    for (int64_t e = part.begin; e < part.end; ++e, offset += n_.heads) {
      const int64_t j = in_.indices[e];
      if (table_.is_distance()) {
        Products<true>(part.row, j, arrays + offset);
      } else if (table_.has_product()) {
        Products<false>(part.row, j, arrays + offset);
      }
      for (int s = 0; s < table_.row_scalars; ++s) {
        CopyNumbers(rows_.data() + (part.row * table_.row_scalars + s) * n_.heads, n_.heads,
                    arrays + (1 + s) * stride_ + offset);
      }
      for (int s = 0; s < table_.column_scalars; ++s) {
        CopyNumbers(columns_.data() + (j * table_.column_scalars + s) * n_.heads, n_.heads,
                    arrays + (1 + table_.row_scalars + s) * stride_ + offset);
      }
    }
  }

  // Returns the arrays of a chunk and the head scalars as arguments for a table's functions.
  PairArrays Arrays(const float* arrays) const {
    return {arrays, arrays + stride_, arrays + (1 + table_.row_scalars) * stride_,
            heads_.data() + stride_, stride_};
  }
  const float* factor() const { return heads_.data(); }

  // Returns the scores, in log2 units, of a vector of pairs that starts at pair q, counted from the
  // first pair of first_edge. The chunk has `count` pairs. An edge with bias -inf has zero weight
  // even if f is NaN.
  HWY_INLINE VF Score(int64_t first_edge, int64_t q, int64_t count, VF f) const {
    const DF d;
    const VF log2e = hn::Set(d, kLog2E);
    const VF score = f * (hn::Load(d, factor() + q) * log2e);
    if (in_.edge_bias == nullptr) return score;
    const float* from = in_.edge_bias + first_edge * n_.heads + q;
    HWY_ALIGN float rest[kLaneCount] = {};
    if (count - q < kLaneCount) from = std::copy_n(from, count - q, rest) - (count - q);
    const VF bias = hn::LoadU(d, from);
    const auto none = bias == hn::Set(d, -kInfinity);
    return hn::IfThenElse(none, bias, hn::MulAdd(bias, log2e, score));
  }

  bool drops() const { return in_.dropout.rate > 0; }

  // Multiplies per-pair values of a part by the dropout mask.
  void Drop(const EdgeChunks::Part& part, float* numbers) const {
    const uint32_t threshold = DropoutThreshold(in_.dropout);
    const auto scale = static_cast<float>(DropoutScale(in_.dropout));
    for (int64_t h = 0; h < n_.heads; ++h) {
      const DropoutRow row = HashRow(in_.dropout.seed, 0, h, part.row);
      float* number = numbers + h;
      for (int64_t e = part.begin; e < part.end; ++e, number += n_.heads) {
        const uint32_t hash = HashColumn(row, static_cast<uint32_t>(e));
        *number = hash < threshold ? 0.0f : *number * scale;
      }
    }
  }

  // The dropout factor of an edge: 0 or 1 / (1 - rate).
  float Kept(int64_t h, int64_t i, int64_t e) const {
    if (!drops()) return 1.0f;
    const uint32_t hash = HashColumn(HashRow(in_.dropout.seed, 0, h, i), static_cast<uint32_t>(e));
    return hash < DropoutThreshold(in_.dropout) ? 0.0f
                                                : static_cast<float>(DropoutScale(in_.dropout));
  }

 private:
  template <bool kDistance>
  HWY_INLINE void Products(int64_t i, int64_t j, float* products) const {
    HeadProducts<kDistance>(n_.key_heads, group_, in_.x.row(0, 0, i), in_.x.stride[1],
                            in_.y.row(0, 0, j), in_.y.stride[1], n_.dim, products);
  }

  // Transposes (count, from_heads, nodes) to (nodes, count, from_heads * repeat), for nodes [begin,
  // end).
  static void PackScalars(const float* from, int count, int64_t nodes, int64_t from_heads,
                          int64_t repeat, int64_t begin, int64_t end, float* to) {
    const int64_t to_heads = from_heads * repeat;
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t h = 0; h < to_heads; ++h) {
        const float* row = from + (s * from_heads + h / repeat) * nodes;
        for (int64_t i = begin; i < end; ++i) to[(i * count + s) * to_heads + h] = row[i];
      }
    }
  }

  const PairTable& table_;
  const GraphInput<float>& in_;
  const GraphShape& n_;
  int64_t group_;
  int64_t stride_;
  Buffer rows_;
  Buffer columns_;
  Buffer heads_;  // factor and head scalars, repeated for all pairs of a chunk
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
