#include "cuda/derivative_plan.h"

#include <algorithm>

#include "cuda/constants.h"

namespace gnomon::cuda {

DerivativePlan::DerivativePlan(const PairFunction& function, const Input& in, const Input& tangent,
                               Backend& backend)
    : Plan(function, in, backend), tangent_(tangent) {
  Tangents& of = p_.tangent;
  if (function.input != PairInput::kNone) {
    of.x = ToArray(tangent.x);
    of.y = ToArray(tangent.y);
  }
  of.v = ToArray(tangent.v);
  of.row_scalars = tangent.row_scalars;
  of.column_scalars = tangent.column_scalars;
  of.head_scalars = tangent.head_scalars;
  of.factor = tangent.factor;
  of.bias = tangent.bias.table;
  of.key_bias = tangent.key_bias;
  of.pair_bias = ToArray(tangent.pair_bias);
  of.temperature = tangent.temperature;
}

void DerivativePlan::Forward(const Saved& saved, const OutputTangents& out) {
  if (context_.rows() == 0) return;
  p_.exact_o = const_cast<float*>(saved.exact_o);
  p_.statistics = const_cast<float*>(saved.statistics);
  p_.tangent.o = out.o;
  p_.tangent.lse = out.lse;
  PrepareNorms();
  PrepareValues();
  Constants c = features_;
  c.kAligned =
      context_.Aligned({&p_.x, &p_.y, &p_.v, &p_.tangent.x, &p_.tangent.y, &p_.tangent.v}) ? 1 : 0;
  c.kColumns = std::min<int64_t>(MostColumns(), c.kValueDim);
  p_.chunks = Int(Up(c.kValueDim, c.kColumns));
  const int words = WordsOfKeys();
  const int64_t scores = 2 * c.kRelativeValues;
  Fit(c, /*is_backward=*/false, words, scores);
  const int64_t of_head = Up(n_.queries, 16 * c.kWarps);
  relative_.ForEachSlice(/*is_backward=*/false, [&](int64_t first, int64_t count) {
    relative_.AllocateTangents(tangent_, /*is_backward=*/false, count);
    relative_.ComputeScores(first, count);
    relative_.ComputeScoreTangents(tangent_, first, count);
    context_.Launch("forward_tangents", c, count * of_head * p_.chunks, 1,
                    SharedBytes(c, /*is_backward=*/false, words, scores), function_.name);
    if (c.kRelativeValues != 0) relative_.AddValueTangents(tangent_, first, count);
  });
}

void DerivativePlan::Backward(const Saved& saved, const CotangentTangents& cotangent,
                              const Gradient& gradient) {
  p_.tangent.d_o = ToArray(cotangent.d_o);
  p_.tangent.d_lse = cotangent.d_lse;
  const bool sums_heads = SetGradients(saved, gradient);
  const size_t rows = Size(context_.rows());
  p_.shift = context_.New<float>(rows);
  p_.inverse = context_.New<float>(rows);
  p_.delta = context_.New<float>(rows);
  p_.tangent.lse = context_.New<float>(rows);
  p_.tangent.delta = context_.New<float>(rows);
  PrepareNorms();

  Constants c = features_;
  c.kHides = 0;
  c.kAligned = context_.Aligned({&p_.x, &p_.y, &p_.v, &p_.d_o, &p_.d_x, &p_.d_y, &p_.d_v,
                                 &p_.tangent.x, &p_.tangent.y, &p_.tangent.v, &p_.tangent.d_o})
                   ? 1
                   : 0;
  const int words = WordsOfKeys();
  Constants of_rows = c;
  Fit(of_rows, /*is_backward=*/true, words, 0);
  Constants of_queries = c;
  of_queries.kColumns = std::min<int64_t>(MostColumns(), c.kDim);
  of_queries.kRelativeSums = RelativeTables::WantsSums(gradient) ? 1 : 0;
  const int64_t tables =
      of_queries.kRelativeSums != 0 ? 2 * (c.kRelativeKeys + c.kRelativeValues) : 0;
  Fit(of_queries, /*is_backward=*/true, words, tables);
  Constants of_keys = c;
  of_keys.kColumns = std::min<int64_t>(64, std::max(c.kDim, c.kValueDim));
  of_keys.kBiasGradient = gradient.bias.table != nullptr ? 1 : 0;
  of_keys.kRelativeSums = RelativeTables::WantsKeySums(gradient) ? 1 : 0;
  Fit(of_keys, /*is_backward=*/true, WordsOfQueries(), ScoresOfKeys(of_keys));

  const bool wants_queries = gradient.x.data != nullptr || gradient.row_scalars != nullptr ||
                             sums_heads || gradient.temperature != nullptr ||
                             of_queries.kRelativeSums != 0;
  PrepareSums(of_keys, gradient);
  relative_.ForEachSlice(/*is_backward=*/true, [&](int64_t first, int64_t count) {
    relative_.AllocateTangents(tangent_, /*is_backward=*/true, count);
    relative_.ComputeScores(first, count);
    relative_.ComputeScoreTangents(tangent_, first, count);
    if (c.kRelativeValues != 0) {
      relative_.MultiplyByValues(saved.d_o, count);
      relative_.MultiplyTangentsByValues(tangent_, saved.d_o, cotangent.d_o, count);
    }
    p_.chunks = 1;
    context_.Launch("row_tangents", of_rows, count * Up(n_.queries, 16 * of_rows.kWarps), 1,
                    SharedBytes(of_rows, /*is_backward=*/true, words, 0), function_.name);
    if (wants_queries) {
      p_.chunks = Int(Up(c.kDim, of_queries.kColumns));
      context_.Launch("query_tangents", of_queries,
                      count * Up(n_.queries, 16 * of_queries.kWarps) * p_.chunks, 1,
                      SharedBytes(of_queries, /*is_backward=*/true, words, tables), function_.name);
    }
    if (of_queries.kRelativeSums != 0) {
      relative_.MultiplySumTangents(gradient, tangent_, cotangent.d_o, first, count);
    }
    p_.chunks = Int(Up(std::max(c.kDim, c.kValueDim), of_keys.kColumns));
    PassOverQueries(of_keys, WordsOfQueries(), gradient, first, count);
    relative_.MultiplyKeySumTangents(gradient, tangent_, first, count);
  });
  if (sums_heads) SumHeads(gradient);
  if (gradient.bias.table != nullptr) SumBiases(gradient.bias);
  relative_.Sum(gradient);
}

void DerivativePlan::PrepareNorms() {
  if (!distance_) return;
  Tangents& of = p_.tangent;
  if (of.x.data != nullptr) {
    of.norm_x = context_.New<float>(Size(context_.rows()));
    PrepareNorms(p_.x, of.x, n_.heads, n_.queries, of.norm_x);
  }
  if (of.y.data != nullptr) {
    of.norm_y = context_.New<float>(Size(n_.batch * n_.key_heads * n_.keys));
    PrepareNorms(p_.y, of.y, n_.key_heads, n_.keys, of.norm_y);
  }
}

void DerivativePlan::PrepareNorms(const Array& rows, const Array& tangents, int64_t heads,
                                  int64_t count, float* to) {
  const auto matrix = [](const Array& a) {
    return Matrix{a.data, a.stride[0], a.stride[1], a.stride[2], 1, 1};
  };
  p_.product = {};
  p_.product.left = matrix(rows);
  p_.product.right = matrix(tangents);
  p_.product.rows = Int(count);
  p_.product.columns = Int(heads);
  p_.product.depth = p_.dim;
  p_.product.to = to;
  const Constants c = context_.OfRows();
  context_.Launch("prepare_norm_tangents", c, Up(n_.batch * heads * count, c.kWarps), 1, 0);
}

void DerivativePlan::PrepareValues() {
  if (features_.kHides == 0 || p_.tangent.v.data == nullptr) return;
  const int64_t groups = n_.batch * n_.key_heads * Up(n_.keys, 16);
  p_.tangent.spoiled = context_.New<int>(Size(groups));
  // The kernel that inspects values reads them from p_.v.
  const Parameters kept = p_;
  p_.v = p_.tangent.v;
  p_.spoiled = p_.tangent.spoiled;
  p_.norm_y = nullptr;
  Constants c = context_.OfRows();
  c.kAligned = context_.Aligned({&p_.v}) ? 1 : 0;
  context_.Launch("prepare_keys", c, Up(groups, c.kWarps), 1, 0);
  p_ = kept;
}

int DerivativePlan::SharedBytes(const Constants& c, bool is_backward, int words,
                                int64_t scores) const {
  return LayoutOfDuals(context_.Type(), Int(c.kDim), Int(c.kValueDim), Int(16 * c.kWarps),
                       Int(c.kStep), Int(c.kStages), Int(c.kOwn), words, Int(c.kBias), Int(scores),
                       is_backward)
      .size;
}

void DerivativePlan::Fit(Constants& c, bool is_backward, int words, int64_t scores) const {
  struct Tiles {
    int warps, step, stages, own;
  };
  constexpr Tiles kTiles[] = {{4, 32, 2, 1}, {4, 16, 2, 1}, {4, 16, 1, 1}, {2, 16, 1, 1},
                              {4, 16, 1, 0}, {2, 16, 1, 0}, {1, 16, 1, 0}};
  // Every supported GPU allows this much shared memory per block.
  constexpr int kMostBytes = 99 * 1024;
  const int64_t bytes = std::max(c.kDim, c.kValueDim) * BytesOf(context_.Type());
  // Large tiles need registers that wide heads, scalars and terms also need.
  const bool is_plain = !distance_ && Scalars() == 0 && Terms() == 0;
  const int most_step = is_plain && bytes <= 128 ? 32 : 16;
  for (const Tiles& tiles : kTiles) {
    if (tiles.step > most_step) continue;
    c.kWarps = n_.queries <= 16 ? 1 : tiles.warps;
    c.kStep = tiles.step;
    c.kStages = tiles.stages;
    c.kOwn = tiles.own;
    if (SharedBytes(c, is_backward, words, scores) <= kMostBytes) return;
  }
}

int64_t DerivativePlan::MostColumns() const {
  // Scalars and terms also need registers.
  return context_.Type() == 0 && (distance_ || Scalars() + Terms() > 0) ? 64 : 128;
}

int DerivativePlan::WordsOfKeys() const {
  const Constants& c = features_;
  return KeyWords(function_.column_scalars, distance_, Int(c.kKeyBias), Int(c.kSegments),
                  Int(c.kPositions)) +
         KeyTangentWords(function_.column_scalars, distance_, Int(c.kKeyBias));
}

int DerivativePlan::WordsOfQueries() const {
  const Constants& c = features_;
  return QueryWords(function_.row_scalars, distance_, Int(c.kKeyBias), Int(c.kSegments),
                    Int(c.kPositions), Int(c.kTemperature), Int(c.kDropout), 0) +
         QueryTangentWords(function_.row_scalars, distance_, Int(c.kTemperature));
}

int64_t DerivativePlan::ScoresOfKeys(const Constants& c) {
  return std::max(c.kBiasGradient, 2 * c.kRelativeSums);
}

void DerivativePlan::PassOverQueries(const Constants& c, int words, const Gradient& gradient,
                                     int64_t first, int64_t count) {
  if (!WantsKeys(gradient)) return;
  // Heads that share the gradient of a pair bias run in sequence.
  const bool shares = gradient.pair_bias.data != nullptr &&
                      (gradient.pair_bias.stride[0] == 0 || gradient.pair_bias.stride[1] == 0);
  const int64_t key_heads = count / p_.group;
  const int64_t at_once = shares ? 1 : key_heads;
  for (int64_t n = 0; n < key_heads; n += at_once) {
    p_.first_head = Int(first / p_.group + n);
    context_.Launch("key_tangents", c, at_once * PartsOfKeys(c, gradient) * p_.chunks, 1,
                    SharedBytes(c, /*is_backward=*/true, words, ScoresOfKeys(c)), function_.name);
  }
  p_.first_head = Int(first);
}

}  // namespace gnomon::cuda
