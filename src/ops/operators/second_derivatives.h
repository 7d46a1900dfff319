// Operators whose results cannot be differentiated again.
#ifndef GNOMON_OPS_OPERATORS_SECOND_DERIVATIVES_H_
#define GNOMON_OPS_OPERATORS_SECOND_DERIVATIVES_H_

#include <torch/library.h>

namespace gnomon {

// The autograd kernel of a backward operator. If an argument requires grad, as with
// create_graph=True, so do the results; their backward pass throws c10::NotImplementedError, which
// names the public function.
torch::CppFunction WithoutSecondDerivatives();

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_SECOND_DERIVATIVES_H_
