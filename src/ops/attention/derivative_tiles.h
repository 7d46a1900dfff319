// Forward-mode and second derivatives in float32, computed tile by tile: matrix products with loops
// over rows of scores between them. Memory is linear in the lengths, and results are bitwise
// identical for any number of threads.
#ifndef GNOMON_OPS_ATTENTION_DERIVATIVE_TILES_H_
#define GNOMON_OPS_ATTENTION_DERIVATIVE_TILES_H_

#include <vector>

#include "ops/operators/attention_operators.h"

namespace gnomon {

// Whether TiledDerivatives supports a call: dot products of float32 or 16-bit tokens, interval
// masks, offset and key biases, and finite values.
bool HasTiledDerivatives(const Cotangents* cotangents, const OperatorArguments& a,
                         const Tangents& tangents);

// The results of attention_jvp and, if there are cotangents, those of attention_backward_jvp
// (argument_list.h).
std::vector<at::Tensor> TiledDerivatives(const Cotangents* cotangents, const OperatorArguments& a,
                                         const Tangents& tangents,
                                         const AttentionOperator::BothNeeded& needed);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_DERIVATIVE_TILES_H_
