#include "models/adaptive_embedding.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

// Ratio of the dimensions of successive bands.
constexpr int64_t kReduction = 4;

int64_t Columns(int64_t dim, int64_t band) {
  for (int64_t n = 0; n < band; ++n) dim /= kReduction;
  return std::max<int64_t>(dim, 1);
}

torch::Tensor Normal(torch::IntArrayRef shape, int64_t fan_in) {
  return torch::randn(shape) / std::sqrt(static_cast<double>(fan_in));
}

// Indices of a band's tokens in `tokens` (N,).
torch::Tensor Places(const torch::Tensor& tokens, int64_t begin, int64_t end) {
  return tokens.ge(begin).logical_and_(tokens.lt(end)).nonzero().squeeze(1);
}

}  // namespace

void CheckCutoffs(const std::vector<int64_t>& cutoffs, int64_t vocabulary) {
  int64_t before = 0;
  for (const int64_t cutoff : cutoffs) {
    if (cutoff <= before || cutoff >= vocabulary) {
      throw Error(StrCat("--adaptive is ", at::IntArrayRef(cutoffs),
                         "; expected increasing numbers from 1 to ", vocabulary - 1,
                         " (less than the vocabulary size)"));
    }
    before = cutoff;
  }
}

AdaptiveEmbeddingImpl::AdaptiveEmbeddingImpl(int64_t vocabulary, int64_t dim,
                                             const std::vector<int64_t>& cutoffs)
    : ends_(cutoffs) {
  CheckCutoffs(cutoffs, vocabulary);
  ends_.push_back(vocabulary);
  for (int64_t band = 0; band < bands(); ++band) {
    const int64_t columns = Columns(dim, band);
    tables_.push_back(register_parameter(StrCat("table_", band),
                                         Normal({ends_[band] - begin(band), columns}, columns)));
    if (band == 0) continue;
    projections_.push_back(
        register_parameter(StrCat("projection_", band), Normal({dim, columns}, dim)));
  }
  clusters_ = register_parameter("clusters", Normal({bands() - 1, dim}, dim));
}

torch::Tensor AdaptiveEmbeddingImpl::forward(const torch::Tensor& tokens) {
  const torch::Tensor flat = tokens.reshape({-1});
  torch::Tensor rows = torch::zeros({flat.numel(), tables_[0].size(1)}, tables_[0].options());
  for (int64_t band = 0; band < bands(); ++band) {
    const torch::Tensor places = Places(flat, begin(band), ends_[band]);
    torch::Tensor own = torch::embedding(tables_[band], flat.index_select(0, places) - begin(band));
    if (band > 0) own = torch::matmul(own, projections_[band - 1].t());
    rows = rows.index_copy(0, places, own);
  }
  std::vector<int64_t> shape = tokens.sizes().vec();
  shape.push_back(rows.size(1));
  return rows.view(shape);
}

torch::Tensor AdaptiveEmbeddingImpl::HeadLogProbabilities(const torch::Tensor& x) {
  return torch::log_softmax(torch::matmul(x, torch::cat({tables_[0], clusters_}).t()), -1);
}

torch::Tensor AdaptiveEmbeddingImpl::TailLogits(const torch::Tensor& x, int64_t band) {
  return torch::matmul(torch::matmul(x, projections_[band - 1]), tables_[band].t());
}

torch::Tensor AdaptiveEmbeddingImpl::LogProbabilities(const torch::Tensor& x) {
  const torch::Tensor head = HeadLogProbabilities(x);
  std::vector<torch::Tensor> parts = {head.narrow(-1, 0, ends_[0])};
  for (int64_t band = 1; band < bands(); ++band) {
    parts.push_back(torch::log_softmax(TailLogits(x, band), -1) +
                    head.narrow(-1, ends_[0] + band - 1, 1));
  }
  return torch::cat(parts, -1);
}

torch::Tensor AdaptiveEmbeddingImpl::Losses(const torch::Tensor& x, const torch::Tensor& targets) {
  const torch::Tensor rows = x.reshape({-1, x.size(-1)});
  const torch::Tensor flat = targets.reshape({-1});
  torch::Tensor in_head = flat.clone();
  for (int64_t band = 1; band < bands(); ++band) {
    in_head.masked_fill_(flat.ge(begin(band)).logical_and_(flat.lt(ends_[band])),
                         ends_[0] + band - 1);
  }
  torch::Tensor losses = -HeadLogProbabilities(rows).gather(1, in_head.unsqueeze(1)).squeeze(1);
  for (int64_t band = 1; band < bands(); ++band) {
    const torch::Tensor places = Places(flat, begin(band), ends_[band]);
    const torch::Tensor own =
        torch::log_softmax(TailLogits(rows.index_select(0, places), band), 1)
            .gather(1, (flat.index_select(0, places) - begin(band)).unsqueeze(1))
            .squeeze(1);
    losses = losses.index_add(0, places, -own);
  }
  return losses.view_as(targets);
}

std::vector<int64_t> AdaptiveEmbeddingImpl::TableSizes(int64_t vocabulary, int64_t dim,
                                                       const std::vector<int64_t>& cutoffs,
                                                       int64_t band) {
  const auto last = static_cast<int64_t>(cutoffs.size());
  const int64_t begin = band == 0 ? 0 : cutoffs[band - 1];
  const int64_t end = band == last ? vocabulary : cutoffs[band];
  return {std::max<int64_t>(end - begin, 0), Columns(dim, band)};
}

double AdaptiveEmbeddingImpl::CountWeights(int64_t vocabulary, int64_t dim,
                                           const std::vector<int64_t>& cutoffs) {
  double count = 0;
  for (size_t band = 0; band <= cutoffs.size(); ++band) {
    const std::vector<int64_t> sizes =
        TableSizes(vocabulary, dim, cutoffs, static_cast<int64_t>(band));
    const auto columns = static_cast<double>(sizes[1]);
    // Each band except the first also has a projection and a row of `clusters`.
    const double more = band == 0 ? 0 : static_cast<double>(dim) * (columns + 1);
    count += static_cast<double>(sizes[0]) * columns + more;
  }
  return count;
}

}  // namespace gnomon::lab
