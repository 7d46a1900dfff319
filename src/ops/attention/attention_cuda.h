// The kernels of attention_forward and attention_backward on GPUs.
#ifndef GNOMON_OPS_ATTENTION_ATTENTION_CUDA_H_
#define GNOMON_OPS_ATTENTION_ATTENTION_CUDA_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "cuda/backend.h"
#include "ops/attention/operators.h"

namespace gnomon {

// Throws c10::NotImplementedError, naming the environment variable GNOMON_CUDA, for a tensor on a
// CUDA device unless that is 1.
void CheckCudaIsOn(const char* operation, const char* name, const at::Tensor& tensor);

// Whether the kernels of the tokens' device want all of them of one type, a lower one than float32
// too.
bool WantsOneType(const at::Tensor& tokens);

// The passes of the operator by the CUDA plan, on any place where kernels run. The tensors lie
// there.
Outputs ForwardOn(const OperatorArguments& arguments, cuda::Backend& backend);
std::vector<at::Tensor> BackwardOn(const SavedOutputs& saved, const OperatorArguments& arguments,
                                   const AttentionOperator::Needed& needed, cuda::Backend& backend);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_ATTENTION_CUDA_H_
