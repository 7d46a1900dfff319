// Rotations of column pairs (RoPE): on the CPU, on GPUs and, for other calls, with PyTorch's
// operators.
#ifndef GNOMON_OPS_OPERATORS_PAIR_ROTATION_H_
#define GNOMON_OPS_OPERATORS_PAIR_ROTATION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>

namespace gnomon {

// Cosines and sines of angles (..., n), multiplied by a factor.
struct Turns {
  at::Tensor cosine;
  at::Tensor sine;
};

// A rotation that a GPU kernel applies later, or none.
struct PendingRotation {
  Turns turns = {};
  int64_t block = 0;  // columns whose two halves form pairs; 0 if pairs are adjacent

  bool exists() const { return turns.cosine.defined(); }
};

// Whether a GPU kernel can rotate or map the tokens: they are on a GPU, of at most 32 bits, and not
// traced, transformed or differentiated in forward mode. True for tokens on the CPU within a
// dispatch mode, so that the mode receives the operators of a GPU call.
bool MapsOnGpu(const at::Tensor& x);

// Whether a derivative with respect to any of the tensors is recorded or propagated.
bool AreDifferentiated(std::initializer_list<const std::optional<at::Tensor>*> tensors);

// Rotates the first 2 n columns of tokens (B, heads, L, D) by angles that broadcast to (B, heads,
// L, n), and copies the others. Each block of `block` columns is rotated separately, in pairs (i, i
// + block / 2) if `half`, else (2 i, 2 i + 1). On a CPU, this takes one pass without intermediate
// copies and writes to `to`, if it is defined, unless the call is traced, transformed, or
// differentiated with respect to the angles. On a GPU, one kernel rotates the tokens unless the
// call is traced, transformed or differentiated in forward mode. If `pending` is not null, such a
// rotation is stored there instead, and x is returned unchanged. x may then be of low precision; if
// it is rotated after all, the result is in float32.
at::Tensor RotatePairs(const at::Tensor& x, const Turns& turns, bool half, int64_t block,
                       const at::Tensor& to = {}, PendingRotation* pending = nullptr);

// Applies pending rotations to q and k with one kernel, and converts both to `type`. k may be
// undefined.
std::pair<at::Tensor, at::Tensor> RotateTokens(const at::Tensor& q, const PendingRotation& of_q,
                                               const at::Tensor& k, const PendingRotation& of_k,
                                               at::ScalarType type);

// Rotates tokens of at least 32 bits with PyTorch's operators, by the angles or, if `back`, by
// their negatives.
at::Tensor RotateComposed(const at::Tensor& x, const PendingRotation& rotation, bool back);

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_PAIR_ROTATION_H_
