// Measurements of the kernels, in addition to their times: `gnomon bench`.
#ifndef GNOMON_TORCH_MEASUREMENT_H_
#define GNOMON_TORCH_MEASUREMENT_H_

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gnomon {

// Runs a multiply-add loop, shaped like the kernels' fp32 GEMM with all operands in cache, on
// PyTorch's threads for about `seconds`. Returns floating-point operations per second.
double MeasurePeakFlops(double seconds);

// Counts of query-key pairs, in whole tiles: those visible under the masks, and those computed. The
// rest was skipped (AttentionOptions::tolerance). Both are 0 if no fused kernel ran.
struct PairCounts {
  int64_t seen = 0;
  int64_t computed = 0;
};

// The pairs of all calls, of all threads, while `run` runs.
PairCounts CountPairs(const std::function<void()>& run);

// A similarity applied to tokens that were mapped in advance: the time of the operator without its
// token map.
class MappedAttention {
 public:
  // q (B, H, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), float32; gamma (H,), the similarity's
  // first per-head parameter.
  MappedAttention(const std::string& similarity, const torch::Tensor& q, const torch::Tensor& k,
                  const torch::Tensor& v, const torch::Tensor& gamma);

  // The operator's inputs, leaves that require gradients: mapped tokens, values, and scalars of
  // rows and columns, if any.
  const std::vector<torch::Tensor>& inputs() const { return inputs_; }
  torch::Tensor operator()(bool causal) const;

 private:
  std::string function_;
  torch::Tensor factor_;
  std::vector<torch::Tensor> inputs_;
  bool has_row_scalars_;
  bool has_column_scalars_;
};

}  // namespace gnomon

#endif  // GNOMON_TORCH_MEASUREMENT_H_
