// The operators gnomon::attention_forward and gnomon::attention_backward, called through Torch's
// dispatcher.
#ifndef GNOMON_OPS_ATTENTION_OPERATORS_H_
#define GNOMON_OPS_ATTENTION_OPERATORS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
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

// The number, to which a compiled graph is then specialised.
inline int64_t Concrete(const c10::SymInt& number) { return number.guard_int(__FILE__, __LINE__); }
inline int64_t SizeOf(const at::Tensor& tensor, int64_t axis) {
  return Concrete(tensor.sym_size(axis));
}

// While one lives, autocast leaves the operators' own products in the types that they compute in.
class WithoutAutocast {
 public:
  WithoutAutocast() : guard_(c10::autocast_dispatch_keyset) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

// The arguments of attention_forward in the order of its schema, as the interface on plain views
// (gnomon/attention.h) has them. The first kGradients of them have gradients.
struct OperatorArguments {
  at::Tensor x;                    // (B, H, Lq, D)
  at::Tensor y;                    // (B, Hkv, Lk, D)
  at::Tensor v;                    // (B, Hkv, Lk, Dv)
  OptionalTensor row_scalars;      // (R, B, H, Lq)
  OptionalTensor column_scalars;   // (C, B, Hkv, Lk)
  OptionalTensor head_scalars;     // (S, H)
  at::Tensor factor;               // (H)
  OptionalTensor bias;             // (1 or B, H, n), n = Lq + Lk - 1, or the entries on the grid
  OptionalTensor key_bias;         // (B, H, Lk)
  OptionalTensor relative_query;   // (B, H, Lq, Dr)
  OptionalTensor relative_keys;    // (1 or H, n, Dr)
  OptionalTensor relative_values;  // (1 or H, n, Dv)
  OptionalTensor key_starts;       // (B,) int64, like the four that follow
  OptionalTensor key_lengths;      // (B,)
  OptionalTensor query_offsets;    // (B,); query_offset counts where it is absent
  OptionalTensor query_segments;   // (B, Lq)
  OptionalTensor key_segments;     // (B, Lk)
  OptionalTensor seed;             // of the dropout: () or (1,), int64
  std::string_view function;       // the pair function's name
  c10::SymInt query_offset = 0;
  OptionalSymInt left;  // of the window
  OptionalSymInt right;
  // The size of chunks, and how many a query sees before and after its own.
  at::OptionalSymIntArrayRef chunks;
  // The prefix and the lengths of the axes of the grid that the tokens lie on.
  at::OptionalSymIntArrayRef grid;
  // How the n rows of relative keys and values are read:
  //   "clip", "zero": by offset, from -m to m, n = 2 m + 1, the nearest beyond or none;
  //   "clip_past", "zero_past": by offset from -m to 0, n = m + 1;
  //   "past": the same, and it is an error if the queries reach farther;
  //   "keys": by the key, n = Lk;
  //   "grid": the sum over the axes of the grid, tables of 2 length - 1 rows.
  std::string_view relative_layout;
  double relative_factor = 1;
  double dropout = 0;
  bool bfloat16 = false;  // whether x, y and v hold numbers of bfloat16

  // References to all members, in order.
  template <class Arguments>
  static auto Tie(Arguments& a) {
    return std::tie(a.x, a.y, a.v, a.row_scalars, a.column_scalars, a.head_scalars, a.factor,
                    a.bias, a.key_bias, a.relative_query, a.relative_keys, a.relative_values,
                    a.key_starts, a.key_lengths, a.query_offsets, a.query_segments, a.key_segments,
                    a.seed, a.function, a.query_offset, a.left, a.right, a.chunks, a.grid,
                    a.relative_layout, a.relative_factor, a.dropout, a.bfloat16);
  }
};

inline constexpr size_t kGradients = 12;
using Needed = std::array<bool, kGradients>;
// o (B, H, Lq, Dv), lse (B, H, Lq) and the rows' statistics (3, B, H, Lq), which have no gradient.
using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Gradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
               at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// What attention_backward takes before the arguments of attention_forward.
struct SavedOutputs {
  at::Tensor d_o;
  OptionalTensor d_lse;
  at::Tensor o;
  at::Tensor lse;
  at::Tensor statistics;
};

// The operators' signatures, and functions of these made from functions of OperatorArguments.
template <class... Args>
struct FlatOperator {
  using Forward = Outputs(Args...);
  using Backward = Gradients(const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                             const at::Tensor&, const at::Tensor&, Args..., Needed);

  template <Outputs (*run)(const OperatorArguments&)>
  static Outputs RunForward(Args... args) {
    return run(OperatorArguments{args...});
  }
  template <Gradients (*run)(const SavedOutputs&, const OperatorArguments&, const Needed&)>
  static Gradients RunBackward(const at::Tensor& d_o, const OptionalTensor& d_lse,
                               const at::Tensor& o, const at::Tensor& lse,
                               const at::Tensor& statistics, Args... args, Needed needed) {
    return run({d_o, d_lse, o, lse, statistics}, OperatorArguments{args...}, needed);
  }
};

using AttentionOperator =
    FlatOperator<const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                 const OptionalTensor&, const OptionalTensor&, const at::Tensor&,
                 const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                 const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                 const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                 const OptionalTensor&, const OptionalTensor&, std::string_view, c10::SymInt,
                 OptionalSymInt, OptionalSymInt, at::OptionalSymIntArrayRef,
                 at::OptionalSymIntArrayRef, std::string_view, double, double, bool>;

// Through the dispatcher. The gradients that are not needed are empty.
Outputs CallAttentionForward(const OperatorArguments& arguments);
Gradients CallAttentionBackward(const SavedOutputs& saved, const OperatorArguments& arguments,
                                const Needed& needed);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_OPERATORS_H_
