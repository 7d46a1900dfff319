// Forward-mode derivatives of attention and of its gradients.
//
// Each task processes a block of query rows of one head, with all keys to which they attend. It
// stores the weights of all pairs and the tangents of these weights, so that the outputs and the
// gradients can use them. Tasks add to the gradients of keys, values and biases in a fixed order,
// so results do not depend on the number of workers.
//
// A product of dual numbers is a single product of stacked matrices: if x' is the tangent of a row
// x, then (x . y)' = [x' x] . [y y'].
//
// A pair function maps rows of inner products to rows of f, and gradients of f back to gradients of
// the products. It is called through a table of functions (cpu/dual_table.h). The inner product
// itself does not need a table.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/derivatives.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/near_share.h"
#include "base/parallel.h"
#include "base/visible_keys.h"
#include "cpu/columns-inl.h"
#include "cpu/derivatives.h"
#include "cpu/dual_addends-inl.h"
#include "cpu/dual_content-inl.h"
#include "cpu/dual_relative-inl.h"
#include "cpu/dual_scores-inl.h"
#include "cpu/dual_sums-inl.h"
#include "cpu/dual_table.h"
#include "cpu/gemm-inl.h"
#include "cpu/head_slots.h"
#include "cpu/packing-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {
namespace {

// The number of keys that one matrix product sums over, chosen so that its results stay in cache.
constexpr int64_t kKeysAtOnce = 256;
// The number of keys whose gradients are added in one turn (see Turns).
constexpr int64_t kTurnKeys = kBackwardColumns;

class Pass {
 public:
  Pass(const AttentionDerivatives<Real>& of, const Executor& executor)
      : of_(of),
        function_(of.function),
        in_(of.input),
        tangent_(of.tangent),
        executor_(executor),
        n_(in_.shape),
        addends_(in_, tangent_),
        group_(n_.heads / std::max<int64_t>(1, n_.key_heads)),
        dim_(has_product() ? n_.dim : 0),
        padded_dim_(PaddedColumns(dim_)),
        padded_value_dim_(PaddedColumns(n_.value_dim)),
        stride_(RoundUp(LongestRow(), kWidth) + kLaneCount),
        block_(std::clamp<int64_t>(kScores / stride_ / kStep * kStep, kStep, kRowBlock)),
        row_blocks_(DivideUp(n_.queries, block_)),
        turn_blocks_(DivideUp(n_.keys, kTurnKeys)),
        head_tasks_(n_, executor, group_ * row_blocks_),
        relative_(in_, tangent_, block_, stride_),
        relative_queries_(in_.relative.query, head_tasks_.queries(),
                          relative_.keys().exists() ? n_.queries : 0, in_.relative.dim),
        relative_query_tangents_(tangent_.relative.query, head_tasks_.queries(),
                                 tangent_.relative.query.data != nullptr ? n_.queries : 0,
                                 in_.relative.dim),
        d_relative_keys_(n_, relative_.keys(), of.gradient.relative_keys,
                         of.gradient_tangent.relative_keys),
        d_relative_values_(n_, relative_.values(), of.gradient.relative_values,
                           of.gradient_tangent.relative_values),
        content_(in_, tangent_),
        content_keys_(in_.relative.key, head_tasks_.keys(), wants_relative_queries() ? n_.keys : 0,
                      in_.relative.key_dim),
        content_key_tangents_(tangent_.relative.key, head_tasks_.keys(),
                              wants_relative_queries() && has_content_key() ? n_.keys : 0,
                              in_.relative.key_dim),
        d_content_keys_(of.gradient.relative_key, n_, head_tasks_.keys(), in_.relative.key_dim),
        d_content_key_tangents_(of.gradient_tangent.relative_key, n_, head_tasks_.keys(),
                                in_.relative.key_dim),
        d_relative_queries_(n_, content_.table(), of.gradient.relative_queries,
                            of.gradient_tangent.relative_queries),
        key_panels_(in_.y, tangent_.y, head_tasks_.keys(), n_.keys, dim_),
        keys_(in_.y, head_tasks_.keys(), wants_x() ? n_.keys : 0, dim_),
        key_tangents_(tangent_.y, head_tasks_.keys(), wants_x() && has_y() ? n_.keys : 0, dim_),
        values_(in_.v, head_tasks_.keys(), n_.keys, n_.value_dim),
        value_tangents_(tangent_.v, head_tasks_.keys(), has_v() ? n_.keys : 0, n_.value_dim),
        value_panels_(in_.v, tangent_.v, head_tasks_.keys(), wants_scores() ? n_.keys : 0,
                      n_.value_dim),
        d_y_(of.gradient.y, n_, head_tasks_.keys(), dim_),
        d_y_tangent_(of.gradient_tangent.y, n_, head_tasks_.keys(), dim_),
        d_v_(of.gradient.v, n_, head_tasks_.keys(), n_.value_dim),
        d_v_tangent_(of.gradient_tangent.v, n_, head_tasks_.keys(), n_.value_dim),
        d_heads_(Size(2 * n_.batch * n_.heads * row_blocks_)),
        key_turns_(n_.batch * n_.key_heads * turn_blocks_),
        head_turns_(n_.batch * n_.heads),
        pair_turns_(shares_pairs() ? row_blocks_ : 0),
        table_turns_(n_.batch * n_.heads),
        content_turns_(n_.batch * n_.key_heads) {
    if (wants_bias()) d_bias_.Reset(2 * n_.batch * n_.heads * addends_.table_size());
    if (!is_distance()) return;
    norms_.Reset(2 * n_.batch * n_.key_heads * n_.keys);
    if (wants_y()) d_norms_.Reset(2 * n_.batch * n_.key_heads * n_.keys);
  }

  void Run() {
    for (int64_t n = 0; shares_pairs() && n < row_blocks_; ++n) pair_turns_.Start(n, 0);
    const int64_t heads = n_.batch * n_.key_heads;
    const int64_t in_head = group_ * row_blocks_;
    const int64_t tasks = head_tasks_.whole() ? heads : heads * in_head;
    const Buffer memory(scratch_size() * WorkersFor(executor_, tasks));
    ParallelTasks(executor_, relative_.tasks(), [&](int64_t task, int) { relative_.Fill(task); });
    ParallelTasks(executor_, content_.tasks(), [&](int64_t task, int) { content_.Fill(task); });
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
      if (shares_pairs()) {
        // For each block of rows, the tasks of all heads are consecutive.
        ParallelTasks(executor_, tasks, [&](int64_t task, int worker) {
          const int64_t all = heads * group_;
          RunRows(task % all / group_, task / all * group_ + task % group_,
                  MakeScratch(memory.data() + worker * scratch_size()));
        });
      } else {
        RunSideBySide(tasks, memory);
      }
      ParallelTasks(executor_, heads, [&](int64_t head, int) { Finish(head); });
    }
    Merge();
  }

 private:
  // Interleaves as many heads as there are workers, so that workers rarely wait for their turn.
  void RunSideBySide(int64_t tasks, const Buffer& memory) {
    const int64_t heads = n_.batch * n_.key_heads;
    const int64_t in_head = group_ * row_blocks_;
    const int64_t side_by_side = std::min<int64_t>(heads, WorkersFor(executor_, tasks));
    ParallelTasks(executor_, tasks, [&](int64_t task, int worker) {
      const int64_t first = task / (side_by_side * in_head) * side_by_side;
      const int64_t width = std::min(side_by_side, heads - first);
      const int64_t in_heads = task - first * in_head;
      RunRows(first + in_heads % width, in_heads / width,
              MakeScratch(memory.data() + worker * scratch_size()));
    });
  }

  // The gradients of a head's factor and scalars.
  struct HeadSums {
    double factor = 0;
    double t[kMostScalars] = {};
  };

  // The number of rows in a block (a multiple of kStep), chosen so that a block has about kScores
  // scores.
  static constexpr int64_t kScores = int64_t{1} << 19;
  static constexpr auto kStep = static_cast<int64_t>(kMicroRows);

  // Scratch memory of a worker. Rows that are operands of the same matrix product are adjacent.
  struct Scratch {
    Real* weights;  // tangents of the rows' weights, then the weights
    // Tangents of the scores' gradients, then the gradients; before, position-to-content terms.
    Real* gradients;
    Real* x;             // [x' x] per row
    Real* scaled;        // rows of c x, then rows of (c x)'
    Real* d_o;           // [d_o' d_o] per row
    Real* stacked_d_o;   // rows of d_o, then rows of d_o'
    Real* sums;          // tangents of rows' sums, then the sums
    Real* bias;          // biases of a row, in log2 units
    Real* bias_tangent;  // tangents of the biases of a row
    Real* d_bias;        // gradients per offset; then their tangents
    Real* d_key_bias;    // gradients per key; then their tangents
    Real* g;             // tangents of the pair function's argument, then the argument
    Real* pairs;         // scalars of pairs, one array each; then their tangents
    Real* slopes;        // slopes of pairs, one array each; then their tangents
    Real* d_columns;     // gradients of column scalars and squared norms; then their tangents
    Real* norms;         // squared norms of the block's keys; then their tangents
    Real* plain;         // tangents of the scores before temperature and cap, then the scores
    // Windows of the relative tables, with their tangents. key_window holds products with relative
    // keys, and later gradients of scores. value_window holds gradients of outputs times relative
    // values, and later weights.
    Real* key_window;
    Real* value_window;
    Real* table_rows;  // a window; later gradients of relative.query and their tangents
    Real* content;     // scratch memory of DualContent
  };
  int64_t window() const { return stride_ + block_; }
  static constexpr size_t kParts = 21;
  // The maximum number of scalars of a pair, each of which has its own array.
  static constexpr int64_t kScalarArrays = 3 * kMostScalars;
  std::array<int64_t, kParts> Sizes() const {
    const bool is_backward = wants_any();
    return {2 * block_ * stride_,
            wants_scores() || content_.exists() ? 2 * block_ * stride_ : 0,
            2 * block_ * dim_,
            wants_scores() ? 2 * block_ * padded_dim_ : 0,
            is_backward ? 2 * block_ * n_.value_dim : 0,
            is_backward ? 2 * block_ * padded_value_dim_ : 0,
            2 * block_ * std::max(padded_dim_, padded_value_dim_),
            has_bias() ? stride_ : 0,
            has_bias_tangent() ? stride_ : 0,
            wants_bias() && !addends_.has_layout() ? 2 * window() : 0,
            wants_key_bias() ? 2 * stride_ : 0,
            function_ != nullptr ? 2 * block_ * stride_ : 0,
            function_ != nullptr ? 2 * kScalarArrays * stride_ : 0,
            function_ != nullptr ? 2 * (kScalarArrays + 1) * stride_ : 0,
            function_ != nullptr ? 2 * (kMostScalars + 1) * stride_ : 0,
            is_distance() ? 2 * stride_ : 0,
            has_temper() ? 2 * block_ * stride_ : 0,
            relative_.keys().exists() ? 2 * block_ * relative_.stride() : 0,
            relative_.values().exists() ? 2 * block_ * relative_.stride() : 0,
            block_ * std::max(relative_.stride(), 2 * relative_.keys().values().padded()),
            content_.scratch_size()};
  }
  int64_t scratch_size() const {
    int64_t size = 0;
    for (const int64_t of_part : Sizes()) size += RoundUp(of_part, kWidth);
    return size;
  }
  Scratch MakeScratch(Real* memory) const {
    std::array<Real*, kParts> parts;
    const std::array<int64_t, kParts> sizes = Sizes();
    for (size_t n = 0; n < parts.size(); ++n) {
      parts[n] = memory;
      memory += RoundUp(sizes[n], kWidth);
    }
    return {parts[0],  parts[1],  parts[2],  parts[3],  parts[4],  parts[5],  parts[6],
            parts[7],  parts[8],  parts[9],  parts[10], parts[11], parts[12], parts[13],
            parts[14], parts[15], parts[16], parts[17], parts[18], parts[19], parts[20]};
  }

  bool has_product() const { return function_ == nullptr || function_->pairs->has_product(); }
  bool is_distance() const { return function_ != nullptr && function_->pairs->is_distance(); }
  int row_scalars() const { return function_ == nullptr ? 0 : function_->pairs->row_scalars; }
  int column_scalars() const { return function_ == nullptr ? 0 : function_->pairs->column_scalars; }
  int head_scalars() const { return function_ == nullptr ? 0 : function_->pairs->head_scalars; }
  bool has_x() const { return tangent_.x.data != nullptr; }
  bool has_y() const { return tangent_.y.data != nullptr; }
  bool has_v() const { return tangent_.v.data != nullptr; }
  bool has_d_o() const { return of_.d_o_tangent.data != nullptr; }
  bool has_temper() const { return in_.temperature != nullptr || in_.softcap != 0; }
  bool drops() const { return in_.dropout.rate != 0; }
  bool has_content_key() const { return tangent_.relative.key.data != nullptr; }
  bool has_bias() const {
    return addends_.has_values() || relative_.keys().exists() || content_.exists();
  }
  bool has_bias_tangent() const {
    return addends_.has_tangents() || (relative_.keys().exists() && relative_.has_key_tangents()) ||
           (content_.exists() && content_.has_tangents());
  }
  // Whether a gradient or its tangent is needed.
  template <class Member>
  bool Wants(const Member& member) const {
    return member(of_.gradient) || member(of_.gradient_tangent);
  }
  bool wants_factor() const {
    return Wants([](const auto& gradient) { return gradient.factor != nullptr; });
  }
  bool wants_scalars() const {
    return Wants([](const auto& gradient) {
      return gradient.row_scalars != nullptr || gradient.column_scalars != nullptr ||
             gradient.head_scalars != nullptr;
    });
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
  bool wants_pair_bias() const {
    return Wants([](const auto& gradient) { return gradient.pair_bias.data != nullptr; });
  }
  bool wants_temperature() const {
    return Wants([](const auto& gradient) { return gradient.temperature != nullptr; });
  }
  bool wants_relative_query() const {
    return Wants([](const auto& gradient) { return gradient.relative_query.data != nullptr; });
  }
  bool wants_relative_keys() const {
    return Wants([](const auto& gradient) { return gradient.relative_keys != nullptr; });
  }
  bool wants_relative_values() const {
    return Wants([](const auto& gradient) { return gradient.relative_values != nullptr; });
  }
  bool wants_relative_queries() const {
    return Wants([](const auto& gradient) { return gradient.relative_queries != nullptr; });
  }
  bool wants_content() const {
    return wants_relative_queries() ||
           Wants([](const auto& gradient) { return gradient.relative_key.data != nullptr; });
  }
  bool wants_scores() const {
    return wants_x() || wants_y() || wants_scalars() || wants_bias() || wants_key_bias() ||
           wants_pair_bias() || wants_temperature() || wants_relative_query() ||
           wants_relative_keys() || wants_content();
  }
  // Whether several heads add to the same gradients of pair biases.
  bool shares_pairs() const {
    return Wants([this](const auto& gradient) {
      const View<Real>& pairs = gradient.pair_bias;
      return pairs.data != nullptr &&
             ((pairs.stride[0] == 0 && n_.batch > 1) || (pairs.stride[1] == 0 && n_.heads > 1));
    });
  }
  bool wants_any() const { return wants_scores() || wants_v() || wants_relative_values(); }

  int64_t panels() const { return DivideUp(n_.keys, kWidth); }

  // A range that contains all keys to which rows [begin, end) attend.
  KeyRange KeysOfRows(int64_t b, int64_t begin, int64_t end) const {
    KeyRange all{n_.keys, 0};
    for (int64_t i = begin; i < end; ++i) {
      const KeyRange seen = addends_.Keys(b, i);
      if (seen.empty()) continue;
      all = {std::min(all.begin, seen.begin), std::max(all.end, seen.end)};
    }
    return all;
  }
  // An upper bound on the number of columns of a block of rows.
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

  // Packs panel p of key head `head`, which is counted across the batch.
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
    if (wants_relative_queries()) {
      content_keys_.Fill(b, h, begin, end);
      if (has_content_key()) content_key_tangents_.Fill(b, h, begin, end);
    }
    if (!is_distance()) return;
    RowReader rows(in_.y, dim_);
    RowReader tangents(tangent_.y, has_y() ? dim_ : 0);
    for (int64_t j = begin; j < end; ++j) {
      const Real* const y = rows.Row(b, h, j);
      *KeyNumber(norms_, false, head, j) = SquaredNorm(y, dim_);
      *KeyNumber(norms_, true, head, j) =
          has_y() ? NormTangent(y, tangents.Row(b, h, j), dim_) : 0.0f;
    }
  }
  // The entry of key j, or its tangent, in an array with one entry per key. `head`
  // is counted across the batch.
  Real* KeyNumber(const Buffer& numbers, bool is_tangent, int64_t head, int64_t j) const {
    return numbers.data() + (is_tangent * n_.batch * n_.key_heads + head) * n_.keys + j;
  }
  static Real NormTangent(const Real* x, const Real* tangent, int64_t columns) {
    return 2 * Sum(columns, [=](int64_t e) { return x[e] * tangent[e]; });
  }

  // Clears the sums of a key head.
  void Start(int64_t head) {
    const int64_t b = head / n_.key_heads;
    const int64_t h = head % n_.key_heads;
    for (const KeySums* sums : key_sums()) sums->Clear(b, h);
    content_turns_.Start(head, 0);
    for (int64_t n = 0; n < turn_blocks_; ++n) key_turns_.Start(head * turn_blocks_ + n, 0);
    for (const bool is_tangent : {false, true}) {
      if (d_norms_) std::fill_n(KeyNumber(d_norms_, is_tangent, head, 0), n_.keys, 0.0f);
      Real* const d_scalars = Gradient(is_tangent).column_scalars;
      for (int s = 0; d_scalars != nullptr && s < column_scalars(); ++s) {
        std::fill_n(ColumnScalar(d_scalars, s, head), n_.keys, 0.0f);
      }
    }
    for (int64_t of_head = head * group_; of_head < (head + 1) * group_; ++of_head) {
      head_turns_.Start(of_head, 0);
      table_turns_.Start(of_head, 0);
      d_relative_keys_.Clear(of_head);
      d_relative_values_.Clear(of_head);
      d_relative_queries_.Clear(of_head);
      for (const bool is_tangent : {false, true}) {
        if (wants_bias()) {
          std::fill_n(BiasGradient(is_tangent, of_head), addends_.table_size(), 0.0f);
        }
        if (Real* d_key_bias = Gradient(is_tangent).key_bias) {
          std::fill_n(d_key_bias + of_head * n_.keys, n_.keys, 0.0f);
        }
      }
    }
  }
  // Scalar s of the keys of a key head, or of the queries of a query head. Heads are counted across
  // the batch.
  template <class T>
  T* ColumnScalar(T* scalars, int s, int64_t head) const {
    return scalars + (s * n_.batch * n_.key_heads + head) * n_.keys;
  }
  template <class T>
  T* RowScalar(T* scalars, int s, int64_t head) const {
    return scalars + (s * n_.batch * n_.heads + head) * n_.queries;
  }

  void Finish(int64_t head) const {
    if (d_norms_) AddNormGradients(head);
    for (const KeySums* sums : key_sums()) {
      sums->Finish(head / n_.key_heads, head % n_.key_heads);
    }
  }
  std::array<const KeySums*, 6> key_sums() const {
    return {&d_y_, &d_y_tangent_, &d_v_, &d_v_tangent_, &d_content_keys_, &d_content_key_tangents_};
  }

  // Adds the gradients that pass through the squared norms: d|y|^2/dy = 2 y.
  void AddNormGradients(int64_t head) const {
    const int64_t b = head / n_.key_heads;
    const int64_t h = head % n_.key_heads;
    RowReader rows(in_.y, dim_);
    RowReader tangents(tangent_.y, has_y() ? dim_ : 0);
    for (int64_t j = 0; j < n_.keys; ++j) {
      const Real d_norm = 2 * *KeyNumber(d_norms_, false, head, j);
      const Real d_norm_tangent = 2 * *KeyNumber(d_norms_, true, head, j);
      if (d_norm == 0 && d_norm_tangent == 0) continue;
      const Real* const y = rows.Row(b, h, j);
      if (d_y_.wanted()) AddScaled(d_norm, y, dim_, d_y_.row(b, h, j));
      if (!d_y_tangent_.wanted()) continue;
      AddScaled(d_norm_tangent, y, dim_, d_y_tangent_.row(b, h, j));
      if (has_y()) AddScaled(d_norm, tangents.Row(b, h, j), dim_, d_y_tangent_.row(b, h, j));
    }
  }

  // A pair of nearly equal tokens: the query of row r and the key of column j. Their gradients are
  // multiples of the difference of the tokens; adding the two tokens to separate sums would lose
  // digits of that difference.
  struct NearDual {
    int64_t r;
    int64_t j;
    Real d_distance;
    Real d_distance_tangent;
  };

  // Rows [begin, end) of a query head, and the range of keys to which they attend.
  struct Block {
    int64_t b;
    int64_t h;
    int64_t key_head;
    int64_t begin;
    int64_t end;
    KeyRange keys;
    int64_t first;   // key of column 0
    int64_t number;  // index among the blocks of the query head
    int64_t turn;    // index among the blocks of the key head
    int64_t stride;  // stride of rows of scores
    Real c;
    Real dc;
    // Per row: the column of the largest score, or -1; the sum of the gradients of scores before
    // temperature and cap; the squared norm and its tangent; the gradient of the squared norm and
    // its tangent.
    int64_t top[kRowBlock];
    DualNumber sum[kRowBlock];
    Real norm[kRowBlock];
    Real norm_tangent[kRowBlock];
    Real d_norm[kRowBlock];
    Real d_norm_tangent[kRowBlock];
    std::vector<NearDual> near;
    DualWindow keys_window;
    DualWindow values_window;
    std::vector<TableRun> runs;

    int64_t head(const AttentionShape& n) const { return b * n.heads + h; }
    int64_t key_head_of(const AttentionShape& n) const { return b * n.key_heads + key_head; }
    int64_t rows() const { return end - begin; }
    // The number of columns, rounded up to whole vectors.
    int64_t columns() const { return RoundUp(keys.end - first, kLaneCount); }
    size_t row_count() const { return Size(end - begin); }
  };

  // Computes block `index` of a key head.
  void RunRows(int64_t head, int64_t index, const Scratch& scratch) {
    Block block;
    block.b = head / n_.key_heads;
    block.key_head = head % n_.key_heads;
    // Heads that share gradients of pair biases add to them in turn, so the tasks of all heads of a
    // block of rows are consecutive.
    const bool by_row = shares_pairs();
    block.number = by_row ? index / group_ : index % row_blocks_;
    block.h = block.key_head * group_ + (by_row ? index % group_ : index / row_blocks_);
    block.begin = block.number * block_;
    block.end = std::min(block.begin + block_, n_.queries);
    block.keys = KeysOfRows(block.b, block.begin, block.end);
    block.first = block.keys.begin / kWidth * kWidth;
    block.turn = index;
    // Padding makes rows map to different cache sets.
    block.stride = RoundUp(block.keys.end - block.first, kWidth) + kLaneCount;
    block.c = in_.factor[block.h];
    block.dc = tangent_.factor != nullptr ? tangent_.factor[block.h] : 0.0f;
    if (block.keys.empty()) return RunEmpty(block);
    MultiplyQueries(block, scratch);
    if (relative_.exists()) SetWindows(block, scratch);
    if (content_.exists()) {
      content_.Products(ContentTile(block), ContentPairs(block, scratch), scratch.content,
                        &block.runs);
    }
    if (function_ != nullptr) SetScalars(block, scratch);
    Columns columns[kRowBlock];
    for (int64_t r = 0; r < block.rows(); ++r) columns[r] = SetRow(block, r, scratch);
    if (wants_any()) PackGradients(block, scratch);
    if (wants_scores()) {
      MultiplyValues(block, scratch);
      for (int64_t r = 0; r < block.rows(); ++r) {
        SetScoreGradientRow(block, r, columns[r], scratch);
      }
      AddBiasGradients(block, columns, scratch);
      if (wants_pair_bias()) AddPairGradients(block, columns, scratch);
      if (relative_.keys().exists()) SetRelativeGradients(block, columns, scratch);
      if (wants_content()) AddContentGradients(block, scratch);
      if (function_ != nullptr) SetProductGradients(block, columns, scratch);
    }
    for (int64_t r = 0; drops() && r < block.rows(); ++r) {
      DropRow(DropperOf(block, r), block.first, columns[r], DualOf(scratch.weights, block, r));
    }
    if (relative_.values().exists()) SetRelativeWeights(block, columns, scratch);
    WriteOutputs(block, scratch);
    if (wants_x() && has_product()) WriteQueryGradients(block, scratch);
    if (wants_tables()) AddTableRows(block, scratch);
    AddKeyGradients(block, scratch);
  }

  // Clears the results of rows that attend to no keys.
  void RunEmpty(const Block& block) {
    for (int64_t i = block.begin; i < block.end; ++i) {
      const auto clear = [&](const View<Real>& view, int64_t columns) {
        if (view.data != nullptr) std::fill_n(view.row(block.b, block.h, i), columns, 0.0f);
      };
      clear(of_.output.o, n_.value_dim);
      clear(of_.o_tangent, n_.value_dim);
      clear(of_.gradient.x, dim_);
      clear(of_.gradient_tangent.x, dim_);
      clear(of_.gradient.relative_query, in_.relative.dim);
      clear(of_.gradient_tangent.relative_query, in_.relative.dim);
      WriteStatistics(block, i, -kInfinity, 0, 0, -1);
      for (const bool is_tangent : {false, true}) {
        if (Real* d_temperature = Gradient(is_tangent).temperature) {
          d_temperature[RowAt(block, i)] = 0;
        }
        Real* const d_scalars = Gradient(is_tangent).row_scalars;
        for (int s = 0; d_scalars != nullptr && s < row_scalars(); ++s) {
          RowScalar(d_scalars, s, block.head(n_))[i] = 0;
        }
      }
    }
    for (const bool is_tangent : {false, true}) *HeadGradient(is_tangent, block) = {};
    if (!wants_any()) return;
    if (wants_scores()) {
      head_turns_.Wait(block.head(n_), block.number);
      head_turns_.Pass(block.head(n_), block.number);
    }
    if (wants_tables()) {
      table_turns_.Wait(block.head(n_), block.number);
      table_turns_.Pass(block.head(n_), block.number);
    }
    if (wants_content()) {
      content_turns_.Wait(block.key_head_of(n_), block.turn);
      content_turns_.Pass(block.key_head_of(n_), block.turn);
    }
    if (wants_pair_bias()) {
      const std::vector<Columns> none(block.row_count(), Columns{0, 0});
      AddPairGradients(block, none.data(), {});
    }
    for (int64_t n = 0; n < turn_blocks_; ++n) {
      const int64_t sum = (block.b * n_.key_heads + block.key_head) * turn_blocks_ + n;
      key_turns_.Wait(sum, block.turn);
      key_turns_.Pass(sum, block.turn);
    }
  }

  // Computes [x' x] . [y y'], skipping tangents that are 0.
  static void MultiplyTangents(size_t rows, size_t vectors, int64_t dim, const Real* x, bool has_x,
                               const Real* panel, bool has_y, Real* to, int64_t stride) {
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

  // Copies row i of a matrix and of its tangent as [tangent, value].
  static void CopyTangentAndValue(const Tokens& value, const Tokens& tangent, const Block& block,
                                  int64_t i, int64_t columns, Real* to) {
    Widen(value.row(block.b, block.h, i), value.type, 0, columns, to + columns);
    if (tangent.data == nullptr) {
      std::fill_n(to, columns, 0.0f);
    } else {
      Widen(tangent.row(block.b, block.h, i), tangent.type, 0, columns, to);
    }
  }

  // Computes inner products of the rows with the keys, and their tangents.
  void MultiplyQueries(const Block& block, const Scratch& scratch) const {
    for (int64_t i = block.begin; i < block.end; ++i) {
      CopyTangentAndValue(in_.x, tangent_.x, block, i, dim_,
                          scratch.x + (i - block.begin) * 2 * dim_);
    }
    Real* const tangents = scratch.weights;
    Real* const products = tangents + block.rows() * block.stride;
    for (int64_t j = block.first; j < block.keys.end; j += kWidth) {
      const Real* const panel = key_panels_.panel(block.b, block.key_head, j / kWidth);
      const size_t vectors = VectorsOfPanel(j, block.keys.end);
      Multiply(block.row_count(), vectors, Size(dim_), {scratch.x + dim_, Size(2 * dim_), 1}, panel,
               Size(kWidth), products + j - block.first, Size(block.stride));
      MultiplyTangents(block.row_count(), vectors, dim_, scratch.x, has_x(), panel, has_y(),
                       tangents + j - block.first, block.stride);
    }
  }

  DualAddends::Row AddendRow(const Block& block, int64_t r, const Columns& columns) const {
    return {block.b, block.h, block.begin + r, block.first, columns};
  }
  // The index of a row in arrays over (B, H, Lq).
  int64_t RowAt(const Block& block, int64_t i) const { return block.head(n_) * n_.queries + i; }
  // Row r of a block's array, in which the tangents come first.
  static DualRow DualOf(Real* array, const Block& block, int64_t r) {
    Real* const tangents = array + r * block.stride;
    return {tangents + block.rows() * block.stride, tangents};
  }
  Dropper DropperOf(const Block& block, int64_t r) const {
    return {in_.dropout, block.b, block.h, block.begin + r};
  }
  Temper TemperOf(const Block& block, int64_t r) const {
    const int64_t row = RowAt(block, block.begin + r);
    return {in_.temperature != nullptr ? in_.temperature[row] : 1.0f,
            tangent_.temperature != nullptr ? tangent_.temperature[row] : 0.0f,
            static_cast<Real>(in_.softcap)};
  }

  // The biases of row r, in log2 units, and their tangents; null if there are none.
  DualRow SumBiases(Block& block, int64_t r, const Columns& columns, const Scratch& scratch) const {
    const DualAddends::Row row = AddendRow(block, r, columns);
    const bool is_relative = relative_.keys().exists();
    const Real factor = in_.relative.factor;
    const bool has_content = content_.exists();
    const DualRow content = has_content ? DualOf(scratch.gradients, block, r) : DualRow{};
    const auto add_content = [&](const Real* from, Real* to) {
      const int64_t first = columns.first();
      AddNumbers(from + first, columns.last() - first, to + first);
    };
    if (has_bias()) {
      const DF d;
      addends_.SumBiases(row, scratch.bias);
      if (has_content) add_content(content.values, scratch.bias);
      if (is_relative) {
        relative_.Read(row, block.keys_window.values, r, factor, scratch.bias, &block.runs);
      }
      for (int64_t j = row.columns.first(); j < row.columns.last(); j += kLaneCount) {
        hn::Store(BiasInLog2(hn::Load(d, scratch.bias + j)), d, scratch.bias + j);
      }
    }
    if (has_bias_tangent()) {
      addends_.SumTangents(row, scratch.bias_tangent);
      if (has_content && content_.has_tangents()) {
        add_content(content.tangents, scratch.bias_tangent);
      }
      if (is_relative) {
        relative_.Read(row, block.keys_window.tangents, r, factor, scratch.bias_tangent,
                       &block.runs);
      }
    }
    return {has_bias() ? scratch.bias : nullptr,
            has_bias_tangent() ? scratch.bias_tangent : nullptr};
  }

  bool wants_tables() const { return d_relative_keys_.wanted() || d_relative_values_.wanted(); }

  // Sets the windows of the relative tables, and multiplies the queries by the relative keys.
  void SetWindows(Block& block, const Scratch& scratch) const {
    const auto window = [&](Real* memory) {
      return relative_.Window(block.b, block.begin, block.end, block.keys, memory);
    };
    if (relative_.values().exists()) block.values_window = window(scratch.value_window);
    if (!relative_.keys().exists()) return;
    block.keys_window = window(scratch.key_window);
    relative_.MultiplyKeys(block.b, block.h, block.begin, block.rows(), block.keys_window,
                           scratch.table_rows);
  }

  // Overwrites the products in the window of relative keys with sums of score gradients, and writes
  // the gradients of relative.query.
  void SetRelativeGradients(Block& block, const Columns* columns, const Scratch& scratch) const {
    const int64_t rows = block.rows();
    const DualWindow& window = block.keys_window;
    for (int64_t r = 0; r < rows; ++r) {
      const DualAddends::Row row = AddendRow(block, r, columns[r]);
      const DualRow gradients = DualOf(scratch.gradients, block, r);
      const Real factor = in_.relative.factor;
      window.ClearRow(r);
      relative_.Add(row, gradients.values, factor, window.values, r, &block.runs);
      relative_.Add(row, gradients.tangents, factor, window.tangents, r, &block.runs);
    }
    if (!wants_relative_query()) return;
    const int64_t padded = relative_.keys().values().padded();
    Real* const sums = scratch.table_rows;
    Real* const tangents = sums + rows * padded;
    std::fill_n(sums, 2 * rows * padded, 0.0f);
    relative_.keys().AddProducts(block.h, rows, window, sums, tangents);
    for (int64_t r = 0; r < rows; ++r) {
      const auto write = [&](const View<Real>& view, const Real* from) {
        if (view.data == nullptr) return;
        std::copy_n(from + r * padded, in_.relative.dim,
                    view.row(block.b, block.h, block.begin + r));
      };
      write(of_.gradient.relative_query, sums);
      write(of_.gradient_tangent.relative_query, tangents);
    }
  }

  DualContent::Tile ContentTile(const Block& block) const {
    return {{block.b, block.h, block.begin, block.rows()},
            block.key_head,
            block.first,
            block.keys.begin - block.first,
            block.keys.end - block.first};
  }
  // The position-to-content terms of a block, which are stored in place of gradients of scores.
  static DualContent::Pairs ContentPairs(const Block& block, const Scratch& scratch) {
    return {DualOf(scratch.gradients, block, 0), block.stride};
  }
  void AddContentGradients(Block& block, const Scratch& scratch) {
    const Rows keys =
        wants_relative_queries() ? content_keys_.Head(block.b, block.key_head) : Rows{};
    const Rows tangents = wants_relative_queries() && has_content_key()
                              ? content_key_tangents_.Head(block.b, block.key_head)
                              : Rows{};
    content_turns_.Wait(block.key_head_of(n_), block.turn);
    content_.Gradients(ContentTile(block), ContentPairs(block, scratch), d_content_keys_,
                       d_content_key_tangents_, d_relative_queries_, keys, tangents,
                       scratch.content, &block.runs);
    content_turns_.Pass(block.key_head_of(n_), block.turn);
  }

  // Overwrites the products in the window of relative values with sums of weights.
  void SetRelativeWeights(Block& block, const Columns* columns, const Scratch& scratch) const {
    const DualWindow& window = block.values_window;
    for (int64_t r = 0; r < block.rows(); ++r) {
      const DualAddends::Row row = AddendRow(block, r, columns[r]);
      const DualRow weights = DualOf(scratch.weights, block, r);
      window.ClearRow(r);
      relative_.Add(row, weights.values, 1.0f, window.values, r, &block.runs);
      relative_.Add(row, weights.tangents, 1.0f, window.tangents, r, &block.runs);
    }
  }

  // Adds the block's contributions to the gradients of the relative tables.
  void AddTableRows(const Block& block, const Scratch& scratch) {
    const int64_t head = block.head(n_);
    const int64_t rows = block.rows();
    table_turns_.Wait(head, block.number);
    if (d_relative_keys_.wanted()) {
      relative_queries_.Fill(block.b, block.h, block.begin, block.end);
      Rows tangents;
      if (tangent_.relative.query.data != nullptr) {
        relative_query_tangents_.Fill(block.b, block.h, block.begin, block.end);
        tangents = relative_query_tangents_.Head(block.b, block.h);
      }
      d_relative_keys_.Add(head, rows, block.keys_window, relative_queries_.Head(block.b, block.h),
                           tangents, block.begin);
    }
    if (d_relative_values_.wanted()) {
      const Rows d_o{scratch.stacked_d_o, padded_value_dim_};
      const Rows d_o_tangents{d_o.row(rows), padded_value_dim_};
      d_relative_values_.Add(head, rows, block.values_window, d_o, d_o_tangents, 0);
    }
    table_turns_.Pass(head, block.number);
  }

  // Turns row r's inner products into weights; returns the columns that are visible to the row.
  Columns SetRow(Block& block, int64_t r, const Scratch& scratch) const {
    const int64_t i = block.begin + r;
    const auto [weights, tangents] = DualOf(scratch.weights, block, r);
    const KeyRange seen = addends_.Keys(block.b, i);
    Columns columns{seen.begin - block.first, seen.end - block.first};
    if (seen.empty()) columns = {0, 0};
    if (function_ != nullptr) SetValues(block, r, columns, {weights, tangents}, scratch);
    const DualRow bias = SumBiases(block, r, columns, scratch);
    Real largest =
        SetScores(weights, tangents, columns, block.c, block.dc, bias.values, bias.tangents);
    if (has_temper()) {
      largest = SetTemperedScores(weights, tangents, columns, TemperOf(block, r),
                                  DualOf(scratch.plain, block, r));
    }
    if (largest == -kInfinity) columns = {0, 0};
    RowTotals totals{0, 0};
    int64_t top = -1;
    if (columns.end > 0) {
      if (of_.output.statistics != nullptr || function_ != nullptr) {
        top = FindScore(weights, columns, largest);
      }
      totals = SetWeights(weights, tangents, columns, largest);
    }
    for (Real* row : {weights, tangents}) {
      std::fill(row, row + columns.first(), 0.0f);
      std::fill(row + columns.last(), row + block.columns(), 0.0f);
    }
    block.top[r] = top;
    WriteStatistics(block, i, largest, totals.weight, totals.mean,
                    top < 0 ? -1 : block.first + top);
    return columns;
  }

  void WriteStatistics(const Block& block, int64_t i, Real largest, Real weight, Real mean,
                       int64_t top) const {
    const int64_t row = RowAt(block, i);
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

  // Multiplies `rows` rows of weights by `of_keys`, which has one row per key, and adds the
  // products to `to`.
  void MultiplyByKeys(const Block& block, const Real* weights, int64_t rows, const Rows& of_keys,
                      int64_t columns, Real* to) const {
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
    Real* const tangents = scratch.sums;
    Real* const sums = tangents + rows * padded_value_dim_;
    std::fill_n(tangents, 2 * rows * padded_value_dim_, 0.0f);
    const Real* const weights = scratch.weights + rows * block.stride;
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
    if (relative_.values().exists()) {
      relative_.values().AddProducts(block.h, rows, block.values_window, has_o ? sums : nullptr,
                                     has_tangent ? tangents : nullptr);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const auto write = [&](const View<Real>& view, const Real* from) {
        if (view.data == nullptr) return;
        std::copy_n(from + r * padded_value_dim_, n_.value_dim,
                    view.row(block.b, block.h, block.begin + r));
      };
      write(of_.output.o, sums);
      write(of_.o_tangent, tangents);
    }
  }

  // The factor by which gradients of inner products must be multiplied. Gradients from a pair
  // function already include it.
  Real ProductFactor(const Block& block) const { return function_ == nullptr ? block.c : 1.0f; }
  Real ProductFactorTangent(const Block& block) const {
    return function_ == nullptr ? block.dc : 0.0f;
  }

  void PackGradients(const Block& block, const Scratch& scratch) const {
    const int64_t rows = block.rows();
    const Real c = ProductFactor(block);
    const Real dc = ProductFactorTangent(block);
    for (int64_t r = 0; r < rows; ++r) {
      Real* const both = scratch.d_o + r * 2 * n_.value_dim;
      CopyTangentAndValue(of_.d_o, of_.d_o_tangent, block, block.begin + r, n_.value_dim, both);
      Real* const value = scratch.stacked_d_o + r * padded_value_dim_;
      Real* const tangent = value + rows * padded_value_dim_;
      std::copy_n(both, n_.value_dim, tangent);
      std::copy_n(both + n_.value_dim, n_.value_dim, value);
      for (Real* row : {value, tangent}) {
        std::fill(row + n_.value_dim, row + padded_value_dim_, 0.0f);
      }
      if (!wants_y()) continue;
      const Real* const x_tangent = scratch.x + r * 2 * dim_;
      const Real* const x = x_tangent + dim_;
      Real* const scaled = scratch.scaled + r * padded_dim_;
      Real* const scaled_tangent = scaled + rows * padded_dim_;
      for (int64_t e = 0; e < dim_; ++e) {
        scaled[e] = c * x[e];
        scaled_tangent[e] = c * x_tangent[e] + dc * x[e];
      }
      for (Real* row : {scaled, scaled_tangent}) {
        std::fill(row + dim_, row + padded_dim_, 0.0f);
      }
    }
  }

  // Computes the gradients of the weights.
  void MultiplyValues(const Block& block, const Scratch& scratch) const {
    Real* const tangents = scratch.gradients;
    Real* const products = tangents + block.rows() * block.stride;
    for (int64_t j = block.first; j < block.keys.end; j += kWidth) {
      const Real* const panel = value_panels_.panel(block.b, block.key_head, j / kWidth);
      const size_t vectors = VectorsOfPanel(j, block.keys.end);
      Multiply(block.row_count(), vectors, Size(n_.value_dim),
               {scratch.d_o + n_.value_dim, Size(2 * n_.value_dim), 1}, panel, Size(kWidth),
               products + j - block.first, Size(block.stride));
      MultiplyTangents(block.row_count(), vectors, n_.value_dim, scratch.d_o, has_d_o(), panel,
                       has_v(), tangents + j - block.first, block.stride);
    }
    if (!relative_.values().exists()) return;
    const auto of_d_o = [&](int64_t first) -> Strided {
      return {scratch.d_o + first, Size(2 * n_.value_dim), 1};
    };
    relative_.values().Multiply(
        block.h, block.rows(),
        {of_d_o(n_.value_dim), has_d_o() ? of_d_o(0) : Strided{nullptr, 0, 0}}, block.values_window,
        scratch.table_rows);
  }

  void SetScoreGradientRow(Block& block, int64_t r, const Columns& columns,
                           const Scratch& scratch) const {
    const int64_t row = RowAt(block, block.begin + r);
    const DualRow gradients = DualOf(scratch.gradients, block, r);
    if (relative_.values().exists()) {
      const DualAddends::Row of_row = AddendRow(block, r, columns);
      relative_.Read(of_row, block.values_window.values, r, 1.0f, gradients.values, &block.runs);
      relative_.Read(of_row, block.values_window.tangents, r, 1.0f, gradients.tangents,
                     &block.runs);
    }
    if (drops()) DropRow(DropperOf(block, r), block.first, columns, gradients);
    const Real d_lse = of_.d_lse != nullptr ? of_.d_lse[row] : 0.0f;
    const Real d_lse_tangent = of_.d_lse_tangent != nullptr ? of_.d_lse_tangent[row] : 0.0f;
    SetScoreGradients(DualOf(scratch.weights, block, r), gradients, columns, d_lse, d_lse_tangent);
    block.sum[r] = {};
    if (function_ != nullptr && block.top[r] >= 0) {
      BalanceRow(gradients.values, columns, block.top[r], d_lse);
      BalanceRow(gradients.tangents, columns, block.top[r], d_lse_tangent);
      block.sum[r] = {d_lse, d_lse_tangent};
    }
    if (has_temper()) SetPlainGradientRow(block, r, columns, scratch);
    for (Real* numbers : {gradients.values, gradients.tangents}) {
      std::fill(numbers, numbers + columns.first(), 0.0f);
      std::fill(numbers + columns.last(), numbers + block.columns(), 0.0f);
    }
  }

  void SetPlainGradientRow(Block& block, int64_t r, const Columns& columns,
                           const Scratch& scratch) const {
    const Temper temper = TemperOf(block, r);
    const TemperSums sums = SetPlainGradients(DualOf(scratch.gradients, block, r),
                                              DualOf(scratch.plain, block, r), columns, temper);
    const int64_t row = RowAt(block, block.begin + r);
    if (Real* d_temperature = of_.gradient.temperature) {
      d_temperature[row] = sums.temperature.value;
    }
    if (Real* d_temperature = of_.gradient_tangent.temperature) {
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

  void WriteQueryGradients(const Block& block, const Scratch& scratch) {
    const int64_t rows = block.rows();
    const Real c = ProductFactor(block);
    const Real dc = ProductFactorTangent(block);
    const bool has_value = of_.gradient.x.data != nullptr || wants_factor() || dc != 0;
    Real* const tangents = scratch.sums;
    Real* const sums = tangents + rows * padded_dim_;
    std::fill_n(tangents, 2 * rows * padded_dim_, 0.0f);
    MultiplyByKeys(block, scratch.gradients, has_value ? 2 * rows : rows,
                   keys_.Head(block.b, block.key_head), dim_, tangents);
    if (has_y()) {
      MultiplyByKeys(block, scratch.gradients + rows * block.stride, rows,
                     key_tangents_.Head(block.b, block.key_head), dim_, tangents);
    }
    if (is_distance()) AddDistanceGradients(block, {sums, tangents}, scratch);
    HeadSums of_head;
    HeadSums of_head_tangent;
    for (int64_t r = 0; r < rows; ++r) {
      const Real* const sum = sums + r * padded_dim_;
      const Real* const tangent = tangents + r * padded_dim_;
      const Real* const x_tangent = scratch.x + r * 2 * dim_;
      const Real* const x = x_tangent + dim_;
      if (of_.gradient.x.data != nullptr) {
        Real* const to = of_.gradient.x.row(block.b, block.h, block.begin + r);
        for (int64_t e = 0; e < dim_; ++e) to[e] = c * sum[e];
      }
      if (of_.gradient_tangent.x.data != nullptr) {
        Real* const to = of_.gradient_tangent.x.row(block.b, block.h, block.begin + r);
        for (int64_t e = 0; e < dim_; ++e) to[e] = c * tangent[e] + dc * sum[e];
      }
      if (!wants_factor() || function_ != nullptr) continue;
      of_head.factor += Sum(dim_, [=](int64_t e) { return x[e] * sum[e]; });
      of_head_tangent.factor +=
          Sum(dim_, [=](int64_t e) { return x[e] * tangent[e] + x_tangent[e] * sum[e]; });
    }
    if (function_ != nullptr) return;
    *HeadGradient(false, block) = of_head;
    *HeadGradient(true, block) = of_head_tangent;
  }

  // The pair function's arguments and slopes are computed for this many columns at a time.
  static constexpr int64_t kPairs = 128;

  // The arrays of a row's pairs starting at `column`, or the arrays of their tangents, in scratch
  // memory. Scalars of rows and heads are equal in all columns, so their arrays are read from the
  // beginning. Scalars of columns are read starting at `column`.
  PairArrays PairsAt(bool is_tangent, const Real* g, int64_t column, const Scratch& scratch) const {
    const Real* const pairs = scratch.pairs + is_tangent * kScalarArrays * stride_;
    return {g + column, pairs, pairs + kMostScalars * stride_ + column,
            pairs + 2 * kMostScalars * stride_, stride_};
  }
  SlopeArrays Slopes(bool is_tangent, const Scratch& scratch) const {
    Real* const slopes = scratch.slopes + is_tangent * (kScalarArrays + 1) * stride_;
    return {slopes, slopes + stride_, slopes + (1 + kMostScalars) * stride_,
            slopes + (1 + 2 * kMostScalars) * stride_};
  }
  Real* ColumnGradient(bool is_tangent, int s, const Scratch& scratch) const {
    return scratch.d_columns + (is_tangent * (kMostScalars + 1) + s) * stride_;
  }
  DualRow ArgumentsOf(const Block& block, int64_t r, const Scratch& scratch) const {
    return DualOf(scratch.g, block, r);
  }

  // Copies the scalars of the block's keys, and computes the squared norms of its queries.
  void SetScalars(Block& block, const Scratch& scratch) const {
    const int64_t begin = block.keys.begin - block.first;
    const int64_t end = block.keys.end - block.first;
    const int64_t head = block.key_head_of(n_);
    for (const bool is_tangent : {false, true}) {
      const auto copy = [&](const Real* from, Real hidden, Real* to) {
        if (from == nullptr) {
          std::fill_n(to, block.columns(), 0.0f);
          return;
        }
        std::fill_n(to, begin, hidden);
        std::copy(from + block.first + begin, from + block.first + end, to + begin);
        std::fill(to + end, to + block.columns(), hidden);
      };
      const Real* const scalars = (is_tangent ? tangent_ : in_).column_scalars;
      Real* const arrays = scratch.pairs + (is_tangent * kScalarArrays + kMostScalars) * stride_;
      for (int s = 0; s < column_scalars(); ++s) {
        copy(scalars != nullptr ? ColumnScalar(scalars, s, head) : nullptr,
             is_tangent ? 0.0f : 1.0f, arrays + s * stride_);
      }
      if (is_distance()) {
        copy(KeyNumber(norms_, is_tangent, head, 0), 0.0f, scratch.norms + is_tangent * stride_);
      }
    }
    if (!is_distance()) return;
    for (int64_t r = 0; r < block.rows(); ++r) {
      const Real* const x_tangent = scratch.x + r * 2 * dim_;
      block.norm[r] = SquaredNorm(x_tangent + dim_, dim_);
      block.norm_tangent[r] = NormTangent(x_tangent + dim_, x_tangent, dim_);
    }
  }

  // Fills the arrays with the scalars of row r and of its head.
  void SetRowScalars(const Block& block, int64_t r, const Scratch& scratch) const {
    const int64_t count = std::min(kPairs, stride_);
    for (const bool is_tangent : {false, true}) {
      const AttentionInput<Real>& from = is_tangent ? tangent_ : in_;
      Real* const arrays = scratch.pairs + is_tangent * kScalarArrays * stride_;
      for (int s = 0; s < row_scalars(); ++s) {
        std::fill_n(arrays + s * stride_, count,
                    from.row_scalars != nullptr
                        ? RowScalar(from.row_scalars, s, block.head(n_))[block.begin + r]
                        : 0.0f);
      }
      for (int s = 0; s < head_scalars(); ++s) {
        std::fill_n(
            arrays + (2 * kMostScalars + s) * stride_, count,
            from.head_scalars != nullptr ? from.head_scalars[s * n_.heads + block.h] : 0.0f);
      }
    }
  }

  // Computes the pair function's arguments from inner products.
  void SetArguments(const Block& block, int64_t r, const Columns& columns, const DualRow& products,
                    const Scratch& scratch) const {
    const DF d;
    const DualRow g = ArgumentsOf(block, r, scratch);
    if (!is_distance()) {
      const int64_t first = columns.first();
      const int64_t count = columns.last() - first;
      std::copy_n(products.values + first, count, g.values + first);
      std::copy_n(products.tangents + first, count, g.tangents + first);
      return;
    }
    const VF norm = hn::Set(d, block.norm[r]);
    const VF norm_tangent = hn::Set(d, block.norm_tangent[r]);
    const VF near = hn::Set(d, NearShare(block.c * TemperOf(block, r).temperature, block.norm[r]));
    const VF least = hn::Set(d, std::numeric_limits<Real>::min());
    for (int64_t j = columns.first(); j < columns.last(); j += kLaneCount) {
      const VF product = hn::Load(d, products.values + j);
      const VF product_tangent = hn::Load(d, products.tangents + j);
      const VF norms = norm + hn::Load(d, scratch.norms + j);
      const VF norm_tangents = norm_tangent + hn::Load(d, scratch.norms + stride_ + j);
      const VF distances = Max(hn::Zero(d), norms - (product + product));
      hn::Store(distances, d, g.values + j);
      hn::Store(norm_tangents - (product_tangent + product_tangent), d, g.tangents + j);
      if (HWY_LIKELY(hn::AllTrue(d, distances > hn::MulSub(norms, near, least)))) continue;
      SetByDifferences(block, r, std::max(j, columns.begin), std::min(j + kLaneCount, columns.end),
                       g, scratch);
    }
  }
  // Computes the arguments of columns [begin, end) from the differences of tokens.
  void SetByDifferences(const Block& block, int64_t r, int64_t begin, int64_t end, const DualRow& g,
                        const Scratch& scratch) const {
    KeyReader keys(*this, block);
    const Real* const x_tangent = scratch.x + r * 2 * dim_;
    const Real* const x = x_tangent + dim_;
    for (int64_t j = begin; j < end; ++j) {
      const auto [y, y_tangent] = keys.At(block.first + j);
      g.values[j] = SquaredDistance(x, y, dim_);
      g.tangents[j] = 2 * Sum(dim_, [=, y = y, y_tangent = y_tangent](int64_t e) {
                        return (x[e] - y[e]) * (x_tangent[e] - y_tangent[e]);
                      });
    }
  }

  // Reads keys of a head with their tangents.
  class KeyReader {
   public:
    KeyReader(const Pass& pass, const Block& block)
        : block_(block),
          rows_(pass.in_.y, pass.dim_),
          tangents_(pass.tangent_.y, pass.has_y() ? pass.dim_ : 0),
          zeros_(pass.has_y() ? 0 : Size(pass.dim_)) {}

    std::pair<const Real*, const Real*> At(int64_t key) {
      const Real* const y = rows_.Row(block_.b, block_.key_head, key);
      return {y, zeros_.empty() ? tangents_.Row(block_.b, block_.key_head, key) : zeros_.data()};
    }

   private:
    const Block& block_;
    RowReader rows_;
    RowReader tangents_;
    std::vector<Real> zeros_;
  };

  // Computes the tangents of f for pairs [n, n + kLanes) from its slopes.
  HWY_INLINE VF ValueTangent(const SlopeArrays& slopes, const PairArrays& tangents,
                             int64_t n) const {
    const DF d;
    VF sum = hn::Zero(d);
    const auto add = [&](const Real* of_slopes, const Real* of_tangents, int scalars) HWY_ATTR {
      for (int s = 0; s < scalars; ++s) {
        const int64_t at = s * stride_ + n;
        sum = hn::MulAdd(hn::Load(d, of_slopes + at), hn::LoadU(d, of_tangents + at), sum);
      }
    };
    add(slopes.g, tangents.g, has_product() ? 1 : 0);
    add(slopes.a, tangents.a, row_scalars());
    add(slopes.b, tangents.b, column_scalars());
    add(slopes.t, tangents.t, head_scalars());
    return sum;
  }

  // Turns row r's inner products into values of f, and their tangents into tangents of f.
  void SetValues(const Block& block, int64_t r, const Columns& columns, const DualRow& row,
                 const Scratch& scratch) const {
    HWY_ALIGN Real one[kPairs];
    std::fill_n(one, kPairs, 1.0f);
    SetRowScalars(block, r, scratch);
    SetArguments(block, r, columns, row, scratch);
    const DualRow g = ArgumentsOf(block, r, scratch);
    const SlopeArrays slopes = Slopes(false, scratch);
    for (int64_t j = columns.first(); j < columns.last(); j += kPairs) {
      const int64_t count = std::min(kPairs, columns.last() - j);
      const PairArrays pairs = PairsAt(false, g.values, j, scratch);
      const PairArrays tangents = PairsAt(true, g.tangents, j, scratch);
      function_->pairs->values(pairs, count, row.values + j);
      function_->pairs->slopes(pairs, count, one, slopes);
      for (int64_t n = 0; n < count; n += kLaneCount) {
        hn::Store(ValueTangent(slopes, tangents, n), DF(), row.tangents + j + n);
      }
    }
  }

  // Clears `f` and the slopes of hidden pairs, which may hold arbitrary numbers, among the `count`
  // pairs starting at column j.
  void ClearHidden(const Columns& columns, int64_t j, int64_t count, Real* f,
                   const Scratch& scratch) const {
    const auto clear = [&](int64_t begin, int64_t end) {
      for (int64_t n = std::max(begin - j, int64_t{0}); n < std::min(end - j, count); ++n) {
        f[n] = 0;
        for (int64_t array = 0; array < 2 * (kScalarArrays + 1); ++array) {
          scratch.slopes[array * stride_ + n] = 0;
        }
      }
    };
    clear(columns.first(), columns.begin);
    clear(columns.end, columns.last());
  }

  // A number and its tangent in each lane.
  struct DualSum {
    VF value;
    VF tangent;
    // GCC generates implicit constructors outside the region that selects the instruction set.
    HWY_INLINE DualSum() {}
    HWY_INLINE DualSum(VF x, VF dx) : value(x), tangent(dx) {}
    // Adds the product of the dual numbers (x, dx) and (y, dy).
    HWY_INLINE void Add(VF x, VF dx, VF y, VF dy) {
      value = hn::MulAdd(x, y, value);
      tangent = hn::MulAdd(dx, y, hn::MulAdd(x, dy, tangent));
    }
  };
  // Turns the gradients of scores into gradients of inner products, and sums the gradients of
  // scalars, squared norms and factors. Slopes are relative to those of the row's largest score
  // (see RowSoftmax).
  void SetProductGradients(Block& block, const Columns* columns, const Scratch& scratch) {
    std::fill_n(scratch.d_columns, 2 * (kMostScalars + 1) * stride_, 0.0f);
    block.near.clear();
    HeadSums of_head;
    HeadSums of_head_tangent;
    for (int64_t r = 0; r < block.rows(); ++r) {
      SetProductGradientRow(block, r, columns[r], of_head, of_head_tangent, scratch);
    }
    *HeadGradient(false, block) = of_head;
    *HeadGradient(true, block) = of_head_tangent;
  }

  void SetProductGradientRow(Block& block, int64_t r, const Columns& columns, HeadSums& of_head,
                             HeadSums& of_head_tangent, const Scratch& scratch) {
    const DF d;
    const VF zero = hn::Zero(d);
    const DualRow gradients = DualOf(scratch.gradients, block, r);
    const DualRow g = ArgumentsOf(block, r, scratch);
    const SlopeArrays slopes = Slopes(false, scratch);
    const SlopeArrays slope_tangents = Slopes(true, scratch);
    HWY_ALIGN Real f[kPairs];
    SetRowScalars(block, r, scratch);
    const auto differentiate = [&](int64_t j, int64_t count) HWY_ATTR {
      const PairArrays pairs = PairsAt(false, g.values, j, scratch);
      function_->pairs->values(pairs, count, f);
      function_->slopes(pairs, PairsAt(true, g.tangents, j, scratch), count, slopes,
                        slope_tangents);
      ClearHidden(columns, j, count, f, scratch);
    };
    // f at the largest score, and its derivatives with respect to g and the row's scalars.
    DualNumber top_f;
    DualNumber top_g;
    DualNumber top_a[kMostScalars];
    if (const int64_t top = block.top[r]; top >= 0) {
      const int64_t j = top / kLaneCount * kLaneCount;
      const int64_t n = top - j;
      differentiate(j, kLaneCount);
      HWY_ALIGN Real tangents[kLanes];
      hn::Store(ValueTangent(slopes, PairsAt(true, g.tangents, j, scratch), 0), d, tangents);
      const auto number = [&](Real value, Real tangent) {
        return std::isfinite(value) && std::isfinite(tangent) ? DualNumber{value, tangent}
                                                              : DualNumber{};
      };
      top_f = number(f[n], tangents[n]);
      if (is_distance() && !IsNear(block, r, top, g, scratch)) {
        top_g = number(slopes.g[n], slope_tangents.g[n]);
      }
      for (int s = 0; s < row_scalars(); ++s) {
        const int64_t at = s * stride_ + n;
        top_a[s] = number(slopes.a[at], slope_tangents.a[at]);
      }
    }
    const VF c = hn::Set(d, block.c);
    const VF dc = hn::Set(d, block.dc);
    const auto difference = [&](const Real* numbers, Real top)
                                HWY_ATTR { return hn::Load(d, numbers) - hn::Set(d, top); };
    DualSum sum_f{zero, zero};
    DualSum sum_norm{zero, zero};
    DualSum sum_a[kMostScalars];
    DualSum sum_t[kMostScalars];
    for (int s = 0; s < kMostScalars; ++s) sum_a[s] = sum_t[s] = {zero, zero};
    for (int64_t j = columns.first(); j < columns.last(); j += kPairs) {
      const int64_t count = std::min(kPairs, columns.last() - j);
      differentiate(j, count);
      const PairArrays tangents = PairsAt(true, g.tangents, j, scratch);
      for (int64_t n = 0; n < count; n += kLaneCount) {
        const VF ds = hn::Load(d, gradients.values + j + n);
        const VF ds_tangent = hn::Load(d, gradients.tangents + j + n);
        const VF df = c * ds;
        const VF df_tangent = hn::MulAdd(c, ds_tangent, dc * ds);
        sum_f.Add(ds, ds_tangent, difference(f + n, top_f.value),
                  ValueTangent(slopes, tangents, n) - hn::Set(d, top_f.tangent));
        for (int s = 0; s < row_scalars(); ++s) {
          const int64_t at = s * stride_ + n;
          sum_a[s].Add(df, df_tangent, difference(slopes.a + at, top_a[s].value),
                       difference(slope_tangents.a + at, top_a[s].tangent));
        }
        for (int s = 0; s < head_scalars(); ++s) {
          const int64_t at = s * stride_ + n;
          sum_t[s].Add(df, df_tangent, hn::Load(d, slopes.t + at),
                       hn::Load(d, slope_tangents.t + at));
        }
        const auto add_column = [&](int s, VF slope, VF slope_tangent) HWY_ATTR {
          Real* const to = ColumnGradient(false, s, scratch) + j + n;
          Real* const to_tangent = ColumnGradient(true, s, scratch) + j + n;
          DualSum sum{hn::Load(d, to), hn::Load(d, to_tangent)};
          sum.Add(df, df_tangent, slope, slope_tangent);
          hn::Store(sum.value, d, to);
          hn::Store(sum.tangent, d, to_tangent);
        };
        for (int s = 0; s < column_scalars(); ++s) {
          const int64_t at = s * stride_ + n;
          add_column(s, hn::Load(d, slopes.b + at), hn::Load(d, slope_tangents.b + at));
        }
        if (!has_product()) continue;
        VF slope = hn::Load(d, slopes.g + n);
        VF slope_tangent = hn::Load(d, slope_tangents.g + n);
        DualSum dg{zero, zero};
        if (is_distance()) {
          TakeNear(block, r, j + n, df, df_tangent, g, slope, slope_tangent, scratch);
          add_column(kMostScalars, slope, slope_tangent);
          sum_norm.Add(df, df_tangent, slope - hn::Set(d, top_g.value),
                       slope_tangent - hn::Set(d, top_g.tangent));
          const VF minus_two = hn::Set(d, -2.0f);
          slope = slope * minus_two;
          slope_tangent = slope_tangent * minus_two;
        }
        dg.Add(df, df_tangent, slope, slope_tangent);
        hn::Store(dg.value, d, gradients.values + j + n);
        hn::Store(dg.tangent, d, gradients.tangents + j + n);
      }
    }
    const DualNumber d_sum = block.sum[r];
    const Real df = block.c * d_sum.value;
    const Real df_tangent = block.c * d_sum.tangent + block.dc * d_sum.value;
    const auto whole = [&](const DualSum& sum, const DualNumber& top) HWY_ATTR {
      return DualNumber{Total(sum.value) + df * top.value,
                        Total(sum.tangent) + df_tangent * top.value + df * top.tangent};
    };
    of_head.factor += Total(sum_f.value) + d_sum.value * top_f.value;
    of_head_tangent.factor +=
        Total(sum_f.tangent) + d_sum.tangent * top_f.value + d_sum.value * top_f.tangent;
    for (int s = 0; s < head_scalars(); ++s) {
      of_head.t[s] += Total(sum_t[s].value);
      of_head_tangent.t[s] += Total(sum_t[s].tangent);
    }
    for (int s = 0; s < row_scalars(); ++s) {
      const DualNumber sum = whole(sum_a[s], top_a[s]);
      for (const bool is_tangent : {false, true}) {
        Real* const to = Gradient(is_tangent).row_scalars;
        if (to == nullptr) continue;
        RowScalar(to, s, block.head(n_))[block.begin + r] = is_tangent ? sum.tangent : sum.value;
      }
    }
    const DualNumber of_norm = whole(sum_norm, top_g);
    block.d_norm[r] = of_norm.value;
    block.d_norm_tangent[r] = of_norm.tangent;
  }

  bool IsNear(const Block& block, int64_t r, int64_t j, const DualRow& g,
              const Scratch& scratch) const {
    return g.values[j] < (block.norm[r] + scratch.norms[j]) * kLeastNear;
  }
  // Moves the gradients of pairs of nearly equal tokens in columns [j, j + kLanes) to block.near,
  // and clears the slopes of these pairs.
  void TakeNear(Block& block, int64_t r, int64_t j, VF df, VF df_tangent, const DualRow& g,
                VF& slope, VF& slope_tangent, const Scratch& scratch) const {
    const DF d;
    const VF norms = hn::Set(d, block.norm[r]) + hn::Load(d, scratch.norms + j);
    const auto near = hn::Load(d, g.values + j) < norms * hn::Set(d, kLeastNear);
    if (HWY_LIKELY(hn::AllFalse(d, near))) return;
    HWY_ALIGN Real values[kLanes];
    HWY_ALIGN Real tangents[kLanes];
    DualSum dg{hn::Zero(d), hn::Zero(d)};
    dg.Add(df, df_tangent, slope, slope_tangent);
    hn::Store(hn::IfThenElseZero(near, dg.value), d, values);
    hn::Store(hn::IfThenElseZero(near, dg.tangent), d, tangents);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      if (values[lane] == 0 && tangents[lane] == 0) continue;
      block.near.push_back({r, j + static_cast<int64_t>(lane), values[lane], tangents[lane]});
    }
    slope = hn::IfThenZeroElse(near, slope);
    slope_tangent = hn::IfThenZeroElse(near, slope_tangent);
  }

  // Adds the gradients of queries from squared norms (d|x|^2/dx = 2 x) and from near pairs.
  void AddDistanceGradients(const Block& block, const DualRow& sums, const Scratch& scratch) const {
    for (int64_t r = 0; r < block.rows(); ++r) {
      const Real* const x_tangent = scratch.x + r * 2 * dim_;
      const Real* const x = x_tangent + dim_;
      AddScaled(2 * block.d_norm[r], x, dim_, sums.values + r * padded_dim_);
      AddScaled(2 * block.d_norm_tangent[r], x, dim_, sums.tangents + r * padded_dim_);
      AddScaled(2 * block.d_norm[r], x_tangent, dim_, sums.tangents + r * padded_dim_);
    }
    KeyReader keys(*this, block);
    for (const NearDual& pair : block.near) {
      const Real* const x_tangent = scratch.x + pair.r * 2 * dim_;
      const Real* const x = x_tangent + dim_;
      const auto [y, y_tangent] = keys.At(block.first + pair.j);
      Real* const tangent = sums.tangents + pair.r * padded_dim_;
      AddScaledDifference(2 * pair.d_distance, x, y, dim_, sums.values + pair.r * padded_dim_);
      AddScaledDifference(2 * pair.d_distance_tangent, x, y, dim_, tangent);
      AddScaledDifference(2 * pair.d_distance, x_tangent, y_tangent, dim_, tangent);
    }
  }

  // Adds the gradients of scalars, squared norms and near pairs of keys [begin, end).
  void AddColumnGradients(const Block& block, int64_t begin, int64_t end,
                          const Scratch& scratch) const {
    const int64_t head = block.key_head_of(n_);
    for (const bool is_tangent : {false, true}) {
      const auto add = [&](int s, Real* to) {
        AddRow(ColumnGradient(is_tangent, s, scratch) + begin - block.first, end - begin,
               to + begin);
      };
      Real* const d_scalars = Gradient(is_tangent).column_scalars;
      for (int s = 0; d_scalars != nullptr && s < column_scalars(); ++s) {
        add(s, ColumnScalar(d_scalars, s, head));
      }
      if (d_norms_) add(kMostScalars, KeyNumber(d_norms_, is_tangent, head, 0));
    }
    if (block.near.empty() || !wants_y()) return;
    KeyReader keys(*this, block);
    for (const NearDual& pair : block.near) {
      const int64_t key = block.first + pair.j;
      if (key < begin || key >= end) continue;
      const Real* const x_tangent = scratch.x + pair.r * 2 * dim_;
      const Real* const x = x_tangent + dim_;
      const auto [y, y_tangent] = keys.At(key);
      if (d_y_.wanted()) {
        AddScaledDifference(2 * pair.d_distance, y, x, dim_,
                            d_y_.row(block.b, block.key_head, key));
      }
      if (!d_y_tangent_.wanted()) continue;
      Real* const tangent = d_y_tangent_.row(block.b, block.key_head, key);
      AddScaledDifference(2 * pair.d_distance_tangent, y, x, dim_, tangent);
      AddScaledDifference(2 * pair.d_distance, y_tangent, x_tangent, dim_, tangent);
    }
  }

  const AttentionGradient<Real>& Gradient(bool is_tangent) const {
    return is_tangent ? of_.gradient_tangent : of_.gradient;
  }
  HeadSums* HeadGradient(bool is_tangent, const Block& block) {
    return &d_heads_[Size((is_tangent * n_.batch * n_.heads + block.head(n_)) * row_blocks_ +
                          block.number)];
  }
  // The gradient of a query head's bias table. `head` is counted across the batch.
  Real* BiasGradient(bool is_tangent, int64_t head) const {
    return d_bias_.data() + (is_tangent * n_.batch * n_.heads + head) * addends_.table_size();
  }

  // Sums the gradients of the scores over the rows. Sums per table entry are added to the head's
  // gradient; sums per key stay in scratch memory.
  void AddBiasGradients(const Block& block, const Columns* columns, const Scratch& scratch) {
    const int64_t rows = block.rows();
    const int64_t count = block.keys.end - block.first;
    const int64_t head = block.head(n_);
    const auto gradients = [&](bool is_tangent, int64_t r) {
      const DualRow row = DualOf(scratch.gradients, block, r);
      return is_tangent ? row.tangents : row.values;
    };
    for (const bool is_tangent : {false, true}) {
      if (!wants_key_bias()) break;
      Real* const sums = scratch.d_key_bias + is_tangent * stride_;
      std::fill_n(sums, count, 0.0f);
      for (int64_t r = 0; r < rows; ++r) AddRow(gradients(is_tangent, r), count, sums);
    }
    const bool by_offset = wants_bias() && !addends_.has_layout();
    const int64_t size = rows - 1 + count;
    for (const bool is_tangent : {false, true}) {
      if (!by_offset) break;
      Real* const sums = scratch.d_bias + is_tangent * window();
      std::fill_n(sums, size, 0.0f);
      for (int64_t r = 0; r < rows; ++r) {
        AddRow(gradients(is_tangent, r), count, sums + rows - 1 - r);
      }
    }
    head_turns_.Wait(head, block.number);
    for (const bool is_tangent : {false, true}) {
      if (!by_offset) break;
      AddRow(scratch.d_bias + is_tangent * window(), size,
             BiasGradient(is_tangent, head) + n_.queries - block.end + block.first);
    }
    if (wants_bias() && addends_.has_layout()) AddTableGradients(block, columns, scratch);
    head_turns_.Pass(head, block.number);
  }
  void AddTableGradients(const Block& block, const Columns* columns, const Scratch& scratch) const {
    std::vector<TableRun> runs;
    for (int64_t r = 0; r < block.rows(); ++r) {
      const DualRow row = DualOf(scratch.gradients, block, r);
      addends_.FindRuns(AddendRow(block, r, columns[r]), &runs);
      for (const bool is_tangent : {false, true}) {
        const Real* const from = (is_tangent ? row.tangents : row.values) + columns[r].begin;
        Real* const to = BiasGradient(is_tangent, block.head(n_));
        for (const TableRun& run : runs) {
          for (int64_t n = 0; n < run.count; ++n) {
            to[run.entry + n * run.step] += from[run.column + n];
          }
        }
      }
    }
  }

  // Writes the gradients of pair biases, or adds them to those of earlier heads.
  void AddPairGradients(const Block& block, const Columns* columns, const Scratch& scratch) {
    const bool shares = shares_pairs();
    if (shares) pair_turns_.Wait(block.number, block.head(n_));
    for (const bool is_tangent : {false, true}) {
      const View<Real>& pairs = Gradient(is_tangent).pair_bias;
      if (pairs.data == nullptr) continue;
      const bool is_first =
          (block.b == 0 || pairs.stride[0] != 0) && (block.h == 0 || pairs.stride[1] != 0);
      for (int64_t r = 0; r < block.rows(); ++r) {
        Real* const to = pairs.row(block.b, block.h, block.begin + r);
        if (is_first) std::fill_n(to, n_.keys, 0.0f);
        const int64_t count = columns[r].end - columns[r].begin;
        if (count == 0) continue;
        const DualRow row = DualOf(scratch.gradients, block, r);
        AddRow((is_tangent ? row.tangents : row.values) + columns[r].begin, count,
               to + block.first + columns[r].begin);
      }
    }
    if (shares) pair_turns_.Pass(block.number, block.head(n_));
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
    const auto add = [&](const KeySums& sums, const Real* of_pairs, int64_t count,
                         const Real* of_rows, int64_t padded) {
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
    add(d_y_tangent_, scratch.gradients,
        has_x() || ProductFactorTangent(block) != 0 ? 2 * rows : rows, scratch.scaled, padded_dim_);
    if (function_ != nullptr) AddColumnGradients(block, begin, end, scratch);
    for (const bool is_tangent : {false, true}) {
      Real* const to = Gradient(is_tangent).key_bias;
      if (to == nullptr) continue;
      AddRow(scratch.d_key_bias + is_tangent * stride_ + begin - block.first, end - begin,
             to + (block.b * n_.heads + block.h) * n_.keys + begin);
    }
  }

  // Adds up, in a fixed order, the gradients of tensors that all sequences of the batch share.
  void Merge() const {
    d_relative_keys_.Merge();
    d_relative_values_.Merge();
    d_relative_queries_.Merge();
    for (const bool is_tangent : {false, true}) {
      const AttentionGradient<Real>& gradient = Gradient(is_tangent);
      for (int64_t h = 0; h < n_.heads; ++h) {
        HeadSums sums;
        for (int64_t b = 0; b < n_.batch; ++b) {
          const int64_t head = b * n_.heads + h;
          for (int64_t n = 0; n < row_blocks_; ++n) {
            const HeadSums& from =
                d_heads_[Size((is_tangent * n_.batch * n_.heads + head) * row_blocks_ + n)];
            sums.factor += from.factor;
            for (int s = 0; s < head_scalars(); ++s) sums.t[s] += from.t[s];
          }
          if (gradient.bias.table == nullptr) continue;
          const int64_t size = addends_.table_size();
          Real* const to = gradient.bias.table + b * gradient.bias.batch_stride + h * size;
          if (b == 0 || gradient.bias.batch_stride != 0) std::fill_n(to, size, 0.0f);
          AddRow(BiasGradient(is_tangent, head), size, to);
        }
        if (gradient.factor != nullptr) gradient.factor[h] = static_cast<Real>(sums.factor);
        for (int s = 0; gradient.head_scalars != nullptr && s < head_scalars(); ++s) {
          gradient.head_scalars[s * n_.heads + h] = static_cast<Real>(sums.t[s]);
        }
      }
    }
  }

  const AttentionDerivatives<Real>& of_;
  const DualTableOf<Real>* function_;
  const AttentionInput<Real>& in_;
  const AttentionInput<Real>& tangent_;
  const Executor& executor_;
  const AttentionShape& n_;
  DualAddends addends_;
  int64_t group_;
  int64_t dim_;
  int64_t padded_dim_;
  int64_t padded_value_dim_;
  int64_t stride_;  // at least that of every block
  int64_t block_;   // rows per block
  int64_t row_blocks_;
  int64_t turn_blocks_;
  HeadTasks head_tasks_;
  DualRelative relative_;
  PaddedRows relative_queries_;
  PaddedRows relative_query_tangents_;
  DualTableGradient d_relative_keys_;
  DualTableGradient d_relative_values_;
  DualContent content_;
  PaddedRows content_keys_;
  PaddedRows content_key_tangents_;
  KeySums d_content_keys_;
  KeySums d_content_key_tangents_;
  DualTableGradient d_relative_queries_;
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
  Buffer norms_;                   // squared norms of the keys; then their tangents
  Buffer d_norms_;                 // gradients of the squared norms; then their tangents
  std::vector<HeadSums> d_heads_;  // per head and block of rows; then the tangents
  Buffer d_bias_;                  // per head; then the tangents
  Turns key_turns_;                // per key head and block of keys
  Turns head_turns_;               // per query head
  Turns pair_turns_;               // per block of rows, if heads share gradients of pairs
  Turns table_turns_;              // per query head
  Turns content_turns_;            // per key head
};

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS

namespace HWY_NAMESPACE {
namespace {

void Differentiate(const AttentionDerivatives<GNOMON_REAL>& of, const Executor& executor) {
  GNOMON_KERNELS::Pass(of, executor).Run();
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

void DerivativesKernel(const AttentionDerivatives<GNOMON_REAL>& of, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(Differentiate)(of, executor);
}

}  // namespace gnomon
#endif
