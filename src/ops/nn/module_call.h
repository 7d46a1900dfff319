// Code that the forward() methods of modules share.
#ifndef GNOMON_OPS_NN_MODULE_CALL_H_
#define GNOMON_OPS_NN_MODULE_CALL_H_

#include <gnomon/torch/nn.h>

#include <cstdint>
#include <vector>

#include "ops/attention/call.h"

namespace gnomon::nn {

torch::Tensor AsDefaultDtype(const torch::Tensor& tensor);

// Throws c10::ValueError, with a message that names the module, unless embeddings have shape (B, L,
// dim).
void CheckEmbeddings(const char* module, const torch::Tensor& embeddings, int64_t dim);

// Reshapes (B, L, heads * columns) to (B, heads, L, columns).
torch::Tensor Heads(const torch::Tensor& projected, int64_t count);

// The operator arguments of a module call. With a cache, k and v are extended by the cached tokens,
// and `joined` receives the new content of the cache, to be stored when the call can no longer
// fail. query and key (B, L, ...) are the tokens of the call; of_keys holds tensors that a position
// computes from the keys.
CallArguments JoinCache(const char* module, const AttentionCall& call, const torch::Tensor& query,
                        const torch::Tensor& key, const std::vector<torch::Tensor>& of_keys,
                        torch::Tensor& k, torch::Tensor& v, KVCache& joined);

}  // namespace gnomon::nn

#endif  // GNOMON_OPS_NN_MODULE_CALL_H_
