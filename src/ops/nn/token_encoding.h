// Encodings that are added to the embeddings of tokens before the first layer.
#ifndef GNOMON_OPS_NN_TOKEN_ENCODING_H_
#define GNOMON_OPS_NN_TOKEN_ENCODING_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ops/catalogue/token_encoder.h"
#include "ops/grammar/component.h"

namespace gnomon {

// The encodings in a position, as specifications of their own; a table of positions has max_length
// rows unless its component says otherwise.
std::vector<Component> TokenEncodings(const std::string& position, int64_t max_length);

// That of a component; throws c10::ValueError where it has none.
std::unique_ptr<TokenEncoder> MakeTokenEncoder(const Component& component, int64_t dim,
                                               bool causal);

// MakeTokenEncoder and Encode, for embeddings that are checked first. In the dtype of embeddings.
at::Tensor EncodeTokens(const Component& component, int64_t dim, bool causal,
                        const std::vector<at::Tensor>& tensors, const TokenBatch& batch);

}  // namespace gnomon

#endif  // GNOMON_OPS_NN_TOKEN_ENCODING_H_
