// The compile-time constants of a kernel, and the layout of its shared memory. Host and device
// share this file, so it includes nothing.
#ifndef GNOMON_SRC_CUDA_CONSTANTS_H_
#define GNOMON_SRC_CUDA_CONSTANTS_H_

// X(name), in the order of KernelName::constants.
//   kType         0 fp32, 1 bf16, 2 fp16
//   kDim          columns of x and y, padded to a multiple of 16; 0 if unused
//   kValueDim     columns of v, likewise padded
//   kWarps        warps per block
//   kProducers    warps that only copy tiles (hopper.cuh); the first warps of a block
//   kRowTiles     tiles of 16 rows that each warp owns: 1, or 2 in the forward pass and in the
//                 backward pass in one pass
//   kResident     minimum resident blocks per multiprocessor, which limits registers; 0 means 1
//   kStep         rows that a block loads at a time, a multiple of 16
//   kStages       2: prefetches the next rows while the current ones are processed; 1: does not
//   kOwn          whether the block's own rows are in registers instead of shared memory
//   kColumns      gradient columns that a block accumulates, a multiple of 16
//   kAligned      whether the rows of all tensors are 16-byte aligned
//   kBias         0 none, 1 by offset, 2 by a layout
//   kKeyBias      0 none, 1 one part, 2 two parts with a base
//   kPairBias, kPairMask, kSegments, kTemperature, kSoftcap, kDropout
//   kPositions    whether tokens have call positions (`positions=`)
//   kPages        whether keys and values are in pages (Input::pages)
//   kPacked       whether the queries of a head are query heads at one position (Input::packed)
//   kRelativeKeys, kRelativeValues, kRelativeQueries
//   kRelativeSums whether a pass accumulates the sums for their gradients: a pass over keys those
//   of
//                 relative keys and values, a pass over queries those of relative queries
//   kParts        whether results cover a part of the keys and are merged later
//   kSplit        whether 16-bit weights of the forward pass are split into two numbers each, so
//                 that outputs have the precision of fp32
//   kHides        whether a tile may hold hidden keys with non-finite values
//   kBiasGradient whether the bias gradient is computed
//   kHeadSums     whether gradients of head scalars or temperatures are computed
//   kOnePass      whether a row's shift includes the logarithm of the sum of its weights, and the
//                 threshold of near distances is computed in advance
//   kTokenType    the element type of tokens before a token map; kType is that of mapped tokens
//   kMap          0 none; umbral cones: 1, or 2 if columns are heights; penumbral cones: 3 or 4
//   kTurns        rotated pairs: 0 none, 1 adjacent columns, 2 columns in two halves of a block
#define GNOMON_CUDA_CONSTANTS(X) \
  X(kType)                       \
  X(kDim)                        \
  X(kValueDim)                   \
  X(kWarps)                      \
  X(kProducers)                  \
  X(kRowTiles)                   \
  X(kResident)                   \
  X(kStep)                       \
  X(kStages)                     \
  X(kOwn)                        \
  X(kColumns)                    \
  X(kAligned)                    \
  X(kBias)                       \
  X(kKeyBias)                    \
  X(kPairBias)                   \
  X(kPairMask)                   \
  X(kSegments)                   \
  X(kPositions)                  \
  X(kPages)                      \
  X(kPacked)                     \
  X(kTemperature)                \
  X(kSoftcap)                    \
  X(kDropout)                    \
  X(kRelativeKeys)               \
  X(kRelativeValues)             \
  X(kRelativeQueries)            \
  X(kRelativeSums)               \
  X(kParts)                      \
  X(kSplit)                      \
  X(kHides)                      \
  X(kBiasGradient)               \
  X(kHeadSums)                   \
  X(kOnePass)                    \
  X(kTokenType)                  \
  X(kMap)                        \
  X(kTurns)

namespace gnomon::cuda {

// The number of lanes that share a token in token_map.cuh, given kDim.
constexpr int LanesOfToken(int columns) {
  return columns <= 16 ? 2 : columns <= 32 ? 4 : columns <= 64 ? 8 : columns <= 128 ? 16 : 32;
}

constexpr int BytesOf(int type) { return type == 0 ? 4 : 2; }
// Bytes per row of a tile in shared memory. The extra 16 bytes per row place the 16-byte pieces of
// eight rows, which ldmatrix reads at once, in different banks.
constexpr int RowBytes(int type, int columns) { return columns * BytesOf(type) + 16; }

// The number of keys, and of entries of a bias table, that share bounds (skipping.cuh).
constexpr int kKeyCell = 64;
constexpr int kBiasCell = 16;
// The bounds of keys: the ranges of their norms and scalars.
constexpr int WordsOfKeyCell(int column_scalars) { return 2 + 2 * column_scalars; }

// The number of 4-byte words that are copied with a tile for each row that the block does not own.
constexpr int KeyWords(int column_scalars, bool distance, int key_bias, int segments,
                       int positions) {
  return column_scalars + (distance ? 1 : 0) + key_bias + segments + positions;
}
constexpr int QueryWords(int row_scalars, bool distance, int key_bias, int segments, int positions,
                         int temperature, int dropout, int one_pass) {
  // Five words are the ends of the key interval, the shift, the inverse sum and delta. One pass
  // does not need the inverse sum, but the threshold of near distances.
  return 5 - one_pass + row_scalars + (distance ? 1 + one_pass : 0) + (key_bias == 2 ? 1 : 0) +
         segments + 2 * positions + temperature + 2 * dropout;
}

// The backward pass in one pass: the numbers per query that it sums in addition to the gradients of
// tokens. They are the gradients of the scalars of queries or, for distances without such scalars,
// the sum of df, which is ds times the factor. With `head_sums`, these follow: the sum of ds, and
// the sums of ds and of weights times f and times the slopes of head scalars.
constexpr int SlopeSums(int row_scalars, bool distance) {
  return row_scalars > 0 ? row_scalars : distance ? 1 : 0;
}
constexpr int QuerySums(int row_scalars, int head_scalars, bool distance, int head_sums) {
  return SlopeSums(row_scalars, distance) + head_sums * (3 + 2 * head_scalars);
}
// The number of queries in a tile.
constexpr int kOnePassStep = 32;
// The sums of a tile of queries: the gradients of tokens; for distances, of each 16 queries, two
// fragments (AddToSums()) with parts of the weights' sums; then the terms.
constexpr int SumsOfTokens(int dim, int step) { return step * dim; }
constexpr int SumsOfWeights(int step, bool distance) { return distance ? step / 16 * 2 * 128 : 0; }
constexpr int SumsOfTile(int dim, int step, bool distance, int terms) {
  return SumsOfTokens(dim, step) + SumsOfWeights(step, distance) + terms * step;
}

// Byte offsets of the arrays in shared memory.
struct SharedLayout {
  int own_x, own_y;      // the block's own rows
  int other_x, other_y;  // per stage, consecutive
  int words;             // likewise
  int bias;              // per stage: the biases of a tile's diagonals
  int scores;            // the requested number of arrays of pair values, kStep + 1 columns each
  int terms;             // one pass: each warp's sums over its rows
  int own_words;         // one pass: the words of KeyWords() for the block's own rows
  int near;              // one pass: each thread's near pairs
  int own_weights;       // one pass, for distances: each thread's sums of weights of its rows
  int size;
};

// The size is a multiple of 16, like all components of a tile.
constexpr int ScoreBytes(int rows, int step) { return rows * (step + 1) * 4; }

// The layout of the rows over which a block iterates; the block's own rows follow them. `rows` is
// the number of own rows.
constexpr SharedLayout LayoutOfOthers(int type, int dim, int value_dim, int rows, int step,
                                      int stages, int words, int bias, int scores) {
  SharedLayout at{};
  at.other_x = 0;
  at.other_y = at.other_x + stages * step * RowBytes(type, dim);
  at.words = at.other_y + stages * step * RowBytes(type, value_dim);
  at.bias = at.words + stages * words * step * 4;
  at.scores = at.bias + (bias == 1 ? stages * (rows + step) * 4 : 0);
  at.own_x = at.scores + scores * ScoreBytes(rows, step);
  return at;
}

constexpr SharedLayout ForwardLayout(int type, int dim, int value_dim, int rows, int step,
                                     int stages, int own, int words, int bias, int scores) {
  SharedLayout at = LayoutOfOthers(type, dim, value_dim, rows, step, stages, words, bias, scores);
  const int query = rows * RowBytes(type, dim);
  at.size = at.own_x + query;
  if (own != 0) {
    // Own rows are loaded into registers through the tiles' memory.
    at.size = at.own_x > query ? at.own_x : query;
    at.own_x = 0;
  }
  return at;
}

constexpr SharedLayout BackwardLayout(int type, int dim, int value_dim, int rows, int step,
                                      int stages, int own, int words, int bias, int scores) {
  SharedLayout at = LayoutOfOthers(type, dim, value_dim, rows, step, stages, words, bias, scores);
  at.own_y = at.own_x + rows * RowBytes(type, dim);
  at.size = at.own_y + rows * RowBytes(type, value_dim);
  if (own != 0) {
    const int owned = at.size - at.own_x;
    at.size = at.own_x > owned ? at.own_x : owned;
    at.own_y -= at.own_x;
    at.own_x = 0;
  }
  return at;
}

// The number of words that each thread of ClearSums() clears.
constexpr int kClearedWords = 8;

// The layout of the backward pass in one pass. `scores` holds the score gradients of a tile, and
// `bias` the state of the block's turn and each warp's largest weight (16 bytes each).
constexpr SharedLayout OnePassLayout(int type, int dim, int value_dim, int rows, int step,
                                     int stages, int words, int own_words, int warps, int terms,
                                     bool distance) {
  SharedLayout at = LayoutOfOthers(type, dim, value_dim, rows, step, stages, words, 0, 0);
  at.own_words = at.bias + 32;
  at.terms = at.own_words + own_words * rows * 4;
  // Near pairs take a word, and sums two numbers, per thread and 16 rows of its warp.
  at.near = at.terms + warps * terms * step * 4;
  at.own_weights = at.near + (distance ? 2 * rows * 4 : 0);
  at.scores = at.own_weights + (distance ? 4 * rows * 4 : 0);
  at.own_x = at.scores + rows * RowBytes(type, step);
  at.own_y = at.own_x + rows * RowBytes(type, dim);
  at.size = at.own_y + rows * RowBytes(type, value_dim);
  return at;
}

// The layout of the forward pass on compute capability 9.0 (hopper.cuh), whose numbers have 16
// bits. Tiles are not padded, and begin at multiples of 1024 bytes from an aligned address; the
// size includes the bytes before it.
struct HopperLayout {
  int queries;
  int keys, values;  // per stage, consecutive
  int words;         // likewise
  int barriers;      // four arrays of mbarriers, one per stage
  int size;
};
constexpr HopperLayout LayoutOnHopper(int dim, int value_dim, int rows, int step, int stages,
                                      int words) {
  HopperLayout at{};
  at.queries = 0;
  at.keys = at.queries + rows * dim * 2;
  at.values = at.keys + stages * step * dim * 2;
  at.words = at.values + stages * step * value_dim * 2;
  at.barriers = at.words + stages * words * step * 4;
  at.size = at.barriers + 4 * stages * 8 + 1024 - 16;
  return at;
}

// The same for derivatives.cuh: words that hold tangents.
constexpr int KeyTangentWords(int column_scalars, bool distance, int key_bias) {
  return column_scalars + (distance ? 1 : 0) + (key_bias != 0 ? 1 : 0);
}
constexpr int QueryTangentWords(int row_scalars, bool distance, int temperature) {
  // Two words are the tangents of lse and delta.
  return 2 + row_scalars + (distance ? 1 : 0) + temperature;
}

// Byte offsets of the arrays in shared memory. Rows: those of x or y, their tangents, those of v or
// d_o, and their tangents.
struct DualLayout {
  int own[4];    // only if kOwn is set; the last two only in the backward passes
  int other[4];  // per stage, consecutive
  int words;     // likewise: words of rows, then words of their tangents
  int bias;      // likewise
  int scores;    // arrays of pair values
  int size;
};
constexpr DualLayout LayoutOfDuals(int type, int dim, int value_dim, int rows, int step, int stages,
                                   int own, int words, int bias, int scores, bool backward) {
  DualLayout at{};
  int size = 0;
  const auto place = [&size](int bytes) {
    const int begin = size;
    size += bytes;
    return begin;
  };
  for (int n = 0; n < 4; ++n) {
    at.other[n] = place(stages * step * RowBytes(type, n < 2 ? dim : value_dim));
  }
  at.words = place(stages * words * step * 4);
  at.bias = place(bias == 1 ? stages * (rows + step) * 4 : 0);
  at.scores = place(scores * ScoreBytes(rows, step));
  for (int n = 0; n < (backward ? 4 : 2); ++n) {
    at.own[n] = place(own != 0 ? rows * RowBytes(type, n < 2 ? dim : value_dim) : 0);
  }
  at.size = size;
  return at;
}

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_CONSTANTS_H_
