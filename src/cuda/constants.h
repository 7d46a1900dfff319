// The constants that a kernel is compiled with, and what of its shared memory lies where: shared by
// the host and the device, and so without any include.
#ifndef GNOMON_SRC_CUDA_CONSTANTS_H_
#define GNOMON_SRC_CUDA_CONSTANTS_H_

// X(name), in the order of KernelName::constants.
//   kType         0 fp32, 1 bf16, 2 fp16
//   kDim          columns of x and y, padded to a multiple of 16; 0 where none are read
//   kValueDim     columns of v, padded likewise
//   kWarps        of a block: it owns 16 rows for each
//   kStep         rows that a block walks over at a time, a multiple of 16
//   kStages       2: the next rows are copied while these are worked on; 1: not
//   kOwn          whether what a block owns stays in registers, not in shared memory
//   kColumns      of gradients that a block adds up, a multiple of 16
//   kAligned      whether rows of all tensors start at multiples of 16 bytes
//   kBias         0 none, 1 by offset, 2 by a layout
//   kKeyBias      0 none, 1 one, 2 in two parts with a base
//   kPairBias, kPairMask, kSegments, kTemperature, kDropout
//   kRelativeKeys, kRelativeValues
//   kRelativeSums whether a pass over keys adds up what their gradients are made of
//   kParts        whether results are of a part of the keys, to be merged
//   kHides        whether a row may not see a key of its tile's that holds no finite value
//   kBiasGradient whether it is added up
//   kHeadSums     whether gradients of the heads' numbers or of temperatures are added up
#define GNOMON_CUDA_CONSTANTS(X) \
  X(kType)                       \
  X(kDim)                        \
  X(kValueDim)                   \
  X(kWarps)                      \
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
  X(kTemperature)                \
  X(kDropout)                    \
  X(kRelativeKeys)               \
  X(kRelativeValues)             \
  X(kRelativeSums)               \
  X(kParts)                      \
  X(kHides)                      \
  X(kBiasGradient)               \
  X(kHeadSums)

namespace gnomon::cuda {

constexpr int BytesOf(int type) { return type == 0 ? 4 : 2; }
// Of a row of a tile in shared memory. 16 more than the columns: eight rows' 16 bytes, which
// ldmatrix reads at a time, then lie in different banks.
constexpr int RowBytes(int type, int columns) { return columns * BytesOf(type) + 16; }

// Numbers of a row that a block does not own, each of 4 bytes, that are copied with its tile.
constexpr int KeyWords(int column_scalars, bool distance, int key_bias, int segments) {
  return column_scalars + (distance ? 1 : 0) + key_bias + segments;
}
constexpr int QueryWords(int row_scalars, bool distance, int key_bias, int segments,
                         int temperature, int dropout) {
  // Its interval, largest score, inverse sum and delta.
  return 5 + row_scalars + (distance ? 1 : 0) + (key_bias == 2 ? 1 : 0) + segments + temperature +
         2 * dropout;
}

// Offsets in bytes of what lies in shared memory.
struct SharedLayout {
  int own_x, own_y;      // what the block owns
  int other_x, other_y;  // of each stage, one after the other
  int words;             // likewise
  int bias;              // likewise: the biases of a tile's diagonals
  int scores;            // numbers of a tile's pairs, kStep + 1 columns, as often as is asked for
  int size;
};

// A multiple of 16, as all that a tile is made of is.
constexpr int ScoreBytes(int rows, int step) { return rows * (step + 1) * 4; }

// What a block walks over, up to where its own rows begin. `rows`: how many it owns.
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
    // Through the tiles' memory into registers.
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

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_CONSTANTS_H_
