// The forward pass of the kernel for derivatives: weights and outputs of a block of rows, and their
// tangents.
#if defined(GNOMON_SRC_CPU_DUAL_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_FORWARD_INL_H_
#undef GNOMON_SRC_CPU_DUAL_FORWARD_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_FORWARD_INL_H_
#endif

#include <algorithm>

#include "base/visible_keys.h"
#include "cpu/dual_biases-inl.h"
#include "cpu/dual_block-inl.h"
#include "cpu/dual_pairs-inl.h"
#include "cpu/dual_products-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/dual_sums-inl.h"
#include "cpu/head_slots.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

class DualForward {
 public:
  DualForward(const DualAttention& call, const HeadTasks& tasks, const DualPairs& pairs,
              const DualBiases& biases)
      : call_(call),
        pairs_(pairs),
        biases_(biases),
        keys_(call.in.y, call.tangent.y, tasks.keys(), call.n.keys, call.dim),
        values_(call.in.v, call.tangent.v, tasks.keys(), call.n.keys, call.n.value_dim) {}

  // Packs the keys of panel p, of which [begin, end) are visible.
  void Pack(int64_t b, int64_t h, int64_t p, int64_t begin, int64_t end) const {
    keys_.Fill(b, h, p, BatchKeys(call_.in.mask, call_.n.keys, b));
    values_.Fill(b, h, begin, end);
  }

  // Computes inner products of the rows with the keys, and their tangents.
  void MultiplyQueries(const DualBlock& block) const {
    CopyDual(block, call_.in.x, call_.tangent.x, call_.dim, block.x);
    MultiplyPanels(block, block.x, call_.has_x, keys_, block.weights);
  }

  // Turns row r's inner products into weights.
  void SetRow(DualBlock& block, int64_t r) const {
    const auto [weights, tangents] = block.Row(block.weights, r);
    const KeyRange seen = call_.addends.Keys(block.b, block.begin + r);
    Columns columns{seen.begin - block.first, seen.end - block.first};
    if (seen.empty()) columns = {0, 0};
    if (call_.function != nullptr) pairs_.SetValues(block, r, columns, {weights, tangents});
    const DualRow bias = biases_.Sum(block, r, columns);
    Real largest =
        SetScores(weights, tangents, columns, block.c, block.dc, bias.values, bias.tangents);
    if (call_.has_temper()) {
      largest = SetTemperedScores(weights, tangents, columns, call_.TemperOf(block, r),
                                  block.Row(block.plain, r));
    }
    if (largest == -kInfinity) columns = {0, 0};
    RowTotals totals{0, 0};
    int64_t top = -1;
    if (columns.end > 0) {
      if (call_.of.output.statistics != nullptr || call_.function != nullptr) {
        top = FindScore(weights, columns, largest);
      }
      totals = SetWeights(weights, tangents, columns, largest);
    }
    for (Real* row : {weights, tangents}) {
      std::fill(row, row + columns.first(), 0.0f);
      std::fill(row + columns.last(), row + block.columns(), 0.0f);
    }
    block.seen[r] = columns;
    block.top[r] = top;
    call_.WriteStatistics(rows(), call_.RowAt(block, r), largest, totals,
                          top < 0 ? -1 : block.first + top);
  }

  void WriteOutputs(const DualBlock& block) const {
    const bool has_o = call_.of.output.o.data != nullptr;
    const bool has_tangent = call_.of.o_tangent.data != nullptr;
    if (!has_o && !has_tangent) return;
    const int64_t padded = call_.padded_value_dim;
    Real* const tangents = block.sums;
    Real* const sums = tangents + block.rows() * padded;
    MultiplyKeys(block, block.weights, values_, call_.n.value_dim, has_o, has_tangent, block.sums);
    if (call_.relative.values().exists()) {
      call_.relative.values().AddProducts(block.h, block.rows(), block.values_window,
                                          has_o ? sums : nullptr, has_tangent ? tangents : nullptr);
    }
    block.Write(call_.of.output.o, sums, padded, call_.n.value_dim);
    block.Write(call_.of.o_tangent, tangents, padded, call_.n.value_dim);
  }

  // Writes the results of rows that attend to no keys.
  void WriteEmpty(const DualBlock& block) const {
    for (int64_t r = 0; r < block.rows(); ++r) {
      call_.WriteStatistics(rows(), call_.RowAt(block, r), -kInfinity, {0, 0}, -1);
    }
    block.Clear(call_.of.output.o, call_.n.value_dim);
    block.Clear(call_.of.o_tangent, call_.n.value_dim);
  }

 private:
  int64_t rows() const { return call_.n.batch * call_.n.heads * call_.n.queries; }

  const DualAttention& call_;
  const DualPairs& pairs_;
  const DualBiases& biases_;
  DualPanels keys_;
  DualRows values_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
