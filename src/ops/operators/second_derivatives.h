// Operators for second derivatives. Autograd records their results but cannot differentiate them.
#ifndef GNOMON_OPS_OPERATORS_SECOND_DERIVATIVES_H_
#define GNOMON_OPS_OPERATORS_SECOND_DERIVATIVES_H_

#include <torch/library.h>

namespace gnomon {

// The autograd kernel of an operator that returns a list of second derivatives: if its arguments
// require grad, its results do as well, and their backward pass throws c10::NotImplementedError,
// which names the function that the user called.
torch::CppFunction WithoutThirdDerivatives();

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_SECOND_DERIVATIVES_H_
