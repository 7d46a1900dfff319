// Forward-mode derivatives of dot-product attention and of its gradients.
//
// A task is a block of query rows of one head with all keys that they see. It holds the weights and
// their tangents of all these pairs, so that both are computed once for the outputs and the
// gradients. Tasks add to the gradients of keys, values and biases in turn, so results do not
// depend on the number of workers.
//
// A product of dual numbers is one product of stacked matrices: with x the value and x' the tangent
// of a row, (x . y)' = [x' x] . [y y'].
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/derivatives.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "base/visible_keys.h"
#include "cpu/derivatives.h"
#include "cpu/gemm-inl.h"
#include "cpu/head_places.h"
#include "cpu/packing-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {
namespace {

// The depth of products whose sums stay in cache.
constexpr int64_t kKeysAtOnce = 256;
// Keys whose gradients tasks add to in turn.
constexpr int64_t kTurnKeys = kBackwardColumns;

// The whole vectors that cover columns [begin, end).
struct Columns {
  int64_t begin;
  int64_t end;
  int64_t first() const { return begin / kLaneCount * kLaneCount; }
  int64_t last() const { return RoundUp(end, kLaneCount); }
};

HWY_INLINE VF Within(const Columns& columns, int64_t j, VF value, VF otherwise) {
  if (HWY_LIKELY(j >= columns.begin && j + kLaneCount <= columns.end)) return value;
  RowView view;
  view.span = {columns.begin, columns.end};
  return Masked(value, otherwise, view, j);
}

HWY_INLINE float Total(VF sums) { return hn::GetLane(hn::SumOfLanes(DF(), sums)); }

// Turns inner products into scores in log2 units, and their tangents into tangents of scores.
// Returns the largest score. The biases are added if they are not null; `bias` is in log2 units.
HWY_INLINE float SetScores(float* HWY_RESTRICT scores, float* HWY_RESTRICT tangents,
                           const Columns& columns, float factor, float factor_tangent,
                           const float* HWY_RESTRICT bias, const float* HWY_RESTRICT bias_tangent) {
  const DF d;
  const VF in_log2 = hn::Set(d, factor * kLog2E);
  const VF c = hn::Set(d, factor);
  const VF dc = hn::Set(d, factor_tangent);
  const VF hidden = hn::Set(d, -kInfinity);
  VF largest = hidden;
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF g = hn::Load(d, scores + j);
    VF score = g * in_log2;
    if (bias != nullptr) score = hn::MulAdd(g, in_log2, hn::LoadU(d, bias + j));
    score = Within(columns, j, score, hidden);
    largest = Max(largest, score);
    VF tangent = hn::MulAdd(hn::Load(d, tangents + j), c, g * dc);
    if (bias_tangent != nullptr) tangent = tangent + hn::LoadU(d, bias_tangent + j);
    hn::Store(score, d, scores + j);
    hn::Store(tangent, d, tangents + j);
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// The first column with a given score; -1 if there is none.
HWY_INLINE int64_t FindScore(const float* scores, const Columns& columns, float score) {
  const DF d;
  const VF wanted = hn::Set(d, score);
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const intptr_t lane = hn::FindFirstTrue(d, hn::Load(d, scores + j) == wanted);
    if (lane >= 0) return j + lane;
  }
  return -1;
}

// The sum of 2^(score - largest) over a row, and the mean of the tangents of its scores.
struct RowTotals {
  float weight;
  float mean;
};

// Turns scores into weights, and the tangents of scores into those of weights.
HWY_INLINE RowTotals SetWeights(float* HWY_RESTRICT scores, float* HWY_RESTRICT tangents,
                                const Columns& columns, float largest) {
  const DF d;
  const VF shift = hn::Set(d, largest);
  VF sum = hn::Zero(d);
  VF sum_of_tangents = hn::Zero(d);
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF weight = Exp2(hn::Load(d, scores + j) - shift);
    sum = sum + weight;
    sum_of_tangents = hn::MulAdd(weight, hn::Load(d, tangents + j), sum_of_tangents);
    hn::Store(weight, d, scores + j);
  }
  const float total = Total(sum);
  const float mean = Total(sum_of_tangents) / total;
  const VF inverse = hn::Set(d, 1.0f / total);
  const VF m = hn::Set(d, mean);
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF weight = hn::Load(d, scores + j) * inverse;
    hn::Store(weight, d, scores + j);
    hn::Store(weight * (hn::Load(d, tangents + j) - m), d, tangents + j);
  }
  return {total, mean};
}

// A row of numbers and the row of their tangents.
struct DualRow {
  float* values;
  float* tangents;
};

// Turns the gradients of weights into those of scores.
HWY_INLINE void SetScoreGradients(const DualRow& weights, const DualRow& gradients,
                                  const Columns& columns, float d_lse, float d_lse_tangent) {
  const DF d;
  const float* HWY_RESTRICT p = weights.values;
  const float* HWY_RESTRICT dp = weights.tangents;
  float* HWY_RESTRICT g = gradients.values;
  float* HWY_RESTRICT dg = gradients.tangents;
  VF sum = hn::Zero(d);
  VF sum_of_tangents = hn::Zero(d);
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF weight = hn::Load(d, p + j);
    const VF gradient = hn::Load(d, g + j);
    sum = hn::MulAdd(weight, gradient, sum);
    const VF part = hn::MulAdd(weight, hn::Load(d, dg + j), sum_of_tangents);
    sum_of_tangents = hn::MulAdd(hn::Load(d, dp + j), gradient, part);
  }
  const VF delta = hn::Set(d, Total(sum) - d_lse);
  const VF delta_tangent = hn::Set(d, Total(sum_of_tangents) - d_lse_tangent);
  for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
    const VF weight = hn::Load(d, p + j);
    const VF difference = hn::Load(d, g + j) - delta;
    const VF tangent = weight * (hn::Load(d, dg + j) - delta_tangent);
    hn::Store(weight * difference, d, g + j);
    hn::Store(hn::MulAdd(hn::Load(d, dp + j), difference, tangent), d, dg + j);
  }
}

HWY_INLINE void AddRow(const float* HWY_RESTRICT from, int64_t count, float* HWY_RESTRICT to) {
  for (int64_t n = 0; n < count; ++n) to[n] += from[n];
}

// The rows of each key head as transposed panels: a panel of the values, then one of the tangents.
class DualPanels {
 public:
  DualPanels(const Tokens& values, const Tokens& tangents, const HeadPlaces& places, int64_t rows,
             int64_t columns)
      : values_(values),
        tangents_(tangents),
        places_(places),
        columns_(columns),
        depth_(columns * (tangents.data != nullptr ? 2 : 1)),
        panels_(DivideUp(rows, kWidth)),
        data_(places.count * panels_ * depth_ * kWidth) {}

  void Fill(int64_t b, int64_t h, int64_t p, KeyRange keys) const {
    float* const to = panel(b, h, p);
    PackPanel(values_, b, h, p * kWidth, keys, columns_, to);
    if (tangents_.data == nullptr) return;
    PackPanel(tangents_, b, h, p * kWidth, keys, columns_, to + columns_ * kWidth);
  }
  float* panel(int64_t b, int64_t h, int64_t p) const {
    return data_.data() + (places_.Of(b, h) * panels_ + p) * depth_ * kWidth;
  }

 private:
  Tokens values_;
  Tokens tangents_;
  HeadPlaces places_;
  int64_t columns_;
  int64_t depth_;
  int64_t panels_;
  Buffer data_;
};

// Sums over rows of a view with one row per key, in place or in memory padded to whole vectors.
class KeySums {
 public:
  KeySums(const View<float>& out, const AttentionShape& n, const HeadPlaces& places,
          int64_t columns)
      : out_(out),
        places_(places),
        keys_(n.keys),
        columns_(columns),
        padded_(PaddedColumns(columns)) {
    if (out.data != nullptr && padded_ != columns) {
      padded_sums_.Reset(places.count * keys_ * padded_);
    }
  }

  bool wanted() const { return out_.data != nullptr; }
  int64_t stride() const { return padded_sums_ ? padded_ : out_.stride[2]; }
  float* row(int64_t b, int64_t h, int64_t j) const {
    if (!padded_sums_) return out_.row(b, h, j);
    return padded_sums_.data() + (places_.Of(b, h) * keys_ + j) * padded_;
  }
  void Clear(int64_t b, int64_t h) const {
    if (!wanted()) return;
    for (int64_t j = 0; j < keys_; ++j) {
      std::fill_n(row(b, h, j), padded_sums_ ? padded_ : columns_, 0.0f);
    }
  }
  void Finish(int64_t b, int64_t h) const {
    if (!padded_sums_) return;
    for (int64_t j = 0; j < keys_; ++j) std::copy_n(row(b, h, j), columns_, out_.row(b, h, j));
  }

 private:
  View<float> out_;
  HeadPlaces places_;
  int64_t keys_;
  int64_t columns_;
  int64_t padded_;
  Buffer padded_sums_;
};

class Pass {
 public:
  Pass(const AttentionDerivatives& of, const Executor& executor)
      : of_(of),
        in_(of.input),
        tangent_(of.tangent),
        executor_(executor),
        n_(in_.shape),
        group_(n_.heads / std::max<int64_t>(1, n_.key_heads)),
        padded_dim_(PaddedColumns(n_.dim)),
        padded_value_dim_(PaddedColumns(n_.value_dim)),
        stride_(RoundUp(LongestRow(), kWidth) + kLaneCount),
        block_(std::clamp<int64_t>(kScores / stride_ / kStep * kStep, kStep, kRowBlock)),
        row_blocks_(DivideUp(n_.queries, block_)),
        turn_blocks_(DivideUp(n_.keys, kTurnKeys)),
        head_tasks_(n_, executor, group_ * row_blocks_),
        key_panels_(in_.y, tangent_.y, head_tasks_.keys(), n_.keys, n_.dim),
        keys_(in_.y, head_tasks_.keys(), wants_x() ? n_.keys : 0, n_.dim),
        key_tangents_(tangent_.y, head_tasks_.keys(), wants_x() && has_y() ? n_.keys : 0, n_.dim),
        values_(in_.v, head_tasks_.keys(), n_.keys, n_.value_dim),
        value_tangents_(tangent_.v, head_tasks_.keys(), has_v() ? n_.keys : 0, n_.value_dim),
        value_panels_(in_.v, tangent_.v, head_tasks_.keys(), wants_scores() ? n_.keys : 0,
                      n_.value_dim),
        d_y_(of.gradient.y, n_, head_tasks_.keys(), n_.dim),
        d_y_tangent_(of.gradient_tangent.y, n_, head_tasks_.keys(), n_.dim),
        d_v_(of.gradient.v, n_, head_tasks_.keys(), n_.value_dim),
        d_v_tangent_(of.gradient_tangent.v, n_, head_tasks_.keys(), n_.value_dim),
        d_factor_(Size(2 * n_.batch * n_.heads * row_blocks_)),
        key_turns_(n_.batch * n_.key_heads * turn_blocks_),
        head_turns_(n_.batch * n_.heads) {
    if (wants_bias()) d_bias_.Reset(2 * n_.batch * n_.heads * offsets());
  }

  void Run() {
    const int64_t heads = n_.batch * n_.key_heads;
    const int64_t in_head = group_ * row_blocks_;
    const int64_t tasks = head_tasks_.whole() ? heads : heads * in_head;
    const Buffer memory(scratch_size() * WorkersFor(executor_, tasks));
    if (head_tasks_.whole()) {
      ParallelTasks(executor_, heads, [&](int64_t head, int worker) {
        head_tasks_.Assign(head, worker);
        const Scratch scratch = MakeScratch(memory.data() + worker * scratch_size());
        for (int64_t p = 0; p < panels(); ++p) Pack(head, p);
        Start(head);
        for (int64_t index = 0; index < in_head; ++index) RunRows(head, index, scratch);
        Finish(head);
      });
    } else {
      ParallelTasks(executor_, heads * panels(),
                    [&](int64_t task, int) { Pack(task / panels(), task % panels()); });
      ParallelTasks(executor_, heads, [&](int64_t head, int) { Start(head); });
      // Interleave as many heads as there are workers, which then rarely wait for their turn.
      const int64_t side_by_side = std::min<int64_t>(heads, WorkersFor(executor_, tasks));
      ParallelTasks(executor_, tasks, [&](int64_t task, int worker) {
        const int64_t first = task / (side_by_side * in_head) * side_by_side;
        const int64_t width = std::min(side_by_side, heads - first);
        const int64_t in_heads = task - first * in_head;
        RunRows(first + in_heads % width, in_heads / width,
                MakeScratch(memory.data() + worker * scratch_size()));
      });
      ParallelTasks(executor_, heads, [&](int64_t head, int) { Finish(head); });
    }
    Merge();
  }

 private:
  // Rows in a block, a multiple of kStep: as many as have about kScores scores.
  static constexpr int64_t kScores = int64_t{1} << 19;
  static constexpr auto kStep = static_cast<int64_t>(kMicroRows);

  // Scratch memory of a worker. Rows that are multiplied together lie together.
  struct Scratch {
    float* weights;       // tangents of the rows' weights, then the weights
    float* gradients;     // the same of the scores' gradients
    float* x;             // [x' x] per row
    float* scaled;        // rows of c x, then rows of (c x)'
    float* d_o;           // [d_o' d_o] per row
    float* stacked_d_o;   // rows of d_o, then rows of d_o'
    float* sums;          // tangents of rows' sums, then the sums
    float* bias;          // of a row, in log2 units
    float* bias_tangent;  // of a row
    float* d_bias;        // window of offsets; then its tangent
    float* d_key_bias;    // of the keys; then its tangent
  };
  int64_t window() const { return stride_ + block_; }
  std::array<int64_t, 11> Sizes() const {
    const bool is_backward = wants_any();
    return {2 * block_ * stride_,
            wants_scores() ? 2 * block_ * stride_ : 0,
            2 * block_ * n_.dim,
            wants_scores() ? 2 * block_ * padded_dim_ : 0,
            is_backward ? 2 * block_ * n_.value_dim : 0,
            is_backward ? 2 * block_ * padded_value_dim_ : 0,
            2 * block_ * std::max(padded_dim_, padded_value_dim_),
            has_bias() ? stride_ : 0,
            has_bias_tangent() ? stride_ : 0,
            wants_bias() ? 2 * window() : 0,
            wants_key_bias() ? 2 * stride_ : 0};
  }
  int64_t scratch_size() const {
    int64_t size = 0;
    for (const int64_t of_part : Sizes()) size += RoundUp(of_part, kWidth);
    return size;
  }
  Scratch MakeScratch(float* memory) const {
    std::array<float*, 11> parts;
    const std::array<int64_t, 11> sizes = Sizes();
    for (size_t n = 0; n < parts.size(); ++n) {
      parts[n] = memory;
      memory += RoundUp(sizes[n], kWidth);
    }
    return {parts[0], parts[1], parts[2], parts[3], parts[4], parts[5],
            parts[6], parts[7], parts[8], parts[9], parts[10]};
  }

  bool has_x() const { return tangent_.x.data != nullptr; }
  bool has_y() const { return tangent_.y.data != nullptr; }
  bool has_v() const { return tangent_.v.data != nullptr; }
  bool has_d_o() const { return of_.d_o_tangent.data != nullptr; }
  bool has_bias() const { return in_.bias.table != nullptr || in_.key_bias != nullptr; }
  bool has_bias_tangent() const {
    return tangent_.bias.table != nullptr || tangent_.key_bias != nullptr;
  }
  // Whether a gradient or its tangent is needed.
  template <class Member>
  bool Wants(const Member& member) const {
    return member(of_.gradient) || member(of_.gradient_tangent);
  }
  bool wants_factor() const {
    return Wants([](const auto& gradient) { return gradient.factor != nullptr; });
  }
  bool wants_x() const {
    return wants_factor() || Wants([](const auto& gradient) { return gradient.x.data != nullptr; });
  }
  bool wants_y() const {
    return Wants([](const auto& gradient) { return gradient.y.data != nullptr; });
  }
  bool wants_v() const {
    return Wants([](const auto& gradient) { return gradient.v.data != nullptr; });
  }
  bool wants_bias() const {
    return Wants([](const auto& gradient) { return gradient.bias.table != nullptr; });
  }
  bool wants_key_bias() const {
    return Wants([](const auto& gradient) { return gradient.key_bias != nullptr; });
  }
  bool wants_scores() const { return wants_x() || wants_y() || wants_bias() || wants_key_bias(); }
  bool wants_any() const { return wants_scores() || wants_v(); }

  int64_t panels() const { return DivideUp(n_.keys, kWidth); }
  int64_t offsets() const { return n_.queries + n_.keys - 1; }

  KeyRange KeysOf(int64_t b, int64_t i) const {
    KeyRange keys =
        VisibleKeys(in_.mask, BatchKeys(in_.mask, n_.keys, b), QueryPosition(in_, b, i));
    keys.begin = std::clamp<int64_t>(keys.begin, 0, n_.keys);
    keys.end = std::clamp<int64_t>(keys.end, keys.begin, n_.keys);
    return keys;
  }
  // The range that contains all keys seen by rows [begin, end).
  KeyRange KeysOfRows(int64_t b, int64_t begin, int64_t end) const {
    KeyRange all{n_.keys, 0};
    for (int64_t i = begin; i < end; ++i) {
      const KeyRange seen = KeysOf(b, i);
      if (seen.empty()) continue;
      all = {std::min(all.begin, seen.begin), std::max(all.end, seen.end)};
    }
    return all;
  }
  // At least the number of columns that a block of rows has.
  int64_t LongestRow() const {
    int64_t longest = 0;
    for (int64_t b = 0; b < n_.batch; ++b) {
      for (int64_t begin = 0; begin < n_.queries; begin += kRowBlock) {
        const int64_t end = std::min(begin + 2 * kRowBlock, n_.queries);
        const KeyRange keys = KeysOfRows(b, begin, end);
        longest = std::max(longest, keys.end - keys.begin / kWidth * kWidth);
      }
    }
    return longest;
  }

  // Packs panel p of a key head, counted across the batch.
  void Pack(int64_t head, int64_t p) const {
    const int64_t b = head / n_.key_heads;
    const int64_t h = head % n_.key_heads;
    const KeyRange keys = BatchKeys(in_.mask, n_.keys, b);
    key_panels_.Fill(b, h, p, keys);
    if (wants_scores()) value_panels_.Fill(b, h, p, keys);
    const int64_t begin = std::max(keys.begin, p * kWidth);
    const int64_t end = std::min(keys.end, (p + 1) * kWidth);
    if (wants_x()) keys_.Fill(b, h, begin, end);
    if (wants_x() && has_y()) key_tangents_.Fill(b, h, begin, end);
    values_.Fill(b, h, begin, end);
    if (has_v()) value_tangents_.Fill(b, h, begin, end);
  }

  // Clears the sums of a key head.
  void Start(int64_t head) {
    const int64_t b = head / n_.key_heads;
    const int64_t h = head % n_.key_heads;
    for (const KeySums* sums : {&d_y_, &d_y_tangent_, &d_v_, &d_v_tangent_}) sums->Clear(b, h);
    for (int64_t n = 0; n < turn_blocks_; ++n) key_turns_.Start(head * turn_blocks_ + n, 0);
    for (int64_t of_head = head * group_; of_head < (head + 1) * group_; ++of_head) {
      head_turns_.Start(of_head, 0);
      for (const bool is_tangent : {false, true}) {
        if (wants_bias()) std::fill_n(BiasGradient(is_tangent, of_head), offsets(), 0.0f);
        if (float* d_key_bias = Gradient(is_tangent).key_bias) {
          std::fill_n(d_key_bias + of_head * n_.keys, n_.keys, 0.0f);
        }
      }
    }
  }
  void Finish(int64_t head) const {
    for (const KeySums* sums : {&d_y_, &d_y_tangent_, &d_v_, &d_v_tangent_}) {
      sums->Finish(head / n_.key_heads, head % n_.key_heads);
    }
  }

  // Rows [begin, end) of a query head, and the range of keys that they see.
  struct Block {
    int64_t b;
    int64_t h;
    int64_t key_head;
    int64_t begin;
    int64_t end;
    KeyRange keys;
    int64_t first;   // column 0
    int64_t turn;    // among the blocks of the key head
    int64_t stride;  // of rows of scores
    float c;
    float dc;

    int64_t rows() const { return end - begin; }
    // In whole vectors.
    int64_t columns() const { return RoundUp(keys.end - first, kLaneCount); }
    size_t row_count() const { return Size(end - begin); }
  };

  // The index-th block of a key head.
  void RunRows(int64_t head, int64_t index, const Scratch& scratch) {
    Block block;
    block.b = head / n_.key_heads;
    block.key_head = head % n_.key_heads;
    block.h = block.key_head * group_ + index / row_blocks_;
    block.begin = index % row_blocks_ * block_;
    block.end = std::min(block.begin + block_, n_.queries);
    block.keys = KeysOfRows(block.b, block.begin, block.end);
    block.first = block.keys.begin / kWidth * kWidth;
    block.turn = index;
    // Rows in different sets of a cache.
    block.stride = RoundUp(block.keys.end - block.first, kWidth) + kLaneCount;
    block.c = in_.factor[block.h];
    block.dc = tangent_.factor != nullptr ? tangent_.factor[block.h] : 0.0f;
    if (block.keys.empty()) return RunEmpty(block);
    MultiplyQueries(block, scratch);
    Columns columns[kRowBlock];
    for (int64_t r = 0; r < block.rows(); ++r) columns[r] = SetRow(block, r, scratch);
    WriteOutputs(block, scratch);
    if (wants_any()) {
      PackGradients(block, scratch);
      if (wants_scores()) {
        MultiplyValues(block, scratch);
        for (int64_t r = 0; r < block.rows(); ++r) {
          SetScoreGradientRow(block, r, columns[r], scratch);
        }
      }
      if (wants_x()) WriteQueryGradients(block, scratch);
      AddBiasGradients(block, scratch);
    }
    AddKeyGradients(block, scratch);
  }

  // Rows that see no keys.
  void RunEmpty(const Block& block) {
    for (int64_t i = block.begin; i < block.end; ++i) {
      const auto clear = [&](const View<float>& view, int64_t columns) {
        if (view.data != nullptr) std::fill_n(view.row(block.b, block.h, i), columns, 0.0f);
      };
      clear(of_.output.o, n_.value_dim);
      clear(of_.o_tangent, n_.value_dim);
      clear(of_.gradient.x, n_.dim);
      clear(of_.gradient_tangent.x, n_.dim);
      WriteStatistics(block, i, -kInfinity, 0, 0, -1);
    }
    for (const bool is_tangent : {false, true}) *FactorGradient(is_tangent, block) = 0;
    if (!wants_any()) return;
    head_turns_.Wait(block.b * n_.heads + block.h, block.turn % row_blocks_);
    head_turns_.Pass(block.b * n_.heads + block.h, block.turn % row_blocks_);
    for (int64_t n = 0; n < turn_blocks_; ++n) {
      const int64_t sum = (block.b * n_.key_heads + block.key_head) * turn_blocks_ + n;
      key_turns_.Wait(sum, block.turn);
      key_turns_.Pass(sum, block.turn);
    }
  }

  // [x' x] . [y y'], where a tangent of 0 is omitted.
  static void MultiplyTangents(size_t rows, size_t vectors, int64_t dim, const float* x, bool has_x,
                               const float* panel, bool has_y, float* to, int64_t stride) {
    const int64_t begin = has_x ? 0 : dim;
    const int64_t end = has_y ? 2 * dim : dim;
    if (begin < end) {
      return Multiply(rows, vectors, Size(end - begin), {x + begin, Size(2 * dim), 1},
                      panel + begin * kWidth, Size(kWidth), to, Size(stride));
    }
    for (size_t r = 0; r < rows; ++r) {
      std::fill_n(to + static_cast<int64_t>(r) * stride, vectors * kLanes, 0.0f);
    }
  }

  // Row i of a matrix and its tangent as [tangent, value].
  static void CopyTangentAndValue(const Tokens& value, const Tokens& tangent, const Block& block,
                                  int64_t i, int64_t columns, float* to) {
    Widen(value.row(block.b, block.h, i), value.type, 0, columns, to + columns);
    if (tangent.data == nullptr) {
      std::fill_n(to, columns, 0.0f);
    } else {
      Widen(tangent.row(block.b, block.h, i), tangent.type, 0, columns, to);
    }
  }

  // Inner products of the rows with the keys, and their tangents.
  void MultiplyQueries(const Block& block, const Scratch& scratch) const {
    for (int64_t i = block.begin; i < block.end; ++i) {
      CopyTangentAndValue(in_.x, tangent_.x, block, i, n_.dim,
                          scratch.x + (i - block.begin) * 2 * n_.dim);
    }
    float* const tangents = scratch.weights;
    float* const products = tangents + block.rows() * block.stride;
    for (int64_t j = block.first; j < block.keys.end; j += kWidth) {
      const float* const panel = key_panels_.panel(block.b, block.key_head, j / kWidth);
      const size_t vectors = VectorsOfPanel(j, block.keys.end);
      Multiply(block.row_count(), vectors, Size(n_.dim), {scratch.x + n_.dim, Size(2 * n_.dim), 1},
               panel, Size(kWidth), products + j - block.first, Size(block.stride));
      MultiplyTangents(block.row_count(), vectors, n_.dim, scratch.x, has_x(), panel, has_y(),
                       tangents + j - block.first, block.stride);
    }
  }

  // Adds the biases of row i to bias and their tangents to bias_tangent, both relative to the
  // block's first column. Returns pointers that are null if there are none.
  DualRow SumBiases(const Block& block, int64_t i, const Columns& columns,
                    const Scratch& scratch) const {
    const int64_t of_offsets = n_.queries - 1 + block.first - i;
    const int64_t of_keys = (block.b * n_.heads + block.h) * n_.keys + block.first;
    const auto sum = [&](const AttentionInput<float>& from, float* to) {
      if (from.bias.table == nullptr && from.key_bias == nullptr) return false;
      std::fill(to + columns.first(), to + columns.last(), 0.0f);
      const int64_t count = columns.end - columns.begin;
      if (from.bias.table != nullptr) {
        const float* const table =
            from.bias.table + block.b * from.bias.batch_stride + block.h * offsets();
        AddRow(table + of_offsets + columns.begin, count, to + columns.begin);
      }
      if (from.key_bias != nullptr) {
        AddRow(from.key_bias + of_keys + columns.begin, count, to + columns.begin);
      }
      return true;
    };
    const bool has_values = sum(in_, scratch.bias);
    const bool has_tangents = sum(tangent_, scratch.bias_tangent);
    if (has_values) {
      const DF d;
      for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
        hn::Store(BiasInLog2(hn::Load(d, scratch.bias + j)), d, scratch.bias + j);
      }
    }
    return {has_values ? scratch.bias : nullptr, has_tangents ? scratch.bias_tangent : nullptr};
  }

  // Turns row r's inner products into weights; returns the columns that it sees.
  Columns SetRow(const Block& block, int64_t r, const Scratch& scratch) const {
    const int64_t i = block.begin + r;
    float* const tangents = scratch.weights + r * block.stride;
    float* const weights = tangents + block.rows() * block.stride;
    const KeyRange seen = KeysOf(block.b, i);
    Columns columns{seen.begin - block.first, seen.end - block.first};
    if (seen.empty()) columns = {0, 0};
    const DualRow bias = SumBiases(block, i, columns, scratch);
    const float largest =
        SetScores(weights, tangents, columns, block.c, block.dc, bias.values, bias.tangents);
    if (largest == -kInfinity) columns = {0, 0};
    RowTotals totals{0, 0};
    int64_t top = -1;
    if (columns.end > 0) {
      if (of_.output.statistics != nullptr) top = FindScore(weights, columns, largest);
      totals = SetWeights(weights, tangents, columns, largest);
    }
    for (float* row : {weights, tangents}) {
      std::fill(row, row + columns.first(), 0.0f);
      std::fill(row + columns.last(), row + block.columns(), 0.0f);
    }
    WriteStatistics(block, i, largest, totals.weight, totals.mean,
                    top < 0 ? -1 : block.first + top);
    return columns;
  }

  void WriteStatistics(const Block& block, int64_t i, float largest, float weight, float mean,
                       int64_t top) const {
    const int64_t row = (block.b * n_.heads + block.h) * n_.queries + i;
    if (of_.lse_tangent != nullptr) of_.lse_tangent[row] = mean;
    if (of_.output.lse != nullptr) {
      of_.output.lse[row] =
          weight == 0.0f ? -kInfinity : (largest + std::log(weight) * kLog2E) * kLn2;
    }
    if (of_.output.statistics == nullptr) return;
    const int64_t rows = n_.batch * n_.heads * n_.queries;
    of_.output.statistics[row] = largest;
    of_.output.statistics[rows + row] = weight;
    of_.output.statistics[2 * rows + row] = TopKey(top < 0 ? 0.0f : weight, top);
  }

  // Adds the products of `rows` rows of weights, from the block's first key on, with rows of keys.
  void MultiplyByKeys(const Block& block, const float* weights, int64_t rows, const Rows& of_keys,
                      int64_t columns, float* to) const {
    const int64_t padded = PaddedColumns(columns);
    for (int64_t j = block.keys.begin; j < block.keys.end; j += kKeysAtOnce) {
      const int64_t count = std::min(kKeysAtOnce, block.keys.end - j);
      MultiplyAdd(Size(rows), Size(padded) / kLanes, Size(count),
                  {weights + j - block.first, Size(block.stride), 1}, of_keys.row(j),
                  Size(of_keys.stride), to, Size(padded));
    }
  }

  void WriteOutputs(const Block& block, const Scratch& scratch) const {
    const bool has_o = of_.output.o.data != nullptr;
    const bool has_tangent = of_.o_tangent.data != nullptr;
    if (!has_o && !has_tangent) return;
    const int64_t rows = block.rows();
    float* const tangents = scratch.sums;
    float* const sums = tangents + rows * padded_value_dim_;
    std::fill_n(tangents, 2 * rows * padded_value_dim_, 0.0f);
    const float* const weights = scratch.weights + rows * block.stride;
    const Rows values = values_.Head(block.b, block.key_head);
    if (has_tangent) {
      MultiplyByKeys(block, scratch.weights, has_o ? 2 * rows : rows, values, n_.value_dim,
                     tangents);
      if (has_v()) {
        MultiplyByKeys(block, weights, rows, value_tangents_.Head(block.b, block.key_head),
                       n_.value_dim, tangents);
      }
    } else {
      MultiplyByKeys(block, weights, rows, values, n_.value_dim, sums);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const auto write = [&](const View<float>& view, const float* from) {
        if (view.data == nullptr) return;
        std::copy_n(from + r * padded_value_dim_, n_.value_dim,
                    view.row(block.b, block.h, block.begin + r));
      };
      write(of_.output.o, sums);
      write(of_.o_tangent, tangents);
    }
  }

  void PackGradients(const Block& block, const Scratch& scratch) const {
    const int64_t rows = block.rows();
    for (int64_t r = 0; r < rows; ++r) {
      float* const both = scratch.d_o + r * 2 * n_.value_dim;
      CopyTangentAndValue(of_.d_o, of_.d_o_tangent, block, block.begin + r, n_.value_dim, both);
      float* const value = scratch.stacked_d_o + r * padded_value_dim_;
      float* const tangent = value + rows * padded_value_dim_;
      std::copy_n(both, n_.value_dim, tangent);
      std::copy_n(both + n_.value_dim, n_.value_dim, value);
      for (float* row : {value, tangent}) {
        std::fill(row + n_.value_dim, row + padded_value_dim_, 0.0f);
      }
      if (!wants_y()) continue;
      const float* const x_tangent = scratch.x + r * 2 * n_.dim;
      const float* const x = x_tangent + n_.dim;
      float* const scaled = scratch.scaled + r * padded_dim_;
      float* const scaled_tangent = scaled + rows * padded_dim_;
      for (int64_t e = 0; e < n_.dim; ++e) {
        scaled[e] = block.c * x[e];
        scaled_tangent[e] = block.c * x_tangent[e] + block.dc * x[e];
      }
      for (float* row : {scaled, scaled_tangent}) {
        std::fill(row + n_.dim, row + padded_dim_, 0.0f);
      }
    }
  }

  // The gradients of the weights.
  void MultiplyValues(const Block& block, const Scratch& scratch) const {
    float* const tangents = scratch.gradients;
    float* const products = tangents + block.rows() * block.stride;
    for (int64_t j = block.first; j < block.keys.end; j += kWidth) {
      const float* const panel = value_panels_.panel(block.b, block.key_head, j / kWidth);
      const size_t vectors = VectorsOfPanel(j, block.keys.end);
      Multiply(block.row_count(), vectors, Size(n_.value_dim),
               {scratch.d_o + n_.value_dim, Size(2 * n_.value_dim), 1}, panel, Size(kWidth),
               products + j - block.first, Size(block.stride));
      MultiplyTangents(block.row_count(), vectors, n_.value_dim, scratch.d_o, has_d_o(), panel,
                       has_v(), tangents + j - block.first, block.stride);
    }
  }

  void SetScoreGradientRow(const Block& block, int64_t r, const Columns& columns,
                           const Scratch& scratch) const {
    const int64_t row = (block.b * n_.heads + block.h) * n_.queries + block.begin + r;
    const auto dual = [&](float* tangents) {
      tangents += r * block.stride;
      return DualRow{tangents + block.rows() * block.stride, tangents};
    };
    const DualRow gradients = dual(scratch.gradients);
    SetScoreGradients(dual(scratch.weights), gradients, columns,
                      of_.d_lse != nullptr ? of_.d_lse[row] : 0.0f,
                      of_.d_lse_tangent != nullptr ? of_.d_lse_tangent[row] : 0.0f);
    for (float* numbers : {gradients.values, gradients.tangents}) {
      std::fill(numbers, numbers + columns.first(), 0.0f);
      std::fill(numbers + columns.last(), numbers + block.columns(), 0.0f);
    }
  }

  void WriteQueryGradients(const Block& block, const Scratch& scratch) {
    const int64_t rows = block.rows();
    const bool has_value = of_.gradient.x.data != nullptr || wants_factor() || block.dc != 0;
    float* const tangents = scratch.sums;
    float* const sums = tangents + rows * padded_dim_;
    std::fill_n(tangents, 2 * rows * padded_dim_, 0.0f);
    MultiplyByKeys(block, scratch.gradients, has_value ? 2 * rows : rows,
                   keys_.Head(block.b, block.key_head), n_.dim, tangents);
    if (has_y()) {
      MultiplyByKeys(block, scratch.gradients + rows * block.stride, rows,
                     key_tangents_.Head(block.b, block.key_head), n_.dim, tangents);
    }
    double of_factor = 0;
    double of_factor_tangent = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const float* const sum = sums + r * padded_dim_;
      const float* const tangent = tangents + r * padded_dim_;
      const float* const x_tangent = scratch.x + r * 2 * n_.dim;
      const float* const x = x_tangent + n_.dim;
      if (of_.gradient.x.data != nullptr) {
        float* const to = of_.gradient.x.row(block.b, block.h, block.begin + r);
        for (int64_t e = 0; e < n_.dim; ++e) to[e] = block.c * sum[e];
      }
      if (of_.gradient_tangent.x.data != nullptr) {
        float* const to = of_.gradient_tangent.x.row(block.b, block.h, block.begin + r);
        for (int64_t e = 0; e < n_.dim; ++e) to[e] = block.c * tangent[e] + block.dc * sum[e];
      }
      if (!wants_factor()) continue;
      of_factor += Sum(n_.dim, [=](int64_t e) { return x[e] * sum[e]; });
      of_factor_tangent +=
          Sum(n_.dim, [=](int64_t e) { return x[e] * tangent[e] + x_tangent[e] * sum[e]; });
    }
    *FactorGradient(false, block) = of_factor;
    *FactorGradient(true, block) = of_factor_tangent;
  }

  const AttentionGradient<float>& Gradient(bool is_tangent) const {
    return is_tangent ? of_.gradient_tangent : of_.gradient;
  }
  double* FactorGradient(bool is_tangent, const Block& block) {
    const int64_t head = block.b * n_.heads + block.h;
    return &d_factor_[Size((is_tangent * n_.batch * n_.heads + head) * row_blocks_ +
                           block.turn % row_blocks_)];
  }
  // The sum of a head, counted across the batch.
  float* BiasGradient(bool is_tangent, int64_t head) const {
    return d_bias_.data() + (is_tangent * n_.batch * n_.heads + head) * offsets();
  }

  // Sums the gradients of the scores over the rows: by offset, which are added to those of the
  // head, and by key, which stay in scratch memory.
  void AddBiasGradients(const Block& block, const Scratch& scratch) {
    const int64_t rows = block.rows();
    const int64_t columns = block.keys.end - block.first;
    const int64_t head = block.b * n_.heads + block.h;
    const auto gradients = [&](bool is_tangent, int64_t r) {
      return scratch.gradients + (r + (is_tangent ? 0 : rows)) * block.stride;
    };
    for (const bool is_tangent : {false, true}) {
      if (!wants_key_bias()) break;
      float* const sums = scratch.d_key_bias + is_tangent * stride_;
      std::fill_n(sums, columns, 0.0f);
      for (int64_t r = 0; r < rows; ++r) AddRow(gradients(is_tangent, r), columns, sums);
    }
    const int64_t size = rows - 1 + columns;
    for (const bool is_tangent : {false, true}) {
      if (!wants_bias()) break;
      float* const sums = scratch.d_bias + is_tangent * window();
      std::fill_n(sums, size, 0.0f);
      for (int64_t r = 0; r < rows; ++r) {
        AddRow(gradients(is_tangent, r), columns, sums + rows - 1 - r);
      }
    }
    const int64_t turn = block.turn % row_blocks_;
    head_turns_.Wait(head, turn);
    for (const bool is_tangent : {false, true}) {
      if (!wants_bias()) break;
      AddRow(scratch.d_bias + is_tangent * window(), size,
             BiasGradient(is_tangent, head) + n_.queries - block.end + block.first);
    }
    head_turns_.Pass(head, turn);
  }

  // Adds the gradients of keys, values and key biases.
  void AddKeyGradients(const Block& block, const Scratch& scratch) {
    if (!wants_any()) return;
    for (int64_t n = 0; n < turn_blocks_; ++n) {
      const int64_t sum = (block.b * n_.key_heads + block.key_head) * turn_blocks_ + n;
      const int64_t begin = std::max(block.keys.begin, n * kTurnKeys);
      const int64_t end = std::min(block.keys.end, (n + 1) * kTurnKeys);
      key_turns_.Wait(sum, block.turn);
      if (begin < end) AddKeyGradients(block, begin, end, scratch);
      key_turns_.Pass(sum, block.turn);
    }
  }
  void AddKeyGradients(const Block& block, int64_t begin, int64_t end,
                       const Scratch& scratch) const {
    const int64_t rows = block.rows();
    const auto add = [&](const KeySums& sums, const float* of_pairs, int64_t count,
                         const float* of_rows, int64_t padded) {
      if (!sums.wanted()) return;
      MultiplyAdd(Size(end - begin), Size(padded) / kLanes, Size(count),
                  {of_pairs + begin - block.first, 1, Size(block.stride)}, of_rows, Size(padded),
                  sums.row(block.b, block.key_head, begin), Size(sums.stride()));
    };
    const int64_t values = rows * block.stride;
    add(d_v_, scratch.weights + values, rows, scratch.stacked_d_o, padded_value_dim_);
    add(d_v_tangent_, scratch.weights, has_d_o() ? 2 * rows : rows, scratch.stacked_d_o,
        padded_value_dim_);
    add(d_y_, scratch.gradients + values, rows, scratch.scaled, padded_dim_);
    add(d_y_tangent_, scratch.gradients, has_x() || block.dc != 0 ? 2 * rows : rows, scratch.scaled,
        padded_dim_);
    for (const bool is_tangent : {false, true}) {
      float* const to = Gradient(is_tangent).key_bias;
      if (to == nullptr) continue;
      AddRow(scratch.d_key_bias + is_tangent * stride_ + begin - block.first, end - begin,
             to + (block.b * n_.heads + block.h) * n_.keys + begin);
    }
  }

  // Adds the gradients of what the batch shares, in order.
  void Merge() const {
    for (const bool is_tangent : {false, true}) {
      const AttentionGradient<float>& gradient = Gradient(is_tangent);
      for (int64_t h = 0; h < n_.heads; ++h) {
        double of_factor = 0;
        for (int64_t b = 0; b < n_.batch; ++b) {
          const int64_t head = b * n_.heads + h;
          for (int64_t n = 0; n < row_blocks_; ++n) {
            of_factor +=
                d_factor_[Size((is_tangent * n_.batch * n_.heads + head) * row_blocks_ + n)];
          }
          if (gradient.bias.table == nullptr) continue;
          float* const to = gradient.bias.table + b * gradient.bias.batch_stride + h * offsets();
          if (b == 0 || gradient.bias.batch_stride != 0) std::fill_n(to, offsets(), 0.0f);
          AddRow(BiasGradient(is_tangent, head), offsets(), to);
        }
        if (gradient.factor != nullptr) gradient.factor[h] = static_cast<float>(of_factor);
      }
    }
  }

  const AttentionDerivatives& of_;
  const AttentionInput<float>& in_;
  const AttentionInput<float>& tangent_;
  const Executor& executor_;
  const AttentionShape& n_;
  int64_t group_;
  int64_t padded_dim_;
  int64_t padded_value_dim_;
  int64_t stride_;  // at least that of every block
  int64_t block_;   // rows of a block
  int64_t row_blocks_;
  int64_t turn_blocks_;
  HeadTasks head_tasks_;
  DualPanels key_panels_;
  PaddedRows keys_;
  PaddedRows key_tangents_;
  PaddedRows values_;
  PaddedRows value_tangents_;
  DualPanels value_panels_;
  KeySums d_y_;
  KeySums d_y_tangent_;
  KeySums d_v_;
  KeySums d_v_tangent_;
  std::vector<double> d_factor_;  // per head and block of rows; then the tangents
  Buffer d_bias_;                 // per head; then the tangents
  Turns key_turns_;               // per key head and block of keys
  Turns head_turns_;              // per query head
};

void Differentiate(const AttentionDerivatives& of, const Executor& executor) {
  Pass(of, executor).Run();
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gnomon {
namespace {
HWY_EXPORT(Differentiate);
}  // namespace

void DerivativesKernel(const AttentionDerivatives& of, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(Differentiate)(of, executor);
}

}  // namespace gnomon
#endif
