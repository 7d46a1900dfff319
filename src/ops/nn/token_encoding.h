// Encodings that are added to token embeddings before the first layer.
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

// The encodings in a position, as separate specifications. Position tables have max_length rows
// unless a component sets its length.
std::vector<Component> TokenEncodings(const std::string& position, int64_t max_length);

// The encoder of a component; throws c10::ValueError if it has none.
std::unique_ptr<TokenEncoder> MakeTokenEncoder(const Component& component, int64_t dim,
                                               bool causal);

// Checks the embeddings, then calls MakeTokenEncoder and Encode. The result has the dtype of the
// embeddings.
at::Tensor EncodeTokens(const Component& component, int64_t dim, bool causal,
                        const std::vector<at::Tensor>& tensors, const TokenBatch& batch);

}  // namespace gnomon

#endif  // GNOMON_OPS_NN_TOKEN_ENCODING_H_
