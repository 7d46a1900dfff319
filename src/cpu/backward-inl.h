// The backward pass of the fused operator, for one instruction set.
//
// A task is a block of keys of one key head, with all queries that attend to them. It accumulates
// the gradients of its keys and values in private memory. The gradient of a block of queries is
// shared: tasks add to it in turn, in key order. They add table gradients to a few partial sums,
// also in turn. Tasks start in key order, so a task waits only for tasks that have already started.
// Sums have a fixed order, so results do not depend on the number of workers. With many key heads,
// each head is one task that packs its own data, processes its blocks in order and finishes its
// gradients.
#if defined(GNOMON_SRC_CPU_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_BACKWARD_INL_H_
#undef GNOMON_SRC_CPU_BACKWARD_INL_H_
#else
#define GNOMON_SRC_CPU_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <array>
#include <vector>

#include "base/call_log.h"
#include "base/pair_count.h"
#include "base/parallel.h"
#include "base/visible_keys.h"
#include "cpu/addends-inl.h"
#include "cpu/columns-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/mask-inl.h"
#include "cpu/packing-inl.h"
#include "cpu/real.h"
#include "cpu/row_products-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/skipping-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// Functions is ByTable or Inlined.
template <class Functions>
class BackwardPass {
 public:
  BackwardPass(const PairTable& table, const AttentionInput<Real>& in,
               const AttentionBackwardInput<Real>& saved, const AttentionGradient<Real>& grad,
               const Executor& executor)
      : functions_(table),
        in_(in),
        saved_(saved),
        grad_(grad),
        executor_(executor),
        n_(in.shape),
        group_(n_.heads / std::max<int64_t>(1, n_.key_heads)),
        dim_(functions_.has_product() ? n_.dim : 0),
        pairs_(MultipliesPairs(in, dim_)),
        in_place_(MultipliesInPlace(n_, pairs_)),
        panel_rows_(pairs_ ? DivideUp(dim_, 2) : dim_),
        padded_dim_(PaddedColumns(dim_)),
        padded_value_dim_(PaddedColumns(n_.value_dim)),
        blocks_(std::max<int64_t>(1, DivideUp(n_.keys, kBackwardColumns))),
        row_blocks_(DivideUp(n_.queries, kRowBlock)),
        parts_(Parts(n_, grad, blocks_)),
        head_rows_(n_.batch * n_.heads * n_.queries),
        head_tasks_(n_, executor_, blocks_),
        key_panels_(in.y, head_tasks_.keys(), dim_ > 0 && !in_place_ ? n_.keys : 0, dim_, pairs_),
        value_panels_(in.v, head_tasks_.keys(), n_.keys, n_.value_dim),
        keys_(in.y, head_tasks_.keys(), dim_ > 0 ? n_.keys : 0, dim_),
        queries_(in.x, head_tasks_.queries(), dim_ > 0 ? n_.queries : 0, dim_),
        d_o_(saved.d_o, head_tasks_.queries(), n_.queries, n_.value_dim),
        scalars_(in, table, head_tasks_.keys(), n_.keys),
        addends_(in, kBackwardColumns,
                 {.multiply = true, .add_product = grad.relative_query.data != nullptr},
                 {.multiply = true, .add_product = false}, grad.relative_key.data != nullptr),
        segments_(in.mask, n_),
        skipping_(in, table),
        positions_(in),
        relative_queries_(in.relative.query, head_tasks_.queries(),
                          addends_.keys().exists() ? n_.queries : 0, in.relative.dim),
        content_keys_(in.relative.key, head_tasks_.keys(), of_keys().exists() ? n_.keys : 0,
                      in.relative.key_dim),
        d_position_queries_(of_keys().table(), grad.relative_queries,
                            TableParts(of_keys().table())),
        d_relative_keys_(addends_.keys(), grad.relative_keys, TableParts(addends_.keys())),
        d_relative_values_(addends_.values(), grad.relative_values, TableParts(addends_.values())),
        largest_(head_rows_),
        inverse_sum_(head_rows_),
        delta_(head_rows_),
        top_f_(head_rows_),
        top_slopes_(head_rows_ * (functions_.row_scalars() + 2)),
        row_sums_(row_numbers() + (balances() ? 2 : 0) + (grad.temperature != nullptr ? 2 : 0)),
        d_head_(Size(n_.batch * n_.heads * blocks_)),
        row_turns_(n_.batch * n_.heads * row_blocks_),
        part_turns_(n_.batch * n_.key_heads * parts_),
        pair_turns_(PairSums() * row_blocks_ * blocks_) {
    for (int64_t b = 0; b < n_.batch; ++b) {
      for (int64_t r = 0; r < row_blocks_; ++r) seen_blocks_.push_back(FindSeenBlocks(b, r));
    }
    // Gradients are accumulated in whole vectors.
    if (grad.x.data != nullptr && dim_ > 0 && padded_dim_ != dim_) {
      d_queries_.Reset(head_tasks_.queries().count * n_.queries * padded_dim_);
    }
    if (functions_.is_distance()) norms_.Reset(head_rows_);
    if (pairs_) paired_queries_.Reset(head_tasks_.queries().count * n_.queries * panel_rows_);
    if (row_sums_ > 0) d_rows_.Reset(row_sums_ * head_rows_);
    if (grad.bias.table != nullptr) {
      d_bias_.Reset(n_.batch * n_.heads * parts_ * addends_.bias().stride());
    }
    if (grad.relative_query.data != nullptr) {
      d_relative_queries_.Reset(head_rows_ * addends_.keys().padded());
    }
  }

  void Run() {
    if (call_plan != nullptr) {
      *call_plan = {in_place_ ? "reads keys in place" : "packs all keys first", pairs_,
                    skipping_.active()};
    }
    Prepare();
    if (!skipping_.active()) CountAllPairs();
    const int64_t heads = n_.batch * n_.key_heads;
    const int64_t tasks = head_tasks_.whole() ? heads : heads * blocks_;
    const int64_t scratch =
        kBackwardColumns * (padded_dim_ + padded_value_dim_ + column_numbers() + 2 * kRowBlock + 4 +
                            group_ + (grad_.pair_bias.data != nullptr ? kRowBlock : 0) +
                            (of_keys().exists() ? kRowBlock + of_keys().table().padded() : 0)) +
        row_sums_ * kRowBlock + 2 * addends_.window_size() + of_keys().scratch_size();
    const Buffer memory(scratch * WorkersFor(executor_, tasks));
    if (head_tasks_.whole()) {
      ParallelTasks(executor_, heads, [&](int64_t head, int worker) {
        WholeHead(head, worker, memory.data() + worker * scratch);
      });
    } else {
      // Interleaves as many heads as there are workers, so that workers rarely wait for their turn
      // and each head's rows stay in cache.
      const int64_t side_by_side = std::min<int64_t>(heads, WorkersFor(executor_, tasks));
      ParallelTasks(executor_, tasks, [&](int64_t task, int worker) {
        const int64_t first = task / (side_by_side * blocks_) * side_by_side;
        const int64_t width = std::min(side_by_side, heads - first);
        const int64_t head = first + (task - first * blocks_) % width;
        KeyBlock(head / n_.key_heads, head % n_.key_heads, (task - first * blocks_) / width,
                 memory.data() + worker * scratch);
      });
      const int64_t row_tasks = finishes_rows() ? n_.batch * n_.heads * row_blocks_ : 0;
      ParallelTasks(executor_, row_tasks, [&](int64_t task, int) { FinishRows(task); });
    }
    Merge();
  }

 private:
  // The numbers of row sums (over keys) and column sums (over queries). The sums are the gradients
  // of the scalars, followed by that of the squared norm.
  int row_numbers() const { return functions_.row_scalars() + (functions_.is_distance() ? 1 : 0); }
  int column_numbers() const {
    return functions_.column_scalars() + (functions_.is_distance() ? 1 : 0);
  }

  // The gradients of a head's factor and scalars.
  struct HeadSums {
    double factor = 0;
    double t[kMostScalars] = {};
  };

  // The number of partial table sums per key head, in which its blocks of keys take turns: enough
  // to balance the load, but few enough that their memory is small compared with the inputs. A bias
  // has few numbers, so many workers get sums of their own.
  static int64_t Parts(const AttentionShape& n, const AttentionGradient<Real>& grad,
                       int64_t blocks) {
    constexpr int64_t kTasks = 16;
    constexpr int64_t kTasksOfBias = 128;
    const int64_t heads = std::max<int64_t>(1, n.batch * n.key_heads);
    const bool only_bias = grad.relative_keys == nullptr && grad.relative_values == nullptr &&
                           grad.relative_queries == nullptr;
    const int64_t affordable =
        only_bias ? n.queries * n.value_dim / (4 * std::max<int64_t>(1, n.queries + n.keys)) : 0;
    const int64_t parts =
        std::max(DivideUp(kTasks, heads), std::min(DivideUp(kTasksOfBias, heads), affordable));
    return std::min(blocks, parts);
  }
  bool sums_tables() const {
    return d_bias_ || d_relative_keys_.wanted() || d_relative_values_.wanted() ||
           d_position_queries_.wanted();
  }

  // Processes a whole key head: packs it, runs its blocks of keys, and finishes its rows.
  void WholeHead(int64_t head, int worker, Real* scratch) {
    head_tasks_.Assign(head, worker);
    for (int64_t p = 0; p < key_panels(); ++p) PrepareKeys(head * key_panels() + p);
    const int64_t in_head = group_ * row_blocks_;
    for (int64_t n = head * in_head; n < (head + 1) * in_head; ++n) {
      PrepareRows(n);
      if (skipping_.active()) ChooseTiles(n, choices_[Size(worker)]);
    }
    for (int64_t index = 0; index < blocks_; ++index) {
      KeyBlock(head / n_.key_heads, head % n_.key_heads, index, scratch);
    }
    for (int64_t n = head * in_head; finishes_rows() && n < (head + 1) * in_head; ++n) {
      FinishRows(n);
    }
  }

  // Packs keys and values, scales the bias, computes each row's softmax, clears the accumulators of
  // rows and tables, and selects tiles. If tasks are whole heads, prepares only the data that all
  // heads share.
  void Prepare() {
    const int64_t row_blocks = n_.batch * n_.heads * row_blocks_;
    const int64_t key_tasks = head_tasks_.whole() ? 0 : n_.batch * n_.key_heads * key_panels();
    const int64_t row_tasks = head_tasks_.whole() ? 0 : row_blocks;
    const int64_t packs_and_addends = key_tasks + row_tasks + addends_.tasks();
    ParallelTasks(executor_, packs_and_addends + skipping_.tasks(), [&](int64_t task, int) {
      if (task >= packs_and_addends) return skipping_.Fill(task - packs_and_addends);
      if (task < key_tasks) return PrepareKeys(task);
      if (task < key_tasks + row_tasks) return PrepareRows(task - key_tasks);
      addends_.Fill(task - key_tasks - row_tasks);
    });
    if (!skipping_.active()) return;
    tiles_.resize(Size(row_blocks));
    choices_.resize(Size(WorkersFor(executor_, row_blocks)));
    ParallelTasks(executor_, row_tasks,
                  [&](int64_t task, int worker) { ChooseTiles(task, choices_[Size(worker)]); });
  }

  int64_t key_panels() const { return DivideUp(n_.keys, kWidth); }

  // Packs panel `index`, counted across all key heads.
  void PrepareKeys(int64_t index) const {
    const int64_t p = index % key_panels();
    const int64_t b = index / key_panels() / n_.key_heads;
    const int64_t h = index / key_panels() % n_.key_heads;
    const KeyRange keys = BatchKeys(in_.mask, n_.keys, b);
    value_panels_.Fill(b, h, p, keys);
    scalars_.Fill(b, h, p, keys);
    const int64_t begin = std::max(keys.begin, p * kWidth);
    const int64_t end = std::min(keys.end, (p + 1) * kWidth);
    if (of_keys().exists()) content_keys_.Fill(b, h, begin, end);
    if (dim_ == 0) return;
    if (!in_place_) key_panels_.Fill(b, h, p, keys);
    keys_.Fill(b, h, begin, end);
  }

  // A range of queries of one head.
  struct RowRange {
    int64_t b;
    int64_t h;
    int64_t begin;
    int64_t end;
  };
  // Block `index`, counted across all heads.
  RowRange RowsOf(int64_t index) const {
    const int64_t head = index / row_blocks_;
    const int64_t begin = index % row_blocks_ * kRowBlock;
    return {head / n_.heads, head % n_.heads, begin, std::min(begin + kRowBlock, n_.queries)};
  }

  void PrepareRows(int64_t index) {
    const auto [b, h, begin, end] = RowsOf(index);
    const int64_t first = (b * n_.heads + h) * n_.queries + begin;
    row_turns_.Start(index, SeenBlocks(b, index % row_blocks_).begin);
    if (wants_queries()) {
      for (int64_t i = begin; i < end; ++i) {
        std::fill_n(QueryGradient(b, h, i), padded_dim_, 0.0f);
      }
    }
    for (int s = 0; s < row_sums_; ++s) std::fill_n(RowSum(s) + first, end - begin, 0.0f);
    if (d_relative_queries_) {
      std::fill_n(RelativeQueryGradient(first), (end - begin) * addends_.keys().padded(), 0.0f);
    }
    d_o_.Fill(b, h, begin, end);
    if (dim_ > 0) queries_.Fill(b, h, begin, end);
    if (addends_.keys().exists()) relative_queries_.Fill(b, h, begin, end);
    std::vector<TableRun> runs;
    RowReader values(in_.v, n_.value_dim);
    RowReader keys(in_.y, dim_);
    LonePairs<Functions> top_pairs(functions_, in_);
    int64_t rows_of_pairs[kRowBlock];
    bool near[kRowBlock];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = first + i - begin;
      if (norms_) norms_.data()[row] = SquaredNorm(queries_.Head(b, h).row(i), dim_);
      if (pairs_) {
        PairColumns(in_.x.row(b, h, i), 0, dim_, PairedQuery(b, h, i));
      }
      const Real sum = saved_.statistics[head_rows_ + row];
      if (sum == 0.0f) {
        // 2^(s - inf) = 0, so the weights and gradients of a row without keys are 0.
        largest_.data()[row] = kInfinity;
        inverse_sum_.data()[row] = 0;
        delta_.data()[row] = 0;
        top_f_.data()[row] = 0;
        std::fill_n(TopSlopes(row), functions_.row_scalars() + 2, 0.0f);
        continue;
      }
      largest_.data()[row] = saved_.statistics[row];
      inverse_sum_.data()[row] = 1.0f / sum;
      delta_.data()[row] = Delta(b, h, i, sum, values, &runs) - DLse(row);
      const int64_t top = TopOf(row);
      top_f_.data()[row] = 0;
      std::fill_n(TopSlopes(row), functions_.row_scalars() + 2, 0.0f);
      if (!(multiplies_scores() || balances_queries()) || top < 0) continue;
      const Real* const x = dim_ > 0 ? queries_.Head(b, h).row(i) : nullptr;
      const Real* const y = dim_ > 0 ? keys.Row(b, h / group_, top) : nullptr;
      near[top_pairs.count()] = functions_.is_distance() && IsNear(x, y);
      rows_of_pairs[top_pairs.count()] = row;
      top_pairs.Add(b, h, i, h / group_, top, x, y);
    }
    top_pairs.Differentiate();
    for (int64_t n = 0; n < top_pairs.count(); ++n) {
      const int64_t row = rows_of_pairs[n];
      if (multiplies_scores()) top_f_.data()[row] = top_pairs.f(n);
      if (!balances_queries()) continue;
      // The slope of a definition may not be finite at distance 0.
      const auto finite = [](Real slope) { return std::isfinite(slope) ? slope : 0.0f; };
      Real* const slopes = TopSlopes(row);
      if (functions_.has_product()) slopes[functions_.row_scalars() + 1] = finite(top_pairs.g(n));
      if (functions_.is_distance() && !near[n]) slopes[0] = slopes[functions_.row_scalars() + 1];
      ForScalars(functions_.row_scalars(),
                 [&](int s) { slopes[s + 1] = finite(top_pairs.a(s, n)); });
    }
  }

  // Whether the pair's gradient must be computed from the difference of its tokens.
  bool IsNear(const Real* x, const Real* y) const {
    const Real norms = SquaredNorm(x, dim_) + SquaredNorm(y, dim_);
    return SquaredDistance(x, y, dim_) < norms * kLeastNear;
  }

  // sum_j p_ij dP_ij = dO_i . o_i for a row whose weights are 2^(score - largest) / sum. If one key
  // dominates, dP_ij and delta_i cancel for that key, and so must their rounding errors. Delta is
  // then computed as that key's dP, exactly as in the tiles, plus a correction for the difference
  // between o_i and the key's value.
  Real Delta(int64_t b, int64_t h, int64_t i, Real sum, RowReader& values,
             std::vector<TableRun>* runs) const {
    const Real* HWY_RESTRICT o = saved_.o.row(b, h, i);
    const Real* HWY_RESTRICT d_o = saved_.d_o.row(b, h, i);
    const int64_t key = TopOf((b * n_.heads + h) * n_.queries + i);
    const Real kept = key < 0 || sum >= 2.0f ? 0.0f : addends_.Kept(b, h, i, key);
    if (kept == 0.0f) return Sum(n_.value_dim, [o, d_o](int64_t e) { return o[e] * d_o[e]; });
    const Real* HWY_RESTRICT v = values.Row(b, h / group_, key);
    Real product = InnerProduct(d_o, v, n_.value_dim);
    Real others =
        Sum(n_.value_dim, [o, d_o, v, kept](int64_t e) { return d_o[e] * (o[e] - kept * v[e]); });
    if (addends_.values().exists()) {
      addends_.FindEntries(b, i, key, runs);
      for (const TableRun& run : *runs) {
        const Real* w =
            in_.relative.values +
            (addends_.values().Index(h) * addends_.values().size() + run.entry) * n_.value_dim;
        const Real relative = InnerProduct(d_o, w, n_.value_dim);
        product += relative;
        others -= kept * relative;
      }
    }
    // A sum of 1 means that all other weights are below the rounding error.
    return product * kept + (sum == 1.0f ? 0.0f : others);
  }

  // A range that contains all blocks of keys to which the queries attend.
  KeyRange SeenBlocks(int64_t b, int64_t row_block) const {
    return seen_blocks_[Size(b * row_blocks_ + row_block)];
  }
  KeyRange FindSeenBlocks(int64_t b, int64_t row_block) const {
    const int64_t begin = row_block * kRowBlock;
    const int64_t end = std::min(begin + kRowBlock, n_.queries);
    const KeyRange batch = segments_.Narrowed(BatchKeys(in_.mask, n_.keys, b), b, begin, end);
    if (positions_.exists()) {
      const KeyRange near = positions_.Trimmed(b, positions_.SeenBy(b, begin, end), batch);
      if (near.empty()) return {};
      return {near.begin / kBackwardColumns, DivideUp(near.end, kBackwardColumns)};
    }
    // Both ends of a query's range are monotonic in its position.
    const int64_t position = QueryOffset(in_, b);
    const int64_t first =
        std::max<int64_t>(0, VisibleKeys(in_.mask, batch, position + begin).begin);
    const int64_t last = std::min(n_.keys, VisibleKeys(in_.mask, batch, position + end - 1).end);
    if (last <= first) return {};
    return {first / kBackwardColumns, DivideUp(last, kBackwardColumns)};
  }

  // The blocks of keys that a block of queries computes.
  struct Tiles {
    KeyRange blocks;
    std::vector<bool> left_out;  // per block; empty if no block is skipped

    // Whether a block is computed.
    bool Computes(int64_t block) const {
      return left_out.empty() || !left_out[Size(block - blocks.begin)];
    }
  };

  // Scratch memory of one worker for tile selection.
  struct Choice {
    RowBounds rows;
    std::vector<Real> bounds;
  };

  // Selects the tiles that a block of queries can skip, given the softmax sums from the forward
  // pass.
  void ChooseTiles(int64_t index, Choice& choice) {
    const auto [b, h, begin, end] = RowsOf(index);
    const int64_t rows = end - begin;
    Tiles& tiles = tiles_[Size(index)];
    tiles.blocks = SeenBlocks(b, index % row_blocks_);
    const int64_t seen = tiles.blocks.end - tiles.blocks.begin;
    if (seen > 1 && skipping_.Active(b, h)) {
      LeaveOutTiles({b, h, 1, begin, rows}, choice, &tiles);
      row_turns_.Start(index, tiles.blocks.begin);
    }
    const int64_t computed = tiles.blocks.end - tiles.blocks.begin -
                             std::count(tiles.left_out.begin(), tiles.left_out.end(), true);
    AddPairs(rows * seen * kBackwardColumns, rows * computed * kBackwardColumns);
  }

  void LeaveOutTiles(const BlockRows& range, Choice& choice, Tiles* tiles) const {
    RowBounds& rows = choice.rows;
    const KeyRange batch = BatchKeys(in_.mask, n_.keys, range.b);
    const KeyRange seen = tiles->blocks;
    const auto keys_of = [batch](int64_t block) {
      return KeyRange{std::max(batch.begin, block * kBackwardColumns),
                      std::min(batch.end, (block + 1) * kBackwardColumns)};
    };
    HWY_ALIGN Real sums[kRowBlock] = {};
    HWY_ALIGN Real weights[kRowBlock] = {};
    const int64_t first_row = (range.b * n_.heads + range.h) * n_.queries + range.i;
    std::copy_n(saved_.statistics + first_row, range.queries, sums);
    std::copy_n(saved_.statistics + head_rows_ + first_row, range.queries, weights);
    // A row without keys contributes no gradients.
    Skipping::SumsOf(sums, weights, range.queries, kInfinity, sums);
    const Real gate = skipping_.Gate(range, sums);
    Real top = -kInfinity;
    int64_t promising = 0;
    for (int64_t block = seen.begin; block < seen.end; ++block) {
      const KeyRange keys = keys_of(block);
      top = std::max(top, skipping_.OffsetBias(range, 0, keys.begin, keys.end));
      promising += skipping_.PassesGate(range, gate, keys.begin, keys.end) ? 1 : 0;
    }
    if (promising == 0) return;
    skipping_.SetRows(range, &rows);
    for (int64_t r = 0; r < range.queries; ++r) {
      // Non-finite values must reach all keys to which the row attends, so skip none of its tiles.
      if (!std::isfinite(delta_.data()[first_row + r])) rows.doubt[r] = kNan;
    }
    choice.bounds.resize(Size(seen.end - seen.begin) * kRowBlock);
    for (int64_t block = seen.begin; block < seen.end; ++block) {
      const KeyRange keys = keys_of(block);
      Real* const bound = choice.bounds.data() + (block - seen.begin) * kRowBlock;
      if (skipping_.PassesGate(range, gate, keys.begin, keys.end)) {
        skipping_.Bound(rows, skipping_.KeysOf(range.b, range.h / group_, keys.begin, keys.end),
                        keys.begin, keys.end, &top, bound);
      } else {
        std::fill_n(bound, kRowBlock, kInfinity);
      }
    }
    skipping_.SetLimits(choice.bounds.data(), seen.end - seen.begin, sums, &rows);
    const uint64_t all = Skipping::AllRows(range);
    std::vector<bool> left_out;
    for (int64_t block = seen.begin; block < seen.end; ++block) {
      left_out.push_back(
          Skipping::LeftOut(rows, choice.bounds.data() + (block - seen.begin) * kRowBlock) == all);
    }
    // Remove skipped blocks at both ends from the range.
    const auto first = std::find(left_out.begin(), left_out.end(), false);
    const auto last = std::find(left_out.rbegin(), left_out.rend(), false).base();
    if (first == left_out.end()) {
      tiles->blocks = {};
      return;
    }
    tiles->blocks = {seen.begin + (first - left_out.begin()),
                     seen.begin + (last - left_out.begin())};
    if (std::find(first, last, true) != last) tiles->left_out.assign(first, last);
  }

  void CountAllPairs() const {
    if (!CountsPairs()) return;
    for (int64_t b = 0; b < n_.batch; ++b) {
      for (int64_t first = 0; first < n_.queries; first += kRowBlock) {
        const int64_t rows = std::min(kRowBlock, n_.queries - first);
        const KeyRange seen = SeenBlocks(b, first / kRowBlock);
        const int64_t pairs = n_.heads * rows * (seen.end - seen.begin) * kBackwardColumns;
        AddPairs(pairs, pairs);
      }
    }
  }

  // Rows [first_row, last_row) of a tile and the columns they are multiplied by.
  struct Band {
    int64_t first_row;
    int64_t last_row;
    int64_t begin;
    int64_t end;

    size_t rows() const { return Size(last_row - first_row); }
  };

  // The working memory and accumulators of a block of keys.
  struct Block {
    int64_t b;
    int64_t index;
    int64_t first;       // first key
    int64_t part;        // index of the partial table sums
    Real* tile;          // kRowBlock x kBackwardColumns: inner products, then weights
    Real* gradient;      // kRowBlock x kBackwardColumns: dP, then the inner products' gradients
    Real* d_keys;        // kBackwardColumns x padded_dim_
    Real* d_values;      // kBackwardColumns x padded_value_dim_
    Real* d_columns;     // column_numbers() x kBackwardColumns
    Real* d_key_biases;  // kBackwardColumns for each head of the group
    Real* d_pairs;       // kRowBlock x kBackwardColumns: gradients of the pair bias
    Real* d_rows;        // row_sums_ x kRowBlock: the tile's contribution to row sums
    Real* added;         // scratch for one row: terms added to its scores
    Real* d_added;       // gradients of `added`
    Real* plain;         // added terms before the row's temperature
    Real* capped;        // one row's uncapped scores, then the biases that cap them
    Real* key_window;    // kRowBlock rows: products with relative keys, then their gradients
    Real* value_window;  // kRowBlock rows: products of dO with relative values, then weights
    Real* of_keys;       // products with relative queries, then gradients, laid out like the tile
    Real* key_parts;     // scratch for of_keys
    Real* d_of_keys;     // kBackwardColumns rows: gradients of the rows of content_keys_
    TileMask mask;
    std::vector<Band> bands;
    TableWindow keys_window;
    std::vector<TableRun> runs;
    std::vector<NearPair> near_pairs;  // near pairs of the tile; columns within the tile
  };

  void KeyBlock(int64_t b, int64_t key_head, int64_t index, Real* scratch) {
    const int64_t first = index * kBackwardColumns;
    const int64_t columns = std::min(kBackwardColumns, n_.keys - first);
    Block block{};
    block.b = b;
    block.index = index;
    block.first = first;
    block.part = index % parts_;
    block.tile = scratch;
    block.gradient = block.tile + kRowBlock * kBackwardColumns;
    block.d_keys = block.gradient + kRowBlock * kBackwardColumns;
    block.d_values = block.d_keys + kBackwardColumns * padded_dim_;
    block.d_columns = block.d_values + kBackwardColumns * padded_value_dim_;
    block.d_key_biases = block.d_columns + kBackwardColumns * column_numbers();
    block.added = block.d_key_biases + kBackwardColumns * group_;
    block.d_added = block.added + kBackwardColumns;
    block.plain = block.d_added + kBackwardColumns;
    block.capped = block.plain + kBackwardColumns;
    block.key_window = block.capped + kBackwardColumns;
    block.value_window = block.key_window + addends_.window_size();
    block.d_rows = block.value_window + addends_.window_size();
    block.key_parts = block.d_rows + row_sums_ * kRowBlock;
    block.d_of_keys = block.key_parts + of_keys().scratch_size();
    block.of_keys = block.d_of_keys;
    block.d_pairs = block.d_of_keys;
    if (of_keys().exists()) {
      const int64_t size = kBackwardColumns * of_keys().table().padded();
      std::fill_n(block.d_of_keys, size, 0.0f);
      block.of_keys += size;
      block.d_pairs = block.of_keys + kRowBlock * kBackwardColumns;
    }
    const int64_t sums = (b * n_.key_heads + key_head) * parts_ + block.part;
    if (sums_tables()) {
      part_turns_.Wait(sums, index / parts_);
      if (index == block.part) ClearTables(b, key_head, block.part);
    }
    std::fill_n(block.d_keys, columns * padded_dim_, 0.0f);
    std::fill_n(block.d_values, columns * padded_value_dim_, 0.0f);
    std::fill_n(block.d_columns, kBackwardColumns * (column_numbers() + group_), 0.0f);
    // For each block of rows, process the heads of a group in sequence, because heads that share a
    // pair bias take turns to add to its gradient.
    for (int64_t row_block = 0; row_block < row_blocks_; ++row_block) {
      const int64_t row = row_block * kRowBlock;
      const int64_t rows = std::min(kRowBlock, n_.queries - row);
      const KeyRange seen = skipping_.active() ? KeyRange{} : SeenBlocks(b, row_block);
      for (int64_t h = key_head * group_; h < (key_head + 1) * group_; ++h) {
        const Tiles* const tiles = skipping_.active()
                                       ? &tiles_[Size((b * n_.heads + h) * row_blocks_ + row_block)]
                                       : nullptr;
        const KeyRange blocks = tiles != nullptr ? tiles->blocks : seen;
        const bool sees = index >= blocks.begin && index < blocks.end;
        const bool adds =
            sees && (tiles == nullptr || tiles->Computes(index)) && Tile(block, h, row, rows);
        if (sees) {
          const int64_t turn = (b * n_.heads + h) * row_blocks_ + row_block;
          row_turns_.Wait(turn, index);
          if (adds) AddToRows(block, h, row, rows);
          row_turns_.Pass(turn, index);
        }
        if (grad_.pair_bias.data != nullptr) AddToPairs(block, h, row, rows, adds);
      }
    }
    if (grad_.key_bias != nullptr) {
      for (int64_t h = 0; h < group_; ++h) {
        std::copy_n(block.d_key_biases + h * kBackwardColumns, columns,
                    grad_.key_bias + (b * n_.heads + key_head * group_ + h) * n_.keys + first);
      }
    }
    if (sums_tables()) part_turns_.Pass(sums, index / parts_);
    const Real* d_keys = block.d_keys;
    const Real* d_values = block.d_values;
    const Real* d_columns = block.d_columns;
    for (int64_t j = 0; j < columns; ++j) {
      if (grad_.y.data != nullptr && dim_ > 0) {
        Real* d_y = grad_.y.row(b, key_head, first + j);
        std::copy_n(d_keys + j * padded_dim_, dim_, d_y);
        if (functions_.is_distance()) {
          // If no query attends to the key, d_norm is 0 and the key's row may not have been set.
          const Real d_norm = d_columns[functions_.column_scalars() * kBackwardColumns + j];
          if (d_norm != 0) AddNormGradient(d_norm, keys_.Head(b, key_head).row(first + j), d_y);
        }
      }
      if (grad_.relative_key.data != nullptr) {
        std::copy_n(block.d_of_keys + j * of_keys().table().padded(), in_.relative.key_dim,
                    grad_.relative_key.row(b, key_head, first + j));
      }
      if (grad_.v.data != nullptr) {
        std::copy_n(d_values + j * padded_value_dim_, n_.value_dim,
                    grad_.v.row(b, key_head, first + j));
      }
    }
    for (int s = 0; grad_.column_scalars != nullptr && s < functions_.column_scalars(); ++s) {
      std::copy_n(
          d_columns + s * kBackwardColumns, columns,
          grad_.column_scalars + ((s * n_.batch + b) * n_.key_heads + key_head) * n_.keys + first);
    }
  }

  void ClearTables(int64_t b, int64_t key_head, int64_t part) const {
    for (int64_t h = key_head * group_; h < (key_head + 1) * group_; ++h) {
      if (d_bias_) {
        std::fill_n(BiasGradient(part, b * n_.heads + h), addends_.bias().stride(), 0.0f);
      }
      d_relative_keys_.ClearPart(TablePart(addends_.keys(), b, h, part));
      d_relative_values_.ClearPart(TablePart(addends_.values(), b, h, part));
      d_position_queries_.ClearPart(TablePart(of_keys().table(), b, h, part));
    }
  }

  // Sets the bands of a visible tile: all rows with all columns or, with segments, the rows of each
  // segment with the columns they see. Tables are read and accumulated for whole tiles.
  void SetBands(Block& block, int64_t first_row, int64_t rows) const {
    const TileMask& mask = block.mask;
    block.bands.assign(1, {0, rows, mask.begin, mask.end});
    if (!segments_.exists() || addends_.relative() || of_keys().exists() ||
        grad_.pair_bias.data != nullptr) {
      return;
    }
    block.bands.clear();
    for (int64_t r = 0; r < rows;) {
      const int64_t end = std::min(rows, segments_.EndOfRows(block.b, first_row + r) - first_row);
      const RowSpan seen = mask.Seen(r, end);
      if (seen.begin < seen.end) block.bands.push_back({r, end, seen.begin, seen.end});
      r = end;
    }
  }

  // Computes all gradients of a tile except those of its rows (AddToRows). Returns false if there
  // are none.
  bool Tile(Block& block, int64_t h, int64_t first_row, int64_t rows) {
    const int64_t b = block.b;
    const int64_t first = block.first;
    const int64_t key_head = h / group_;
    Real* HWY_RESTRICT tile = block.tile;
    Real* HWY_RESTRICT gradient = block.gradient;
    TileMask& mask = block.mask;
    const KeyRange batch = BatchKeys(in_.mask, n_.keys, b);
    const KeyRange near = segments_.Narrowed(batch, b, first_row, first_row + rows);
    const int64_t width = std::min(kBackwardColumns, n_.keys - first);
    mask = {};
    if (positions_.exists()) {
      mask.Set(positions_, near, b, first_row, rows, first, width);
    } else {
      mask.Set(in_.mask, near, QueryOffset(in_, b) + first_row, rows, first, width);
    }
    mask.SetSegments(segments_, b, first_row, rows, first);
    mask.SetPairs(addends_.pair_mask(), b, h, 1, first_row, rows, first);
    if (mask.end <= mask.begin) return false;
    SetBands(block, first_row, rows);
    const Rows d_o = d_o_.Head(b, h);
    const Rows queries = dim_ > 0 ? queries_.Head(b, h) : Rows{};
    for (const Band& band : block.bands) {
      if (dim_ > 0) MultiplyTokens(block, band, h, first_row, batch);
      for (int64_t c = band.begin / kLaneCount * kLaneCount; c < band.end;) {
        const size_t vectors = VectorsOfPanel(c, band.end);
        Multiply(band.rows(), vectors, Size(n_.value_dim),
                 {saved_.d_o.row(b, h, first_row + band.first_row), Size(saved_.d_o.stride[2]), 1},
                 value_panels_.panel(b, key_head, (first + c) / kWidth) + c % kWidth, kPanel,
                 gradient + band.first_row * kBackwardColumns + c, kBackwardColumns);
        c += static_cast<int64_t>(vectors) * kLaneCount;
      }
    }
    block.keys_window =
        addends_.Window(b, first_row, rows, first + mask.begin, first + mask.end, block.key_window);
    const TableWindow& keys_window = block.keys_window;
    TableWindow values_window = keys_window;
    values_window.data = block.value_window;
    if (addends_.keys().exists()) addends_.MultiplyKeys(b, h, first_row, rows, keys_window);
    if (addends_.values().exists()) {
      addends_.values().Multiply(
          h, rows, {saved_.d_o.row(b, h, first_row), Size(saved_.d_o.stride[2]), 1}, values_window);
    }
    if (of_keys().exists()) {
      of_keys().template Products<kBackwardColumns>(b, h, first_row, rows, first, mask.begin,
                                                    mask.end, block.of_keys, block.key_parts,
                                                    &block.runs);
    }
    RowGradients(block, h, first_row, mask, keys_window, values_window);
    if (wants_of_keys()) {
      of_keys().template Gradients<kBackwardColumns>(
          b, h, first_row, rows, first, mask.begin, mask.end, block.of_keys,
          grad_.relative_key.data != nullptr ? block.d_of_keys : nullptr, d_position_queries_,
          TablePart(of_keys().table(), b, h, block.part), content_keys_.Head(b, key_head),
          block.key_parts, &block.runs);
    }
    TableGradients(block, h, first_row, rows, keys_window, values_window);
    for (const Band& band : block.bands) {
      const size_t seen = Size(band.end - band.begin);
      const int64_t at = band.first_row * kBackwardColumns + band.begin;
      const int64_t row = first_row + band.first_row;
      if (grad_.v.data != nullptr) {
        MultiplyAdd(seen, Size(padded_value_dim_) / kLanes, band.rows(),
                    {tile + at, 1, Size(kBackwardColumns)}, d_o.row(row), Size(d_o.stride),
                    block.d_values + band.begin * padded_value_dim_, Size(padded_value_dim_));
      }
      if (dim_ > 0 && grad_.y.data != nullptr) {
        MultiplyAdd(seen, Size(padded_dim_) / kLanes, band.rows(),
                    {gradient + at, 1, Size(kBackwardColumns)}, queries.row(row),
                    Size(queries.stride), block.d_keys + band.begin * padded_dim_,
                    Size(padded_dim_));
      }
    }
    if (dim_ > 0 && grad_.y.data != nullptr) {
      const Rows keys = keys_.Head(b, key_head);
      for (const NearPair& pair : block.near_pairs) {
        AddScaledDifference(2 * pair.d_distance, keys.row(first + pair.column),
                            queries.row(first_row + pair.row), dim_,
                            block.d_keys + pair.column * padded_dim_);
      }
    }
    return true;
  }

  // The packed keys of the tile whose first key is `first`, starting at the tile's column `begin`.
  TilePanels PanelsOf(int64_t b, int64_t key_head, int64_t first, int64_t begin) const {
    if (in_place_ || pairs_ || dim_ == 0) return {};
    return {key_panels_.panel(b, key_head, first / kWidth), dim_, begin};
  }

  // Inner products of a band's rows with its keys, identical to those of the forward pass.
  void MultiplyTokens(const Block& block, const Band& band, int64_t h, int64_t first_row,
                      KeyRange batch) const {
    const int64_t b = block.b;
    const int64_t key_head = h / group_;
    const int64_t row = first_row + band.first_row;
    Real* const tile = block.tile + band.first_row * kBackwardColumns;
    const Real* x = nullptr;
    int64_t x_stride = panel_rows_;
    if (pairs_) {
      x = PairedQuery(b, h, row);
    } else {
      const Rows queries = queries_.Head(b, h);
      x = queries.row(row);
      x_stride = queries.stride;
    }
    const int64_t begin = band.begin / kLaneCount * kLaneCount;
    if (in_place_) {
      return MultiplyKeys(in_.y, b, key_head, batch, dim_, pairs_, block.first, begin,
                          RoundUp(band.end, kLaneCount), band.rows(), x, Size(x_stride), tile,
                          Size(kBackwardColumns));
    }
    for (int64_t c = begin; c < band.end;) {
      const size_t vectors = VectorsOfPanel(c, band.end);
      const Real* const panel =
          key_panels_.panel(b, key_head, (block.first + c) / kWidth) + c % kWidth;
      if (pairs_) {
        MultiplyPairs(band.rows(), vectors, Size(panel_rows_), x, Size(x_stride), panel, kPanel,
                      tile + c, kBackwardColumns);
      } else {
        Multiply(band.rows(), vectors, Size(dim_), {x, Size(x_stride), 1}, panel, kPanel, tile + c,
                 kBackwardColumns);
      }
      c += static_cast<int64_t>(vectors) * kLaneCount;
    }
  }

  // Adds a tile's row gradients to the shared row gradients.
  void AddToRows(const Block& block, int64_t h, int64_t first_row, int64_t rows) const {
    const int64_t b = block.b;
    const int64_t first = (b * n_.heads + h) * n_.queries + first_row;
    for (const Band& band : block.bands) {
      for (int s = 0; s < row_sums_; ++s) {
        for (int64_t r = band.first_row; r < band.last_row; ++r) {
          RowSum(s)[first + r] += block.d_rows[s * kRowBlock + r];
        }
      }
    }
    if (d_relative_queries_) {
      addends_.keys().AddProduct(h, rows, block.keys_window, RelativeQueryGradient(first));
    }
    if (!wants_queries()) return;
    const Rows keys = keys_.Head(b, h / group_);
    for (const Band& band : block.bands) {
      MultiplyAdd(band.rows(), Size(padded_dim_) / kLanes, Size(band.end - band.begin),
                  {block.gradient + band.first_row * kBackwardColumns + band.begin,
                   Size(kBackwardColumns), 1},
                  keys.row(block.first + band.begin), Size(keys.stride),
                  QueryGradient(b, h, first_row + band.first_row), Size(query_stride()));
    }
    const Rows queries = queries_.Head(b, h);
    for (const NearPair& pair : block.near_pairs) {
      AddScaledDifference(2 * pair.d_distance, queries.row(first_row + pair.row),
                          keys.row(block.first + pair.column), dim_,
                          QueryGradient(b, h, first_row + pair.row));
    }
  }

  // The shared sum to which a head's pair-bias gradient belongs, and the head's index in that sum.
  struct PairSum {
    int64_t sum;
    int64_t index;
  };
  PairSum PairSumOf(int64_t b, int64_t h) const {
    const int64_t of_batch = grad_.pair_bias.stride[1] == 0 ? 1 : n_.heads;
    const int64_t of_sum = n_.heads / of_batch;
    PairSum to{h % of_batch, h / of_batch};
    if (grad_.pair_bias.stride[0] == 0) {
      to.index += b * of_sum;
    } else {
      to.sum += b * of_batch;
    }
    return to;
  }
  int64_t PairSums() const {
    if (grad_.pair_bias.data == nullptr || n_.batch * n_.heads == 0) return 0;
    return PairSumOf(n_.batch - 1, n_.heads - 1).sum + 1;
  }

  // Writes a tile's pair-bias gradients, or adds them to those of earlier heads that share them.
  // `sees`: whether the tile has any.
  void AddToPairs(const Block& block, int64_t h, int64_t first_row, int64_t rows, bool sees) {
    const auto [sum, index] = PairSumOf(block.b, h);
    const int64_t columns = std::min(kBackwardColumns, n_.keys - block.first);
    const int64_t begin = sees ? block.mask.begin : columns;
    const int64_t end = sees ? block.mask.end : columns;
    const int64_t turn = (sum * row_blocks_ + first_row / kRowBlock) * blocks_ + block.index;
    pair_turns_.Wait(turn, index);
    for (int64_t r = 0; r < rows; ++r) {
      const Real* HWY_RESTRICT from = block.d_pairs + r * kBackwardColumns;
      Real* HWY_RESTRICT to = grad_.pair_bias.row(block.b, h, first_row + r) + block.first;
      if (index == 0) {
        std::fill_n(to, begin, 0.0f);
        std::copy(from + begin, from + end, to + begin);
        std::fill(to + end, to + columns, 0.0f);
      } else {
        for (int64_t j = begin; j < end; ++j) to[j] += from[j];
      }
    }
    pair_turns_.Pass(turn, index);
  }

  // One row of a tile in RowGradients: its inputs and the sums over it.
  struct Row {
    TileRow at;
    PairRow pairs;
    RowView view;
    int64_t open;  // leading columns that need no mask
    RowSoftmax softmax;
    Real factor;
    ColumnScalars::Pointers scalars;
    std::array<Real*, kMostScalars + 1> d_scalars;
    Real* weights;     // inner products, then weights
    Real* d_scores;    // dP, then the inner products' gradients
    Real* d_key_bias;  // sums over the rows
    RowSums sums;
    // Sums of ds and of the weights, each multiplied by the terms added to the scores.
    Real sum_added = 0;
    Real mean_added = 0;
  };

  // Sets what all rows of a band share. The band's columns are extended to whole vectors.
  void SetBand(const Block& block, const Band& band, int64_t h, const TileMask& mask,
               Row& row) const {
    const int64_t b = block.b;
    const int64_t key_head = h / group_;
    const int64_t begin = band.begin / kLaneCount * kLaneCount;
    const int64_t first = block.first;
    row.at = {b,
              h,
              0,
              first + begin,
              RoundUp(band.end, kLaneCount) - begin,
              first + band.begin,
              first + band.end,
              mask.paired,
              1.0f};
    row.pairs = LoadHead(functions_, in_, b, h, key_head, first + begin,
                         PanelsOf(b, key_head, first, begin));
    row.scalars = scalars_.At(b, key_head, first + begin);
    for (int s = 0; s < column_numbers(); ++s) {
      row.d_scalars[Size(s)] = block.d_columns + s * kBackwardColumns + begin;
    }
    row.d_key_bias = block.d_key_biases + h % group_ * kBackwardColumns + begin;
  }

  // Converts a tile's products to weights and score gradients, and the windows' products to
  // gradients per table entry.
  GNOMON_FLATTEN void RowGradients(Block& block, int64_t h, int64_t first_row, const TileMask& mask,
                                   const TableWindow& keys_window,
                                   const TableWindow& values_window) {
    const int64_t b = block.b;
    const int64_t first = block.first;
    const int64_t head = b * n_.heads + h;
    const DF d;
    block.near_pairs.clear();
    const bool tempered = addends_.has_temperature();
    const bool has_addends = addends_.to_scores() || addends_.caps() || mask.paired;
    const bool has_values = addends_.values().exists();
    const bool balanced = balances();
    TileSums totals;
    TileSums of_row;
    ClearSums(functions_.head_scalars(), totals);
    ClearSums(functions_.head_scalars(), of_row);
    TileSums& sums_of_heads = tempered ? of_row : totals;
    Band band{0, 0, 0, 0};
    auto next_band = block.bands.begin();
    Row row;
    int64_t begin = 0;  // the first of the band's columns
    bool masked = false;
    for (int64_t r = 0;; ++r) {
      if (r == band.last_row) {
        if (next_band == block.bands.end()) break;
        band = *next_band++;
        r = band.first_row;
        SetBand(block, band, h, mask, row);
        row.pairs.near_pairs = &block.near_pairs;
        begin = row.at.begin - first;
        masked = mask.HidesWithin({begin, begin + row.at.count}, r, band.last_row) ||
                 mask.segmented || mask.placed;
      }
      if (tempered) ClearSums(functions_.head_scalars(), of_row);
      const int64_t i = first_row + r;
      const int64_t in_heads = head * n_.queries + i;
      row.softmax = {largest_.data()[in_heads], inverse_sum_.data()[in_heads],
                     delta_.data()[in_heads], top_f_.data()[in_heads], TopSlopes(in_heads)};
      row.at.i = i;
      // A row without keys has zero gradients at any temperature.
      row.at.temperature = row.softmax.inverse_sum == 0.0f ? 0.0f : addends_.Temperature(b, h, i);
      row.factor = in_.factor[h] * row.at.temperature;
      LoadRow(functions_, in_, b, h, i, row.factor, norms_ ? norms_.data()[in_heads] : 0,
              row.pairs);
      row.pairs.index = static_cast<int32_t>(r);
      const size_t known_pairs = functions_.is_distance() ? block.near_pairs.size() : 0;
      row.view = {};
      row.view.span = {mask.rows[r].begin - begin, mask.rows[r].end - begin};
      if (segments_.Mixed(b, i)) {
        row.view.segments = segments_.Keys(b, first + begin);
        row.view.segment = segments_.Query(b, i);
      }
      if (mask.placed) {
        row.view.positions = positions_.Keys(b, first + begin);
        const Positions::Range sees = positions_.SeenBy(b, i);
        row.view.low = sees.low;
        row.view.high = sees.high;
      }
      row.view.FindOpen(kLaneCount);
      row.open = masked ? OpenColumns(row.view, row.at.count) : row.at.count;
      row.weights = block.tile + r * kBackwardColumns + begin;
      row.d_scores = block.gradient + r * kBackwardColumns + begin;
      if (has_values) {
        addends_.AddValueProducts(row.at, values_window.Row(r), values_window, row.d_scores,
                                  &block.runs);
      }
      if (addends_.drops()) addends_.Drop(row.at, row.d_scores);
      if (has_addends) {
        GradientsWithAddends(block, keys_window, balanced, sums_of_heads, row);
      } else {
        functions_.template Gradients<false>(row.weights, row.d_scores, row.at.count, row.open,
                                             row.pairs, row.scalars.data(), row.d_scalars.data(),
                                             row.factor, nullptr, nullptr, row.softmax, balanced,
                                             row.view, sums_of_heads, row.sums);
      }
      if (addends_.drops()) addends_.Drop(row.at, row.weights);
      if (has_values) {
        values_window.ClearRow(r);
        addends_.AddWeights(row.at, row.weights, values_window.Row(r), values_window, &block.runs);
      }
      const RowSums& sums = row.sums;
      ForScalars(functions_.row_scalars(),
                 [&](int s) { block.d_rows[s * kRowBlock + r] = sums.a[s]; });
      if (functions_.is_distance()) {
        for (size_t n = known_pairs; n < block.near_pairs.size(); ++n) {
          block.near_pairs[n].column += static_cast<int32_t>(begin);
        }
        block.d_rows[functions_.row_scalars() * kRowBlock + r] = sums.norm;
      }
      if (balanced) {
        block.d_rows[row_numbers() * kRowBlock + r] = sums.score;
        block.d_rows[(row_numbers() + 1) * kRowBlock + r] = sums.mean;
      }
      if (!tempered) continue;
      const Real sum_f = SumOfLanes(of_row.factor);
      const VF factor_before = hn::Load(d, totals.factor);
      const VF of_factor = hn::Load(d, of_row.factor);
      hn::Store(hn::MulAdd(of_factor, hn::Set(d, row.at.temperature), factor_before), d,
                totals.factor);
      for (int s = 0; s < functions_.head_scalars(); ++s) {
        hn::Store(hn::Load(d, totals.t[s]) + hn::Load(d, of_row.t[s]), d, totals.t[s]);
      }
      if (grad_.temperature == nullptr) continue;
      block.d_rows[(row_numbers() + 2) * kRowBlock + r] =
          in_.factor[h] * sum_f + row.sum_added * kLn2;
      block.d_rows[(row_numbers() + 3) * kRowBlock + r] =
          in_.factor[h] * sums.mean + row.mean_added * kLn2;
    }
    HeadSums& of_head = d_head_[Size(head * blocks_ + block.index)];
    of_head.factor += SumOfLanes(totals.factor);
    for (int s = 0; s < functions_.head_scalars(); ++s) {
      of_head.t[s] += SumOfLanes(totals.t[s]);
    }
  }

  // The gradients of a row with terms added to its scores, or with capped scores. This is a
  // function of its own, so that other rows do not reload the vector constants that it needs.
  HWY_NOINLINE GNOMON_FLATTEN void GradientsWithAddends(Block& block,
                                                        const TableWindow& keys_window,
                                                        bool balanced, TileSums& sums_of_heads,
                                                        Row& row) {
    const TileRow& at = row.at;
    const int64_t r = row.pairs.index;
    const int64_t begin = at.begin - block.first;
    const Real* products = addends_.keys().exists() ? keys_window.Row(r) : nullptr;
    Real* const of_keys_row =
        of_keys().exists() ? block.of_keys + r * kBackwardColumns + begin : nullptr;
    const Real* added =
        addends_.ScoreRow(at, products, keys_window, of_keys_row, block.added, &block.runs,
                          grad_.temperature != nullptr ? block.plain : nullptr);
    ScoreGradients to;
    if (d_bias_) to.bias = BiasGradient(block.part, at.b * n_.heads + at.h);
    if (grad_.key_bias != nullptr) to.key_bias = row.d_key_bias;
    if (grad_.pair_bias.data != nullptr) to.pairs = block.d_pairs + r * kBackwardColumns + begin;
    if (wants_of_keys()) to.of_keys = of_keys_row;
    if (d_relative_queries_ || d_relative_keys_.wanted()) to.relative = keys_window.Row(r);
    to.temperature = grad_.temperature != nullptr;
    if (addends_.caps()) {
      std::copy_n(row.weights, at.count, block.capped);
      functions_.template Scores<true>(block.capped, at.count, row.open, row.pairs,
                                       row.scalars.data(), row.factor * kLog2E, added, row.view);
      addends_.CapGradients(at.count, added, row.softmax.delta, block.capped, row.d_scores);
      added = block.capped;
    }
    Real* d_added = addends_.GradientRow(at, to, block.d_added);
    functions_.template Gradients<true>(row.weights, row.d_scores, at.count, row.open, row.pairs,
                                        row.scalars.data(), row.d_scalars.data(), row.factor, added,
                                        d_added, row.softmax, balanced, row.view, sums_of_heads,
                                        row.sums);
    row.sum_added = to.temperature ? SumOfSeen(at.count, row.weights, d_added, block.plain) : 0;
    row.mean_added =
        to.temperature ? SumOfSeen(at.count, row.weights, row.weights, block.plain) : 0;
    if (to.relative != nullptr) keys_window.ClearRow(r);
    if (d_added == block.d_added) {
      addends_.SpreadGradient(at, to, keys_window, d_added, &block.runs);
    }
  }

  // Adds the windows' gradients to the tables.
  void TableGradients(const Block& block, int64_t h, int64_t first_row, int64_t rows,
                      const TableWindow& keys_window, const TableWindow& values_window) const {
    if (d_relative_keys_.wanted()) {
      d_relative_keys_.Add(TablePart(addends_.keys(), block.b, h, block.part), rows, keys_window,
                           relative_queries_.Head(block.b, h), first_row);
    }
    if (d_relative_values_.wanted()) {
      d_relative_values_.Add(TablePart(addends_.values(), block.b, h, block.part), rows,
                             values_window, d_o_.Head(block.b, h), first_row);
    }
  }

  // Adds the results of all blocks and parts in order.
  void Merge() {
    for (int s = 0; grad_.row_scalars != nullptr && s < functions_.row_scalars(); ++s) {
      std::copy_n(RowSum(s), head_rows_, grad_.row_scalars + s * head_rows_);
    }
    if (grad_.key_bias != nullptr) BalanceKeyBiases();
    for (int64_t h = 0; h < n_.heads; ++h) {
      HeadSums sums;
      for (int64_t b = 0; b < n_.batch; ++b) {
        const int64_t head = b * n_.heads + h;
        for (int64_t block = 0; block < blocks_; ++block) {
          const HeadSums& from = d_head_[Size(head * blocks_ + block)];
          sums.factor += from.factor;
          for (int s = 0; s < functions_.head_scalars(); ++s) sums.t[s] += from.t[s];
        }
        if (grad_.factor != nullptr) sums.factor += Balance(head);
      }
      if (grad_.factor != nullptr) grad_.factor[h] = static_cast<Real>(sums.factor);
      for (int s = 0; grad_.head_scalars != nullptr && s < functions_.head_scalars(); ++s) {
        grad_.head_scalars[s * n_.heads + h] = static_cast<Real>(sums.t[s]);
      }
    }
    // Like the factor's gradient, the temperature's gradient is a sum of ds times scores.
    for (int64_t row = 0; grad_.temperature != nullptr && row < head_rows_; ++row) {
      const double top_s =
          static_cast<double>(in_.factor[row / n_.queries % n_.heads]) * top_f_.data()[row];
      grad_.temperature[row] = static_cast<Real>(
          RowSum(row_numbers() + 2)[row] + Balance(row, top_s, RowSum(row_numbers() + 3)[row]));
    }
    MergeTables(addends_.keys(), d_relative_keys_);
    MergeTables(addends_.values(), d_relative_values_);
    MergeTables(of_keys().table(), d_position_queries_);
    if (!d_bias_) return;
    const BiasTable& bias = addends_.bias();
    ParallelTasks(executor_, n_.heads, [&](int64_t h, int) {
      // Set all gradients to 0, which is also the gradient of a shared table if the batch is empty.
      for (int64_t n = 0; n < bias.tables() / n_.heads; ++n) {
        std::fill_n(grad_.bias.table + n * grad_.bias.batch_stride + h * bias.size(), bias.size(),
                    0.0f);
      }
      for (int64_t b = 0; b < n_.batch; ++b) {
        Real* to = grad_.bias.table + b * grad_.bias.batch_stride + h * bias.size();
        for (int64_t part = 0; part < parts_; ++part) {
          const Real* from = BiasGradient(part, b * n_.heads + h);
          for (int64_t e = 0; e < bias.size(); ++e) to[e] += from[e];
        }
      }
    });
  }

  // Returns the correction of a factor's gradient, sum ds f, of which only sum ds (f - top_f) has
  // been accumulated. For each row, this adds top_f times the exact sum of ds, which is dlse, and
  // subtracts the rounding error of the computed sum of ds times the row's mean of f - top_f.
  double Balance(int64_t head) const {
    double sum = 0;
    for (int64_t i = 0; i < n_.queries; ++i) {
      const int64_t row = head * n_.queries + i;
      const double of_row = Balance(row, top_f_.data()[row], RowSum(row_numbers() + 1)[row]);
      // A row without keys contributes nothing at any temperature.
      if (of_row != 0) sum += of_row * addends_.Temperature(head / n_.heads, head % n_.heads, i);
    }
    return sum;
  }
  // The correction for one row with scores s; `mean` is the mean of s - top_s.
  double Balance(int64_t row, double top_s, double mean) const {
    return (top_s != 0 ? top_s * DLse(row) : 0) - (mean != 0 ? Imbalance(row) * mean : 0);
  }
  // The sum of a row's ds minus its dlse.
  double Imbalance(int64_t row) const {
    if (addends_.caps()) return 0;
    return static_cast<double>(RowSum(row_numbers())[row]) - DLse(row);
  }
  Real DLse(int64_t row) const { return saved_.d_lse != nullptr ? saved_.d_lse[row] : 0.0f; }
  // The key of the row's largest score, or -1 if unknown. With a soft cap the sum of ds is unknown,
  // so nothing is balanced.
  int64_t TopOf(int64_t row) const {
    if (addends_.caps()) return -1;
    return static_cast<int64_t>(saved_.statistics[2 * head_rows_ + row]);
  }

  // Subtracts each row's imbalance from its highest-weighted key. A forget gate's gradient sums
  // over all later keys and would accumulate the errors of all rows.
  void BalanceKeyBiases() const {
    ParallelTasks(executor_, n_.batch * n_.heads, [&](int64_t head, int) {
      Real* const to = grad_.key_bias + head * n_.keys;
      for (int64_t i = 0; i < n_.queries; ++i) {
        const int64_t row = head * n_.queries + i;
        const int64_t top = TopOf(row);
        const double imbalance = Imbalance(row);
        if (top < 0 || imbalance == 0) continue;
        to[top] -= static_cast<Real>(imbalance) *
                   addends_.Temperature(head / n_.heads, head % n_.heads, i);
      }
    });
  }

  // The dot product over columns with non-zero weight; elsewhere the factors may be infinite.
  static Real SumOfSeen(int64_t columns, const Real* HWY_RESTRICT weights, const Real* x,
                        const Real* HWY_RESTRICT y) {
    return Sum(columns, [=](int64_t n) {
      // The product is a separate variable, because g++ 12 with AVX-512 miscompiles sums of
      // conditional products of doubles.
      const Real product = x[n] * y[n];
      return weights[n] == 0.0f ? Real{0} : product;
    });
  }

  bool finishes_rows() const {
    return wants_queries() || d_relative_queries_ || wants_row_scalars();
  }
  void FinishRows(int64_t index) const {
    const auto [b, h, begin, end] = RowsOf(index);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = RowOf(b, h, i);
      if (d_relative_queries_) {
        std::copy_n(RelativeQueryGradient(row), in_.relative.dim,
                    grad_.relative_query.row(b, h, i));
      }
      Real* to = nullptr;
      if (wants_queries()) {
        to = grad_.x.row(b, h, i);
        if (d_queries_) std::copy_n(QueryGradient(b, h, i), dim_, to);
      }
      if (balances_queries() && TopOf(row) >= 0) BalanceQuery(b, h, i, to);
      if (to == nullptr || !functions_.is_distance()) continue;
      const Real d_norm = RowSum(functions_.row_scalars())[row];
      if (d_norm != 0) AddNormGradient(d_norm, queries_.Head(b, h).row(i), to);
    }
  }

  int64_t RowOf(int64_t b, int64_t h, int64_t i) const {
    return (b * n_.heads + h) * n_.queries + i;
  }
  // The ds of a row add up to its dlse, except for rounding. If the slopes of f are large and
  // nearly equal, they would amplify that rounding error in the query's gradient. Sums that use
  // slope differences omit dlse times the common slope, which is added here. For sums that use the
  // slopes themselves, the rounding error of the sum of ds is subtracted from the highest-weighted
  // pair. `d_x` may be null.
  void BalanceQuery(int64_t b, int64_t h, int64_t i, Real* d_x) const {
    const int64_t row = RowOf(b, h, i);
    const Real* const slopes = TopSlopes(row);
    const Real factor = in_.factor[h] * addends_.Temperature(b, h, i);
    if (const Real df = DLse(row) * factor; df != 0.0f) {
      ForScalars(functions_.row_scalars(), [&](int s) { RowSum(s)[row] += df * slopes[s + 1]; });
      if (functions_.is_distance()) RowSum(functions_.row_scalars())[row] += df * slopes[0];
    }
    const auto imbalance = static_cast<Real>(Imbalance(row));
    if (!functions_.has_product() || d_x == nullptr || imbalance == 0.0f) return;
    const Real* const y = keys_.Head(b, h / group_).row(TopOf(row));
    const Real dg = -imbalance * factor * slopes[functions_.row_scalars() + 1];
    if (!functions_.is_distance()) return AddScaled(dg, y, dim_, d_x);
    // The multiple of x belongs to the squared norm's sum, which uses slope differences.
    if (slopes[0] != 0.0f) return AddScaled(-2 * dg, y, dim_, d_x);
    AddScaledDifference(2 * dg, queries_.Head(b, h).row(i), y, dim_, d_x);
  }

  // Each head has its own parts of a table's gradient. If heads share the table, each key head has
  // its own parts instead.
  int64_t TableHeads(const RowTable& table) const {
    return table.heads() ? n_.heads : n_.key_heads;
  }
  int64_t TableParts(const RowTable& table) const { return n_.batch * TableHeads(table) * parts_; }
  int64_t TablePart(const RowTable& table, int64_t b, int64_t h, int64_t part) const {
    const int64_t head = table.heads() ? h : h / group_;
    return (b * TableHeads(table) + head) * parts_ + part;
  }
  void MergeTables(const RowTable& table, const RowTableGradient& gradient) const {
    if (!gradient.wanted()) return;
    ParallelTasks(executor_, table.tables(), [&](int64_t h, int) {
      gradient.Merge(h,
                     [&](int64_t part) { return !table.heads() || part / parts_ % n_.heads == h; });
    });
  }

  const PositionToContent& of_keys() const { return addends_.position_to_content(); }
  bool wants_of_keys() const {
    return grad_.relative_key.data != nullptr || d_position_queries_.wanted();
  }
  // Whether each row needs its sums of ds and p (f - top_f).
  bool balances() const {
    return wants_queries() || wants_row_scalars() || multiplies_scores() ||
           grad_.key_bias != nullptr;
  }
  // Whether gradients need the sum of ds f.
  bool multiplies_scores() const { return grad_.factor != nullptr || grad_.temperature != nullptr; }
  bool wants_row_scalars() const {
    return functions_.row_scalars() > 0 && grad_.row_scalars != nullptr;
  }
  bool wants_queries() const { return grad_.x.data != nullptr && dim_ > 0; }
  bool balances_queries() const { return wants_queries() || wants_row_scalars(); }
  Real* QueryGradient(int64_t b, int64_t h, int64_t i) const {
    if (!d_queries_) return grad_.x.row(b, h, i);
    return d_queries_.data() + (head_tasks_.queries().Of(b, h) * n_.queries + i) * padded_dim_;
  }
  int64_t query_stride() const { return d_queries_ ? padded_dim_ : grad_.x.stride[2]; }
  Real* PairedQuery(int64_t b, int64_t h, int64_t i) const {
    return paired_queries_.data() + (head_tasks_.queries().Of(b, h) * n_.queries + i) * panel_rows_;
  }
  // `row` counts across all heads.
  Real* RelativeQueryGradient(int64_t row) const {
    return d_relative_queries_.data() + row * addends_.keys().padded();
  }
  // The slopes of a row (RowSoftmax::top_slopes), followed by the slope with respect to g. `row`
  // counts across all heads.
  Real* TopSlopes(int64_t row) const {
    return top_slopes_.data() + row * (functions_.row_scalars() + 2);
  }
  Real* RowSum(int s) const { return d_rows_.data() + s * head_rows_; }
  // d|x|^2/dx = 2x.
  void AddNormGradient(Real d_norm, const Real* x, Real* d_x) const {
    for (int64_t e = 0; e < dim_; ++e) d_x[e] += 2 * d_norm * x[e];
  }
  Real* BiasGradient(int64_t part, int64_t head) const {
    return d_bias_.data() + (head * parts_ + part) * addends_.bias().stride();
  }

  Functions functions_;
  const AttentionInput<Real>& in_;
  const AttentionBackwardInput<Real>& saved_;
  const AttentionGradient<Real>& grad_;
  const Executor& executor_;
  const AttentionShape& n_;
  int64_t group_;
  int64_t dim_;
  bool pairs_;          // whether tokens are multiplied as bfloat16 pairs
  bool in_place_;       // whether keys are read in place, as in the forward pass
  int64_t panel_rows_;  // columns of a token, or pairs of columns
  int64_t padded_dim_;
  int64_t padded_value_dim_;
  int64_t blocks_;
  int64_t row_blocks_;
  int64_t parts_;
  int64_t head_rows_;
  HeadTasks head_tasks_;
  Panels key_panels_;
  Panels value_panels_;
  PaddedRows keys_;
  PaddedRows queries_;
  PaddedRows d_o_;
  PackedScalars scalars_;
  Addends addends_;
  Segments segments_;
  Skipping skipping_;
  std::vector<Tiles> tiles_;     // per block of queries, if tiles may be skipped
  std::vector<Choice> choices_;  // per worker
  Positions positions_;
  std::vector<KeyRange> seen_blocks_;  // per batch and block of queries
  PaddedRows relative_queries_;
  PaddedRows content_keys_;  // rows that are multiplied by relative queries
  RowTableGradient d_position_queries_;
  RowTableGradient d_relative_keys_;
  RowTableGradient d_relative_values_;
  Buffer largest_;                // per row, in log2 units
  Buffer inverse_sum_;            // inverse of sum 2^(score - largest)
  Buffer delta_;                  // sum_j p_ij dP_ij - dlse_i
  Buffer top_f_;                  // f of the largest score, if f is multiplied by ds
  Buffer top_slopes_;             // TopSlopes per row
  Buffer norms_;                  // squared norms of the queries, for a distance
  Buffer paired_queries_;         // queries as bfloat16 pairs
  int row_sums_;                  // row_numbers() and balancing sums
  std::vector<HeadSums> d_head_;  // per block of keys
  Turns row_turns_;               // per block of queries, in the order of the blocks of keys
  Turns part_turns_;              // per part of the table sums
  Turns pair_turns_;              // per tile of the pair-bias gradient
  Buffer d_queries_;              // padded copy, if rows do not fill whole vectors
  Buffer d_rows_;
  Buffer d_bias_;
  Buffer d_relative_queries_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
