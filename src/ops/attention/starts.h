// Initial values of the parameters of terms.
#ifndef GNOMON_OPS_ATTENTION_STARTS_H_
#define GNOMON_OPS_ATTENTION_STARTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/catalogue/registry.h"

namespace gnomon {

// Returns the number that a component sets for a per-head parameter; nullopt if it sets none or a
// tensor.
std::optional<double> HeadNumberIn(const Component& component, const Parameter& parameter);

// The initial gamma or beta of a similarity in a module, which gives the logits of N(0, 1) tokens
// with this head dimension a standard deviation of 1.
double HeadParameterStart(const SimilarityEntry& entry, const Component& component,
                          int64_t head_dim);

// TensorUse::start of a parameter, float64. Throws c10::ValueError if there is none, for example if
// the component does not specify its grid, or if the value is not one number per head.
at::Tensor StartOf(const Parameter& parameter, const Component& component,
                   const ModuleShape& shape);

// The initial values (H,) of a parameter of a position, for q, in the computing type.
at::Tensor PositionStart(const Parameter& parameter, const Component& component,
                         const ModuleShape& shape, const at::Tensor& q);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_STARTS_H_
