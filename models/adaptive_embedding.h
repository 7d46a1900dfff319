// Adaptive input representations (Baevski and Auli 2019) and the adaptive softmax (Grave et al.
// 2017) with the same weights: what is rare has fewer columns.
#ifndef GNOMON_MODELS_ADAPTIVE_EMBEDDING_H_
#define GNOMON_MODELS_ADAPTIVE_EMBEDDING_H_

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace gnomon::models {

// Throws Error, naming the option, unless the cutoffs rise from at least 1 to less than the
// vocabulary.
void CheckCutoffs(const std::vector<int64_t>& cutoffs, int64_t vocabulary);

// Tokens, the most frequent ones first, in bands that end at the cutoffs and at the vocabulary.
// Band n has tables.n (tokens, columns) of dim / 4^n columns, at least one, and all but the first
// projections.n (dim, columns): a token's embedding is its row, projected. Read the other way
// round, the rows of the first band and one of `clusters` (bands - 1, dim) for each other band are
// the logits of the head, and those of the band share its probability among its tokens.
class AdaptiveEmbeddingImpl : public torch::nn::Module {
 public:
  // Embeddings of variance 1 / dim, and unit logits of unit inputs. The cutoffs are checked.
  AdaptiveEmbeddingImpl(int64_t vocabulary, int64_t dim, const std::vector<int64_t>& cutoffs);

  // Rows (..., dim) of the tokens (...), int64.
  torch::Tensor forward(const torch::Tensor& tokens);
  // Logarithms of the probabilities (..., vocabulary) that x (..., dim) gives to all tokens.
  torch::Tensor LogProbabilities(const torch::Tensor& x);
  // Minus those of the targets (...), without those of all others.
  torch::Tensor Losses(const torch::Tensor& x, const torch::Tensor& targets);

  // (tokens, columns) of the table of a band, for the sizes of a checkpoint.
  static std::vector<int64_t> TableSizes(int64_t vocabulary, int64_t dim,
                                         const std::vector<int64_t>& cutoffs, int64_t band);
  // How many numbers all weights are.
  static double CountWeights(int64_t vocabulary, int64_t dim, const std::vector<int64_t>& cutoffs);

 private:
  int64_t bands() const { return static_cast<int64_t>(ends_.size()); }
  // The first token of a band.
  int64_t begin(int64_t band) const { return band == 0 ? 0 : ends_[band - 1]; }
  torch::Tensor HeadLogProbabilities(const torch::Tensor& x);
  torch::Tensor TailLogits(const torch::Tensor& x, int64_t band);

  std::vector<int64_t> ends_;
  std::vector<torch::Tensor> tables_;
  std::vector<torch::Tensor> projections_;  // of band n at n - 1
  torch::Tensor clusters_;
};
TORCH_MODULE(AdaptiveEmbedding);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_ADAPTIVE_EMBEDDING_H_
