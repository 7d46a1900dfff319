// The backward pass of the kernel for derivatives: gradients of scores, queries, keys and values of
// a block of rows, and their tangents.
#if defined(GNOMON_SRC_CPU_DUAL_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_BACKWARD_INL_H_
#undef GNOMON_SRC_CPU_DUAL_BACKWARD_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_BACKWARD_INL_H_
#endif

#include <algorithm>

#include "base/parallel.h"
#include "base/visible_keys.h"
#include "cpu/columns-inl.h"
#include "cpu/dual_block-inl.h"
#include "cpu/dual_pairs-inl.h"
#include "cpu/dual_products-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/dual_sums-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/head_slots.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

class DualBackward {
 public:
  DualBackward(const DualAttention& call, const HeadTasks& tasks, const DualPairs& pairs,
               DualHeadSums& heads)
      : call_(call),
        pairs_(pairs),
        heads_(heads),
        turn_blocks_(DivideUp(call.n.keys, kTurnKeys)),
        keys_(call.in.y, call.tangent.y, tasks.keys(), call.wants_x ? call.n.keys : 0, call.dim),
        values_(call.in.v, call.tangent.v, tasks.keys(), call.wants_scores ? call.n.keys : 0,
                call.n.value_dim),
        d_y_(call.of.gradient.y, call.of.gradient_tangent.y, call.n, tasks.keys(), call.dim),
        d_v_(call.of.gradient.v, call.of.gradient_tangent.v, call.n, tasks.keys(),
             call.n.value_dim),
        turns_(call.n.batch * call.n.key_heads * turn_blocks_) {}

  // Packs the keys of panel p, of which [begin, end) are visible.
  void Pack(int64_t b, int64_t h, int64_t p, int64_t begin, int64_t end) const {
    if (call_.wants_scores) {
      values_.Fill(b, h, p, BatchKeys(call_.in.mask, call_.n.keys, b));
    }
    if (call_.wants_x) keys_.Fill(b, h, begin, end);
  }

  // Clears the sums of a key head, which is counted across the batch.
  void Start(int64_t head) {
    d_y_.Clear(head / call_.n.key_heads, head % call_.n.key_heads);
    d_v_.Clear(head / call_.n.key_heads, head % call_.n.key_heads);
    for (int64_t n = 0; n < turn_blocks_; ++n) turns_.Start(head * turn_blocks_ + n, 0);
  }
  void Finish(int64_t head) const {
    pairs_.AddNormGradients(head, d_y_);
    d_y_.Finish(head / call_.n.key_heads, head % call_.n.key_heads);
    d_v_.Finish(head / call_.n.key_heads, head % call_.n.key_heads);
  }

  // Copies the gradients of outputs, and the queries, as operands of matrix products.
  void PackRows(const DualBlock& block) const {
    const int64_t rows = block.rows();
    const auto [c, dc] = Factor(block);
    CopyDual(block, call_.of.d_o, call_.of.d_o_tangent, call_.n.value_dim, block.d_o);
    for (int64_t r = 0; r < rows; ++r) {
      const Real* const both = block.d_o + r * 2 * call_.n.value_dim;
      Real* const value = block.stacked_d_o + r * call_.padded_value_dim;
      Real* const tangent = value + rows * call_.padded_value_dim;
      std::copy_n(both, call_.n.value_dim, tangent);
      std::copy_n(both + call_.n.value_dim, call_.n.value_dim, value);
      for (Real* row : {value, tangent}) {
        std::fill(row + call_.n.value_dim, row + call_.padded_value_dim, 0.0f);
      }
      if (!call_.wants_y) continue;
      const auto [x, x_tangent] = block.Query(r);
      Real* const scaled = block.scaled + r * call_.padded_dim;
      Real* const scaled_tangent = scaled + rows * call_.padded_dim;
      for (int64_t e = 0; e < call_.dim; ++e) {
        scaled[e] = c * x[e];
        scaled_tangent[e] = c * x_tangent[e] + dc * x[e];
      }
      for (Real* row : {scaled, scaled_tangent}) {
        std::fill(row + call_.dim, row + call_.padded_dim, 0.0f);
      }
    }
  }

  // Computes the gradients of weights.
  void MultiplyValues(const DualBlock& block) const {
    MultiplyPanels(block, block.d_o, call_.has_d_o, values_, block.gradients);
    if (!call_.relative.values().exists()) return;
    const auto of_d_o = [&](int64_t first) -> Strided {
      return {block.d_o + first, Size(2 * call_.n.value_dim), 1};
    };
    call_.relative.values().Multiply(
        block.h, block.rows(),
        {of_d_o(call_.n.value_dim), call_.has_d_o ? of_d_o(0) : Strided{nullptr, 0, 0}},
        block.values_window, block.table_rows);
  }

  // Turns the gradients of row r's weights into gradients of scores before temperature and cap.
  void SetScoreGradientRow(DualBlock& block, int64_t r) const {
    const Columns& columns = block.seen[r];
    const DualRow gradients = block.Row(block.gradients, r);
    if (call_.relative.values().exists()) {
      const DualAddends::Row row = block.AddendRow(r, columns);
      const DualWindow& window = block.values_window;
      call_.relative.Read(row, window.values, r, 1.0f, gradients.values, &block.runs);
      call_.relative.Read(row, window.tangents, r, 1.0f, gradients.tangents, &block.runs);
    }
    if (call_.drops()) DropRow(call_.DropperOf(block, r), block.first, columns, gradients);
    const DualNumber d_lse = call_.DLse(call_.RowAt(block, r));
    SetScoreGradients(block.Row(block.weights, r), gradients, columns, d_lse.value, d_lse.tangent);
    block.sum[r] = {};
    if (call_.function != nullptr && block.top[r] >= 0) {
      BalanceRow(gradients.values, columns, block.top[r], d_lse.value);
      BalanceRow(gradients.tangents, columns, block.top[r], d_lse.tangent);
      block.sum[r] = d_lse;
    }
    if (call_.has_temper()) SetPlainGradientRow(block, r);
    for (Real* numbers : {gradients.values, gradients.tangents}) {
      std::fill(numbers, numbers + columns.first(), 0.0f);
      std::fill(numbers + columns.last(), numbers + block.columns(), 0.0f);
    }
  }

  void WriteQueryGradients(const DualBlock& block) {
    const int64_t rows = block.rows();
    const auto [c, dc] = Factor(block);
    const bool has_value = call_.of.gradient.x.data != nullptr || call_.wants_factor || dc != 0;
    Real* const tangents = block.sums;
    Real* const sums = tangents + rows * call_.padded_dim;
    MultiplyKeys(block, block.gradients, keys_, call_.dim, has_value, true, block.sums);
    if (call_.is_distance()) pairs_.AddDistanceGradients(block, {sums, tangents});
    DualHeadSums::Sums of_head;
    DualHeadSums::Sums of_head_tangent;
    for (int64_t r = 0; r < rows; ++r) {
      const Real* const sum = sums + r * call_.padded_dim;
      const Real* const tangent = tangents + r * call_.padded_dim;
      const DualNumbers x = block.Query(r);
      if (call_.of.gradient.x.data != nullptr) {
        Real* const to = call_.of.gradient.x.row(block.b, block.h, block.begin + r);
        for (int64_t e = 0; e < call_.dim; ++e) to[e] = c * sum[e];
      }
      if (call_.of.gradient_tangent.x.data != nullptr) {
        Real* const to = call_.of.gradient_tangent.x.row(block.b, block.h, block.begin + r);
        for (int64_t e = 0; e < call_.dim; ++e) to[e] = c * tangent[e] + dc * sum[e];
      }
      if (!call_.wants_factor || call_.function != nullptr) continue;
      of_head.factor += Sum(call_.dim, [=](int64_t e) { return x.values[e] * sum[e]; });
      of_head_tangent.factor += Sum(
          call_.dim, [=](int64_t e) { return x.values[e] * tangent[e] + x.tangents[e] * sum[e]; });
    }
    if (call_.function != nullptr) return;
    heads_.Of(false, block.head, block.number) = of_head;
    heads_.Of(true, block.head, block.number) = of_head_tangent;
  }

  // Adds the gradients of keys, values and key biases.
  void AddKeyGradients(const DualBlock& block) {
    if (!call_.wants_any) return;
    for (int64_t n = 0; n < turn_blocks_; ++n) {
      const int64_t sum = block.head_of_keys * turn_blocks_ + n;
      const int64_t begin = std::max(block.keys.begin, n * kTurnKeys);
      const int64_t end = std::min(block.keys.end, (n + 1) * kTurnKeys);
      turns_.Wait(sum, block.turn);
      if (begin < end) AddKeyGradients(block, begin, end);
      turns_.Pass(sum, block.turn);
    }
  }

  // Writes the gradients of rows that attend to no keys, and lets the next block add its gradients.
  void WriteEmpty(const DualBlock& block) {
    for (const bool is_tangent : {false, true}) {
      const AttentionGradient<Real>& gradient = call_.Gradient(is_tangent);
      block.Clear(gradient.x, call_.dim);
      block.Clear(gradient.relative_query, call_.in.relative.dim);
      for (int64_t r = 0; r < block.rows(); ++r) {
        if (gradient.temperature != nullptr) gradient.temperature[call_.RowAt(block, r)] = 0;
        for (int s = 0; gradient.row_scalars != nullptr && s < call_.row_scalars(); ++s) {
          call_.RowScalar(gradient.row_scalars, s, block.head)[block.begin + r] = 0;
        }
      }
      heads_.Of(is_tangent, block.head, block.number) = {};
    }
    AddKeyGradients(block);
  }

 private:
  // The number of keys whose gradients are added in one turn (see Turns).
  static constexpr int64_t kTurnKeys = kBackwardColumns;

  // The factor by which gradients of inner products must be multiplied. Gradients from a pair
  // function already include it.
  DualNumber Factor(const DualBlock& block) const {
    return call_.function == nullptr ? DualNumber{block.c, block.dc} : DualNumber{1, 0};
  }

  void SetPlainGradientRow(DualBlock& block, int64_t r) const {
    const Temper temper = call_.TemperOf(block, r);
    const TemperSums sums = SetPlainGradients(block.Row(block.gradients, r),
                                              block.Row(block.plain, r), block.seen[r], temper);
    const int64_t row = call_.RowAt(block, r);
    if (Real* d_temperature = call_.of.gradient.temperature) {
      d_temperature[row] = sums.temperature.value;
    }
    if (Real* d_temperature = call_.of.gradient_tangent.temperature) {
      d_temperature[row] = sums.temperature.tangent;
    }
    const DualNumber sum = block.sum[r];
    // Without a cap, the temperature times the sum of the scores' gradients is exact.
    block.sum[r] =
        temper.softcap != 0
            ? sums.scores
            : DualNumber{temper.temperature * sum.value,
                         temper.temperature * sum.tangent + temper.temperature_tangent * sum.value};
  }

  void AddKeyGradients(const DualBlock& block, int64_t begin, int64_t end) const {
    const int64_t rows = block.rows();
    const auto add = [&](const KeySums& sums, const Real* of_pairs, int64_t count,
                         const Real* of_rows, int64_t padded) {
      if (!sums.wanted()) return;
      MultiplyAdd(Size(end - begin), Size(padded) / kLanes, Size(count),
                  {of_pairs + begin - block.first, 1, Size(block.stride)}, of_rows, Size(padded),
                  sums.row(block.b, block.key_head, begin), Size(sums.stride()));
    };
    const int64_t values = rows * block.stride;
    add(d_v_.values, block.weights + values, rows, block.stacked_d_o, call_.padded_value_dim);
    add(d_v_.tangents, block.weights, call_.has_d_o ? 2 * rows : rows, block.stacked_d_o,
        call_.padded_value_dim);
    add(d_y_.values, block.gradients + values, rows, block.scaled, call_.padded_dim);
    add(d_y_.tangents, block.gradients, call_.has_x || Factor(block).tangent != 0 ? 2 * rows : rows,
        block.scaled, call_.padded_dim);
    if (call_.function != nullptr) pairs_.AddColumnGradients(block, begin, end, d_y_);
    for (const bool is_tangent : {false, true}) {
      Real* const to = call_.Gradient(is_tangent).key_bias;
      if (to == nullptr) continue;
      AddRow(block.d_key_bias + is_tangent * call_.stride + begin - block.first, end - begin,
             to + block.head * call_.n.keys + begin);
    }
  }

  const DualAttention& call_;
  const DualPairs& pairs_;
  DualHeadSums& heads_;
  int64_t turn_blocks_;
  DualRows keys_;
  DualPanels values_;
  DualKeySums d_y_;
  DualKeySums d_v_;
  Turns turns_;  // per key head and block of keys
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
