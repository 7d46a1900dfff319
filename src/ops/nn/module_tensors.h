// The tensors that a module holds for its similarity and its position.
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

// The tensors of a module of that shape, in the order in which ModuleAttention takes them. `given`
// are those of the parameters that the specifications say are tensors, which are kept as they are,
// learned where they require grad. Throws c10::ValueError for a term that has no place in a module.
std::vector<ModuleTensor> ModuleTensors(const ModuleTerms& terms, const ModuleShape& shape,
                                        at::TensorList given = {});

// What each of them belongs to, in the same order.
struct TensorOrigin {
  std::string name;
  int64_t component;  // ModuleTerms::Use::component
  const Parameter* parameter;
  TensorPart part;
  Index index;  // what its entries or rows belong to; kNone unless it is a table
};
std::vector<TensorOrigin> TensorOrigins(const ModuleTerms& terms);

// What such a module has learned: a value for each head as it acts in the scores, and where it
// started, or a table, or a tensor that was given; detached.
struct LearnedTensor {
  std::string name;
  at::Tensor value;
  std::optional<at::Tensor> start;  // of a value for each head that was not given
};
std::vector<LearnedTensor> LearnedTensors(const ModuleTerms& terms, const ModuleShape& shape,
                                          at::TensorList tensors);

}  // namespace gnomon

#endif  // GNOMON_OPS_NN_MODULE_TENSORS_H_
