// Forward-mode and second derivatives in float32, tile by tile: products of matrices, and loops
// over rows of scores between them. Memory is linear in the lengths, and results are bitwise the
// same for any number of threads.
#ifndef GNOMON_OPS_ATTENTION_DERIVATIVE_TILES_H_
#define GNOMON_OPS_ATTENTION_DERIVATIVE_TILES_H_

#include <vector>

#include "ops/operators/attention_operators.h"

namespace gnomon {

// Whether TiledDerivatives supports a call: dot products of tokens up to float32, masks by
// intervals, biases by offset and key, and finite numbers.
bool HasTiledDerivatives(const Cotangents* cotangents, const OperatorArguments& a,
                         const Tangents& tangents);

// The results of attention_jvp and, if there are cotangents, those of attention_backward_jvp
// (argument_list.h).
std::vector<at::Tensor> TiledDerivatives(const Cotangents* cotangents, const OperatorArguments& a,
                                         const Tangents& tangents,
                                         const AttentionOperator::BothNeeded& needed);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_DERIVATIVE_TILES_H_
