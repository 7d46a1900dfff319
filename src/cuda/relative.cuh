// Relative keys, values and queries: the rows of a table that query-key pairs read through a
// layout. Each query has tables with one number per row, such as its products with the relative
// keys or the sums of its attention weights. With relative queries, each key has tables. Multiply()
// multiplies these tables by the rows; the other functions clear, scale and update them.
#ifndef GNOMON_SRC_CUDA_RELATIVE_CUH_
#define GNOMON_SRC_CUDA_RELATIVE_CUH_

#include "cuda/tables.cuh"

namespace gnomon::device {

using cuda::Matrix;
using cuda::Product;

template <class C>
GNOMON_DEVICE float LoadNumber(const Matrix& m, Int64 head, int row, int column) {
  const Int64 at = head + row * m.row + column * m.column;
  return m.element != 0 ? LoadElement<C>(m.data, at) : static_cast<const float*>(m.data)[at];
}

// Computes the matrix product to = factor * left * right for each head. Each block computes 16
// rows, with one column per thread.
template <class C>
GNOMON_DEVICE void Multiply(const Parameters& p) {
  constexpr int kRows = 16;
  constexpr int kDepth = 16;
  const Product& product = p.product;
  const int threads = 32 * C::kWarps;
  const int column_blocks = DivideUp(product.columns, threads);
  const int row_blocks = DivideUp(product.rows, kRows);
  const int column = BlockX() % column_blocks * threads + Thread();
  const int first_row = BlockX() / column_blocks % row_blocks * kRows;
  const int index = BlockX() / column_blocks / row_blocks;
  const int b = (p.first_head + index) / product.heads;
  const int h = (p.first_head + index) % product.heads;
  const Int64 left = b * product.left.batch + h * product.left.head;
  const Int64 right = b * product.right.batch + h * product.right.head;
  unsigned char* const memory = SharedMemory();
  float sum[kRows] = {};
  for (int start = 0; start < product.depth; start += kDepth) {
    for (int n = Thread(); n < kRows * kDepth; n += threads) {
      const int row = first_row + n / kDepth;
      const int k = start + n % kDepth;
      const bool inside = row < product.rows && k < product.depth;
      StoreShared<float>(memory + 4 * n, inside ? LoadNumber<C>(product.left, left, row, k) : 0.0f);
    }
    Barrier();
    if (column < product.columns) {
      for (int k = 0; k < kDepth && start + k < product.depth; ++k) {
        const float factor = LoadNumber<C>(product.right, right, start + k, column);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float number = LoadShared<float>(memory + 4 * (r * kDepth + k));
          // An entry that no pair has read contributes 0, even if its row is not finite.
          if (product.skips == 0 || number != 0) sum[r] = Fma(number, factor, sum[r]);
        }
      }
    }
    Barrier();
  }
  if (column >= product.columns) return;
  const Head rounded = HeadOf<C>(product.rounded, b, h);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r;
    if (row >= product.rows) continue;
    float value = product.factor * sum[r];
    if (product.to != nullptr) {
      float& to =
          product.to[(static_cast<Int64>(index) * product.rows + row) * product.columns + column];
      if (product.adds != 0) value += to;
      to = value;
    }
    if (product.rounded.data != nullptr) {
      StorePair<C>(rounded.data, row * rounded.stride + column, value, 0.0f, 1);
    }
  }
}

// The following functions access the tables of a warp's 16 queries, which no other warp accesses.

template <class C>
GNOMON_DEVICE Int64 RelativeEntryOf(const Parameters& p, int b, int h, int i) {
  const Int64 row = (static_cast<Int64>(b) * p.heads + h) * p.queries + i;
  return (row - p.relative_row) * p.relative_size;
}

template <class C>
GNOMON_DEVICE void ClearTables(const Parameters& p, float* tables, int b, int h, int first) {
  for (int r = 0; r < 16 && first + r < p.queries; ++r) {
    float* const to = tables + RelativeEntryOf<C>(p, b, h, first + r);
    for (int n = Thread() % 32; n < p.relative_size; n += 32) to[n] = 0;
  }
}

// The tables of a warp's 16 keys, which no other warp accesses either. Key `first` is the first
// one.

template <class C>
GNOMON_DEVICE void ClearKeyTables(const Parameters& p, float* tables, int b, int key_head,
                                  int first) {
  float* const to = tables + KeyTableOf(p, b, key_head * p.group) + first * KeyTableStep(p);
  const Int64 size = Least(16, p.keys - first) * KeyTableStep(p);
  for (Int64 n = Thread() % 32; n < size; n += 32) to[n] = 0;
}

// Adds a tile's numbers, which shared memory holds in rows of kStep + 1, to the tables of head h.
// The tile's rows are keys. The numbers of queries beyond Lq are 0.
template <class C>
GNOMON_DEVICE void AddToKeyTables(const Parameters& p, float* tables, const unsigned char* numbers,
                                  int b, int h, int first, int first_query) {
  const int warp = Thread() / 32;
  const Int64 origin = QueryOffset(p, b);
  float* const of_head = tables + KeyTableOf(p, b, h);
  const int count = C::kPositions != 0 ? Least(C::kStep, p.queries - first_query) : C::kStep;
  for (int r = 0; r < 16 && first + r < p.keys; ++r) {
    const int j = first + r;
    const auto number_of = [&](int column, int) {
      return NumberInKeyTable<C>(p, b, origin, first_query + column, j);
    };
    AddNumbers<C>(p.relative_layout, numbers + 4 * (16 * warp + r) * (C::kStep + 1), 4, count,
                  number_of, of_head + j * KeyTableStep(p));
  }
}

// Scales the tables. by[0] and by[1] are the factors for rows lane / 4 and lane / 4 + 8.
template <class C>
GNOMON_DEVICE void ScaleTables(const Parameters& p, float* tables, int b, int h, int first,
                               const float (&by)[2]) {
  for (int r = 0; r < 16; ++r) {
    const float factor = Shuffle(r < 8 ? by[0] : by[1], r % 8 * 4);
    if (first + r >= p.queries || factor == 1.0f) continue;
    float* const to = tables + RelativeEntryOf<C>(p, b, h, first + r);
    for (int n = Thread() % 32; n < p.relative_size; n += 32) to[n] *= factor;
  }
}

// Adds a tile's numbers, which shared memory holds in rows of kStep + 1, to the tables.
template <class C>
GNOMON_DEVICE void AddToTables(const Parameters& p, float* tables, const unsigned char* numbers,
                               int b, int h, int first, int first_key) {
  const int warp = Thread() / 32;
  for (int r = 0; r < 16 && first + r < p.queries; ++r) {
    AddToEntries<C>(p, p.relative_layout, numbers + 4 * (16 * warp + r) * (C::kStep + 1), 4,
                    C::kStep, first_key, b, first + r,
                    tables + RelativeEntryOf<C>(p, b, h, first + r));
  }
}

}  // namespace gnomon::device

#endif  // GNOMON_SRC_CUDA_RELATIVE_CUH_
