// Helper functions of encodings.
#ifndef GNOMON_OPS_ENCODINGS_TOKENS_H_
#define GNOMON_OPS_ENCODINGS_TOKENS_H_

#include <ATen/ATen.h>

#include <vector>

#include "ops/catalogue/token_encoder.h"

namespace gnomon {

inline c10::SymInt Length(const TokenBatch& batch) { return batch.embeddings.sym_size(1); }

// Consecutive positions (L,), or those given by the caller, (B, L) or (L,).
inline at::Tensor Positions(const TokenBatch& batch) {
  if (batch.positions) return batch.positions->to(at::kLong);
  return at::arange(batch.offset, batch.offset + Length(batch),
                    batch.embeddings.options().dtype(at::kLong));
}

// Reshapes lengths (B,), or one length for all sequences, to (B or 1, 1).
inline at::Tensor OverTokens(const at::Tensor& lengths) { return lengths.reshape({-1, 1}); }

// The n-th tensor of an encoding; the error message calls it `name`.
inline const at::Tensor& Take(const std::vector<at::Tensor>& tensors, size_t n, const char* name) {
  TORCH_CHECK_VALUE(n < tensors.size(), "gnomon.nn: ", name, " is missing");
  return tensors[n];
}

}  // namespace gnomon

#endif  // GNOMON_OPS_ENCODINGS_TOKENS_H_
