#include "cuda/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/dropout.h"
#include "base/visible_keys.h"
#include "cuda/constants.h"
#include "cuda/parameters.h"
#include "gnomon/table_layout.h"

namespace gnomon::cuda {
namespace {

// What a kernel is compiled with. Kernels that do not ask for one of them leave it as it is here.
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

Array ToArray(const ConstTensor& t) {
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

// Blocks that keep a large GPU busy: results must not depend on the GPU, so neither may this.
constexpr int64_t kBlocks = 264;

static_assert(sizeof(Parameters) <= 4096, "what a kernel may be given on every GPU");

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

  // Norms, intervals of keys, hashes, values that are not finite.
  void PrepareRows() {
    const size_t of_batch = Size(n_.batch * n_.queries);
    p_.low = New<int>(of_batch);
    p_.high = New<int>(of_batch);
    const int64_t groups = Up(n_.keys, 16);
    if (distance_) {
      p_.norm_x = New<float>(Size(rows_));
      p_.norm_y = New<float>(Size(n_.batch * n_.key_heads * n_.keys));
    }
    if (features_.kDropout != 0) p_.drop = New<unsigned>(2 * Size(rows_));
    if (features_.kHides != 0) p_.spoiled = New<int>(Size(n_.batch * n_.key_heads * groups));
    Constants c = OfRows();
    if (rows_ > 0) Launch("prepare_queries", c, Up(rows_, c.kWarps), 1, 0);
    const int64_t of_keys = n_.batch * n_.key_heads * groups;
    if (of_keys > 0 && (distance_ || features_.kHides != 0)) {
      Launch("prepare_keys", c, Up(of_keys, c.kWarps), 1, 0);
    }
  }

  void Forward(const Output& out) {
    if (rows_ == 0) return;
    p_.o = ToArray(out.o);
    p_.exact_o = out.exact_o;
    p_.lse = out.lse;
    p_.statistics = out.statistics;
    Constants c = features_;
    c.kBiasGradient = 0;
    c.kColumns = 0;
    const int64_t bytes = std::max(c.kDim, c.kValueDim) * BytesOf(Type());
    // Of 99 KiB that a block may have on every GPU, and 255 registers.
    c.kWarps = bytes > 512 ? 2 : 4;
    c.kStep = bytes > 512 ? 16 : bytes > 256 || (bytes > 128 && Type() == 0) ? 32 : 64;
    c.kStages = bytes > 256 ? 1 : 2;
    c.kOwn = Type() != 0 && bytes <= 256 ? 1 : 0;
    if (n_.queries <= 16) c.kWarps = 1;
    c.kAligned = Aligned({&p_.x, &p_.y, &p_.v, &p_.o}) ? 1 : 0;
    // A block of one warp brings its queries through the same memory.
    const int64_t blocks = heads_ * Up(n_.queries, 16 * c.kWarps);
    const int64_t tiles = Up(n_.keys, c.kStep);
    constexpr int64_t kLeastTiles = 4;
    const int64_t parts = std::clamp<int64_t>(std::min(kBlocks / blocks, tiles / kLeastTiles), 1,
                                              std::max<int64_t>(1, tiles));
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
        ForwardLayout(Type(), Int(c.kDim), Int(c.kValueDim), Int(c.kWarps), Int(c.kStep),
                      Int(c.kStages), Int(c.kOwn), words, Int(c.kBias));
    Launch("forward", c, blocks * p_.parts, 1, layout.size, function_.name);
    if (p_.parts == 1) return;
    Constants merge = OfRows();
    Launch("merge", merge, Up(rows_, merge.kWarps), 1, 0);
  }

  void Backward(const Saved& saved, const Gradient& gradient) {
    p_.d_o = ToArray(saved.d_o);
    p_.d_lse = saved.d_lse;
    p_.o = ToArray(saved.o);
    p_.exact_o = const_cast<float*>(saved.exact_o);
    p_.statistics = const_cast<float*>(saved.statistics);
    if (rows_ > 0) PrepareDelta();

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
    const int64_t bytes = std::max(c.kDim, c.kValueDim) * BytesOf(Type());
    c.kWarps = bytes > 512 ? 1 : 4;
    c.kStep = bytes > 256 ? 16 : bytes > 64 ? 32 : 64;
    c.kStages = bytes > 256 ? 1 : 2;
    // Scalars and their gradients need the registers, too.
    const int scalars = function_.row_scalars + function_.column_scalars + function_.head_scalars;
    c.kOwn = Type() != 0 && bytes <= 128 && scalars <= 2 ? 1 : 0;
    c.kColumns = std::min<int64_t>(128, std::max(c.kDim, c.kValueDim));
    p_.chunks = Int(Up(std::max(c.kDim, c.kValueDim), c.kColumns));
    c.kAligned = Aligned({&p_.x, &p_.y, &p_.v, &p_.d_o, &p_.d_x, &p_.d_y, &p_.d_v}) ? 1 : 0;

    PassOverKeys(c);
    p_.delta = p_.balanced_delta;
    c.kBiasGradient = gradient.bias.table != nullptr ? 1 : 0;
    PassOverQueries(c, gradient);
    if (sums_heads) SumHeads(gradient);
    if (gradient.bias.table != nullptr) SumBiases(gradient.bias);
  }

 private:
  static size_t Size(int64_t n) { return static_cast<size_t>(std::max<int64_t>(n, 0)); }
  static int Int(int64_t n) { return static_cast<int>(n); }
  int Type() const { return static_cast<int>(in_.element); }

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

  // Of kernels that work on rows alone.
  Constants OfRows() const {
    Constants c;
    c.kType = Type();
    c.kWarps = 4;
    return c;
  }

  void Launch(const char* kind, const Constants& c, int64_t x, int64_t y, int shared,
              const char* definition = "") {
    const KernelName name{kind, definition, c.List()};
    const LaunchShape shape{{static_cast<uint32_t>(x), static_cast<uint32_t>(y), 1},
                            static_cast<uint32_t>(32 * c.kWarps),
                            static_cast<uint32_t>(shared)};
    backend_.Launch(name, shape, &p_, sizeof(p_));
  }

  void SetInput() {
    // Bytes between the members, too: they are part of what a kernel is given.
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
    // The same 64 bits.
    p_.query_offsets = reinterpret_cast<const Int64*>(in_.query_offsets);
    p_.key_starts = reinterpret_cast<const Int64*>(in_.mask.key_starts);
    p_.key_lengths = reinterpret_cast<const Int64*>(in_.mask.key_lengths);
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
    const bool bounded = in_.mask.left < kFar || in_.mask.right < kFar || in_.mask.chunks.size > 0;
    c.kHides = bounded || c.kBias != 0 || c.kKeyBias != 0 || c.kPairBias != 0 || c.kPairMask != 0 ||
                       c.kSegments != 0
                   ? 1
                   : 0;
  }

  void PrepareDelta() {
    p_.largest = New<float>(Size(rows_));
    p_.inverse = New<float>(Size(rows_));
    p_.delta = New<float>(Size(rows_));
    p_.balanced_delta = New<float>(Size(rows_));
    Constants c = OfRows();
    c.kWarps = 1;
    c.kValueDim = features_.kValueDim;
    c.kDropout = features_.kDropout;
    c.kAligned = Aligned({&p_.d_o, &p_.v}) ? 1 : 0;
    Launch("prepare_delta", c, heads_ * Up(n_.queries, 16), 1,
           2 * 16 * RowBytes(Type(), Int(c.kValueDim)));
  }

  int SharedOfBackward(const Constants& c, int words) const {
    return BackwardLayout(Type(), Int(c.kDim), Int(c.kValueDim), Int(c.kWarps), Int(c.kStep),
                          Int(c.kStages), Int(c.kOwn), words, Int(c.kBias), c.kBiasGradient != 0)
        .size;
  }

  // Gradients of queries and factors, and the deltas that the other pass reads.
  void PassOverKeys(const Constants& c) {
    if (rows_ == 0) return;
    const int words =
        KeyWords(function_.column_scalars, distance_, Int(c.kKeyBias), Int(c.kSegments));
    const int64_t blocks = heads_ * Up(n_.queries, 16 * c.kWarps);
    Launch("backward_queries", c, blocks * p_.chunks, 1, SharedOfBackward(c, words),
           function_.name);
  }

  // Gradients of keys, values and biases.
  void PassOverQueries(const Constants& c, const Gradient& gradient) {
    const bool has_pairs = gradient.pair_bias.data != nullptr;
    if (has_pairs && rows_ > 0) {
      Constants clear = OfRows();
      clear.kType = 0;
      Launch("clear_pairs", clear, rows_, 1, 0);
    }
    const bool wanted = gradient.y.data != nullptr || gradient.v.data != nullptr ||
                        gradient.column_scalars != nullptr || gradient.key_bias != nullptr ||
                        gradient.bias.table != nullptr || has_pairs;
    const int64_t key_heads = n_.batch * n_.key_heads;
    const int64_t blocks = Up(n_.keys, 16 * c.kWarps);
    int64_t parts = blocks;
    if (gradient.bias.table != nullptr) {
      parts = std::min(blocks, Up(2 * kBlocks, std::max<int64_t>(1, key_heads)));
      // With a layout, each warp has sums of its own.
      p_.bias_parts = Int(parts * (c.kBias == 2 ? c.kWarps : 1));
      p_.d_bias_parts = New<float>(Size(heads_ * p_.bias_parts * p_.bias_size));
    }
    if (!wanted || key_heads * blocks == 0) return;
    const int words = QueryWords(function_.row_scalars, distance_, Int(c.kKeyBias),
                                 Int(c.kSegments), Int(c.kTemperature), Int(c.kDropout));
    // Heads that share the gradient of their pairs' bias add to it one after the other; those of
    // one key head do so anyway.
    const bool shares_heads = has_pairs && gradient.pair_bias.stride[1] == 0;
    const int64_t by_batch = has_pairs && gradient.pair_bias.stride[0] == 0 ? n_.batch : 1;
    const int64_t by_head = shares_heads ? n_.key_heads : 1;
    for (int64_t b = 0; b < by_batch; ++b) {
      for (int64_t h = 0; h < by_head; ++h) {
        p_.first_head = Int(b * n_.key_heads + h);
        p_.head_step = shares_heads ? Int(n_.key_heads) : 1;
        const int64_t heads = key_heads / by_batch / by_head;
        Launch("backward_keys", c, heads * parts * p_.chunks, 1, SharedOfBackward(c, words),
               function_.name);
      }
    }
    p_.first_head = 0;
    p_.head_step = 1;
  }

  // The rows' parts, over each head's rows in all batches.
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
    // A table that the batch shares is there even if the batch is empty.
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
};

}  // namespace

std::string Unsupported(const PairFunction& function, const Input& in) {
  constexpr int64_t kMostColumns = 256;
  const auto wide = [](const char* name, int64_t columns) {
    return std::string(name) + ": is " + std::to_string(columns) + ", at most 256";
  };
  const AttentionShape& n = in.shape;
  if (function.input != PairInput::kNone && n.dim > kMostColumns) return wide("head_dim", n.dim);
  if (n.value_dim > kMostColumns) return wide("head_dim of v", n.value_dim);
  if (in.relative.layout != nullptr &&
      (in.relative.keys != nullptr || in.relative.values != nullptr)) {
    return "relative: relative keys and values are not computed on CUDA";
  }
  LayoutParameters layout;
  if (in.bias.table != nullptr && in.bias.layout != nullptr &&
      !Describe(*in.bias.layout, &layout)) {
    return "bias: its layout is not known on CUDA";
  }
  return "";
}

void Forward(const PairFunction& function, const Input& input, const Output& output,
             Backend& backend) {
  Plan plan(function, input, backend);
  plan.PrepareRows();
  plan.Forward(output);
}

void Backward(const PairFunction& function, const Input& input, const Saved& saved,
              const Gradient& gradient, Backend& backend) {
  Plan plan(function, input, backend);
  plan.PrepareRows();
  Saved complete = saved;
  const AttentionShape& n = input.shape;
  const int64_t rows = n.batch * n.heads * n.queries;
  if (saved.statistics == nullptr && rows > 0) {
    const auto bytes = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
    const int64_t of_head = n.queries * n.value_dim;
    Output out;
    out.o = {backend.Scratch(bytes(rows * n.value_dim)), {n.heads * of_head, of_head, n.value_dim}};
    out.exact_o = static_cast<float*>(backend.Scratch(bytes(rows * n.value_dim)));
    out.statistics = static_cast<float*>(backend.Scratch(bytes(3 * rows)));
    plan.Forward(out);
    complete.o = {out.o.data, out.o.stride};
    complete.exact_o = out.exact_o;
    complete.statistics = out.statistics;
  }
  plan.Backward(complete, gradient);
}

}  // namespace gnomon::cuda
