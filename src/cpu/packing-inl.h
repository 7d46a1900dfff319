// Packing of rows and panels for the matrix product, and sums over a row's columns.
#if defined(GNOMON_SRC_CPU_PACKING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GNOMON_SRC_CPU_PACKING_INL_H_
#undef GNOMON_SRC_CPU_PACKING_INL_H_
#else
#define GNOMON_SRC_CPU_PACKING_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/most_bias.h"
#include "base/visible_keys.h"
#include "cpu/bfloat16.h"
#include "cpu/gemm-inl.h"
#include "cpu/head_slots.h"
#include "cpu/vocabulary-inl.h"
#include "cpu/workspace.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {

// The number of rows of a tile, and its number of columns in the forward and in the backward pass.
constexpr int64_t kRowBlock = 48;
constexpr int64_t kForwardColumns = (kMicroVectors == 4 ? 1024 : 512) / sizeof(Real);
constexpr int64_t kBackwardColumns = (kMicroVectors == 4 ? 768 : 384) / sizeof(Real);
constexpr int64_t kWidth = static_cast<int64_t>(kPanel);
constexpr int64_t kLaneCount = static_cast<int64_t>(kLanes);
static_assert(kRowBlock % kLaneCount == 0);

// The type of tokens that are read as Real without conversion.
constexpr TokenType kOwnType = TokenType::kFloat32;
inline int64_t BytesOf(TokenType type) {
  return type == kOwnType ? static_cast<int64_t>(sizeof(Real)) : 2;
}

#ifdef GNOMON_DOUBLE
using Buffer = DoubleBuffer;

// Like gnomon::Tokens, for tokens of one type.
struct Tokens : View<const Real> {
  static constexpr TokenType type = kOwnType;
  Tokens(View<const Real> view) : View(view) {}  // NOLINT: implicit
  Tokens(const Real* numbers, std::array<int64_t, 3> strides) : View{numbers, strides} {}
  const void* row(int64_t b, int64_t h, int64_t i) const { return View::row(b, h, i); }
};

// Doubles are never multiplied as pairs of bfloat16 numbers, so these functions are not called.
inline bool MultipliesPairs(const AttentionInput<Real>& /*in*/, int64_t /*dim*/) { return false; }
inline Real WithoutHalf(Real pair, bool /*second*/) { return pair; }
inline void RoundToPairs(const Real* /*from*/, size_t /*count*/, Real* /*to*/) {}
inline void MultiplyPairs(size_t, size_t, size_t, const Real*, size_t, const Real*, size_t, Real*,
                          size_t) {}
inline void MultiplyAddPairs(size_t, size_t, size_t, const Real*, size_t, const Real*, size_t,
                             Real*, size_t) {}
inline void MultiplyPairRows(size_t, size_t, size_t, const Real*, size_t, const void*, int64_t,
                             Real*, size_t) {}
inline void PairColumns(const void*, int64_t, int64_t, Real*) {}
inline void PackPairs(const Tokens&, int64_t, int64_t, int64_t, KeyRange, int64_t, Real*) {}
inline void PairRows(const Tokens&, int64_t, int64_t, int64_t, int64_t, KeyRange, int64_t, Real*) {}
#else
// Whether inner products use bfloat16 pairs; this requires the vector length of cpu/bfloat16.h.
// Both passes make the same decision, so that they compute identical scores.
inline bool MultipliesPairs(const AttentionInput<Real>& in, int64_t dim) {
  return HWY_ARCH_X86 && kLanes == 16 && dim > 0 && in.x.type == TokenType::kBFloat16 &&
         in.v.type == TokenType::kBFloat16 && HasBfloat16Products();
}
#endif

inline TokenType TypeOf(const Tokens& tokens) { return tokens.type; }

HWY_INLINE size_t Size(int64_t n) { return static_cast<size_t>(n); }

// Converts biases to log2 units. Finite biases stay finite.
#ifdef GNOMON_DOUBLE
constexpr Real kMostFinite = 1e306;
#else
constexpr Real kMostFinite = kMostBias;
#endif
HWY_INLINE VF BiasInLog2(VF bias) {
  const DF d;
  const VF finite = Min(hn::Set(d, kMostFinite), Max(hn::Set(d, -kMostFinite), bias));
  return Select(hn::Abs(bias) < hn::Set(d, kInfinity), finite, bias) * hn::Set(d, kLog2E);
}
HWY_INLINE Real FiniteBias(Real bias) {
  return std::isinf(bias) ? bias : std::clamp(bias, -kMostFinite, kMostFinite);
}
HWY_INLINE Real BiasInLog2(Real bias) { return FiniteBias(bias) * kLog2E; }

#ifndef GNOMON_DOUBLE
// Widens a vector of 16-bit numbers to floats.
HWY_INLINE VF Widened(hn::Vec<hn::Rebind<uint16_t, DF>> bits, TokenType type) {
  const DF d;
  const DU du;
  const auto wide = hn::PromoteTo(du, bits);
  if (type == TokenType::kBFloat16) return hn::BitCast(d, hn::ShiftLeft<16>(wide));
  const auto number = hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), bits));
  // Where Highway emulates this conversion, it turns infinities and NaN into finite numbers.
  const auto exponent = hn::Set(du, 0x7c00u);
  const auto none = hn::Or(
      hn::ShiftLeft<16>(hn::And(wide, hn::Set(du, 0x8000u))),
      hn::Or(hn::Set(du, 0x7f800000u), hn::ShiftLeft<13>(hn::And(wide, hn::Set(du, 0x3ffu)))));
  return hn::IfThenElse(hn::RebindMask(d, hn::And(wide, exponent) == exponent),
                        hn::BitCast(d, none), number);
}
#endif

// Reads numbers [first, first + count) of a row of tokens as Real.
#ifdef GNOMON_DOUBLE
inline void Widen(const void* row, TokenType /*type*/, int64_t first, int64_t count,
                  Real* HWY_RESTRICT to) {
  std::copy_n(static_cast<const Real*>(row) + first, count, to);
}
#else
inline void Widen(const void* row, TokenType type, int64_t first, int64_t count,
                  Real* HWY_RESTRICT to) {
  if (type == kOwnType) {
    std::copy_n(static_cast<const Real*>(row) + first, count, to);
    return;
  }
  const DF d;
  const hn::Rebind<uint16_t, DF> d16;
  const auto* const from = static_cast<const uint16_t*>(row) + first;
  int64_t n = 0;
  for (; n + kLaneCount <= count; n += kLaneCount) {
    hn::StoreU(Widened(hn::LoadU(d16, from + n), type), d, to + n);
  }
  if (n == count) return;
  uint16_t last[kLanes] = {};
  Real wide[kLanes];
  std::copy_n(from + n, count - n, last);
  hn::StoreU(Widened(hn::LoadU(d16, last), type), d, wide);
  std::copy_n(wide, count - n, to + n);
}
#endif

// Reads rows as Real, either in place or widened into a buffer that the next row reuses.
class RowReader {
 public:
  RowReader(const Tokens& tokens, int64_t columns) : tokens_(tokens), columns_(columns) {
    if (tokens.type != kOwnType) wide_.resize(Size(columns));
  }

  const Real* Row(int64_t b, int64_t h, int64_t i) {
    const void* const row = tokens_.row(b, h, i);
    if (wide_.empty()) return static_cast<const Real*>(row);
    Widen(row, tokens_.type, 0, columns_, wide_.data());
    return wide_.data();
  }

 private:
  Tokens tokens_;
  int64_t columns_;
  std::vector<Real> wide_;
};

// The number of vectors that cover the first `columns` columns of a panel.
HWY_INLINE size_t Vectors(int64_t columns) {
  return std::min(kMicroVectors, Size(DivideUp(columns, kLaneCount)));
}
// The number of vectors from column c (the first column of a vector) to `end`, within the panel of
// c.
HWY_INLINE size_t VectorsOfPanel(int64_t c, int64_t end) {
  return std::min(kMicroVectors - Size(c % kWidth) / kLanes, Size(DivideUp(end - c, kLaneCount)));
}

// Returns term(0) + ... + term(count - 1) in the type of the terms. Sixteen partial sums let the
// loop vectorise.
template <class Term>
HWY_INLINE auto Sum(int64_t count, const Term& term) {
  constexpr int64_t kParts = 16;
  decltype(term(count)) part[kParts] = {};
  int64_t e = 0;
  for (; e + kParts <= count; e += kParts) {
    for (int64_t n = 0; n < kParts; ++n) part[n] += term(e + n);
  }
  for (; e < count; ++e) part[0] += term(e);
  // The partial sums are added pairwise; adding them in sequence would create a long dependency
  // chain.
  for (int64_t half = kParts / 2; half > 0; half /= 2) {
    for (int64_t n = 0; n < half; ++n) part[n] += part[n + half];
  }
  return part[0];
}

// Computes one element of the matrix product (gemm.cc) term by term, with identical rounding.
inline Real InnerProduct(const Real* x, const Real* y, int64_t columns) {
  const hn::CappedTag<Real, 1> d;
  constexpr auto kDepth = static_cast<int64_t>(kProductDepth);
  Real total = 0;
  for (int64_t first = 0; first < columns; first += kDepth) {
    auto sum = hn::Zero(d);
    for (int64_t e = first; e < std::min(first + kDepth, columns); ++e) {
      sum = hn::MulAdd(hn::Set(d, x[e]), hn::Set(d, y[e]), sum);
    }
    total = first == 0 ? hn::GetLane(sum) : total + hn::GetLane(sum);
  }
  return total;
}

// SquaredNorm rounds its sum only once, because squared distances are differences of such sums,
// which amplify rounding errors.
#ifdef GNOMON_DOUBLE
inline Real SquaredNorm(const Real* row, int64_t columns) {
  const DF d;
  // The partial sums and their rounding errors.
  VF sum = hn::Zero(d);
  VF lost = hn::Zero(d);
  const auto add = [&](VF x) HWY_ATTR {
    const VF square = x * x;
    const VF next = sum + square;
    const VF added = next - sum;
    lost = lost + ((sum - (next - added)) + (square - added));
    lost = lost + hn::MulSub(x, x, square);
    sum = next;
  };
  int64_t e = 0;
  for (; e + kLaneCount <= columns; e += kLaneCount) add(hn::LoadU(d, row + e));
  if (e < columns) {
    HWY_ALIGN Real last[kLanes] = {};
    std::copy_n(row + e, columns - e, last);
    add(hn::Load(d, last));
  }
  const Real total = hn::GetLane(hn::SumOfLanes(d, sum));
  // For an infinite sum, the error would be infinity minus infinity, which is NaN.
  if (!std::isfinite(total)) return total;
  return total + hn::GetLane(hn::SumOfLanes(d, lost));
}
#else
inline Real SquaredNorm(const Real* row, int64_t columns) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> d_half;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto even = hn::Zero(d);
  auto odd = even;
  int64_t e = 0;
  for (; e + 2 * lanes <= columns; e += 2 * lanes) {
    const auto first = hn::PromoteTo(d, hn::LoadU(d_half, row + e));
    const auto second = hn::PromoteTo(d, hn::LoadU(d_half, row + e + lanes));
    even = hn::MulAdd(first, first, even);
    odd = hn::MulAdd(second, second, odd);
  }
  double sum = hn::GetLane(hn::SumOfLanes(d, even + odd));
  for (; e < columns; ++e) sum += static_cast<double>(row[e]) * row[e];
  return static_cast<Real>(sum);
}
#endif

inline Real SquaredDistance(const Real* x, const Real* y, int64_t columns) {
  return Sum(columns, [x, y](int64_t e) {
    const Real difference = x[e] - y[e];
    return difference * difference;
  });
}

// The rows of a matrix as a right operand, padded to whole vectors.
struct Rows {
  const Real* data = nullptr;
  int64_t stride = 0;
  const Real* row(int64_t i) const { return data + i * stride; }
};

HWY_INLINE int64_t PaddedColumns(int64_t columns) { return RoundUp(columns, kLaneCount); }

// Copies rows [begin, end) of one head, zero-padded to whole vectors.
inline void CopyPadded(const Tokens& tokens, int64_t b, int64_t h, int64_t begin, int64_t end,
                       int64_t columns, Real* to) {
  const int64_t padded = PaddedColumns(columns);
  for (int64_t i = begin; i < end; ++i, to += padded) {
    Widen(tokens.row(b, h, i), tokens.type, 0, columns, to);
    std::fill(to + columns, to + padded, 0.0f);
  }
}

// The token rows of a (batch, head) pair, in place or as a copy padded to whole vectors if the
// columns or the type require one.
class PaddedRows {
 public:
  PaddedRows(const Tokens& tokens, const HeadSlots& slots, int64_t rows, int64_t columns)
      : tokens_(tokens),
        slots_(slots),
        rows_(rows),
        columns_(columns),
        padded_(PaddedColumns(columns)) {
    if (padded_ != columns || tokens.type != kOwnType) {
      copy_.Reset(slots.count * rows * padded_);
    }
  }

  bool copies() const { return static_cast<bool>(copy_); }

  // Copies rows [begin, end) of one head, if copies().
  void Fill(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    if (!copies()) return;
    CopyPadded(tokens_, b, h, begin, end, columns_, Copy(b, h) + begin * padded_);
  }

  Rows Head(int64_t b, int64_t h) const {
    if (copies()) return {Copy(b, h), padded_};
    return {static_cast<const Real*>(tokens_.row(b, h, 0)), tokens_.stride[2]};
  }

 private:
  Real* Copy(int64_t b, int64_t h) const {
    return copy_.data() + slots_.Of(b, h) * rows_ * padded_;
  }

  Tokens tokens_;
  HeadSlots slots_;
  int64_t rows_;
  int64_t columns_;
  int64_t padded_;
  Buffer copy_;
};

#ifdef GNOMON_DOUBLE
// Transposes rows: to[d * kStride + n] = from[n][d].
template <int64_t kRows, int64_t kStride>
HWY_INLINE void Transpose(const Real* const* from, int64_t columns, Real* HWY_RESTRICT to) {
  for (int64_t d = 0; d < columns; ++d) {
    for (int64_t n = 0; n < kRows; ++n) to[d * kStride + n] = from[n][d];
  }
}
#else
// Transposes four rows: to[d * kStride + n] = from[n][d].
template <int64_t kStride>
HWY_INLINE void TransposeFour(const Real* const* from, int64_t columns, Real* HWY_RESTRICT to) {
  int64_t d = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::Full128<Real> d4;
  for (; d + 4 <= columns; d += 4) {
    const auto row0 = hn::LoadU(d4, from[0] + d);
    const auto row1 = hn::LoadU(d4, from[1] + d);
    const auto row2 = hn::LoadU(d4, from[2] + d);
    const auto row3 = hn::LoadU(d4, from[3] + d);
    const auto lower01 = hn::InterleaveLower(d4, row0, row1);
    const auto lower23 = hn::InterleaveLower(d4, row2, row3);
    const auto upper01 = hn::InterleaveUpper(d4, row0, row1);
    const auto upper23 = hn::InterleaveUpper(d4, row2, row3);
    Real* at = to + d * kStride;
    hn::StoreU(hn::ConcatLowerLower(d4, lower23, lower01), d4, at);
    hn::StoreU(hn::ConcatUpperUpper(d4, lower23, lower01), d4, at + kStride);
    hn::StoreU(hn::ConcatLowerLower(d4, upper23, upper01), d4, at + 2 * kStride);
    hn::StoreU(hn::ConcatUpperUpper(d4, upper23, upper01), d4, at + 3 * kStride);
  }
#endif
  for (; d < columns; ++d) {
    for (int64_t n = 0; n < 4; ++n) to[d * kStride + n] = from[n][d];
  }
}

#if HWY_TARGET != HWY_SCALAR
// Transposes kLanes rows, for vectors of two or four 128-bit blocks.
template <int64_t kBlocks, int64_t kStride>
HWY_INLINE void TransposeLanes(const Real* const* from, int64_t columns, Real* HWY_RESTRICT to) {
  const DF d;
  const hn::RepartitionToWide<hn::RebindToUnsigned<DF>> d64;
  int64_t first = 0;
  for (; first + kLaneCount <= columns; first += kLaneCount) {
    // Transposes each block of four rows by four columns, and then the arrangement of the blocks.
    VF block[4][kBlocks];
    for (int64_t g = 0; g < kBlocks; ++g) {
      const auto row0 = hn::LoadU(d, from[4 * g] + first);
      const auto row1 = hn::LoadU(d, from[4 * g + 1] + first);
      const auto row2 = hn::LoadU(d, from[4 * g + 2] + first);
      const auto row3 = hn::LoadU(d, from[4 * g + 3] + first);
      const auto lower01 = hn::BitCast(d64, hn::InterleaveLower(d, row0, row1));
      const auto lower23 = hn::BitCast(d64, hn::InterleaveLower(d, row2, row3));
      const auto upper01 = hn::BitCast(d64, hn::InterleaveUpper(d, row0, row1));
      const auto upper23 = hn::BitCast(d64, hn::InterleaveUpper(d, row2, row3));
      block[0][g] = hn::BitCast(d, hn::InterleaveLower(d64, lower01, lower23));
      block[1][g] = hn::BitCast(d, hn::InterleaveUpper(d64, lower01, lower23));
      block[2][g] = hn::BitCast(d, hn::InterleaveLower(d64, upper01, upper23));
      block[3][g] = hn::BitCast(d, hn::InterleaveUpper(d64, upper01, upper23));
    }
    for (int64_t c = 0; c < 4; ++c) {
      Real* const at = to + (first + c) * kStride;
      const VF* const of = block[c];
      if constexpr (kBlocks == 2) {
        hn::StoreU(hn::ConcatLowerLower(d, of[1], of[0]), d, at);
        hn::StoreU(hn::ConcatUpperUpper(d, of[1], of[0]), d, at + 4 * kStride);
      } else {
        const VF even01 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(of[1]), of[0]);
        const VF even23 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(of[3]), of[2]);
        const VF odd01 = hn::OddEvenBlocks(of[1], hn::SwapAdjacentBlocks(of[0]));
        const VF odd23 = hn::OddEvenBlocks(of[3], hn::SwapAdjacentBlocks(of[2]));
        hn::StoreU(hn::ConcatLowerLower(d, even23, even01), d, at);
        hn::StoreU(hn::ConcatLowerLower(d, odd23, odd01), d, at + 4 * kStride);
        hn::StoreU(hn::ConcatUpperUpper(d, even23, even01), d, at + 8 * kStride);
        hn::StoreU(hn::ConcatUpperUpper(d, odd23, odd01), d, at + 12 * kStride);
      }
    }
  }
  for (int64_t g = 0; g < kBlocks && first < columns; ++g) {
    const Real* const rest[4] = {from[4 * g] + first, from[4 * g + 1] + first,
                                 from[4 * g + 2] + first, from[4 * g + 3] + first};
    TransposeFour<kStride>(rest, columns - first, to + first * kStride + 4 * g);
  }
}
#endif

// Transposes kRows rows (1, 4, or kLanes): to[d * kStride + n] = from[n][d].
template <int64_t kRows, int64_t kStride>
HWY_INLINE void Transpose(const Real* const* from, int64_t columns, Real* HWY_RESTRICT to) {
  if constexpr (kRows == 1) {
    for (int64_t e = 0; e < columns; ++e) to[e * kStride] = from[0][e];
  } else if constexpr (kRows == 4) {
    TransposeFour<kStride>(from, columns, to);
#if HWY_TARGET != HWY_SCALAR
  } else {
    TransposeLanes<kRows / 4, kStride>(from, columns, to);
#endif
  }
}
#endif

// Calls pack(rows, to) for groups of kLanes, then four, then single rows of `keys`: `rows` is an
// array of row pointers, and `to` is the column of the first row in the panel of rows [first, first
// + kWidth) of one head. Clears unused columns of the panel, up to the last vector that contains a
// used column.
template <class Pack>
HWY_INLINE void FillPanel(const Tokens& tokens, int64_t b, int64_t h, int64_t first, KeyRange keys,
                          int64_t panel_rows, Real* HWY_RESTRICT to, const Pack& pack) {
  const int64_t begin = std::clamp<int64_t>(keys.begin - first, 0, kWidth);
  const int64_t end = std::clamp<int64_t>(keys.end - first, begin, kWidth);
  for (int64_t j = 0; j < panel_rows; ++j) {
    std::fill_n(to + j * kWidth, begin, 0.0f);
    std::fill(to + j * kWidth + end, to + j * kWidth + RoundUp(end, kLaneCount), 0.0f);
  }
  int64_t n = begin;
  const auto fill = [&]<int64_t kRows>(std::integral_constant<int64_t, kRows>) HWY_ATTR {
    for (; n + kRows <= end; n += kRows) {
      std::array<const void*, static_cast<size_t>(kRows)> rows;
      for (int64_t r = 0; r < kRows; ++r) rows[Size(r)] = tokens.row(b, h, first + n + r);
      pack(rows, to + n);
    }
  };
  if constexpr (kLaneCount > 4) fill(std::integral_constant<int64_t, kLaneCount>());
  fill(std::integral_constant<int64_t, 4>());
  fill(std::integral_constant<int64_t, 1>());
}

// Rows are widened or paired this many columns at a time.
constexpr int64_t kPackedColumns = 64;

// Packs rows of one head as a transposed panel: column j of row first + n goes to to[j * kWidth +
// n].
inline void PackPanel(const Tokens& tokens, int64_t b, int64_t h, int64_t first, KeyRange keys,
                      int64_t columns, Real* HWY_RESTRICT to) {
  FillPanel(tokens, b, h, first, keys, columns, to,
            [=, type = tokens.type]<size_t kCount>(const std::array<const void*, kCount>& rows,
                                                   Real* HWY_RESTRICT at) HWY_ATTR {
              constexpr auto kRows = static_cast<int64_t>(kCount);
              const Real* from[kCount];
              if (type == kOwnType) {
                for (size_t r = 0; r < kCount; ++r) from[r] = static_cast<const Real*>(rows[r]);
                Transpose<kRows, kWidth>(from, columns, at);
                return;
              }
              Real wide[kCount][kPackedColumns];
              for (size_t r = 0; r < kCount; ++r) from[r] = wide[r];
              for (int64_t j = 0; j < columns; j += kPackedColumns) {
                const int64_t count = std::min(kPackedColumns, columns - j);
                for (size_t r = 0; r < kCount; ++r) Widen(rows[r], type, j, count, wide[r]);
                Transpose<kRows, kWidth>(from, count, at + j * kWidth);
              }
            });
}

#ifndef GNOMON_DOUBLE
// Copies columns [first, first + count) of a bfloat16 row as pairs (cpu/bfloat16.h), zero-padded if
// the count is odd. `first` is even.
HWY_INLINE void PairColumns(const void* row, int64_t first, int64_t count, Real* to) {
  const auto* const numbers = static_cast<const uint16_t*>(row) + first;
  std::memcpy(to, numbers, Size(count / 2) * sizeof(Real));
  if (count % 2 != 0) to[count / 2] = PairOf(numbers[count - 1], 0);
}

// Like PackPanel, for pairs of bfloat16 columns.
inline void PackPairs(const Tokens& tokens, int64_t b, int64_t h, int64_t first, KeyRange keys,
                      int64_t columns, Real* HWY_RESTRICT to) {
  FillPanel(tokens, b, h, first, keys, DivideUp(columns, 2), to,
            [=]<size_t kCount>(const std::array<const void*, kCount>& rows, Real* HWY_RESTRICT at)
                HWY_ATTR {
                  constexpr auto kRows = static_cast<int64_t>(kCount);
                  const Real* from[kCount];
                  // Whole vectors can be loaded from any address, but single floats must be
                  // aligned.
                  if (kRows > 1 && columns % 8 == 0) {
                    for (size_t r = 0; r < kCount; ++r) {
                      from[r] = static_cast<const Real*>(rows[r]);
                    }
                    Transpose<kRows, kWidth>(from, columns / 2, at);
                    return;
                  }
                  Real paired[kCount][kPackedColumns / 2];
                  for (size_t r = 0; r < kCount; ++r) from[r] = paired[r];
                  for (int64_t j = 0; j < columns; j += kPackedColumns) {
                    const int64_t count = std::min(kPackedColumns, columns - j);
                    for (size_t r = 0; r < kCount; ++r) PairColumns(rows[r], j, count, paired[r]);
                    Transpose<kRows, kWidth>(from, DivideUp(count, 2), at + j / 2 * kWidth);
                  }
                });
}

// Packs rows [begin, end) of one head as pairs; `begin` is even. Column j of rows begin + 2 n and
// begin + 2 n + 1 goes to to[n * padded + j], zero-padded to whole vectors. Rows outside `keys` are
// 0.
inline void PairRows(const Tokens& tokens, int64_t b, int64_t h, int64_t begin, int64_t end,
                     KeyRange keys, int64_t columns, Real* HWY_RESTRICT to) {
  const int64_t padded = PaddedColumns(columns);
  for (int64_t i = begin; i < end; i += 2, to += padded) {
    const bool first = i >= keys.begin && i < keys.end;
    const bool second = i + 1 >= keys.begin && i + 1 < keys.end;
    const auto row = [&](bool seen, int64_t key) {
      return static_cast<const uint16_t*>(seen ? tokens.row(b, h, key) : nullptr);
    };
    const uint16_t* HWY_RESTRICT low = row(first, i);
    const uint16_t* HWY_RESTRICT high = row(second, i + 1);
    if (first && second) {
      for (int64_t j = 0; j < columns; ++j) to[j] = PairOf(low[j], high[j]);
    } else {
      for (int64_t j = 0; j < columns; ++j) {
        to[j] = PairOf(first ? low[j] : uint16_t{0}, second ? high[j] : uint16_t{0});
      }
    }
    std::fill(to + columns, to + padded, 0.0f);
  }
}
#endif

// The rows of each head, packed as consecutive transposed panels of floats or pairs.
class Panels {
 public:
  Panels(const Tokens& tokens, const HeadSlots& slots, int64_t rows, int64_t columns,
         bool pairs = false)
      : tokens_(tokens),
        slots_(slots),
        columns_(columns),
        pairs_(pairs),
        panel_rows_(pairs ? DivideUp(columns, 2) : columns),
        panels_(DivideUp(rows, kWidth)),
        data_(slots.count * panels_ * panel_rows_ * kWidth) {}

  int64_t count() const { return panels_; }

  const Real* panel(int64_t b, int64_t h, int64_t p) const { return At(b, h, p); }

  void Fill(int64_t b, int64_t h, int64_t p, KeyRange keys) const {
    const auto pack = pairs_ ? PackPairs : PackPanel;
    pack(tokens_, b, h, p * kWidth, keys, columns_, At(b, h, p));
  }

 private:
  Real* At(int64_t b, int64_t h, int64_t p) const {
    return data_.data() + (slots_.Of(b, h) * panels_ + p) * panel_rows_ * kWidth;
  }

  Tokens tokens_;
  HeadSlots slots_;
  int64_t columns_;
  bool pairs_;
  int64_t panel_rows_;
  int64_t panels_;
  Buffer data_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#endif
