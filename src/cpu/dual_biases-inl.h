// The biases of blocks of rows in the kernel for derivatives, and their gradients.
#if defined(GNOMON_SRC_CPU_DUAL_BIASES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_BIASES_INL_H_
#undef GNOMON_SRC_CPU_DUAL_BIASES_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_BIASES_INL_H_
#endif

#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "cpu/columns-inl.h"
#include "cpu/dual_addends-inl.h"
#include "cpu/dual_block-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

class DualBiases {
 public:
  explicit DualBiases(const DualAttention& call)
      : call_(call),
        head_turns_(call.n.batch * call.n.heads),
        pair_turns_(call.shares_pairs ? call.row_blocks : 0) {
    if (call.wants_bias) {
      d_bias_.Reset(2 * call.n.batch * call.n.heads * call.addends.table_size());
    }
    for (int64_t n = 0; call.shares_pairs && n < call.row_blocks; ++n) pair_turns_.Start(n, 0);
  }

  // Clears the sums of a key head, which is counted across the batch.
  void Start(int64_t head) {
    for (int64_t h = head * call_.group; h < (head + 1) * call_.group; ++h) {
      head_turns_.Start(h, 0);
      for (const bool is_tangent : {false, true}) {
        if (call_.wants_bias) {
          std::fill_n(TableGradient(is_tangent, h), call_.addends.table_size(), 0.0f);
        }
        if (Real* d_key_bias = call_.Gradient(is_tangent).key_bias) {
          std::fill_n(d_key_bias + h * call_.n.keys, call_.n.keys, 0.0f);
        }
      }
    }
  }
  // Adds up, in a fixed order, the gradients of bias tables that all sequences of the batch share.
  void Merge() const {
    const int64_t size = call_.addends.table_size();
    for (const bool is_tangent : {false, true}) {
      const Bias<Real>& gradient = call_.Gradient(is_tangent).bias;
      for (int64_t head = 0; gradient.table != nullptr && head < call_.n.batch * call_.n.heads;
           ++head) {
        const int64_t b = head / call_.n.heads;
        Real* const to = gradient.table + b * gradient.batch_stride + head % call_.n.heads * size;
        if (b == 0 || gradient.batch_stride != 0) std::fill_n(to, size, 0.0f);
        AddRow(TableGradient(is_tangent, head), size, to);
      }
    }
  }

  // The biases of row r, in log2 units, and their tangents; null if there are none.
  DualRow Sum(DualBlock& block, int64_t r, const Columns& columns) const {
    const bool has_values = call_.has_bias();
    const bool has_tangents = call_.has_bias_tangent();
    const DualRelative& relative = call_.relative;
    const DualAddends::Row row = block.AddendRow(r, columns);
    const bool is_relative = relative.keys().exists();
    const Real factor = call_.in.relative.factor;
    const bool has_content = call_.content.exists();
    const DualRow content = has_content ? block.Row(block.gradients, r) : DualRow{};
    const auto add_content = [&](const Real* from, Real* to) {
      const int64_t first = columns.first();
      AddNumbers(from + first, columns.last() - first, to + first);
    };
    if (has_values) {
      const DF d;
      call_.addends.SumBiases(row, block.bias);
      if (has_content) add_content(content.values, block.bias);
      if (is_relative) {
        relative.Read(row, block.keys_window.values, r, factor, block.bias, &block.runs);
      }
      for (int64_t j = row.columns.first(); j < row.columns.last(); j += kLaneCount) {
        hn::Store(BiasInLog2(hn::Load(d, block.bias + j)), d, block.bias + j);
      }
    }
    if (has_tangents) {
      call_.addends.SumTangents(row, block.bias_tangent);
      if (has_content && call_.content.has_tangents()) {
        add_content(content.tangents, block.bias_tangent);
      }
      if (is_relative) {
        relative.Read(row, block.keys_window.tangents, r, factor, block.bias_tangent, &block.runs);
      }
    }
    return {has_values ? block.bias : nullptr, has_tangents ? block.bias_tangent : nullptr};
  }

  // Sums the gradients of the scores over the rows. Sums per key stay in scratch memory; the others
  // are added to the gradients.
  void AddScoreGradients(const DualBlock& block) {
    for (const bool is_tangent : {false, true}) {
      if (!call_.wants_key_bias) break;
      const int64_t count = block.keys.end - block.first;
      Real* const sums = block.d_key_bias + is_tangent * call_.stride;
      std::fill_n(sums, count, 0.0f);
      for (int64_t r = 0; r < block.rows(); ++r) {
        AddRow(block.Row(block.gradients, r).Of(is_tangent), count, sums);
      }
    }
    if (call_.wants_bias) AddTableGradients(block);
    if (call_.wants_pair_bias) AddPairGradients(block);
  }
  // Lets the next block add its gradients. The rows attend to no keys.
  void Skip(DualBlock& block) {
    if (call_.wants_bias) {
      head_turns_.Wait(block.head, block.number);
      head_turns_.Pass(block.head, block.number);
    }
    std::fill_n(block.seen, block.rows(), Columns{0, 0});
    if (call_.wants_pair_bias) AddPairGradients(block);
  }

 private:
  // The gradient of a query head's bias table. `head` is counted across the batch.
  Real* TableGradient(bool is_tangent, int64_t head) const {
    return d_bias_.data() +
           (is_tangent * call_.n.batch * call_.n.heads + head) * call_.addends.table_size();
  }
  void AddTableGradients(const DualBlock& block) {
    const int64_t rows = block.rows();
    const int64_t count = block.keys.end - block.first;
    const int64_t size = rows - 1 + count;
    const bool by_offset = !call_.addends.has_layout();
    for (const bool is_tangent : {false, true}) {
      if (!by_offset) break;
      Real* const sums = block.d_bias + is_tangent * call_.offsets();
      std::fill_n(sums, size, 0.0f);
      for (int64_t r = 0; r < rows; ++r) {
        AddRow(block.Row(block.gradients, r).Of(is_tangent), count, sums + rows - 1 - r);
      }
    }
    std::vector<TableRun> runs;
    head_turns_.Wait(block.head, block.number);
    for (const bool is_tangent : {false, true}) {
      if (!by_offset) break;
      AddRow(block.d_bias + is_tangent * call_.offsets(), size,
             TableGradient(is_tangent, block.head) + call_.n.queries - block.end + block.first);
    }
    for (int64_t r = 0; !by_offset && r < rows; ++r) {
      call_.addends.FindRuns(block.AddendRow(r, block.seen[r]), &runs);
      for (const bool is_tangent : {false, true}) {
        const Real* const from = block.Row(block.gradients, r).Of(is_tangent) + block.seen[r].begin;
        Real* const to = TableGradient(is_tangent, block.head);
        for (const TableRun& run : runs) {
          for (int64_t n = 0; n < run.count; ++n) {
            to[run.entry + n * run.step] += from[run.column + n];
          }
        }
      }
    }
    head_turns_.Pass(block.head, block.number);
  }

  // Writes the gradients of pair biases, or adds them to those of earlier heads.
  void AddPairGradients(const DualBlock& block) {
    const bool shares = call_.shares_pairs;
    if (shares) pair_turns_.Wait(block.number, block.head);
    for (const bool is_tangent : {false, true}) {
      const View<Real>& pairs = call_.Gradient(is_tangent).pair_bias;
      if (pairs.data == nullptr) continue;
      const bool is_first =
          (block.b == 0 || pairs.stride[0] != 0) && (block.h == 0 || pairs.stride[1] != 0);
      for (int64_t r = 0; r < block.rows(); ++r) {
        Real* const to = pairs.row(block.b, block.h, block.begin + r);
        if (is_first) std::fill_n(to, call_.n.keys, 0.0f);
        const int64_t count = block.seen[r].end - block.seen[r].begin;
        if (count == 0) continue;
        AddRow(block.Row(block.gradients, r).Of(is_tangent) + block.seen[r].begin, count,
               to + block.first + block.seen[r].begin);
      }
    }
    if (shares) pair_turns_.Pass(block.number, block.head);
  }

  const DualAttention& call_;
  Buffer d_bias_;     // per head; then the tangents
  Turns head_turns_;  // per query head
  Turns pair_turns_;  // per block of rows, if heads share gradients of pairs
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
