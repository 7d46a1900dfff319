// Measurements for `gnomon bench`: peak FLOP/s, skipped pairs, and attention without token maps.
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

// Numbers of query-key pairs, rounded up to whole tiles: the pairs that the masks allow, and the
// pairs that were computed. The remaining pairs were skipped (AttentionOptions::tolerance). Both
// are 0 if no fused kernel ran.
struct PairCounts {
  int64_t seen = 0;
  int64_t computed = 0;
};

// Calls `run`, and counts the pairs of all attention calls, on all threads, until it returns.
PairCounts CountPairs(const std::function<void()>& run);

// Attention with tokens that were mapped in advance, to time the operator without the similarity's
// token map.
class MappedAttention {
 public:
  // q (B, H, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), float32; gamma (H,), the similarity's
  // first per-head parameter.
  MappedAttention(const std::string& similarity, const torch::Tensor& q, const torch::Tensor& k,
                  const torch::Tensor& v, const torch::Tensor& gamma);

  // The operator's inputs, leaf tensors that require grad: mapped tokens, values, and row and
  // column scalars, if any.
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
