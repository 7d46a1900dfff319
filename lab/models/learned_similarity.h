// A similarity from the catalogue with learned per-head parameters, for code that calls operators
// directly instead of nn::MultiheadAttention.
#ifndef GNOMON_MODELS_LEARNED_SIMILARITY_H_
#define GNOMON_MODELS_LEARNED_SIMILARITY_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gnomon/torch/term.h"

namespace gnomon::lab {

// Has the same parameters and buffers as nn::MultiheadAttention with this similarity: for example,
// "gamma_theta" and "gamma_start" for the learned parameter gamma.
class LearnedSimilarityImpl : public torch::nn::Module {
 public:
  // Tokens have `dim` columns per head, unless the similarity requires a different number. Throws
  // c10::Error if the specification is invalid.
  LearnedSimilarityImpl(const std::string& spec, int64_t heads, int64_t dim);

  // Number of columns of q and k per head.
  int64_t columns() const { return columns_; }
  // The specification in the form that operators accept.
  Similarity term() const;

 private:
  std::string spec_;  // with "gamma=tensor" if gamma is learned
  int64_t columns_ = 0;
  std::vector<torch::Tensor> thetas_;
  std::vector<torch::Tensor> starts_;
};
TORCH_MODULE(LearnedSimilarity);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_LEARNED_SIMILARITY_H_
