#include "cuda/attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/call_log.h"
#include "base/dropout.h"
#include "base/visible_keys.h"
#include "cuda/constants.h"
#include "cuda/parameters.h"
#include "gnomon/table_layout.h"

namespace gnomon::cuda {
namespace {

// The compile-time constants of a kernel. Constants that a kernel does not use keep these values.
struct Constants {
#define GNOMON_MEMBER(name) int64_t name = 0;
  GNOMON_CUDA_CONSTANTS(GNOMON_MEMBER)
#undef GNOMON_MEMBER

  std::vector<std::pair<std::string, int64_t>> List() const {
    return {
#define GNOMON_ENTRY(name) {#name, name},
        GNOMON_CUDA_CONSTANTS(GNOMON_ENTRY)
#undef GNOMON_ENTRY
    };
  }
};

int64_t Up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t Padded(int64_t columns) { return std::max<int64_t>(16, Up(columns, 16) * 16); }

[[noreturn]] void Fail(const std::string& problem) { throw Error("attention on CUDA: " + problem); }

Array ToArray(const Tokens& t) {
  return {const_cast<void*>(t.data), {t.stride[0], t.stride[1], t.stride[2]}};
}
Array ToArray(const Tensor& t) { return {t.data, {t.stride[0], t.stride[1], t.stride[2]}}; }
template <class T>
Array ToArray(const View<T>& t) {
  return {const_cast<std::remove_const_t<T>*>(t.data), {t.stride[0], t.stride[1], t.stride[2]}};
}

bool Describe(const TableLayout& layout, LayoutParameters* to) {
  *to = {};
  if (layout.size() > std::numeric_limits<int>::max()) return false;
  to->size = static_cast<int>(layout.size());
  if (const auto* offset = dynamic_cast<const OffsetLayout*>(&layout)) {
    to->kind = LayoutParameters::kByOffset;
    to->past = offset->past();
    to->future = offset->future();
    to->clips = offset->far() == OffsetLayout::Far::kClip ? 1 : 0;
    return true;
  }
  if (dynamic_cast<const KeyLayout*>(&layout) != nullptr) {
    to->kind = LayoutParameters::kByKey;
    return true;
  }
  const auto* grid = dynamic_cast<const GridLayout*>(&layout);
  if (grid == nullptr || grid->shape().size() > LayoutParameters::kMostAxes) return false;
  to->kind = LayoutParameters::kOfGrid;
  to->sums = grid->kind() == GridLayout::Kind::kAxes ? 1 : 0;
  to->axes = static_cast<int>(grid->shape().size());
  to->prefix = static_cast<int>(grid->prefix());
  to->tokens = static_cast<int>(grid->tokens());
  for (int axis = 0; axis < to->axes; ++axis) {
    to->shape[axis] = static_cast<int>(grid->shape()[static_cast<size_t>(axis)]);
    to->first[axis] = static_cast<int>(grid->first()[static_cast<size_t>(axis)]);
    to->step[axis] = static_cast<int>(grid->stride()[static_cast<size_t>(axis)]);
  }
  return true;
}

// Enough blocks to fill a large GPU. The number is fixed, because results must not depend on the
// GPU.
constexpr int64_t kBlocks = 264;

static_assert(sizeof(Parameters) <= 4096, "some GPUs limit kernel parameters to 4 KiB");

class Plan {
 public:
  Plan(const PairFunction& function, const Input& in, Backend& backend)
      : function_(function), in_(in), n_(in.shape), backend_(backend) {
    if (const std::string problem = Unsupported(function, in); !problem.empty()) Fail(problem);
    rows_ = n_.batch * n_.heads * n_.queries;
    heads_ = n_.batch * n_.heads;
    distance_ = function.input == PairInput::kSquaredDistance;
    SetInput();
    SetFeatures();
  }

  // Computes norms, key intervals, hashes and, for the forward pass, flags of non-finite values.
  void PrepareRows(bool is_forward) {
    const size_t of_batch = Size(n_.batch * n_.queries);
    p_.low = New<int>(of_batch);
    p_.high = New<int>(of_batch);
    const int64_t groups = Up(n_.keys, 16);
    if (distance_) {
      p_.norm_x = New<float>(Size(rows_));
      p_.norm_y = New<float>(Size(n_.batch * n_.key_heads * n_.keys));
    }
    if (features_.kDropout != 0) p_.drop = New<unsigned>(2 * Size(rows_));
    const bool hides = is_forward && features_.kHides != 0;
    if (hides) p_.spoiled = New<int>(Size(n_.batch * n_.key_heads * groups));
    Constants c = OfRows();
    Launch("prepare_intervals", c, Up(n_.batch * n_.queries, 32 * c.kWarps), 1, 0);
    if (distance_ || features_.kDropout != 0) {
      Launch("prepare_queries", c, Up(rows_, c.kWarps), 1, 0);
    }
    c.kAligned = Aligned({&p_.v}) ? 1 : 0;
    const int64_t of_keys = n_.batch * n_.key_heads * groups;
    if (distance_ || hides) Launch("prepare_keys", c, Up(of_keys, c.kWarps), 1, 0);
  }

  void Forward(const Output& out) {
    if (rows_ == 0) return;
    p_.o = ToArray(out.o);
    p_.exact_o = out.exact_o;
    p_.lse = out.lse;
    p_.statistics = out.statistics;
    const bool has_values = features_.kRelativeValues != 0;
    // Relative values are added to the unrounded results later.
    if (has_values && p_.exact_o == nullptr) p_.exact_o = New<float>(Size(rows_ * n_.value_dim));
    Constants c = features_;
    c.kBiasGradient = 0;
    c.kColumns = 0;
    const int64_t bytes = std::max(c.kDim, c.kValueDim) * BytesOf(Type());
    // The limits are 99 KiB of shared memory, which every supported GPU allows per block, and 255
    // registers.
    c.kWarps = bytes > 512 ? 2 : 4;
    c.kStep = bytes > 512 ? 16 : bytes > 256 || (bytes > 128 && Type() == 0) ? 32 : 64;
    // Scalars and terms also need registers.
    if (Terms() > 1 || (bytes > 128 && Terms() + Scalars() > 0)) {
      c.kStep = std::min<int64_t>(c.kStep, bytes > 256 ? 16 : 32);
    }
    c.kStages = bytes > 256 ? 1 : 2;
    c.kOwn = Type() != 0 && bytes <= 256 ? 1 : 0;
    if (n_.queries <= 16) c.kWarps = 1;
    c.kAligned = Aligned({&p_.x, &p_.y, &p_.v, &p_.o}) ? 1 : 0;
    // Splits the keys into parts if there are too few blocks to fill a GPU.
    const int64_t blocks = heads_ * Up(n_.queries, 16 * c.kWarps);
    const int64_t tiles = Up(n_.keys, c.kStep);
    constexpr int64_t kLeastTiles = 4;
    const int64_t most_parts = has_values ? 1 : std::max<int64_t>(1, tiles);
    const int64_t parts =
        std::clamp<int64_t>(std::min(kBlocks / blocks, tiles / kLeastTiles), 1, most_parts);
    p_.tiles_in_part = static_cast<int>(std::max<int64_t>(1, Up(tiles, parts)));
    p_.parts = static_cast<int>(std::max<int64_t>(1, Up(tiles, p_.tiles_in_part)));
    c.kParts = p_.parts > 1 ? 1 : 0;
    if (p_.parts > 1) {
      p_.partial = New<float>(Size(p_.parts * rows_ * n_.value_dim));
      p_.partial_terms = New<float>(Size(3 * p_.parts * rows_));
    }
    const int words =
        KeyWords(function_.column_scalars, distance_, Int(c.kKeyBias), Int(c.kSegments));
    const SharedLayout layout =
        ForwardLayout(Type(), Int(c.kDim), Int(c.kValueDim), Int(16 * c.kWarps), Int(c.kStep),
                      Int(c.kStages), Int(c.kOwn), words, Int(c.kBias), Int(c.kRelativeValues));
    const int64_t of_head = Up(n_.queries, 16 * c.kWarps) * p_.parts;
    ForEachSlice([&](int64_t first, int64_t count) {
      if (c.kRelativeKeys != 0) MultiplyByKeys(count);
      Launch("forward", c, count * of_head, 1, layout.size, function_.name);
      if (!has_values) return;
      Product& product = NewProduct();
      product.left = Tables(p_.relative_weights);
      product.skips = 1;
      product.right = RowsOf(in_.relative.values, n_.value_dim, in_.relative.value_heads);
      product.to = p_.exact_o + first * n_.queries * n_.value_dim;
      product.adds = 1;
      product.rounded = p_.o;
      Multiply(n_.queries, n_.value_dim, p_.relative_size, count);
    });
    if (p_.parts == 1) return;
    Constants merge = OfRows();
    Launch("merge", merge, Up(rows_, merge.kWarps), 1, 0);
  }

  void Backward(const Saved& saved, const Gradient& gradient) {
    is_backward_ = true;
    p_.d_o = ToArray(saved.d_o);
    p_.d_lse = saved.d_lse;
    p_.o = ToArray(saved.o);
    p_.exact_o = const_cast<float*>(saved.exact_o);
    p_.statistics = const_cast<float*>(saved.statistics);
    p_.d_x = ToArray(gradient.x);
    p_.d_y = ToArray(gradient.y);
    p_.d_v = ToArray(gradient.v);
    p_.d_row = gradient.row_scalars;
    p_.d_column = gradient.column_scalars;
    p_.d_temperature = gradient.temperature;
    p_.d_key_bias = gradient.key_bias;
    p_.d_pair_bias = ToArray(gradient.pair_bias);
    const bool sums_heads = gradient.factor != nullptr || gradient.head_scalars != nullptr;
    if (sums_heads) p_.d_factor_rows = New<float>(Size((1 + function_.head_scalars) * rows_));

    Constants c = features_;
    c.kParts = 0;
    c.kHides = 0;
    c.kHeadSums = sums_heads || gradient.temperature != nullptr ? 1 : 0;
    const int64_t bytes = std::max(c.kDim, c.kValueDim) * BytesOf(Type());
    c.kWarps = bytes > 512 ? 1 : 4;
    c.kStep = bytes > 256 ? 16 : bytes > 64 ? 32 : 64;
    c.kStages = bytes > 256 ? 1 : 2;
    // Scalars, terms and their gradients also need registers.
    const bool plain = Terms() == 0 && Scalars() == 0 && !distance_;
    const bool plain_halves = plain && Type() != 0;
    if (plain_halves && bytes <= 128 && c.kBias == 0) c.kStep = 64;
    if ((bytes > 64 && Terms() > 1) || (bytes > 128 && !plain)) c.kStep = 16;
    const bool few = Type() != 0 && bytes <= 128 && Scalars() <= 2 && Terms() <= 1;
    c.kOwn = few || (plain_halves && bytes <= 256) ? 1 : 0;
    c.kColumns = std::min<int64_t>(128, std::max(c.kDim, c.kValueDim));
    if (Type() == 0 && Terms() > 3) c.kColumns = Padded(c.kColumns / 2);
    p_.chunks = Int(Up(std::max(c.kDim, c.kValueDim), c.kColumns));
    c.kAligned = Aligned({&p_.x, &p_.y, &p_.v, &p_.d_o, &p_.d_x, &p_.d_y, &p_.d_v}) ? 1 : 0;

    p_.largest = New<float>(Size(rows_));
    p_.inverse = New<float>(Size(rows_));
    float* const delta = New<float>(Size(rows_));
    p_.balanced_delta = New<float>(Size(rows_));
    PrepareSums(c, gradient);
    ForEachSlice([&](int64_t first, int64_t count) {
      if (c.kRelativeKeys != 0) MultiplyByKeys(count);
      if (c.kRelativeValues != 0) {
        Product& product = NewProduct();
        product.left = RowsOf(saved.d_o);
        product.right =
            Transposed(RowsOf(in_.relative.values, n_.value_dim, in_.relative.value_heads));
        product.to = p_.relative_products;
        Multiply(n_.queries, p_.relative_size, n_.value_dim, count);
      }
      p_.delta = delta;
      PrepareDelta(count);
      PassOverKeys(c, count);
      p_.delta = p_.balanced_delta;
      if (SumsRelative(gradient)) {
        // This second pass over the keys uses the balanced deltas.
        Constants sums = c;
        sums.kRelativeSums = 1;
        PassOverKeys(sums, count);
        MultiplyRelative(gradient, first, count);
      }
      Constants keys = c;
      keys.kBiasGradient = gradient.bias.table != nullptr ? 1 : 0;
      PassOverQueries(keys, gradient, first, count);
    });
    if (sums_heads) SumHeads(gradient);
    if (gradient.bias.table != nullptr) SumBiases(gradient.bias);
    SumRelative(gradient);
  }

 private:
  static size_t Size(int64_t n) { return static_cast<size_t>(std::max<int64_t>(n, 0)); }
  static int Int(int64_t n) { return static_cast<int>(n); }
  int Type() const { return static_cast<int>(in_.x.type); }
  int Scalars() const {
    return function_.row_scalars + function_.column_scalars + function_.head_scalars;
  }
  // The number of inputs per pair in addition to tokens, scalars and the offset bias.
  int64_t Terms() const {
    const Constants& c = features_;
    return (c.kBias == 2 ? 1 : 0) + c.kKeyBias + c.kPairBias + c.kPairMask + c.kSegments +
           c.kTemperature + c.kDropout + c.kRelativeKeys + c.kRelativeValues;
  }

  template <class T>
  T* New(size_t count) {
    return static_cast<T*>(backend_.Scratch(std::max<size_t>(count, 1) * sizeof(T)));
  }

  bool Aligned(std::initializer_list<const Array*> arrays) const {
    return std::all_of(arrays.begin(), arrays.end(), [this](const Array* a) {
      const auto multiple = [](int64_t bytes) { return bytes % 16 == 0; };
      return multiple(static_cast<int64_t>(reinterpret_cast<uintptr_t>(a->data))) &&
             multiple(a->stride[0] * BytesOf(Type())) && multiple(a->stride[1] * BytesOf(Type())) &&
             multiple(a->stride[2] * BytesOf(Type()));
    });
  }

  // The constants of row-wise kernels.
  Constants OfRows() const {
    Constants c;
    c.kType = Type();
    c.kWarps = 4;
    return c;
  }

  void Launch(const char* kind, const Constants& c, int64_t x, int64_t y, int shared,
              const char* definition = "") {
    if (x == 0 || y == 0) return;
    const KernelName name{kind, definition, c.List()};
    const LaunchShape shape{{static_cast<uint32_t>(x), static_cast<uint32_t>(y), 1},
                            static_cast<uint32_t>(32 * c.kWarps),
                            static_cast<uint32_t>(shared)};
    backend_.Launch(name, shape, &p_, sizeof(p_));
  }

  void SetInput() {
    // memset also clears padding, which is part of the kernel argument.
    std::memset(static_cast<void*>(&p_), 0, sizeof(p_));
    p_.batch = Int(n_.batch);
    p_.heads = Int(n_.heads);
    p_.key_heads = Int(n_.key_heads);
    p_.group = n_.key_heads > 0 ? Int(n_.heads / n_.key_heads) : 1;
    p_.queries = Int(n_.queries);
    p_.keys = Int(n_.keys);
    p_.dim = function_.input == PairInput::kNone ? 0 : Int(n_.dim);
    p_.value_dim = Int(n_.value_dim);
    p_.x = ToArray(in_.x);
    p_.y = ToArray(in_.y);
    p_.v = ToArray(in_.v);
    p_.row_scalars = in_.row_scalars;
    p_.column_scalars = in_.column_scalars;
    p_.head_scalars = in_.head_scalars;
    p_.factor = in_.factor;
    p_.bias = in_.bias.table;
    p_.bias_batch_stride = in_.bias.batch_stride;
    p_.bias_size = Int(std::max<int64_t>(0, n_.queries + n_.keys - 1));
    if (in_.bias.table != nullptr && in_.bias.layout != nullptr) {
      Describe(*in_.bias.layout, &p_.layout);
      p_.bias_size = p_.layout.size;
    }
    if (in_.relative.layout != nullptr) {
      Describe(*in_.relative.layout, &p_.relative_layout);
      p_.relative_size = p_.relative_layout.size;
      p_.relative_values = in_.relative.values;
      p_.relative_values_stride = in_.relative.value_heads ? p_.relative_size * n_.value_dim : 0;
    }
    p_.key_bias = in_.key_bias;
    p_.key_bias_low = in_.key_bias_low;
    p_.key_bias_base = in_.key_bias_base;
    p_.pair_bias = ToArray(in_.pair_bias);
    p_.pair_mask = ToArray(in_.mask.pairs);
    p_.temperature = in_.temperature;
    p_.query_segments = in_.mask.query_segments;
    p_.key_segments = in_.mask.key_segments;
    p_.left = in_.mask.left;
    p_.right = in_.mask.right;
    p_.chunk_size = in_.mask.chunks.size;
    p_.chunks_before = in_.mask.chunks.before;
    p_.chunks_after = in_.mask.chunks.after;
    p_.query_offset = in_.query_offset;
    // Int64 and int64_t are both 64 bits wide.
    p_.query_offsets = reinterpret_cast<const Int64*>(in_.query_offsets);
    p_.key_starts = reinterpret_cast<const Int64*>(in_.mask.key_starts);
    p_.key_lengths = reinterpret_cast<const Int64*>(in_.mask.key_lengths);
    p_.key_rows = reinterpret_cast<const Int64*>(in_.key_rows);
    p_.seed = in_.dropout.seed;
    p_.threshold = DropoutThreshold(in_.dropout);
    p_.kept = static_cast<float>(DropoutScale(in_.dropout));
    p_.parts = 1;
    p_.chunks = 1;
    p_.head_step = 1;
  }

  void SetFeatures() {
    Constants& c = features_;
    c.kType = Type();
    c.kDim = Padded(p_.dim);
    c.kValueDim = Padded(n_.value_dim);
    c.kBias = in_.bias.table == nullptr ? 0 : in_.bias.layout == nullptr ? 1 : 2;
    c.kKeyBias = in_.key_bias == nullptr ? 0 : in_.key_bias_low == nullptr ? 1 : 2;
    c.kPairBias = in_.pair_bias.data != nullptr ? 1 : 0;
    c.kPairMask = in_.mask.pairs.data != nullptr ? 1 : 0;
    c.kSegments = in_.mask.query_segments != nullptr ? 1 : 0;
    c.kTemperature = in_.temperature != nullptr ? 1 : 0;
    c.kDropout = in_.dropout.rate != 0 ? 1 : 0;
    const bool relative = in_.relative.layout != nullptr;
    c.kRelativeKeys = relative && in_.relative.keys != nullptr ? 1 : 0;
    c.kRelativeValues = relative && in_.relative.values != nullptr ? 1 : 0;
    const bool bounded = in_.mask.left < kFar || in_.mask.right < kFar ||
                         in_.mask.chunks.size > 0 || in_.key_rows != nullptr;
    c.kHides = bounded || c.kBias != 0 || c.kKeyBias != 0 || c.kPairBias != 0 || c.kPairMask != 0 ||
                       c.kSegments != 0
                   ? 1
                   : 0;
  }

  void PrepareDelta(int64_t count) {
    Constants c = OfRows();
    c.kWarps = 1;
    c.kValueDim = features_.kValueDim;
    c.kDropout = features_.kDropout;
    c.kRelativeValues = features_.kRelativeValues;
    c.kAligned = Aligned({&p_.d_o, &p_.v}) ? 1 : 0;
    Launch("prepare_delta", c, count * Up(n_.queries, 16), 1,
           2 * 16 * RowBytes(Type(), Int(c.kValueDim)));
  }

  // `scores`: the number of arrays of pair values that a tile needs.
  int SharedOfBackward(const Constants& c, int words, int64_t scores) const {
    return BackwardLayout(Type(), Int(c.kDim), Int(c.kValueDim), Int(16 * c.kWarps), Int(c.kStep),
                          Int(c.kStages), Int(c.kOwn), words, Int(c.kBias), Int(scores))
        .size;
  }

  // Computes gradients of queries and factors, and the balanced deltas that the other passes use.
  void PassOverKeys(const Constants& c, int64_t count) {
    const int words =
        KeyWords(function_.column_scalars, distance_, Int(c.kKeyBias), Int(c.kSegments));
    const int64_t blocks = count * Up(n_.queries, 16 * c.kWarps);
    const int64_t scores = c.kRelativeSums != 0 ? c.kRelativeKeys + c.kRelativeValues : 0;
    Launch("backward_queries", c, blocks * p_.chunks, 1, SharedOfBackward(c, words, scores),
           function_.name);
  }

  // The number of blocks that add to a head's bias gradients; each has its own partial sum.
  int64_t PartsOfKeys(const Constants& c, const Gradient& gradient) const {
    const int64_t blocks = Up(n_.keys, 16 * c.kWarps);
    if (gradient.bias.table == nullptr) return blocks;
    return std::min(blocks, Up(2 * kBlocks, std::max<int64_t>(1, n_.batch * n_.key_heads)));
  }

  // Prepares the sums of the pass over queries, for all slices.
  void PrepareSums(const Constants& c, const Gradient& gradient) {
    if (gradient.pair_bias.data != nullptr) {
      Constants clear = OfRows();
      clear.kType = 0;
      Launch("clear_pairs", clear, rows_, 1, 0);
    }
    if (gradient.bias.table != nullptr) {
      // With a layout, each warp has its own partial sums.
      p_.bias_parts = Int(PartsOfKeys(c, gradient) * (c.kBias == 2 ? c.kWarps : 1));
      p_.d_bias_parts = New<float>(Size(heads_ * p_.bias_parts * p_.bias_size));
    }
    const int64_t entries = heads_ * p_.relative_size;
    if (gradient.relative_keys != nullptr) {
      d_relative_keys_ = New<float>(Size(entries * in_.relative.dim));
    }
    if (gradient.relative_values != nullptr) {
      d_relative_values_ = New<float>(Size(entries * n_.value_dim));
    }
  }

  // Computes gradients of keys, values and biases for `count` query heads starting at `first`.
  void PassOverQueries(const Constants& c, const Gradient& gradient, int64_t first, int64_t count) {
    const bool has_pairs = gradient.pair_bias.data != nullptr;
    const bool wanted = gradient.y.data != nullptr || gradient.v.data != nullptr ||
                        gradient.column_scalars != nullptr || gradient.key_bias != nullptr ||
                        gradient.bias.table != nullptr || has_pairs;
    const int64_t parts = PartsOfKeys(c, gradient);
    const int64_t key_heads = count / p_.group;
    if (!wanted) return;
    const int words = QueryWords(function_.row_scalars, distance_, Int(c.kKeyBias),
                                 Int(c.kSegments), Int(c.kTemperature), Int(c.kDropout));
    // Heads that share the gradient of a pair bias must run in sequence. Query heads of the same
    // key head always do.
    const bool by_batch = has_pairs && gradient.pair_bias.stride[0] == 0;
    const bool by_head = has_pairs && gradient.pair_bias.stride[1] == 0;
    int64_t at_once = key_heads;
    p_.head_step = 1;
    if ((by_batch && by_head) || ((by_batch || by_head) && count < heads_)) {
      at_once = 1;
    } else if (by_batch) {
      at_once = n_.key_heads;
    } else if (by_head) {
      at_once = n_.batch;
      p_.head_step = Int(n_.key_heads);
    }
    const int64_t apart = p_.head_step > 1 ? 1 : at_once;
    for (int64_t n = 0; n < key_heads / at_once; ++n) {
      p_.first_head = Int(first / p_.group + n * apart);
      Launch("backward_keys", c, at_once * parts * p_.chunks, 1,
             SharedOfBackward(c, words, c.kBiasGradient), function_.name);
    }
    p_.head_step = 1;
    p_.first_head = Int(first);
  }

  // The following functions are for relative keys and values.

  // Calls body(first, count) for slices of the query heads. A slice consists of whole groups: all
  // heads, or as many as the memory limit for their queries' tables allows.
  template <class Body>
  void ForEachSlice(const Body& body) {
    int64_t step = heads_;
    if (features_.kRelativeKeys + features_.kRelativeValues != 0) {
      const int64_t of_head = std::max<int64_t>(1, n_.queries * p_.relative_size);
      step = std::min(heads_,
                      std::max<int64_t>(1, in_.most_table_numbers / of_head / p_.group) * p_.group);
      AllocateTables(step * of_head);
    }
    for (int64_t first = 0; first < heads_; first += step) {
      p_.first_head = Int(first);
      p_.relative_row = first * n_.queries;
      body(first, std::min(step, heads_ - first));
    }
    p_.first_head = 0;
  }
  // Allocates the tables that the pass needs.
  void AllocateTables(int64_t numbers) {
    const auto need = [&](bool is_needed, float*& table) {
      if (is_needed && table == nullptr) table = New<float>(Size(numbers));
    };
    const bool keys = features_.kRelativeKeys != 0;
    const bool values = features_.kRelativeValues != 0;
    need(keys, p_.relative_scores);
    need(values, p_.relative_weights);
    need(keys && is_backward_, p_.d_relative_scores);
    need(values && is_backward_, p_.relative_products);
  }

  Product& NewProduct() {
    p_.product = {};
    p_.product.factor = 1;
    return p_.product;
  }
  // The tables of a slice's queries, (rows, entries) per head.
  Matrix Tables(const float* tables) const {
    const int64_t of_head = n_.queries * p_.relative_size;
    // The pointer is shifted, because head indices start at first_head.
    return {tables - p_.relative_row * p_.relative_size,
            n_.heads * of_head,
            of_head,
            p_.relative_size,
            1,
            0};
  }
  // A table of rows, (entries, columns).
  Matrix RowsOf(const float* table, int64_t columns, bool of_each_head) const {
    return {table, 0, of_each_head ? p_.relative_size * columns : 0, columns, 1, 0};
  }
  static Matrix RowsOf(const Tokens& t) {
    return {t.data, t.stride[0], t.stride[1], t.stride[2], 1, 1};
  }
  static Matrix Transposed(const Matrix& m) {
    return {m.data, m.batch, m.head, m.column, m.row, m.element};
  }
  void Multiply(int64_t rows, int64_t columns, int64_t depth, int64_t count) {
    p_.product.rows = Int(rows);
    p_.product.columns = Int(columns);
    p_.product.depth = Int(depth);
    Constants c = OfRows();
    Launch("multiply", c, count * Up(rows, 16) * Up(columns, 32 * c.kWarps), 1, 4 * 16 * 16);
  }

  // Computes the scores of relative keys.
  void MultiplyByKeys(int64_t count) {
    const Relative<float>& relative = in_.relative;
    Product& product = NewProduct();
    product.left = RowsOf(in_.relative_query);
    product.right = Transposed(RowsOf(relative.keys, relative.dim, relative.key_heads));
    product.factor = relative.factor;
    product.to = p_.relative_scores;
    Multiply(n_.queries, p_.relative_size, relative.dim, count);
  }

  static bool SumsRelative(const Gradient& gradient) {
    return gradient.relative_query.data != nullptr || gradient.relative_keys != nullptr ||
           gradient.relative_values != nullptr;
  }

  // Computes the gradients of a slice's queries, and the partial gradients of the tables for its
  // heads, from the slice's sums.
  void MultiplyRelative(const Gradient& gradient, int64_t first, int64_t count) {
    const Relative<float>& relative = in_.relative;
    if (gradient.relative_query.data != nullptr) {
      Product& product = NewProduct();
      product.left = Tables(p_.d_relative_scores);
      product.skips = 1;
      product.right = RowsOf(relative.keys, relative.dim, relative.key_heads);
      product.factor = relative.factor;
      product.rounded = ToArray(gradient.relative_query);
      Multiply(n_.queries, relative.dim, p_.relative_size, count);
    }
    if (gradient.relative_keys != nullptr) {
      Product& product = NewProduct();
      product.left = Transposed(Tables(p_.d_relative_scores));
      product.skips = 1;
      product.right = RowsOf(in_.relative_query);
      product.factor = relative.factor;
      product.to = d_relative_keys_ + first * p_.relative_size * relative.dim;
      Multiply(p_.relative_size, relative.dim, n_.queries, count);
    }
    if (gradient.relative_values != nullptr) {
      Product& product = NewProduct();
      product.left = Transposed(Tables(p_.relative_weights));
      product.skips = 1;
      product.right = {p_.d_o.data, p_.d_o.stride[0], p_.d_o.stride[1], p_.d_o.stride[2], 1, 1};
      product.to = d_relative_values_ + first * p_.relative_size * n_.value_dim;
      Multiply(p_.relative_size, n_.value_dim, n_.queries, count);
    }
  }

  // Sums the heads' partial gradients over the batch and over heads that share a table.
  void SumRelative(const Gradient& gradient) {
    const Relative<float>& relative = in_.relative;
    const auto sum = [&](const float* from, float* to, int64_t columns, bool of_each_head) {
      if (to == nullptr) return;
      const int64_t size = p_.relative_size * columns;
      p_.sum_from = from;
      p_.sum_to = to;
      p_.sum_size = size;
      p_.sum_from_step = size;
      p_.sum_to_step = size;
      p_.sum_outer = rows_ == 0 ? 0 : n_.batch;
      p_.sum_outer_stride = n_.heads * size;
      p_.sum_count = of_each_head ? 1 : n_.heads;
      p_.sum_stride = size;
      Constants c = OfRows();
      c.kType = 0;
      Launch("add_up", c, Up(size, 32 * c.kWarps), of_each_head ? n_.heads : 1, 0);
    };
    sum(d_relative_keys_, gradient.relative_keys, relative.dim, relative.key_heads);
    sum(d_relative_values_, gradient.relative_values, n_.value_dim, relative.value_heads);
  }

  // Sums the per-row gradients of factors and head scalars over the rows of each head, in all batch
  // elements.
  void SumHeads(const Gradient& gradient) {
    if (n_.heads == 0) return;
    p_.sum_size = 1;
    p_.sum_outer = n_.batch;
    p_.sum_outer_stride = n_.heads * n_.queries;
    p_.sum_count = n_.queries;
    p_.sum_stride = 1;
    p_.sum_from_step = n_.queries;
    p_.sum_to_step = 1;
    Constants c = OfRows();
    c.kType = 0;
    c.kWarps = 8;
    for (int s = -1; s < function_.head_scalars; ++s) {
      p_.sum_from = p_.d_factor_rows + (1 + s) * rows_;
      p_.sum_to = s < 0                              ? gradient.factor
                  : gradient.head_scalars == nullptr ? nullptr
                                                     : gradient.head_scalars + s * n_.heads;
      if (p_.sum_to != nullptr) Launch("add_up_all", c, 1, n_.heads, 8 * 32 * Int(c.kWarps));
    }
  }

  void SumBiases(const Bias<float>& to) {
    if (n_.heads == 0 || p_.bias_size == 0) return;
    p_.sum_from = p_.d_bias_parts;
    p_.sum_to = to.table;
    p_.sum_size = p_.bias_size;
    p_.sum_count = p_.bias_parts;
    p_.sum_stride = p_.bias_size;
    // A table that is shared by the batch has a zero gradient if the batch is empty.
    const bool shared = to.batch_stride == 0;
    p_.sum_outer = shared ? n_.batch : 1;
    p_.sum_outer_stride = n_.heads * p_.bias_parts * p_.bias_size;
    p_.sum_from_step = p_.bias_parts * static_cast<int64_t>(p_.bias_size);
    p_.sum_to_step = p_.bias_size;
    Constants c = OfRows();
    c.kType = 0;
    const int64_t x = Up(p_.bias_size, 32 * c.kWarps);
    for (int64_t b = 0; b < (shared ? 1 : n_.batch); ++b) {
      if (!shared) {
        p_.sum_from = p_.d_bias_parts + b * p_.sum_outer_stride;
        p_.sum_to = to.table + b * to.batch_stride;
      }
      Launch("add_up", c, x, n_.heads, 0);
    }
  }

  const PairFunction& function_;
  const Input& in_;
  const AttentionShape& n_;
  Backend& backend_;
  int64_t rows_;
  int64_t heads_;
  bool distance_;
  Constants features_;
  Parameters p_;
  bool is_backward_ = false;
  // The partial gradients of each head: (B, H, entries, columns).
  float* d_relative_keys_ = nullptr;
  float* d_relative_values_ = nullptr;
};

}  // namespace

std::string Unsupported(const PairFunction& function, const Input& in) {
  constexpr int64_t kMostColumns = 256;
  constexpr int64_t kMostKeys = int64_t{1} << 24;
  const auto wide = [](const char* name, int64_t columns) {
    return std::string(name) + " is " + std::to_string(columns) + "; expected at most 256";
  };
  const AttentionShape& n = in.shape;
  if (function.input != PairInput::kNone && n.dim > kMostColumns) return wide("head_dim", n.dim);
  if (n.value_dim > kMostColumns) return wide("head_dim of v", n.value_dim);
  // Statistics store key indices as floats, which are exact up to this limit.
  if (n.keys > kMostKeys) {
    return "k has " + std::to_string(n.keys) + " keys; expected at most " +
           std::to_string(kMostKeys);
  }
  LayoutParameters layout;
  if (in.bias.table != nullptr && in.bias.layout != nullptr &&
      !Describe(*in.bias.layout, &layout)) {
    return "bias has a layout that is not supported on a GPU";
  }
  if (in.relative.layout != nullptr && !Describe(*in.relative.layout, &layout)) {
    return "relative has a layout that is not supported on a GPU";
  }
  if (in.softcap != 0) {
    return "score_softcap is not supported on a GPU; expected tensors on the CPU, or "
           "similarity.Dot(softcap=), which caps products before biases are added";
  }
  if (in.query_positions != nullptr) {
    return "positions are not supported on a GPU; pass query_offset instead";
  }
  if (in.relative.queries != nullptr) {
    return "relative queries (position to content) are not supported on a GPU; expected tensors "
           "on the CPU, or a position without them";
  }
  return "";
}

namespace {

void Log(const char* operation, const PairFunction& function, const Input& input) {
  if (!LogsCalls()) return;
  LogCall(std::string(operation) + ": " + DescribeCall(function, input) + ", CUDA",
          DescribeSizes(input.shape));
}

}  // namespace

void Forward(const PairFunction& function, const Input& input, const Output& output,
             Backend& backend) {
  Plan plan(function, input, backend);
  plan.PrepareRows(/*is_forward=*/true);
  plan.Forward(output);
  Log("forward", function, input);
}

void Backward(const PairFunction& function, const Input& input, const Saved& saved,
              const Gradient& gradient, Backend& backend) {
  Plan plan(function, input, backend);
  Saved complete = saved;
  const AttentionShape& n = input.shape;
  const int64_t rows = n.batch * n.heads * n.queries;
  const bool is_forward = saved.statistics == nullptr && rows > 0;
  plan.PrepareRows(is_forward);
  if (is_forward) {
    const auto bytes = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
    const int64_t of_head = n.queries * n.value_dim;
    Output out;
    out.o = {backend.Scratch(bytes(rows * n.value_dim)), {n.heads * of_head, of_head, n.value_dim}};
    out.exact_o = static_cast<float*>(backend.Scratch(bytes(rows * n.value_dim)));
    out.statistics = static_cast<float*>(backend.Scratch(bytes(3 * rows)));
    plan.Forward(out);
    complete.o = {out.o.data, out.o.stride, input.x.type};
    complete.exact_o = out.exact_o;
    complete.statistics = out.statistics;
  }
  plan.Backward(complete, gradient);
  Log("backward", function, input);
}

}  // namespace gnomon::cuda
