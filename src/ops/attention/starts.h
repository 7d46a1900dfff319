// The values of the parameters of terms: numbers, tensors and initial values.
#ifndef GNOMON_OPS_ATTENTION_STARTS_H_
#define GNOMON_OPS_ATTENTION_STARTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/catalogue/registry.h"

namespace gnomon {

// A parameter that may be a tensor, and its value in a component: none, a number, the fixed initial
// value, a value learned from it, or a tensor. Only per-head parameters have values other than none
// and a tensor.
struct Setting {
  enum class Kind { kNone, kNumber, kFixed, kLearned, kTensor };
  const Parameter* parameter;
  Kind kind = Kind::kNone;
  double number = 0;  // for kNumber
};
Setting SettingOf(const Component& component, const Parameter& parameter);

// The initial gamma or beta of a similarity in a module, which gives the logits of N(0, 1) tokens
// with this head dimension a standard deviation of 1.
double HeadParameterStart(const SimilarityEntry& entry, const Component& component,
                          int64_t head_dim);

// TensorUse::start of a parameter, float64. Throws c10::ValueError if there is none, for example if
// the component does not specify its grid, or if the value is not one number per head.
at::Tensor StartOf(const Parameter& parameter, const Component& component,
                   const ModuleShape& shape);

// The value of a per-head parameter in a call with q (B, H, L, D), in the computing type: the
// number of the component; otherwise `held`, a tensor or initial value that the caller provides;
// otherwise the initial value (H,) of TensorUse::start.
at::Tensor HeadValueIn(const at::Tensor& q, const Component& component, const Setting& setting,
                       const OptionalTensor& held);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_STARTS_H_
