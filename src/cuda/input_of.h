// The operator's input for a GPU, from the input that the kernels of the CPU read.
#ifndef GNOMON_SRC_CUDA_INPUT_OF_H_
#define GNOMON_SRC_CUDA_INPUT_OF_H_

#include "cuda/attention.h"

namespace gnomon::cuda {

// All of it but the element type and the tokens: x, y, v and the query of relative keys. Pointers
// are taken as they are, and layouts must outlive the call.
inline Input WithoutTokens(const AttentionInput<float>& from) {
  Input input;
  input.shape = from.shape;
  input.row_scalars = from.row_scalars;
  input.column_scalars = from.column_scalars;
  input.head_scalars = from.head_scalars;
  input.factor = from.factor;
  input.bias = from.bias;
  input.key_bias = from.key_bias;
  input.key_bias_low = from.key_bias_low;
  input.key_bias_base = from.key_bias_base;
  input.pair_bias = from.pair_bias;
  input.relative.layout = from.relative.layout;
  input.relative.dim = from.relative.dim;
  input.relative.factor = from.relative.factor;
  input.relative.keys = from.relative.keys;
  input.relative.key_heads = from.relative.key_heads;
  input.relative.values = from.relative.values;
  input.relative.value_heads = from.relative.value_heads;
  input.temperature = from.temperature;
  input.dropout = from.dropout;
  input.mask = from.mask;
  input.query_offset = from.query_offset;
  input.query_offsets = from.query_offsets;
  return input;
}

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_INPUT_OF_H_
