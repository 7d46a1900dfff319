// Adaptive input representations (Baevski and Auli 2019) and the adaptive softmax (Grave et al.
// 2017) with shared weights: rare tokens have fewer columns.
#ifndef GNOMON_MODELS_ADAPTIVE_EMBEDDING_H_
#define GNOMON_MODELS_ADAPTIVE_EMBEDDING_H_

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace gnomon::lab {

// Throws an Error that names the option unless the cutoffs increase, from at least 1 to less than
// the vocabulary size.
void CheckCutoffs(const std::vector<int64_t>& cutoffs, int64_t vocabulary);

// Tokens are ordered by frequency and split into bands at the cutoffs. Band n has a table tables.n
// (tokens, columns) with dim / 4^n columns, at least one. All bands except the first have
// projections.n (dim, columns). A token's embedding is its projected row. As an output
// layer, the head's logits come from the rows of the first band and from one row of `clusters`
// (bands - 1, dim) for each further band. The rows of a band distribute its probability among its
// tokens.
class AdaptiveEmbeddingImpl : public torch::nn::Module {
 public:
  // Initial embeddings have variance 1 / dim, and unit inputs give unit logits. Checks the cutoffs.
  AdaptiveEmbeddingImpl(int64_t vocabulary, int64_t dim, const std::vector<int64_t>& cutoffs);

  // Embeddings (..., dim) of the tokens (...), int64.
  torch::Tensor forward(const torch::Tensor& tokens);
  // Log-probabilities (..., vocabulary) of all tokens given x (..., dim).
  torch::Tensor LogProbabilities(const torch::Tensor& x);
  // Negative log-probabilities of the targets (...), without computing all others.
  torch::Tensor Losses(const torch::Tensor& x, const torch::Tensor& targets);

  // Shape (tokens, columns) of a band's table, used for checkpoint sizes.
  static std::vector<int64_t> TableSizes(int64_t vocabulary, int64_t dim,
                                         const std::vector<int64_t>& cutoffs, int64_t band);
  // Number of parameters.
  static double CountWeights(int64_t vocabulary, int64_t dim, const std::vector<int64_t>& cutoffs);

 private:
  int64_t bands() const { return static_cast<int64_t>(ends_.size()); }
  // First token of a band.
  int64_t begin(int64_t band) const { return band == 0 ? 0 : ends_[band - 1]; }
  torch::Tensor HeadLogProbabilities(const torch::Tensor& x);
  torch::Tensor TailLogits(const torch::Tensor& x, int64_t band);

  std::vector<int64_t> ends_;
  std::vector<torch::Tensor> tables_;
  std::vector<torch::Tensor> projections_;  // entry n - 1 belongs to band n
  torch::Tensor clusters_;
};
TORCH_MODULE(AdaptiveEmbedding);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_ADAPTIVE_EMBEDDING_H_
