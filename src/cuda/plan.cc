#include "cuda/plan.h"

#include <algorithm>

#include "cuda/constants.h"

namespace gnomon::cuda {
namespace {

// The largest head_dim of the backward pass in one pass, without and with head scalars, which need
// registers.
constexpr int64_t kMostOnePass = 128;
constexpr int64_t kMostOnePassWithScalars = 64;
// The rows of a block of the forward pass on compute capability 9.0: two groups of four warps.
constexpr int64_t kRowsOnHopper = 128;

}  // namespace

Plan::Plan(const PairFunction& function, const Input& in, Backend& backend)
    : context_(function, in, backend),
      relative_(context_),
      function_(function),
      n_(in.shape),
      features_(context_.features()),
      p_(context_.parameters()),
      distance_(function.input == PairInput::kSquaredDistance) {}

void Plan::PrepareRows(bool is_forward) {
  const size_t of_batch = Size(n_.batch * n_.queries);
  p_.low = context_.New<int>(of_batch);
  p_.high = context_.New<int>(of_batch);
  const int64_t groups = Up(n_.keys, 16);
  if (distance_) {
    p_.norm_x = context_.New<float>(Size(context_.rows()));
    p_.norm_y = context_.New<float>(Size(n_.batch * n_.key_heads * n_.keys));
  }
  if (features_.kDropout != 0) p_.drop = context_.New<unsigned>(2 * Size(context_.rows()));
  const bool hides = is_forward && features_.kHides != 0;
  if (hides) p_.spoiled = context_.New<int>(Size(n_.batch * n_.key_heads * groups));
  Constants c = context_.OfRows();
  if (features_.kPositions != 0) {
    PreparePositions(c);
  } else {
    c.kPacked = features_.kPacked;
    context_.Launch("prepare_intervals", c, Up(n_.batch * n_.queries, 32 * c.kWarps), 1, 0);
    c.kPacked = 0;
  }
  if (distance_ || features_.kDropout != 0) {
    context_.Launch("prepare_queries", c, Up(context_.rows(), c.kWarps), 1, 0);
  }
  c.kAligned = context_.Aligned({&p_.v}) ? 1 : 0;
  c.kPages = features_.kPages;
  const int64_t of_keys = n_.batch * n_.key_heads * groups;
  if (distance_ || hides) context_.Launch("prepare_keys", c, Up(of_keys, c.kWarps), 1, 0);
  c.kPages = 0;
  if (Narrows()) NarrowIntervals(c);
}

bool Plan::Narrows() const {
  // With fewer queries, a bound costs as much as the scores.
  constexpr int64_t kLeastQueries = 32;
  return features_.kBias == 1 && features_.kPages == 0 && Terms() == features_.kDropout &&
         context_.in().tolerance > 0 && n_.keys >= context_.in().least_skipping_keys &&
         n_.queries * p_.group >= kLeastQueries && context_.rows() > 0;
}

void Plan::NarrowIntervals(Constants c) {
  c.kBias = features_.kBias;
  const int64_t key_cells = n_.batch * n_.key_heads * Up(n_.keys, kKeyCell);
  const int64_t tables = (p_.bias_batch_stride != 0 ? n_.batch : 1) * n_.heads;
  const int64_t bias_cells = tables * Up(p_.bias_size, kBiasCell);
  p_.key_bounds = context_.New<float>(Size(key_cells * WordsOfKeyCell(function_.column_scalars)));
  p_.bias_bounds = context_.New<float>(Size(bias_cells));
  p_.narrow_low = context_.New<int>(Size(context_.rows()));
  p_.narrow_high = context_.New<int>(Size(context_.rows()));
  context_.Launch("bound_keys", c, Up(key_cells, c.kWarps), 1, 0, function_.name);
  context_.Launch("bound_biases", c, Up(bias_cells, 32 * c.kWarps), 1, 0);
  context_.Launch("narrow_intervals", c, Up(context_.rows(), c.kWarps), 1, 0, function_.name);
  p_.low = p_.narrow_low;
  p_.high = p_.narrow_high;
  p_.interval_heads = p_.heads;
  AscendIntervals(c, context_.heads());
}

void Plan::AscendIntervals(Constants c, int64_t count) {
  c.kWarps = 1;
  context_.Launch("ascend_intervals", c, count, 1, 0);
}

void Plan::PreparePositions(const Constants& c) {
  const size_t queries = Size(n_.batch * n_.queries);
  p_.origins = context_.New<Int64>(Size(n_.batch));
  p_.query_places = context_.New<int>(queries);
  p_.key_places = context_.New<int>(Size(n_.batch * n_.keys));
  p_.first_places = context_.New<int>(queries);
  p_.last_places = context_.New<int>(queries);
  if (n_.queries == 0) return;
  const int64_t tokens = std::max(n_.queries, n_.keys);
  context_.Launch("prepare_places", c, n_.batch * Up(tokens, 32 * c.kWarps), 1, 0);
  p_.query_offsets = p_.origins;
  context_.Launch("find_visible_keys", c, Up(n_.batch * n_.queries, c.kWarps), 1, 0);
  AscendIntervals(c, n_.batch);
}

void Plan::Forward(const Output& out) {
  if (context_.rows() == 0) return;
  p_.o = ToArray(out.o);
  p_.exact_o = out.exact_o;
  p_.lse = out.lse;
  p_.statistics = out.statistics;
  const bool splits = out.precise && p_.exact_o != nullptr && FitsOnePass() && NeedsPrecision();
  const bool has_values = features_.kRelativeValues != 0;
  // Relative values are added to the unrounded results later.
  if (has_values && p_.exact_o == nullptr) {
    p_.exact_o = context_.New<float>(Size(context_.rows() * n_.value_dim));
  }
  if (RunsOnHopper()) {
    ForwardOnHopper(splits);
    return;
  }
  Constants c = features_;
  c.kSplit = splits ? 1 : 0;
  c.kBiasGradient = 0;
  c.kColumns = 0;
  const int64_t bytes = std::max(c.kDim, c.kValueDim) * BytesOf(context_.Type());
  // The limits are 99 KiB of shared memory, which every supported GPU allows per block, and 255
  // registers.
  c.kWarps = bytes > 512 ? 2 : 4;
  c.kStep = bytes > 512 ? 16 : bytes > 256 || (bytes > 128 && context_.Type() == 0) ? 32 : 64;
  // Scalars and terms also need registers.
  if (Terms() > 1 || (bytes > 128 && Terms() + Scalars() > 0)) {
    c.kStep = std::min<int64_t>(c.kStep, bytes > 256 ? 16 : splits ? 48 : 32);
  }
  c.kStages = bytes > 256 ? 1 : 2;
  c.kOwn = context_.Type() != 0 && bytes <= 256 ? 1 : 0;
  if (n_.queries <= 16) c.kWarps = 1;
  const bool halves = context_.Type() != 0 && bytes <= 256;
  // Blocks of 128 rows must fill a GPU, and have at most an eighth more rows than blocks of 64.
  const int64_t tall = Up(n_.queries, 128);
  const bool fills =
      context_.heads() * tall >= context_.BlocksToFill() && 16 * tall <= 9 * Up(n_.queries, 64);
  if (Terms() == 0 && c.kBias == 0 && halves && n_.queries > 16) {
    if (Scalars() == 0 && !distance_ && fills) {
      // With 32 rows, a warp loads a tile's rows half as often.
      c.kRowTiles = 2;
      c.kOwn = bytes <= 128 ? 1 : 0;
      c.kStep = bytes > 128 ? 32 : bytes > 64 ? 48 : 64;
    } else if (bytes <= 128 || Scalars() > 0) {
      // Roots and other slow instructions need more warps, which must then leave the queries in
      // shared memory. Wide heads have no registers for the lower halves of weights as well.
      c.kOwn = distance_ ? 0 : 1;
      c.kResident = Scalars() <= 4 && !(splits && bytes > 128) ? 3 : 0;
    }
  }
  c.kAligned = context_.Aligned({&p_.x, &p_.y, &p_.v, &p_.o}) ? 1 : 0;
  // Splits the keys into parts if there are too few blocks to fill a GPU.
  const int64_t rows_in_block = 16 * c.kRowTiles * c.kWarps;
  const int64_t blocks = context_.heads() * Up(n_.queries, rows_in_block);
  const int64_t tiles = Up(n_.keys, c.kStep);
  constexpr int64_t kLeastTiles = 4;
  const int64_t most_parts = has_values ? 1 : std::max<int64_t>(1, tiles);
  const int64_t parts = std::clamp<int64_t>(
      std::min(context_.BlocksToFill() / blocks, tiles / kLeastTiles), 1, most_parts);
  p_.tiles_in_part = static_cast<int>(std::max<int64_t>(1, Up(tiles, parts)));
  p_.parts = static_cast<int>(std::max<int64_t>(1, Up(tiles, p_.tiles_in_part)));
  c.kParts = p_.parts > 1 ? 1 : 0;
  if (p_.parts > 1) {
    p_.partial = context_.New<float>(Size(p_.parts * context_.rows() * n_.value_dim));
    p_.partial_statistics = context_.New<float>(Size(3 * p_.parts * context_.rows()));
  }
  const int words = KeyWords(function_.column_scalars, distance_, Int(c.kKeyBias), Int(c.kSegments),
                             Int(c.kPositions));
  const SharedLayout layout = ForwardLayout(
      context_.Type(), Int(c.kDim), Int(c.kValueDim), Int(rows_in_block), Int(c.kStep),
      Int(c.kStages), Int(c.kOwn), words, Int(c.kBias), Int(c.kRelativeValues));
  const int64_t of_head = Up(n_.queries, rows_in_block) * p_.parts;
  relative_.ForEachSlice(/*is_backward=*/false, [&](int64_t first, int64_t count) {
    relative_.ComputeScores(first, count);
    context_.Launch("forward", c, count * of_head, 1, layout.size, function_.name);
    if (has_values) relative_.AddValues(first, count);
  });
  if (p_.parts == 1) return;
  Constants merge = context_.OfRows();
  context_.Launch("merge", merge, Up(context_.rows(), merge.kWarps), 1, 0);
}

bool Plan::RunsOnHopper() const {
  // Narrower heads would be padded to twice their columns.
  const bool is_supported =
      context_.Type() != 0 && function_.input != PairInput::kNone && Terms() == 0 &&
      features_.kBias == 0 && std::min(n_.dim, n_.value_dim) > 32 &&
      std::max(n_.dim, n_.value_dim) <= 128 && context_.Aligned({&p_.x, &p_.y, &p_.v, &p_.o});
  // A multiprocessor holds one block. Blocks must fill a GPU, and have at most an eighth more rows
  // than blocks of 64.
  const int64_t blocks = Up(n_.queries, kRowsOnHopper);
  return is_supported && 2 * context_.heads() * blocks >= context_.BlocksToFill() &&
         16 * blocks <= 9 * Up(n_.queries, 64) && context_.IsHopper();
}

void Plan::ForwardOnHopper(bool splits) {
  Constants c = features_;
  c.kSplit = splits ? 1 : 0;
  c.kDim = Up(n_.dim, 64) * 64;
  c.kValueDim = Up(n_.value_dim, 64) * 64;
  c.kProducers = 4;
  c.kWarps = c.kProducers + kRowsOnHopper / 16;
  // Scalars and distances need registers.
  c.kStep = function_.input == PairInput::kInnerProduct && Scalars() == 0 ? 128 : 64;
  c.kStages = 2;
  c.kAligned = 1;
  const int words = KeyWords(function_.column_scalars, distance_, 0, 0, 0);
  const HopperLayout layout = LayoutOnHopper(Int(c.kDim), Int(c.kValueDim), Int(kRowsOnHopper),
                                             Int(c.kStep), Int(c.kStages), words);
  context_.Launch("forward_hopper", c, context_.heads() * Up(n_.queries, kRowsOnHopper), 1,
                  layout.size, function_.name);
}

bool Plan::SetGradients(const Saved& saved, const Gradient& gradient) {
  p_.d_o = ToArray(saved.d_o);
  p_.d_lse = saved.d_lse;
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
  if (sums_heads) {
    p_.d_factor_rows = context_.New<float>(Size((1 + function_.head_scalars) * context_.rows()));
  }
  return sums_heads;
}

void Plan::Backward(const Saved& saved, const Gradient& gradient) {
  p_.o = ToArray(saved.o);
  p_.exact_o = const_cast<float*>(saved.exact_o);
  const bool sums_heads = SetGradients(saved, gradient);

  Constants c = features_;
  c.kParts = 0;
  c.kHides = 0;
  c.kHeadSums = sums_heads || gradient.temperature != nullptr ? 1 : 0;
  const int64_t bytes = std::max(c.kDim, c.kValueDim) * BytesOf(context_.Type());
  c.kWarps = bytes > 512 ? 1 : 4;
  c.kStep = bytes > 256 ? 16 : bytes > 64 ? 32 : 64;
  c.kStages = bytes > 256 ? 1 : 2;
  // Scalars, terms and their gradients also need registers.
  const bool plain = Terms() == 0 && Scalars() == 0 && !distance_;
  const bool plain_halves = plain && context_.Type() != 0;
  if (plain_halves && bytes <= 128 && c.kBias == 0) c.kStep = 64;
  if ((bytes > 64 && Terms() > 1) || (bytes > 128 && !plain)) c.kStep = 16;
  const bool few = context_.Type() != 0 && bytes <= 128 && Scalars() <= 2 && Terms() <= 1;
  c.kOwn = few || (plain_halves && bytes <= 256) ? 1 : 0;
  c.kColumns = std::min<int64_t>(128, std::max(c.kDim, c.kValueDim));
  if (context_.Type() == 0 && Terms() > 3) c.kColumns = Padded(c.kColumns / 2);
  p_.chunks = Int(Up(std::max(c.kDim, c.kValueDim), c.kColumns));
  c.kAligned = context_.Aligned({&p_.x, &p_.y, &p_.v, &p_.d_o, &p_.d_x, &p_.d_y, &p_.d_v}) ? 1 : 0;

  p_.shift = context_.New<float>(Size(context_.rows()));
  p_.inverse = context_.New<float>(Size(context_.rows()));
  float* const delta = context_.New<float>(Size(context_.rows()));
  if (RunsInOnePass(saved, gradient)) {
    p_.delta = delta;
    PassOverPairs(c, gradient);
    if (sums_heads) SumHeads(gradient);
    return;
  }
  p_.balanced_delta = context_.New<float>(Size(context_.rows()));
  PrepareSums(c, gradient);
  relative_.ForEachSlice(/*is_backward=*/true, [&](int64_t first, int64_t count) {
    relative_.ComputeScores(first, count);
    if (c.kRelativeValues != 0) relative_.MultiplyByValues(saved.d_o, count);
    p_.delta = delta;
    PrepareDelta(count, /*one_pass=*/false);
    PassOverKeys(c, count);
    p_.delta = p_.balanced_delta;
    if (RelativeTables::WantsSums(gradient)) {
      // This second pass over the keys uses the balanced deltas.
      Constants sums = c;
      sums.kRelativeSums = 1;
      PassOverKeys(sums, count);
      relative_.MultiplySums(gradient, first, count);
    }
    Constants keys = c;
    keys.kBiasGradient = gradient.bias.table != nullptr ? 1 : 0;
    keys.kRelativeSums = RelativeTables::WantsKeySums(gradient) ? 1 : 0;
    PassOverQueries(keys, gradient, first, count);
    relative_.MultiplyKeySums(gradient, first, count);
  });
  if (sums_heads) SumHeads(gradient);
  if (gradient.bias.table != nullptr) SumBiases(gradient.bias);
  relative_.Sum(gradient);
}

bool Plan::FitsOnePass() const {
  // Blocks would wait forever if the caller's key rows, which are not checked, did not ascend.
  const int64_t most = function_.head_scalars == 0 ? kMostOnePass : kMostOnePassWithScalars;
  return context_.Type() != static_cast<int>(Element::kFloat32) &&
         function_.input != PairInput::kNone && Terms() == 0 && features_.kBias == 0 &&
         features_.kDim <= most && features_.kValueDim <= most && p_.key_rows == nullptr;
}

// The gradients of scalars add up slopes that the pairs of a row or column share. The rounding
// errors of weights in delta, which one pass does not balance, would dominate them.
bool Plan::NeedsPrecision() const { return function_.row_scalars + function_.column_scalars > 0; }

bool Plan::RunsInOnePass(const Saved& saved, const Gradient& gradient) const {
  // With unrounded outputs, the deltas are nearly balanced.
  return FitsOnePass() && p_.exact_o != nullptr && (saved.precise || !NeedsPrecision()) &&
         WantsKeys(gradient);
}

int Plan::Scalars() const {
  return function_.row_scalars + function_.column_scalars + function_.head_scalars;
}

int64_t Plan::Terms() const {
  const Constants& c = features_;
  return (c.kBias == 2 ? 1 : 0) + c.kKeyBias + c.kPairBias + c.kPairMask + c.kSegments +
         c.kPositions + c.kTemperature + c.kSoftcap + c.kDropout + c.kRelativeKeys +
         c.kRelativeValues + c.kRelativeQueries;
}

void Plan::PrepareDelta(int64_t count, bool one_pass) {
  Constants c = context_.OfRows();
  c.kWarps = 1;
  c.kValueDim = features_.kValueDim;
  c.kDropout = features_.kDropout;
  c.kPositions = features_.kPositions;
  c.kRelativeValues = features_.kRelativeValues;
  c.kOnePass = one_pass ? 1 : 0;
  c.kAligned = context_.Aligned({&p_.d_o, &p_.v}) ? 1 : 0;
  context_.Launch("prepare_delta", c, count * Up(n_.queries, 16), 1,
                  2 * 16 * RowBytes(context_.Type(), Int(c.kValueDim)));
}

int Plan::SharedOfBackward(const Constants& c, int words, int64_t scores) const {
  return BackwardLayout(context_.Type(), Int(c.kDim), Int(c.kValueDim), Int(16 * c.kWarps),
                        Int(c.kStep), Int(c.kStages), Int(c.kOwn), words, Int(c.kBias), Int(scores))
      .size;
}

void Plan::PassOverKeys(const Constants& c, int64_t count) {
  const int words = KeyWords(function_.column_scalars, distance_, Int(c.kKeyBias), Int(c.kSegments),
                             Int(c.kPositions));
  const int64_t blocks = count * Up(n_.queries, 16 * c.kWarps);
  const int64_t scores = c.kRelativeSums != 0 ? c.kRelativeKeys + c.kRelativeValues : 0;
  context_.Launch("backward_queries", c, blocks * p_.chunks, 1, SharedOfBackward(c, words, scores),
                  function_.name);
}

int64_t Plan::PartsOfKeys(const Constants& c, const Gradient& gradient) const {
  const int64_t blocks = Up(n_.keys, 16 * c.kWarps);
  if (gradient.bias.table == nullptr) return blocks;
  return std::min(blocks,
                  Up(2 * context_.BlocksToFill(), std::max<int64_t>(1, n_.batch * n_.key_heads)));
}

void Plan::PrepareSums(const Constants& c, const Gradient& gradient) {
  if (gradient.pair_bias.data != nullptr) {
    Constants clear = context_.OfRows();
    clear.kType = 0;
    context_.Launch("clear_pairs", clear, context_.rows(), 1, 0);
  }
  if (gradient.bias.table != nullptr) {
    // With a layout, each warp has its own partial sums.
    p_.bias_parts = Int(PartsOfKeys(c, gradient) * (c.kBias == 2 ? c.kWarps : 1));
    p_.d_bias_parts = context_.New<float>(Size(context_.heads() * p_.bias_parts * p_.bias_size));
  }
  relative_.PrepareSums(gradient);
}

bool Plan::WantsKeys(const Gradient& gradient) {
  return gradient.y.data != nullptr || gradient.v.data != nullptr ||
         gradient.column_scalars != nullptr || gradient.key_bias != nullptr ||
         gradient.bias.table != nullptr || gradient.pair_bias.data != nullptr ||
         RelativeTables::WantsKeySums(gradient);
}

void Plan::PassOverQueries(const Constants& c, const Gradient& gradient, int64_t first,
                           int64_t count) {
  if (!WantsKeys(gradient)) return;
  const bool has_pairs = gradient.pair_bias.data != nullptr;
  const int64_t parts = PartsOfKeys(c, gradient);
  const int64_t key_heads = count / p_.group;
  const int words = QueryWords(function_.row_scalars, distance_, Int(c.kKeyBias), Int(c.kSegments),
                               Int(c.kPositions), Int(c.kTemperature), Int(c.kDropout), 0);
  // Heads that share the gradient of a pair bias must run in sequence. Query heads of the same
  // key head always do.
  const bool by_batch = has_pairs && gradient.pair_bias.stride[0] == 0;
  const bool by_head = has_pairs && gradient.pair_bias.stride[1] == 0;
  int64_t at_once = key_heads;
  p_.head_step = 1;
  if ((by_batch && by_head) || ((by_batch || by_head) && count < context_.heads())) {
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
    context_.Launch("backward_keys", c, at_once * parts * p_.chunks, 1,
                    SharedOfBackward(c, words, std::max(c.kBiasGradient, c.kRelativeSums)),
                    function_.name);
  }
  p_.head_step = 1;
  p_.first_head = Int(first);
}

void Plan::PassOverPairs(Constants c, const Gradient& gradient) {
  c.kWarps = 4;
  // Many scalars, and sums for gradients of factors, also need registers.
  const bool few = Scalars() + 2 * c.kHeadSums <= 4;
  c.kRowTiles = std::max(c.kDim, c.kValueDim) <= 64 && few ? 2 : 1;
  c.kStep = kOnePassStep;
  c.kStages = 2;
  c.kOwn = 0;
  c.kColumns = c.kDim;
  c.kOnePass = 1;
  const int rows_in_block = Int(16 * c.kRowTiles * c.kWarps);
  const int64_t tiles = context_.heads() * Up(n_.queries, c.kStep);
  const int terms =
      QuerySums(function_.row_scalars, function_.head_scalars, distance_, Int(c.kHeadSums));
  const int64_t sums = tiles * SumsOfTile(Int(c.kDim), Int(c.kStep), distance_, terms);
  p_.query_word_count = QueryWords(function_.row_scalars, distance_, 0, 0, 0, 0, 0, 1);
  const int64_t words = tiles * p_.query_word_count * c.kStep;
  p_.query_sums_size = sums + words + tiles + 1;
  p_.query_sums = context_.New<float>(Size(p_.query_sums_size));
  p_.query_words = p_.query_sums + sums;
  p_.turns = reinterpret_cast<int*>(p_.query_words + words);
  p_.tickets = p_.turns + tiles;
  const Constants rows = context_.OfRows();
  context_.Launch("clear_sums", rows, Up(p_.query_sums_size, kClearedWords * 32 * rows.kWarps), 1,
                  0);
  PrepareDelta(context_.heads(), /*one_pass=*/true);
  const SharedLayout layout = OnePassLayout(
      context_.Type(), Int(c.kDim), Int(c.kValueDim), rows_in_block, Int(c.kStep), Int(c.kStages),
      QueryWords(function_.row_scalars, distance_, 0, 0, 0, 0, 0, 1),
      KeyWords(function_.column_scalars, distance_, 0, 0, 0), Int(c.kWarps), terms, distance_);
  context_.Launch("backward", c, n_.batch * n_.key_heads * Up(n_.keys, rows_in_block), 1,
                  layout.size, function_.name);
  if (gradient.x.data == nullptr && p_.d_row == nullptr && p_.d_factor_rows == nullptr) return;
  Constants finish = context_.OfRows();
  finish.kDim = c.kDim;
  finish.kStep = c.kStep;
  finish.kAligned = c.kAligned;
  finish.kHeadSums = c.kHeadSums;
  context_.Launch("finish_queries", finish,
                  Up(context_.heads() * Up(n_.queries, 16), finish.kWarps), 1, 0, function_.name);
}

void Plan::SumHeads(const Gradient& gradient) {
  if (n_.heads == 0) return;
  p_.sum_size = 1;
  p_.sum_outer = n_.batch;
  p_.sum_outer_stride = n_.heads * n_.queries;
  p_.sum_count = n_.queries;
  p_.sum_stride = 1;
  p_.sum_from_step = n_.queries;
  p_.sum_to_step = 1;
  Constants c = context_.OfRows();
  c.kType = 0;
  c.kWarps = 8;
  for (int s = -1; s < function_.head_scalars; ++s) {
    p_.sum_from = p_.d_factor_rows + (1 + s) * context_.rows();
    p_.sum_to = s < 0                              ? gradient.factor
                : gradient.head_scalars == nullptr ? nullptr
                                                   : gradient.head_scalars + s * n_.heads;
    if (p_.sum_to != nullptr) context_.Launch("add_up_all", c, 1, n_.heads, 8 * 32 * Int(c.kWarps));
  }
}

void Plan::SumBiases(const Bias<float>& to) {
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
  Constants c = context_.OfRows();
  c.kType = 0;
  const int64_t x = Up(p_.bias_size, 32 * c.kWarps);
  for (int64_t b = 0; b < (shared ? 1 : n_.batch); ++b) {
    if (!shared) {
      p_.sum_from = p_.d_bias_parts + b * p_.sum_outer_stride;
      p_.sum_to = to.table + b * to.batch_stride;
    }
    context_.Launch("add_up", c, x, n_.heads, 0);
  }
}

}  // namespace gnomon::cuda
