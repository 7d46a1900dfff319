#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/row_products.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/packing-inl.h"
#include "cpu/row_products-inl.h"
#include "cpu/vocabulary-inl.h"
#include "gnomon/attention.h"
#include "hwy/highway.h"

// The sums stay in registers only if all loops over them are unrolled.
#undef GNOMON_UNROLL
#define GNOMON_UNROLL _Pragma("GCC unroll 16")

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR
namespace {

// The number of inner products that are accumulated at once; they use half of the registers.
constexpr int kSums = kMicroVectors == 4 ? 16 : 8;
static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16);

// Reads rows as vectors, for a given element type and number of columns.
template <TokenType kType>
class Reader {
 public:
  using Number = std::conditional_t<kType == TokenType::kFloat32, float, uint16_t>;

  explicit Reader(size_t columns)
      : columns_(columns),
        whole_(columns / kLanes * kLanes),
        before_(hn::FirstN(DF(), kLanes - columns % kLanes)) {}

  // The number of columns covered by whole vectors.
  size_t whole() const { return whole_; }
  bool has_rest() const { return whole_ < columns_; }

  static HWY_INLINE VF Load(const Number* from) {
    if constexpr (kType == TokenType::kFloat32) {
      return hn::LoadU(DF(), from);
    } else {
      return Widened(hn::LoadU(hn::Rebind<uint16_t, DF>(), from), kType);
    }
  }

  // Loads the columns after the whole vectors, with 0 in the other lanes. The vector ends at the
  // end of the row, so nothing past the row is read.
  HWY_INLINE VF LoadRest(const Number* row) const {
    if (HWY_LIKELY(whole_ > 0)) {
      return hn::IfThenZeroElse(before_, Load(row + columns_ - kLanes));
    }
    Number all[kLanes] = {};
    std::copy_n(row, columns_, all);
    return Load(all);
  }
  // The first column of the vector that LoadRest() loads.
  size_t rest() const { return whole_ > 0 ? columns_ - kLanes : 0; }

 private:
  size_t columns_;
  size_t whole_;
  hn::Mask<DF> before_;
};

// Sums each vector within its 128-bit blocks: lane n of a block of the result is the sum of that
// block of the n-th vector.
HWY_INLINE VF SumsOfFour(VF a, VF b, VF c, VF e) {
  const DF d;
  const hn::RepartitionToWide<DU> d64;
  const auto ab = hn::BitCast(d64, hn::InterleaveLower(d, a, b) + hn::InterleaveUpper(d, a, b));
  const auto ce = hn::BitCast(d64, hn::InterleaveLower(d, c, e) + hn::InterleaveUpper(d, c, e));
  return hn::BitCast(d, hn::InterleaveLower(d64, ab, ce)) +
         hn::BitCast(d, hn::InterleaveUpper(d64, ab, ce));
}

// Returns a vector whose lane n is the sum of vector n; there are as many vectors as lanes. The
// order of summation is fixed.
HWY_INLINE VF SumsOfLanes(const VF* HWY_RESTRICT of) {
  const VF first = SumsOfFour(of[0], of[1], of[2], of[3]);
  if constexpr (kLanes == 4) {
    return first;
  } else {
    const DF d;
    const VF second = SumsOfFour(of[4], of[5], of[6], of[7]);
    if constexpr (kLanes == 8) {
      return hn::ConcatLowerLower(d, second, first) + hn::ConcatUpperUpper(d, second, first);
    } else {
      const VF third = SumsOfFour(of[8], of[9], of[10], of[11]);
      const VF fourth = SumsOfFour(of[12], of[13], of[14], of[15]);
      // `even` contains the sums of the halves of `first` and `third`, and `odd` those of `second`
      // and `fourth`.
      const VF even = hn::ConcatLowerLower(d, third, first) + hn::ConcatUpperUpper(d, third, first);
      const VF odd =
          hn::ConcatLowerLower(d, fourth, second) + hn::ConcatUpperUpper(d, fourth, second);
      return hn::OddEvenBlocks(odd + hn::SwapAdjacentBlocks(odd),
                               even + hn::SwapAdjacentBlocks(even));
    }
  }
}

// Adds the products of kRows rows of A with kParts rows of B to sums[r * kKeys + n].
template <TokenType kType, int kRows, int kKeys, int kParts>
HWY_INLINE void AddProducts(const Reader<kType>& reader, const float* const* a,
                            const Reader<TokenType::kFloat32>& floats,
                            const typename Reader<kType>::Number* const* b, VF* HWY_RESTRICT sums) {
  const auto add = [&](const auto& left_of, const auto& right_of) HWY_ATTR {
    VF left[kRows];
    GNOMON_UNROLL
    for (int r = 0; r < kRows; ++r) left[r] = left_of(a[r]);
    GNOMON_UNROLL
    for (int n = 0; n < kParts; ++n) {
      const VF right = right_of(b[n]);
      GNOMON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        sums[r * kKeys + n] = hn::MulAdd(left[r], right, sums[r * kKeys + n]);
      }
    }
  };
  for (size_t column = 0; column < reader.whole(); column += kLanes) {
    add([=](const float* row) HWY_ATTR { return hn::LoadU(DF(), row + column); },
        [=](const auto* row) HWY_ATTR { return Reader<kType>::Load(row + column); });
  }
  if (reader.has_rest()) {
    add([&](const float* row) HWY_ATTR { return floats.LoadRest(row); },
        [&](const auto* row) HWY_ATTR { return reader.LoadRest(row); });
  }
}

// Computes the products of kRows rows of A with kSums / kRows rows of B, and stores those of the
// first `count` rows of B.
template <TokenType kType, int kRows>
HWY_INLINE void ProductBlock(const Reader<kType>& reader, const float* const* a,
                             const Reader<TokenType::kFloat32>& floats,
                             const typename Reader<kType>::Number* const* b, size_t count,
                             float* HWY_RESTRICT c, size_t ldc) {
  constexpr int kKeys = kSums / kRows;
  // At most 8, because the address of each row of B occupies a register.
  constexpr int kParts = std::min(kKeys, 8);
  const DF d;
  VF sums[kSums];
  GNOMON_UNROLL
  for (VF& sum : sums) sum = hn::Zero(d);
  AddProducts<kType, kRows, kKeys, kParts>(reader, a, floats, b, sums);
  if constexpr (kKeys > kParts) {
    static_assert(kKeys == 2 * kParts);
    AddProducts<kType, kRows, kKeys, kParts>(reader, a, floats, b + kParts, sums + kParts);
  }
  HWY_ALIGN float all[kSums];
  GNOMON_UNROLL
  for (size_t n = 0; n < kSums; n += kLanes) hn::Store(SumsOfLanes(sums + n), d, all + n);
  if (HWY_LIKELY(count >= kKeys)) {
    for (size_t r = 0; r < kRows; ++r) {
      std::memcpy(c + r * ldc, all + r * kKeys, sizeof(float) * kKeys);
    }
  } else {
    for (size_t r = 0; r < kRows; ++r) std::copy_n(all + r * kKeys, count, c + r * ldc);
  }
}

// Splits m rows into groups of 4, 2 and 1, and calls body with the size, as a constant, and the
// first row of each group.
template <class Body>
HWY_INLINE void ByRows(size_t m, const Body& body) {
  size_t r = 0;
  for (; r + 4 <= m; r += 4) body(std::integral_constant<int, 4>(), r);
  if ((m & 2) != 0) {
    body(std::integral_constant<int, 2>(), r);
    r += 2;
  }
  if (r < m) body(std::integral_constant<int, 1>(), r);
}

template <TokenType kType>
void ProductsOf(size_t m, size_t n, size_t columns, const float* a, size_t lda, RowsInPlace b,
                float* c, size_t ldc) {
  using Number = typename Reader<kType>::Number;
  const Reader<kType> reader(columns);
  const Reader<TokenType::kFloat32> floats(columns);
  for (size_t j = 0; j < n; j += kSums) {
    // Replaces rows past the end with the last row; their products are not stored.
    const Number* rows[kSums];
    for (size_t t = 0; t < kSums; ++t) {
      rows[t] = static_cast<const Number*>(b.row(static_cast<int64_t>(std::min(j + t, n - 1))));
    }
    const size_t count = std::min<size_t>(kSums, n - j);
    const auto multiply = [&]<int kRows>(std::integral_constant<int, kRows>, size_t r) HWY_ATTR {
      const float* left[kRows];
      for (size_t t = 0; t < kRows; ++t) left[t] = a + (r + t) * lda;
      constexpr size_t kKeys = kSums / kRows;
      for (size_t t = 0; t < count; t += kKeys) {
        ProductBlock<kType, kRows>(reader, left, floats, rows + t, count - t, c + r * ldc + j + t,
                                   ldc);
      }
    };
    ByRows(m, multiply);
  }
}

// Computes C += A B for kRows rows and kVectors vectors of columns starting at `column`, or for the
// remaining columns. Alternate rows of B are added to two sums, which shortens the dependency
// chain.
template <TokenType kType, int kRows, int kVectors, bool kRest>
HWY_INLINE void AddBlock(const Reader<kType>& reader, size_t n, size_t column,
                         const float* const* a, RowsInPlace b, float* HWY_RESTRICT c, size_t ldc) {
  using Number = typename Reader<kType>::Number;
  const DF d;
  VF sums[2][kRows][kVectors];
  GNOMON_UNROLL
  for (auto& of_rows : sums) {
    GNOMON_UNROLL
    for (auto& of_row : of_rows) {
      GNOMON_UNROLL
      for (VF& sum : of_row) sum = hn::Zero(d);
    }
  }
  const auto add = [&](size_t j, auto& to) HWY_ATTR {
    const auto* const row = static_cast<const Number*>(b.row(static_cast<int64_t>(j)));
    VF right[kVectors];
    GNOMON_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      right[v] = kRest ? reader.LoadRest(row) : Reader<kType>::Load(row + column + v * kLanes);
    }
    GNOMON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const VF left = hn::Set(d, a[r][j]);
      GNOMON_UNROLL
      for (int v = 0; v < kVectors; ++v) to[r][v] = hn::MulAdd(left, right[v], to[r][v]);
    }
  };
  size_t j = 0;
  for (; j + 1 < n; j += 2) {
    add(j, sums[0]);
    add(j + 1, sums[1]);
  }
  if (j < n) add(j, sums[0]);
  GNOMON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    GNOMON_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      float* const to =
          c + static_cast<size_t>(r) * ldc + (kRest ? reader.rest() : column + v * kLanes);
      hn::StoreU(hn::LoadU(d, to) + (sums[0][r][v] + sums[1][r][v]), d, to);
    }
  }
}

template <TokenType kType, int kRows>
HWY_INLINE void AddColumns(const Reader<kType>& reader, size_t n, const float* const* a,
                           RowsInPlace b, float* c, size_t ldc) {
  // There are two sums per vector, which use half of the registers.
  constexpr int kVectors = std::min(4, kSums / 2 / kRows);
  size_t column = 0;
  for (; column + kVectors * kLanes <= reader.whole(); column += kVectors * kLanes) {
    AddBlock<kType, kRows, kVectors, false>(reader, n, column, a, b, c, ldc);
  }
  for (; column < reader.whole(); column += kLanes) {
    AddBlock<kType, kRows, 1, false>(reader, n, column, a, b, c, ldc);
  }
  if (reader.has_rest()) AddBlock<kType, kRows, 1, true>(reader, n, 0, a, b, c, ldc);
}

template <TokenType kType>
void AddOf(size_t m, size_t n, size_t columns, const float* a, size_t lda, RowsInPlace b, float* c,
           size_t ldc) {
  // The number of rows of B that stay in the L1 cache while all rows of C use them. It is even,
  // because rows alternate between two sums.
  constexpr size_t kDepth = 64;
  const Reader<kType> reader(columns);
  for (size_t j = 0; j < n; j += kDepth) {
    const size_t count = std::min(kDepth, n - j);
    RowsInPlace from = b;
    from.data = b.row(static_cast<int64_t>(j));
    const auto add = [&]<int kRows>(std::integral_constant<int, kRows>, size_t r) HWY_ATTR {
      const float* left[kRows];
      for (size_t t = 0; t < kRows; ++t) left[t] = a + (r + t) * lda + j;
      AddColumns<kType, kRows>(reader, count, left, from, c + r * ldc, ldc);
    };
    ByRows(m, add);
  }
}

// Calls body with the token type as a constant.
template <class Body>
HWY_INLINE void OfType(TokenType type, const Body& body) {
  switch (type) {
    case TokenType::kFloat32:
      return body(std::integral_constant<TokenType, TokenType::kFloat32>());
    case TokenType::kBFloat16:
      return body(std::integral_constant<TokenType, TokenType::kBFloat16>());
    case TokenType::kFloat16:
      return body(std::integral_constant<TokenType, TokenType::kFloat16>());
  }
}

}  // namespace

void MultiplyRows(size_t m, size_t n, size_t columns, const float* a, size_t lda, RowsInPlace b,
                  float* c, size_t ldc) {
  OfType(b.type, [&]<TokenType kType>(std::integral_constant<TokenType, kType>)
                     HWY_ATTR { ProductsOf<kType>(m, n, columns, a, lda, b, c, ldc); });
}

void MultiplyAddRows(size_t m, size_t n, size_t columns, const float* a, size_t lda, RowsInPlace b,
                     float* c, size_t ldc) {
  OfType(b.type, [&]<TokenType kType>(std::integral_constant<TokenType, kType>)
                     HWY_ATTR { AddOf<kType>(m, n, columns, a, lda, b, c, ldc); });
}

#endif
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();
