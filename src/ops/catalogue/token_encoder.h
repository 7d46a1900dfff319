// The interface of encodings that are added to embeddings.
#ifndef GNOMON_OPS_CATALOGUE_TOKEN_ENCODER_H_
#define GNOMON_OPS_CATALOGUE_TOKEN_ENCODER_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ops/catalogue/module_tensor.h"
#include "ops/grammar/component.h"
#include "ops/operators/argument_list.h"

namespace gnomon {

// The tokens of one call.
struct TokenBatch {
  at::Tensor embeddings;  // (B, L, dim)
  c10::SymInt offset;     // the position of the first token
  bool training = false;
  OptionalTensor lengths;  // (B,) integers; tokens beyond these lengths are padding
  // (B, N, dim): the embeddings of the N preceding tokens, the latest last.
  OptionalTensor before;
  std::optional<at::Generator> generator;  // random generator for training (default: PyTorch's)
  // The sequences are a part of a batch of batch_size sequences, starting at first_sequence;
  // default: the whole batch.
  int64_t first_sequence = 0;
  std::optional<int64_t> batch_size = std::nullopt;
  // (B, L) or (L,) integers: the positions of the tokens, instead of consecutive positions starting
  // at offset.
  OptionalTensor positions = std::nullopt;
};

class TokenEncoder {
 public:
  virtual ~TokenEncoder() = default;

  // The tensors that a module stores for the encoding, initialised with PyTorch's generator.
  virtual std::vector<ModuleTensor> Tensors() const { return {}; }
  // Returns the number of positions at which the encoding is defined; nullopt if it is unlimited.
  virtual std::optional<int64_t> max_length() const { return std::nullopt; }
  // Returns the number of preceding tokens that the encoding reads.
  virtual int64_t history() const { return 0; }
  // The encoding to add to the embeddings; broadcasts with them.
  virtual at::Tensor Encode(const std::vector<at::Tensor>& tensors,
                            const TokenBatch& batch) const = 0;
};

// Creates an encoder for embeddings with `dim` columns. causal: tokens must not depend on later
// tokens. Throws c10::ValueError if the component is invalid.
using TokenEncoderFactory = std::unique_ptr<TokenEncoder> (*)(const Component& component,
                                                              int64_t dim, bool causal);

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_TOKEN_ENCODER_H_
