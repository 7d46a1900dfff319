// The operators gnomon::attention_forward and gnomon::attention_backward, called through Torch's
// dispatcher.
#ifndef GNOMON_OPS_OPERATORS_H_
#define GNOMON_OPS_OPERATORS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

namespace gnomon {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalSymInt = std::optional<c10::SymInt>;

// A tensor that may be undefined as one that may be absent, and back.
inline OptionalTensor AsOptional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}
inline at::Tensor OrUndefined(const OptionalTensor& tensor) {
  return tensor.value_or(at::Tensor());
}

// Gradients in the order of the forward operator's arguments: x, y, v, row scalars, column scalars,
// head scalars, factor, bias.
inline constexpr size_t kGradients = 8;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                             at::Tensor, at::Tensor>;

// As the interface on plain views (gnomon/attention.h) has it: x (B, H, Lq,
// D), y (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), row_scalars (R, B, H, Lq), column_scalars (C, B, Hkv,
// Lk), head_scalars (S, H), factor (H), bias (1 or B, H, Lq + Lk - 1), key_starts, key_lengths and
// query_offsets (B,), query_segments (B, Lq) and key_segments (B, Lk) int64; function names a pair
// function; query_offset counts where query_offsets is absent; left and right bound the window.
// grid is the prefix and the lengths n of the axes of a grid that bias lies on; Lq + Lk - 1 is then
// the product of 2 n - 1 over the axes. Returns o (B, H, Lq, Dv) and lse (B, H, Lq).
using ForwardSignature = std::tuple<at::Tensor, at::Tensor>(
    const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
    const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
    const OptionalTensor& head_scalars, const at::Tensor& factor, const OptionalTensor& bias,
    const OptionalTensor& key_starts, const OptionalTensor& key_lengths,
    const OptionalTensor& query_offsets, const OptionalTensor& query_segments,
    const OptionalTensor& key_segments, std::string_view function, c10::SymInt query_offset,
    OptionalSymInt left, OptionalSymInt right, at::OptionalSymIntArrayRef grid);

// The gradients that are needed; the others are empty.
using BackwardSignature = Gradients(
    const at::Tensor& d_o, const OptionalTensor& d_lse, const at::Tensor& o, const at::Tensor& lse,
    const at::Tensor& x, const at::Tensor& y, const at::Tensor& v,
    const OptionalTensor& row_scalars, const OptionalTensor& column_scalars,
    const OptionalTensor& head_scalars, const at::Tensor& factor, const OptionalTensor& bias,
    const OptionalTensor& key_starts, const OptionalTensor& key_lengths,
    const OptionalTensor& query_offsets, const OptionalTensor& query_segments,
    const OptionalTensor& key_segments, std::string_view function, c10::SymInt query_offset,
    OptionalSymInt left, OptionalSymInt right, at::OptionalSymIntArrayRef grid,
    std::array<bool, kGradients> needed);

ForwardSignature CallAttentionForward;
BackwardSignature CallAttentionBackward;

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_H_
