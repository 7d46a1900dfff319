// Relative tables and position-to-content terms of blocks of rows in the kernel for derivatives,
// and their gradients.
#if defined(GNOMON_SRC_CPU_DUAL_TERMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_DUAL_TERMS_INL_H_
#undef GNOMON_SRC_CPU_DUAL_TERMS_INL_H_
#else
#define GNOMON_SRC_CPU_DUAL_TERMS_INL_H_
#endif

#include <algorithm>

#include "base/parallel.h"
#include "cpu/dual_addends-inl.h"
#include "cpu/dual_block-inl.h"
#include "cpu/dual_content-inl.h"
#include "cpu/dual_relative-inl.h"
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

class DualTerms {
 public:
  DualTerms(const DualAttention& call, const HeadTasks& tasks)
      : call_(call),
        relative_(call.relative),
        content_(call.content),
        queries_(call.in.relative.query, call.tangent.relative.query, tasks.queries(),
                 relative_.keys().exists() ? call.n.queries : 0, call.in.relative.dim),
        d_keys_(call.n, relative_.keys(), call.of.gradient.relative_keys,
                call.of.gradient_tangent.relative_keys),
        d_values_(call.n, relative_.values(), call.of.gradient.relative_values,
                  call.of.gradient_tangent.relative_values),
        content_keys_(call.in.relative.key, call.tangent.relative.key, tasks.keys(),
                      call.wants_relative_queries ? call.n.keys : 0, call.in.relative.key_dim),
        d_content_keys_(call.of.gradient.relative_key, call.of.gradient_tangent.relative_key,
                        call.n, tasks.keys(), call.in.relative.key_dim),
        d_queries_(call.n, content_.table(), call.of.gradient.relative_queries,
                   call.of.gradient_tangent.relative_queries),
        table_turns_(call.n.batch * call.n.heads),
        content_turns_(call.n.batch * call.n.key_heads) {}

  // Packs the tables.
  void FillTables(const Executor& executor) const {
    ParallelTasks(executor, relative_.tasks(), [&](int64_t task, int) { relative_.Fill(task); });
    ParallelTasks(executor, content_.tasks(), [&](int64_t task, int) { content_.Fill(task); });
  }
  // Packs keys [begin, end) of a key head.
  void Pack(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    if (call_.wants_relative_queries) content_keys_.Fill(b, h, begin, end);
  }

  // Clears the sums of a key head, which is counted across the batch.
  void Start(int64_t head) {
    d_content_keys_.Clear(head / call_.n.key_heads, head % call_.n.key_heads);
    content_turns_.Start(head, 0);
    for (int64_t h = head * call_.group; h < (head + 1) * call_.group; ++h) {
      table_turns_.Start(h, 0);
      d_keys_.Clear(h);
      d_values_.Clear(h);
      d_queries_.Clear(h);
    }
  }
  void Finish(int64_t head) const {
    d_content_keys_.Finish(head / call_.n.key_heads, head % call_.n.key_heads);
  }
  void Merge() const {
    d_keys_.Merge();
    d_values_.Merge();
    d_queries_.Merge();
  }

  // Lets the next block add its gradients.
  void Skip(const DualBlock& block) {
    if (wants_tables()) {
      table_turns_.Wait(block.head, block.number);
      table_turns_.Pass(block.head, block.number);
    }
    if (call_.wants_content) {
      content_turns_.Wait(block.head_of_keys, block.turn);
      content_turns_.Pass(block.head_of_keys, block.turn);
    }
  }

  // Sets the windows of the relative tables, multiplies the queries by the relative keys, and
  // computes the position-to-content terms, which are stored in place of gradients of scores.
  void SetTerms(DualBlock& block) const {
    const auto window = [&](Real* memory) {
      return relative_.Window(block.b, block.begin, block.end, block.keys, memory);
    };
    if (relative_.values().exists()) block.values_window = window(block.value_window);
    if (relative_.keys().exists()) {
      block.keys_window = window(block.key_window);
      relative_.MultiplyKeys(block.b, block.h, block.begin, block.rows(), block.keys_window,
                             block.table_rows);
    }
    if (!content_.exists()) return;
    content_.Products(Tile(block), Pairs(block), block.content, &block.runs);
  }

  // Adds the gradients of scores to those of the position-to-content terms, and replaces the
  // products in the window of relative keys by sums of gradients of scores.
  void AddScoreGradients(DualBlock& block) {
    if (relative_.keys().exists()) {
      SetWindow(block, block.keys_window, block.gradients, call_.in.relative.factor);
      if (call_.wants_relative_query) WriteQueryGradients(block);
    }
    if (!call_.wants_content) return;
    content_turns_.Wait(block.head_of_keys, block.turn);
    content_.Gradients(Tile(block), Pairs(block), d_content_keys_.values, d_content_keys_.tangents,
                       d_queries_, content_keys_.Values(block.b, block.key_head),
                       content_keys_.Tangents(block.b, block.key_head), block.content, &block.runs);
    content_turns_.Pass(block.head_of_keys, block.turn);
  }
  // Replaces the products in the window of relative values by sums of weights.
  void AddWeights(DualBlock& block) const {
    if (relative_.values().exists()) SetWindow(block, block.values_window, block.weights, 1.0f);
  }

  // Adds the gradients of the relative tables.
  void AddTableGradients(const DualBlock& block) {
    if (!wants_tables()) return;
    table_turns_.Wait(block.head, block.number);
    if (d_keys_.wanted()) {
      queries_.Fill(block.b, block.h, block.begin, block.end);
      d_keys_.Add(block.head, block.rows(), block.keys_window, queries_.Values(block.b, block.h),
                  queries_.Tangents(block.b, block.h), block.begin);
    }
    if (d_values_.wanted()) {
      const Rows d_o{block.stacked_d_o, call_.padded_value_dim};
      const Rows d_o_tangents{d_o.row(block.rows()), call_.padded_value_dim};
      d_values_.Add(block.head, block.rows(), block.values_window, d_o, d_o_tangents, 0);
    }
    table_turns_.Pass(block.head, block.number);
  }

 private:
  bool wants_tables() const { return d_keys_.wanted() || d_values_.wanted(); }

  static DualContent::Tile Tile(const DualBlock& block) {
    return {{block.b, block.h, block.begin, block.rows()},
            block.key_head,
            block.first,
            block.keys.begin - block.first,
            block.keys.end - block.first};
  }
  static DualContent::Pairs Pairs(const DualBlock& block) {
    return {block.Row(block.gradients, 0), block.stride};
  }

  // Sets each table entry in the window to `factor` times the sum of its pairs' numbers.
  void SetWindow(DualBlock& block, const DualWindow& window, Real* numbers, Real factor) const {
    for (int64_t r = 0; r < block.rows(); ++r) {
      const DualAddends::Row row = block.AddendRow(r, block.seen[r]);
      const DualRow from = block.Row(numbers, r);
      window.ClearRow(r);
      relative_.Add(row, from.values, factor, window.values, r, &block.runs);
      relative_.Add(row, from.tangents, factor, window.tangents, r, &block.runs);
    }
  }
  void WriteQueryGradients(const DualBlock& block) const {
    const int64_t rows = block.rows();
    const int64_t padded = relative_.keys().values().padded();
    Real* const sums = block.table_rows;
    Real* const tangents = sums + rows * padded;
    std::fill_n(sums, 2 * rows * padded, 0.0f);
    relative_.keys().AddProducts(block.h, rows, block.keys_window, sums, tangents);
    block.Write(call_.of.gradient.relative_query, sums, padded, call_.in.relative.dim);
    block.Write(call_.of.gradient_tangent.relative_query, tangents, padded, call_.in.relative.dim);
  }

  const DualAttention& call_;
  const DualRelative& relative_;
  const DualContent& content_;
  DualRows queries_;  // relative.query
  DualTableGradient d_keys_;
  DualTableGradient d_values_;
  DualRows content_keys_;
  DualKeySums d_content_keys_;
  DualTableGradient d_queries_;  // gradients of relative.queries
  Turns table_turns_;            // per query head
  Turns content_turns_;          // per key head
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
