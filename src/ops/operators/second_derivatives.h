// Operators whose results autograd records and cannot differentiate.
#ifndef GNOMON_OPS_OPERATORS_SECOND_DERIVATIVES_H_
#define GNOMON_OPS_OPERATORS_SECOND_DERIVATIVES_H_

#include <torch/library.h>

namespace gnomon {

// The autograd kernel of an operator that is a backward pass: where its arguments require grad, as
// with create_graph=True, its results do, and their backward pass throws c10::NotImplementedError,
// which names what the user has called.
torch::CppFunction WithoutSecondDerivatives();

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_SECOND_DERIVATIVES_H_
