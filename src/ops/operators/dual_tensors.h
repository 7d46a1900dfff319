// Tensors of dual numbers (gnomon/derivatives.h) for the CPU kernels of forward-mode derivatives:
// contiguous float64 with value and tangent on the last axis.
#ifndef GNOMON_OPS_OPERATORS_DUAL_TENSORS_H_
#define GNOMON_OPS_OPERATORS_DUAL_TENSORS_H_

#include <ATen/ATen.h>
#include <gnomon/derivatives.h>

#include <string_view>
#include <vector>

#include "ops/operators/argument_list.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {

inline at::Tensor EmptyDuals(at::IntArrayRef sizes) {
  std::vector<int64_t> all = sizes.vec();
  all.push_back(2);
  return at::empty(all, at::kDouble);
}

// The result is undefined if the values are. Undefined tangents are treated as 0.
inline at::Tensor Duals(const at::Tensor& values, const at::Tensor& tangents) {
  if (!values.defined()) return {};
  at::Tensor both = EmptyDuals(values.sizes());
  both.select(-1, 0).copy_(values);
  at::Tensor second = both.select(-1, 1);
  if (tangents.defined()) {
    TORCH_CHECK_VALUE(tangents.sizes() == values.sizes(), "gnomon: a tangent has shape ",
                      tangents.sizes(), "; expected the shape of its primal, ", values.sizes());
    second.copy_(tangents);
  } else {
    second.zero_();
  }
  return both;
}
inline at::Tensor Duals(const OptionalTensor& values, const OptionalTensor& tangents) {
  return Duals(OrUndefined(values), OrUndefined(tangents));
}
// Like Duals, for a gradient, which may be absent even if its tangent is present.
inline at::Tensor DualsOfGradient(const OptionalTensor& gradient, const OptionalTensor& tangents) {
  if (gradient || !tangents) return Duals(gradient, tangents);
  return Duals(at::zeros_like(*tangents), *tangents);
}

inline Dual* DualData(const at::Tensor& duals) {
  return duals.defined() && duals.numel() > 0 ? reinterpret_cast<Dual*>(duals.data_ptr<double>())
                                              : nullptr;
}

template <>
inline Dual* MutableData<Dual>(at::Tensor& duals) {
  return DualData(duals);
}

inline at::Tensor ValuePart(const at::Tensor& duals) { return duals.select(-1, 0); }
inline at::Tensor TangentPart(const at::Tensor& duals) { return duals.select(-1, 1); }

// The arguments with all floating-point tensors converted to float64.
template <class Arguments>
Arguments InDouble(const Arguments& arguments) {
  Arguments wide = arguments;
  FusedOperator<Arguments>::ForEachTensor(wide, [&](size_t n, auto& member) {
    const OptionalTensor tensor = member;
    const ArgumentKind kind = FusedOperator<Arguments>::kFields[n].kind;
    if (tensor && (HasGradient(kind) || kind == ArgumentKind::kConstant)) {
      member = tensor->to(at::kDouble);
    }
  });
  return wide;
}

// The differentiable arguments as dual numbers, by name.
template <class Arguments>
class NamedDuals {
 public:
  NamedDuals(const Arguments& arguments, const Tangents& tangents) {
    CheckTangentCount<Arguments>(tangents);
    FusedOperator<Arguments>::ForEachTensor(arguments, [&](size_t n, const OptionalTensor& tensor) {
      if (n >= FusedOperator<Arguments>::kGradients) return;
      tangents_.push_back(tangents.empty() ? at::Tensor() : OrUndefined(tangents.get(n)));
      duals_.push_back(Duals(OrUndefined(tensor), tangents_.back()));
    });
  }

  const at::Tensor& operator()(std::string_view name) { return duals_[accessed_.Index(name)]; }
  const at::Tensor& tangent(std::string_view name) { return tangents_[accessed_.Index(name)]; }

  // Throws unless every argument with a tangent has been accessed.
  void Done() const {
    accessed_.CheckAll("tangent", [&](size_t n) { return tangents_[n]; });
  }

 private:
  std::vector<at::Tensor> tangents_, duals_;
  AccessedNames<Arguments> accessed_;
};

// Gradients as dual numbers, by name; undefined where neither value nor tangent is needed.
template <class Arguments>
class DualGradients {
 public:
  using Operator = FusedOperator<Arguments>;
  static constexpr size_t kGradients = Operator::kGradients;

  DualGradients(const Arguments& arguments, const typename Operator::BothNeeded& needed)
      : arguments_(arguments), needed_(needed), gradients_(kGradients) {
    Operator::ForEachTensor(arguments, [&](size_t n, const OptionalTensor& tensor) {
      if (n >= kGradients || !(needed[n] || needed[kGradients + n])) return;
      gradients_[n] = EmptyDuals(tensor->sizes()).zero_();
    });
  }

  bool any() const {
    return std::any_of(gradients_.begin(), gradients_.end(),
                       [](const at::Tensor& gradient) { return gradient.defined(); });
  }

  at::Tensor& operator()(std::string_view name) { return gradients_[IndexOf<Arguments>(name)]; }

  // Appends the gradients and their tangents, in the dtypes of the arguments.
  void AddTo(std::vector<at::Tensor>& results) const {
    for (size_t half = 0; half < 2; ++half) {
      Operator::ForEachTensor(arguments_, [&](size_t n, const OptionalTensor& tensor) {
        if (n >= kGradients) return;
        results.push_back(needed_[half * kGradients + n]
                              ? gradients_[n]
                                    .select(-1, static_cast<int64_t>(half))
                                    .contiguous()
                                    .to(tensor->scalar_type())
                              : at::empty({0}, arguments_.x.options()));
      });
    }
  }

 private:
  const Arguments& arguments_;
  const typename Operator::BothNeeded& needed_;
  std::vector<at::Tensor> gradients_;
};

// The tangents of o and lse, as returned by the operators.
template <class Arguments>
std::vector<at::Tensor> OutputTangentsOf(const Arguments& arguments, bool is_needed,
                                         const at::Tensor& o, const at::Tensor& lse) {
  std::vector<at::Tensor> tangents = EmptyOutputTangents(arguments, is_needed);
  if (is_needed) {
    tangents[0].copy_(TangentPart(o));
    tangents[1].copy_(TangentPart(lse));
  }
  return tangents;
}

// The results of a forward pass, as dual numbers.
struct DualOutputs {
  at::Tensor o, lse, statistics;
};

// Implements a jvp operator. Call holds the arguments and tangents as dual numbers. The first
// outputs are those of the forward operator, which the backward operator can reuse.
template <class Call, class Arguments>
typename FusedOperator<Arguments>::JvpOutputs DualJvp(const Arguments& arguments,
                                                      const Tangents& tangents) {
  const DualOutputs outputs = Call(arguments, tangents).RunForward();
  const auto [o, lse, statistics] = FusedOperator<Arguments>::CallForward(arguments);
  const std::vector<at::Tensor> both = OutputTangentsOf(arguments, true, outputs.o, outputs.lse);
  return {o, lse, statistics, both[0], both[1]};
}

// Implements a backward_jvp operator in the same way.
template <class Call, class Arguments>
std::vector<at::Tensor> DualBackwardJvp(
    const Cotangents& cotangents, const Arguments& arguments, const Tangents& tangents,
    const typename FusedOperator<Arguments>::BothNeeded& needed) {
  const Call call(arguments, tangents);
  const DualOutputs outputs = call.RunForward();
  std::vector<at::Tensor> all = OutputTangentsOf(arguments, needed.back(), outputs.o, outputs.lse);
  DualGradients<Arguments> gradients(arguments, needed);
  if (gradients.any()) {
    const at::Tensor d_o = Duals(cotangents.d_o, cotangents.d_o_tangent);
    const at::Tensor d_lse = DualsOfGradient(cotangents.d_lse, cotangents.d_lse_tangent);
    call.RunBackward(outputs, d_o, d_lse, gradients);
  }
  gradients.AddTo(all);
  return all;
}

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_DUAL_TENSORS_H_
