// The operators gnomon::attention_forward and gnomon::attention_backward, called through the
// PyTorch dispatcher.
#ifndef GNOMON_OPS_OPERATORS_ATTENTION_OPERATORS_H_
#define GNOMON_OPS_OPERATORS_ATTENTION_OPERATORS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>
#include <gnomon/attention.h>

#include <string_view>

#include "ops/operators/argument_list.h"

namespace gnomon {

// The arguments, as in gnomon/attention.h. Axes: B batch, H query heads, G key heads, Q queries, K
// keys, D columns of x and y, V columns of v; r, c and s are the row, column and head scalars of
// the pair function.
//
// `function` is the name of the pair function. The bias has n = Lq + Lk - 1 entries, or one per
// grid offset. The key bias of a pair is key_bias - key_bias_base + key_bias_low, where the base is
// per row (gnomon/attention.h). Tokens may have lower precision than float32; outputs and all other
// tensors are then float32. On a GPU, all tokens share one dtype. On the CPU, x and y share a
// dtype, v may have a different one, and relative_query and relative_key are float32.
// query_positions and key_positions are given together; they replace query_offset + i and j. With
// them, an offset bias is the sum of the biases named in bias_terms: bias_parameters concatenates
// their tensors, and bias_shapes holds the rank and the sizes of each. query_offset applies if
// query_offsets is absent. left and right bound the window. chunks holds the chunk size, and the
// numbers of chunks before and after a query's own chunk that the query attends to. grid holds the
// prefix and the axis lengths of the token grid. tolerance bounds the weight that skipped tiles may
// contribute to a row's sum. With a page_table, keys and values are those of key_pages and
// value_pages (ops/attention/pages.h), of y and v only the shape is used, and K = T L; such a call
// has no derivatives. With rows_first, o is stored as (B, Q, H, V). Autograd sets recorded
// if it records the call: kernels of GPUs then compute o with the precision that the backward pass
// needs, which receives the same flag. Relative queries use the first five layouts below, and are
// indexed in reverse order. relative_layout defines how the m rows of relative
// keys and values are indexed:
//   "clip", "zero": offsets -n to n, m = 2 n + 1; farther pairs use the nearest row, or none;
//   "clip_past", "zero_past": offsets -n to 0, m = n + 1;
//   "past": the same offsets, but a farther pair is an error;
//   "keys": indexed by the key, m = Lk;
//   "grid": the sum over the axes of the grid, with a table of 2 length - 1 rows for each.
#define GNOMON_ATTENTION_ARGUMENTS(ARGUMENT)                                 \
  ARGUMENT(at::Tensor, x, {}, kToken, "B H Q D")                             \
  ARGUMENT(at::Tensor, y, {}, kToken, "B G K D")                             \
  ARGUMENT(at::Tensor, v, {}, kToken, "B G K V")                             \
  ARGUMENT(OptionalTensor, row_scalars, {}, kDifferentiable, "r B H Q")      \
  ARGUMENT(OptionalTensor, column_scalars, {}, kDifferentiable, "c B G K")   \
  ARGUMENT(OptionalTensor, head_scalars, {}, kDifferentiable, "s H")         \
  ARGUMENT(at::Tensor, factor, {}, kDifferentiable, "H")                     \
  ARGUMENT(OptionalTensor, bias, {}, kDifferentiable, "1|B H n")             \
  ARGUMENT(OptionalTensor, key_bias, {}, kDifferentiable, "B H K")           \
  ARGUMENT(OptionalTensor, pair_bias, {}, kDifferentiable, "1|B 1|H Q K")    \
  ARGUMENT(OptionalTensor, temperature, {}, kDifferentiable, "B H Q")        \
  ARGUMENT(OptionalTensor, relative_query, {}, kToken, "B H Q R")            \
  ARGUMENT(OptionalTensor, relative_keys, {}, kDifferentiable, "1|H m R")    \
  ARGUMENT(OptionalTensor, relative_values, {}, kDifferentiable, "1|H m V")  \
  ARGUMENT(OptionalTensor, relative_key, {}, kToken, "B G K S")              \
  ARGUMENT(OptionalTensor, relative_queries, {}, kDifferentiable, "1|H m S") \
  ARGUMENT(OptionalTensor, bias_parameters, {}, kDifferentiable, "P")        \
  ARGUMENT(OptionalTensor, key_bias_low, {}, kConstant, "B H K")             \
  ARGUMENT(OptionalTensor, key_bias_base, {}, kConstant, "B H Q")            \
  ARGUMENT(OptionalTensor, mask, {}, kBoolean, "1|B 1|H Q K")                \
  ARGUMENT(OptionalTensor, key_starts, {}, kInteger, "B")                    \
  ARGUMENT(OptionalTensor, key_lengths, {}, kInteger, "B")                   \
  ARGUMENT(OptionalTensor, query_offsets, {}, kInteger, "B")                 \
  ARGUMENT(OptionalTensor, query_positions, {}, kInteger, "B Q")             \
  ARGUMENT(OptionalTensor, key_positions, {}, kInteger, "B K")               \
  ARGUMENT(OptionalTensor, query_segments, {}, kInteger, "B Q")              \
  ARGUMENT(OptionalTensor, key_segments, {}, kInteger, "B K")                \
  ARGUMENT(OptionalTensor, key_pages, {}, kConstantToken, "N G L D")         \
  ARGUMENT(OptionalTensor, value_pages, {}, kConstantToken, "N G L V")       \
  ARGUMENT(OptionalTensor, page_table, {}, kInteger, "B T")                  \
  ARGUMENT(OptionalTensor, seed, {}, kHostInteger, "1")                      \
  ARGUMENT(std::string_view, function, {}, kOption, "")                      \
  ARGUMENT(c10::SymInt, query_offset, 0, kOption, "")                        \
  ARGUMENT(OptionalSymInt, left, {}, kOption, "")                            \
  ARGUMENT(OptionalSymInt, right, {}, kOption, "")                           \
  ARGUMENT(at::OptionalSymIntArrayRef, chunks, {}, kOption, "")              \
  ARGUMENT(at::OptionalSymIntArrayRef, grid, {}, kOption, "")                \
  ARGUMENT(std::string_view, bias_terms, {}, kOption, "")                    \
  ARGUMENT(at::OptionalSymIntArrayRef, bias_shapes, {}, kOption, "")         \
  ARGUMENT(std::string_view, relative_layout, {}, kOption, "")               \
  ARGUMENT(double, relative_factor, 1, kOption, "")                          \
  ARGUMENT(double, dropout, 0, kOption, "")                                  \
  ARGUMENT(double, softcap, 0, kOption, "")                                  \
  ARGUMENT(bool, rows_first, false, kOption, "")                             \
  ARGUMENT(double, tolerance, kDefaultTolerance, kOption, "")                \
  ARGUMENT(bool, recorded, false, kOption, "")

struct OperatorArguments {
  GNOMON_ARGUMENTS(GNOMON_ATTENTION_ARGUMENTS)
  static constexpr const char* kName = "attention";
  static constexpr const char* kOperation = "gnomon.attention";
  static constexpr AxisLetters kOutputs[] = {"B H Q V", "B H Q", "3 B H Q"};
};

using AttentionOperator = FusedOperator<OperatorArguments>;

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_ATTENTION_OPERATORS_H_
