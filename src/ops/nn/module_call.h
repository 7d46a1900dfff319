// What the modules' calls share.
#ifndef GNOMON_OPS_NN_MODULE_CALL_H_
#define GNOMON_OPS_NN_MODULE_CALL_H_

#include <gnomon/torch/nn.h>

#include <cstdint>
#include <vector>

#include "ops/attention/call.h"

namespace gnomon::nn {

torch::Tensor AsDefaultDtype(const torch::Tensor& tensor);

// Throws c10::ValueError, in the name of a module, unless embeddings are (B, L, dim).
void CheckEmbeddings(const char* module, const torch::Tensor& embeddings, int64_t dim);

// (B, L, heads columns) to (B, heads, L, columns).
torch::Tensor Heads(const torch::Tensor& projected, int64_t count);

// What a call of a module says to the operator. Where it has a cache, k and v become those of the
// cache and the call's own, and `joined` what the cache is to hold once nothing can be refused any
// more. query and key (B, L, ...) are the call's own tokens, of_keys what else a position computes
// from the keys.
CallArguments JoinCache(const char* module, const AttentionCall& call, const torch::Tensor& query,
                        const torch::Tensor& key, const std::vector<torch::Tensor>& of_keys,
                        torch::Tensor& k, torch::Tensor& v, KVCache& joined);

}  // namespace gnomon::nn

#endif  // GNOMON_OPS_NN_MODULE_CALL_H_
