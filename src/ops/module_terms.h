// The similarity and the position of a module: specifications whose parameters the module holds.
#ifndef GNOMON_OPS_MODULE_TERMS_H_
#define GNOMON_OPS_MODULE_TERMS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/compose.h"

namespace gnomon {

// A tensor that a module holds: a parameter where it is learned, else a buffer.
struct ModuleTensor {
  std::string name;
  at::Tensor start;  // float64
  bool learned;
};

// The columns that a head of q and k has by default: the only number that the similarity takes, or
// `otherwise`. Throws c10::ValueError for a mistake in the specification.
int64_t HeadColumns(const std::string& similarity, int64_t otherwise);

// The tensors of a module of that many query heads with head_dim columns, in the order in which
// ModuleAttention takes them. Throws c10::ValueError for a mistake in a specification.
std::vector<ModuleTensor> ModuleTensors(const std::string& similarity, const std::string& position,
                                        int64_t num_heads, int64_t head_dim);

at::Tensor ModuleAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::string& similarity, const std::string& position,
                           at::TensorList tensors, const CallArguments& arguments);

// A component that is added to embeddings.
struct TokenEncoding {
  bool learned;        // a table of `length` rows; else sinusoids
  std::string layout;  // of the sinusoids
  int64_t length;
};

// Those of a position; a learned table has max_length rows unless the component says otherwise.
std::vector<TokenEncoding> TokenEncodings(const std::string& position, int64_t max_length);

}  // namespace gnomon

#endif  // GNOMON_OPS_MODULE_TERMS_H_
