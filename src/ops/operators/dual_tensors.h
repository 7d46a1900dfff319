// Tensors of dual numbers (gnomon/derivatives.h) for the CPU kernels of forward-mode derivatives:
// contiguous float64 with value and tangent on the last axis.
#ifndef GNOMON_OPS_OPERATORS_DUAL_TENSORS_H_
#define GNOMON_OPS_OPERATORS_DUAL_TENSORS_H_

#include <ATen/ATen.h>
#include <gnomon/derivatives.h>

#include <string_view>
#include <vector>

#include "ops/operators/argument_list.h"

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
    constexpr size_t kGradients = FusedOperator<Arguments>::kGradients;
    TORCH_CHECK_VALUE(tangents.empty() || tangents.size() == kGradients, "gnomon: tangents has ",
                      tangents.size(), " tensors; expected ", kGradients);
    FusedOperator<Arguments>::ForEachTensor(arguments, [&](size_t n, const OptionalTensor& tensor) {
      if (n >= kGradients) return;
      tangents_.push_back(tangents.empty() ? at::Tensor() : OrUndefined(tangents.get(n)));
      duals_.push_back(Duals(OrUndefined(tensor), tangents_.back()));
    });
  }

  const at::Tensor& operator()(std::string_view name) const {
    return duals_[IndexOf<Arguments>(name)];
  }
  const at::Tensor& tangent(std::string_view name) const {
    return tangents_[IndexOf<Arguments>(name)];
  }

 private:
  std::vector<at::Tensor> tangents_, duals_;
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

// Returns the jvp outputs: the forward outputs, which the backward operator can reuse, and their
// tangents.
template <class Arguments>
typename FusedOperator<Arguments>::JvpOutputs JvpOutputsOf(const Arguments& arguments,
                                                           const at::Tensor& o,
                                                           const at::Tensor& lse) {
  const auto [value, lse_value, statistics] = FusedOperator<Arguments>::CallForward(arguments);
  const std::vector<at::Tensor> tangents = OutputTangentsOf(arguments, true, o, lse);
  return {value, lse_value, statistics, tangents[0], tangents[1]};
}

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_DUAL_TENSORS_H_
