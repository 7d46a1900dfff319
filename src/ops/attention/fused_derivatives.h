// Forward-mode and second derivatives of attention, computed by the fused kernel for the calls that
// it supports.
#ifndef GNOMON_OPS_ATTENTION_FUSED_DERIVATIVES_H_
#define GNOMON_OPS_ATTENTION_FUSED_DERIVATIVES_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "ops/operators/attention_operators.h"

namespace gnomon {

// Whether the kernel supports a call: its pair function must have a table of dual functions.
bool HasFusedDerivatives(const OperatorArguments& a);

// The results of the operators attention_jvp and attention_backward_jvp (argument_list.h); nullopt
// if they are not finite, because this kernel propagates NaN or infinity in a masked key even to
// rows that do not attend to it.
std::optional<AttentionOperator::JvpOutputs> FusedJvp(const OperatorArguments& a,
                                                      const Tangents& tangents);
std::optional<std::vector<at::Tensor>> FusedBackwardJvp(
    const Cotangents& cotangents, const OperatorArguments& a, const Tangents& tangents,
    const AttentionOperator::BothNeeded& needed);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_FUSED_DERIVATIVES_H_
