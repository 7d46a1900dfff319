// The tensors that a module stores for its similarity and its position.
#ifndef GNOMON_OPS_NN_MODULE_TENSORS_H_
#define GNOMON_OPS_NN_MODULE_TENSORS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/catalogue/module_tensor.h"
#include "ops/nn/module_terms.h"

namespace gnomon {

// The tensors of a module with the given shape, in the order of ModuleAttention. `given` holds
// user-supplied tensors for parameters marked as tensors; they are used unchanged, and learned if
// they require grad. Throws c10::ValueError for a term that modules do not support.
std::vector<ModuleTensor> ModuleTensors(const ModuleTerms& terms, const ModuleShape& shape,
                                        at::TensorList given = {});

// The parameter to which a tensor belongs. TensorOrigins() uses the order of ModuleTensors().
struct TensorOrigin {
  std::string name;
  int64_t component;  // ModuleTerms::Use::component
  const Parameter* parameter;
  TensorPart part;
  Index index;  // the index of a table; otherwise kNone
};
std::vector<TensorOrigin> TensorOrigins(const ModuleTerms& terms);

// A learned value of a module, detached: a per-head value as used in the scores (and its initial
// value), a table, or a user-supplied tensor.
struct LearnedTensor {
  std::string name;
  at::Tensor value;
  std::optional<at::Tensor> start;  // only for a per-head value that the user did not supply
};
std::vector<LearnedTensor> LearnedTensors(const ModuleTerms& terms, const ModuleShape& shape,
                                          at::TensorList tensors);

}  // namespace gnomon

#endif  // GNOMON_OPS_NN_MODULE_TENSORS_H_
