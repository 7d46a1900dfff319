// Adaptive input representations (Baevski and Auli 2019) and the adaptive softmax (Grave et al.
// 2017) with shared weights: rare tokens have smaller embeddings.
#ifndef GNOMON_MODELS_ADAPTIVE_EMBEDDING_H_
#define GNOMON_MODELS_ADAPTIVE_EMBEDDING_H_

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace gnomon::lab {

// Throws an Error that names the option unless the cutoffs are increasing, positive and less than
// the vocabulary size.
void CheckCutoffs(const std::vector<int64_t>& cutoffs, int64_t vocabulary);

// Tokens are ordered by frequency and split into bands at the cutoffs. Band n has a table table_n
// (tokens, columns) with max(dim / 4^n, 1) columns. All bands except the first also have a
// projection projection_n (dim, columns). A token's embedding is its row of the table, projected to
// dim columns. In the output layer, the first softmax covers the tokens of the first band and one
// row of `clusters` (bands - 1, dim) for each further band. A second softmax distributes a band's
// probability among its tokens.
class AdaptiveEmbeddingImpl : public torch::nn::Module {
 public:
  // Checks the cutoffs. Initial embeddings have variance 1 / dim, so inputs with unit variance give
  // logits with unit variance.
  AdaptiveEmbeddingImpl(int64_t vocabulary, int64_t dim, const std::vector<int64_t>& cutoffs);

  // Returns the embeddings (..., dim) of the tokens (...), int64.
  torch::Tensor forward(const torch::Tensor& tokens);
  // Returns the log-probabilities (..., vocabulary) of all tokens given x (..., dim).
  torch::Tensor LogProbabilities(const torch::Tensor& x);
  // Returns the negative log-probabilities of the targets (...), without computing those of all
  // tokens.
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
  std::vector<torch::Tensor> projections_;  // projections_[n - 1] belongs to band n
  torch::Tensor clusters_;
};
TORCH_MODULE(AdaptiveEmbedding);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_ADAPTIVE_EMBEDDING_H_
