// What an encoding that is added to the embeddings of tokens is made of.
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
  c10::SymInt offset;     // the position of the first of them
  bool training = false;
  OptionalTensor lengths;  // (B,) integers: the tokens from there on are padding
  // (B, N, dim): the embeddings of the N tokens before the first one, the latest last.
  OptionalTensor before;
  std::optional<at::Generator> generator;  // of what training draws; Torch's own by default
  // The sequences are those from first_sequence on of a batch of so many; by default all of it.
  int64_t first_sequence = 0;
  std::optional<int64_t> batch_size = std::nullopt;
  // (B, L) or (L,) integers: where the tokens stand, instead of one after the other from offset on.
  OptionalTensor positions = std::nullopt;
};

class TokenEncoder {
 public:
  virtual ~TokenEncoder() = default;

  // What a module holds for it, drawn from Torch's generator.
  virtual std::vector<ModuleTensor> Tensors() const { return {}; }
  // The positions at which it is defined; nullopt: all.
  virtual std::optional<int64_t> max_length() const { return std::nullopt; }
  // How many tokens before the first one it reads.
  virtual int64_t history() const { return 0; }
  // What is added to the embeddings: it broadcasts with them.
  virtual at::Tensor Encode(const std::vector<at::Tensor>& tensors,
                            const TokenBatch& batch) const = 0;
};

// For embeddings of `dim` columns; causal: no token may see a later one. Throw c10::ValueError for
// a mistake in the component.
using TokenEncoderFactory = std::unique_ptr<TokenEncoder> (*)(const Component& component,
                                                              int64_t dim, bool causal);

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_TOKEN_ENCODER_H_
