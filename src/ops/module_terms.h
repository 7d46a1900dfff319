// The similarity and the position of a module: specifications whose parameters the module holds.
#ifndef GNOMON_OPS_MODULE_TERMS_H_
#define GNOMON_OPS_MODULE_TERMS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ops/compose.h"
#include "ops/module_tensor.h"

namespace gnomon {

// The columns that a head of q and k has by default: the only number that the similarity takes, or
// `otherwise`. Throws c10::ValueError for a mistake in the specification.
int64_t HeadColumns(const std::string& similarity, int64_t otherwise);

// The tensors of a module of that shape, in the order in which ModuleAttention takes them. Throws
// c10::ValueError for a mistake in a specification.
std::vector<ModuleTensor> ModuleTensors(const std::string& similarity, const std::string& position,
                                        const ModuleShape& shape);

at::Tensor ModuleAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::string& similarity, const std::string& position,
                           at::TensorList tensors, const CallArguments& arguments);

}  // namespace gnomon

#endif  // GNOMON_OPS_MODULE_TERMS_H_
