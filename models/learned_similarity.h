// A similarity of the catalogue whose numbers of each head are learned, for what calls operators
// itself instead of a nn::MultiheadAttention.
#ifndef GNOMON_MODELS_LEARNED_SIMILARITY_H_
#define GNOMON_MODELS_LEARNED_SIMILARITY_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gnomon/torch/term.h"

namespace gnomon::models {

// Has the parameter and the buffer that a nn::MultiheadAttention of that similarity has:
// "gamma_theta" and "gamma_start", or "beta_theta" and "beta_start", and likewise of what else is
// learned, or none.
class LearnedSimilarityImpl : public torch::nn::Module {
 public:
  // For tokens of `dim` columns in each head, unless the similarity takes another number. Throws
  // c10::Error where the specification is wrong.
  LearnedSimilarityImpl(const std::string& spec, int64_t heads, int64_t dim);

  // The columns of q and of k in each head.
  int64_t columns() const { return columns_; }
  // As operators take it.
  Similarity term() const;

 private:
  std::string spec_;  // with "gamma=tensor" where that is learned
  int64_t columns_ = 0;
  std::vector<torch::Tensor> thetas_;
  std::vector<torch::Tensor> starts_;
};
TORCH_MODULE(LearnedSimilarity);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_LEARNED_SIMILARITY_H_
