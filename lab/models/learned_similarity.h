// A similarity of the catalogue with learned per-head parameters, for code that calls operators
// directly instead of nn::MultiheadAttention.
#ifndef GNOMON_MODELS_LEARNED_SIMILARITY_H_
#define GNOMON_MODELS_LEARNED_SIMILARITY_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gnomon/torch/term.h"

namespace gnomon::lab {

// It has the parameters and buffers that a nn::MultiheadAttention with that similarity has:
// "gamma_theta" and "gamma_start", or "beta_theta" and "beta_start", and likewise for other learned
// values.
class LearnedSimilarityImpl : public torch::nn::Module {
 public:
  // For tokens with `dim` columns per head, unless the similarity requires another number. Throws
  // c10::Error if the specification is invalid.
  LearnedSimilarityImpl(const std::string& spec, int64_t heads, int64_t dim);

  // Columns of q and k per head.
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
