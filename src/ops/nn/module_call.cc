#include "ops/nn/module_call.h"

#include "ops/attention/options.h"

namespace gnomon::nn {

torch::Tensor AsDefaultDtype(const torch::Tensor& tensor) {
  return tensor.to(torch::get_default_dtype());
}

void CheckEmbeddings(const char* module, const torch::Tensor& embeddings, int64_t dim) {
  TORCH_CHECK_VALUE(embeddings.dim() == 3 && embeddings.size(2) == dim, "gnomon.nn.", module,
                    ": embeddings have shape ", embeddings.sizes(), "; expected (B, L, ", dim, ")");
}

torch::Tensor Heads(const torch::Tensor& projected, int64_t count) {
  return projected.unflatten(2, {count, -1}).transpose(1, 2);
}

// The module sets the arguments that AttentionCall lacks, or they keep their defaults.
static_assert(SaysAllBut<AttentionCall>({"scale", "dropout", "seed", "aggregation", "sink",
                                         "temperature", "score_softcap", "tolerance",
                                         "page_table"}));

CallArguments JoinCache(const char* module, const AttentionCall& call, const torch::Tensor& query,
                        const torch::Tensor& key, const std::vector<torch::Tensor>& of_keys,
                        torch::Tensor& k, torch::Tensor& v, KVCache& joined) {
  CallArguments arguments = ArgumentsOf(call);
  if (call.positions && !call.key_positions) {
    TORCH_CHECK_VALUE(query.size(1) == key.size(1), "gnomon.nn.", module,
                      ": key_positions is nullopt, but query has ", query.size(1),
                      " tokens and key has ", key.size(1), "; pass the positions of the keys");
    arguments.key_positions = call.positions;
  }
  if (call.cache == nullptr) return arguments;
  // Positions with several axes do not determine which keys a query attends to.
  const bool says_order = call.positions && call.positions->dim() < 3;
  if (!call.query_offset && !call.query_offsets && !says_order) {
    arguments.query_offset = call.cache->length();
  }
  joined = *call.cache;
  joined.append(k, v, of_keys, arguments.key_positions.value_or(torch::Tensor()));
  if (joined.positions.defined()) arguments.key_positions = joined.positions;
  k = joined.k;
  v = joined.v;
  // Left padding may be longer than the keys so far.
  if (arguments.key_starts) arguments.key_starts = arguments.key_starts->clamp_max(k.size(2));
  return arguments;
}

}  // namespace gnomon::nn
