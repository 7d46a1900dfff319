// The forward pass of graph attention. Each task processes one chunk of rows. Chunks depend only on
// the graph, and their sums are added in a fixed order, so results do not depend on the number of
// workers.
#if defined(GNOMON_SRC_CPU_GRAPH_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_GRAPH_FORWARD_INL_H_
#undef GNOMON_SRC_CPU_GRAPH_FORWARD_INL_H_
#else
#define GNOMON_SRC_CPU_GRAPH_FORWARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
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

class GraphForwardPass {
 public:
  GraphForwardPass(const PairTable& table, const GraphInput<float>& in,
                   const GraphOutput<float>& out, const Executor& executor)
      : table_(table),
        in_(in),
        out_(out),
        executor_(executor),
        n_(in.shape),
        chunks_(in.indptr, n_.queries, EdgesOfChunk(n_)),
        pairs_(table, in),
        width_(n_.heads * (3 + n_.value_dim)),
        slots_(chunks_.slots() * width_) {}

  void Run() {
    pairs_.Pack(executor_);
    const int64_t scratch = arrays() * pairs_.stride() + RoundUp(width_, kLaneCount);
    const Buffer memory(scratch * WorkersFor(executor_, chunks_.count()));
    ParallelTasks(executor_, chunks_.count(), [&](int64_t chunk, int worker) {
      Chunk(chunk, memory.data() + worker * scratch);
    });
    ParallelTasks(executor_, chunks_.count(), [&](int64_t chunk, int) { MergeCutRow(chunk); });
  }

 private:
  using Part = EdgeChunks::Part;
  // Number of scratch arrays: one for g (reused for scores, then weights), the row and column
  // scalars, and one for the row maximum.
  int arrays() const { return 2 + table_.row_scalars + table_.column_scalars; }

  // Partial results of a row: per head, the largest score in log2 units, the sum of the weights,
  // the edge with the largest score, and the sums of weights times values.
  float* Largest(float* sums) const { return sums; }
  float* Weight(float* sums) const { return sums + n_.heads; }
  float* Top(float* sums) const { return sums + 2 * n_.heads; }
  float* Values(float* sums) const { return sums + 3 * n_.heads; }

  void Chunk(int64_t chunk, float* memory) const {
    const DF d;
    const int64_t first = chunks_.FirstEdge(chunk);
    float* const scores = memory;
    float* const shifts = memory + (arrays() - 1) * pairs_.stride();
    float* sums = memory + arrays() * pairs_.stride();
    int64_t count = 0;
    chunks_.ForRows(chunk, [&](const Part& part) {
      pairs_.Fill(part, count, memory);
      count += (part.end - part.begin) * n_.heads;
    });
    table_.values(pairs_.Arrays(memory), count, scores);
    for (int64_t q = 0; q < count; q += kLaneCount) {
      hn::Store(pairs_.Score(first, q, count, hn::Load(d, scores + q)), d, scores + q);
    }
    chunks_.ForRows(chunk, [&](const Part& part) {
      FillShifts(part.end - part.begin, (part.begin - first) * n_.heads, scores, shifts);
    });
    for (int64_t q = 0; q < count; q += kLaneCount) {
      hn::Store(Exp2(hn::Load(d, scores + q) - hn::Load(d, shifts + q)), d, scores + q);
    }
    chunks_.ForRows(chunk, [&](const Part& part) {
      const int64_t offset = (part.begin - first) * n_.heads;
      SumPart(part, scores + offset, shifts + offset, sums);
      if (part.slot < 0) {
        Finish(part.row, sums);
      } else {
        std::copy_n(sums, width_, slots_.data() + part.slot * width_);
      }
    });
  }

  // Copies the largest score per head to all edges of a part. If it is -inf, uses 0 instead,
  // because any finite shift then gives weights of 0.
  void FillShifts(int64_t edges, int64_t offset, const float* scores, float* shifts) const {
    const int64_t heads = n_.heads;
    const float* from = scores + offset;
    float* to = shifts + offset;
    ForVectors(heads, [=](auto d, int64_t h) HWY_ATTR {
      const auto none = hn::Set(d, -kInfinity);
      auto largest = none;
      for (int64_t e = 0; e < edges; ++e) {
        largest = hn::Max(largest, hn::LoadU(d, from + e * heads + h));
      }
      largest = hn::IfThenElse(largest == none, hn::Zero(d), largest);
      for (int64_t e = 0; e < edges; ++e) hn::StoreU(largest, d, to + e * heads + h);
    });
  }

  void SumPart(const Part& part, float* weights, const float* shifts, float* sums) const {
    std::fill_n(sums, width_, 0.0f);
    float* values = Values(sums);
    auto edge = static_cast<float>(part.begin - in_.indptr[part.row]);
    for (int64_t e = 0; e < part.end - part.begin; ++e, ++edge) {
      AddWeights(weights + e * n_.heads, edge, sums);
    }
    if (pairs_.drops()) pairs_.Drop(part, weights);
    for (int64_t e = part.begin; e < part.end; ++e, weights += n_.heads) {
      if (HidesHeads(e)) {
        AddSeenHeads(e, weights, values);
        continue;
      }
      AddScaledHeads(n_.key_heads, pairs_.group(), weights, in_.v.row(0, 0, in_.indices[e]),
                     KeySteps(in_.v.stride[1]), n_.value_dim, values, QuerySteps(n_.value_dim));
    }
    for (int64_t h = 0; h < n_.heads; ++h) {
      Largest(sums)[h] = Weight(sums)[h] == 0.0f ? -kInfinity : shifts[h];
    }
  }

  // Whether an edge has a bias of -inf for some heads.
  bool HidesHeads(int64_t e) const {
    if (in_.edge_bias == nullptr) return false;
    const float* const bias = in_.edge_bias + e * n_.heads;
    return std::find(bias, bias + n_.heads, -kInfinity) != bias + n_.heads;
  }

  // Adds the weighted values of an edge for the heads with a bias above -inf. The others add
  // nothing, even if the value is not finite.
  void AddSeenHeads(int64_t e, const float* weights, float* values) const {
    for (int64_t h = 0; h < n_.heads; ++h) {
      if (in_.edge_bias[e * n_.heads + h] == -kInfinity) continue;
      AddScaled(weights[h], in_.v.row(0, h / pairs_.group(), in_.indices[e]), n_.value_dim,
                values + h * n_.value_dim);
    }
  }

  // Adds the weights of an edge. The largest score of the part has weight 1.
  void AddWeights(const float* weights, float edge, float* sums) const {
    float* sum = Weight(sums);
    float* top = Top(sums);
    ForVectors(n_.heads, [=](auto d, int64_t h) HWY_ATTR {
      const auto weight = hn::LoadU(d, weights + h);
      hn::StoreU(hn::LoadU(d, sum + h) + weight, d, sum + h);
      const auto is_top = weight == hn::Set(d, 1.0f);
      hn::StoreU(hn::IfThenElse(is_top, hn::Set(d, edge), hn::LoadU(d, top + h)), d, top + h);
    });
  }

  void Finish(int64_t i, float* sums) const {
    for (int64_t h = 0; h < n_.heads; ++h) {
      const float weight = Weight(sums)[h];
      const float scale = weight == 0.0f ? 0.0f : 1.0f / weight;
      const float* values = Values(sums) + h * n_.value_dim;
      float* o = out_.o.row(0, h, i);
      for (int64_t k = 0; k < n_.value_dim; ++k) o[k] = values[k] * scale;
      const int64_t row = i * n_.heads + h;
      out_.lse[row] = weight == 0.0f ? -kInfinity : (Largest(sums)[h] + std::log2(weight)) * kLn2;
      if (out_.statistics == nullptr) continue;
      const int64_t rows = n_.queries * n_.heads;
      out_.statistics[row] = weight == 0.0f ? -kInfinity : Largest(sums)[h];
      out_.statistics[rows + row] = weight;
      out_.statistics[2 * rows + row] = TopKey(weight, static_cast<int64_t>(Top(sums)[h]));
    }
  }

  void MergeCutRow(int64_t chunk) const {
    chunks_.ForCutRow(chunk, [&](int64_t row, const std::vector<int64_t>& slots) {
      float* total = slots_.data() + slots[0] * width_;
      for (int64_t h = 0; h < n_.heads; ++h) {
        float largest = -kInfinity;
        float top = 0;
        for (const int64_t slot : slots) {
          float* part = slots_.data() + slot * width_;
          if (!(Largest(part)[h] > largest)) continue;
          largest = Largest(part)[h];
          top = Top(part)[h];
        }
        if (largest == -kInfinity) largest = 0.0f;
        for (const int64_t slot : slots) {
          float* part = slots_.data() + slot * width_;
          const float scale = std::exp2(Largest(part)[h] - largest);
          float* values = Values(part) + h * n_.value_dim;
          if (part == total) {
            Weight(total)[h] *= scale;
            for (int64_t k = 0; k < n_.value_dim; ++k) values[k] *= scale;
          } else {
            Weight(total)[h] += Weight(part)[h] * scale;
            AddScaled(scale, values, n_.value_dim, Values(total) + h * n_.value_dim);
          }
        }
        Largest(total)[h] = largest;
        Top(total)[h] = top;
      }
      Finish(row, total);
    });
  }

  const PairTable& table_;
  const GraphInput<float>& in_;
  const GraphOutput<float>& out_;
  const Executor& executor_;
  const GraphShape& n_;
  EdgeChunks chunks_;
  GraphPairs pairs_;
  int64_t width_;
  Buffer slots_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
