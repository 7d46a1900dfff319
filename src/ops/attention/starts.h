// What a term starts with where a call or a module says nothing.
#ifndef GNOMON_OPS_ATTENTION_STARTS_H_
#define GNOMON_OPS_ATTENTION_STARTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/catalogue/registry.h"

namespace gnomon {

// The number that a component gives a parameter with one value per head; nullopt: none, or a
// tensor.
std::optional<double> HeadNumberIn(const Component& component, const Parameter& parameter);

// gamma or beta of a similarity as it starts in a module: it makes the spread of the logits of
// N(0, 1) tokens of that many columns 1.
double HeadParameterStart(const SimilarityEntry& entry, const Component& component,
                          int64_t head_dim);

// TensorUse::start of a parameter, float64. Throws c10::ValueError where there is none, as on a
// grid that the component does not name, or where it is not one number per head.
at::Tensor StartOf(const Parameter& parameter, const Component& component,
                   const ModuleShape& shape);

// The values (H,) at which a parameter of a position starts, for q, in the computing type.
at::Tensor PositionStart(const Parameter& parameter, const Component& component,
                         const ModuleShape& shape, const at::Tensor& q);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_STARTS_H_
