#ifndef GNOMON_OPS_ATTENTION_HYPE_AUGMENT_H_
#define GNOMON_OPS_ATTENTION_HYPE_AUGMENT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace gnomon {

// gnomon::hype_augment with tau and mu as tensors, () or (H,). If mu is (), k is not expanded to
// the heads of q. Without axes, tokens form a sequence.
std::tuple<at::Tensor, at::Tensor> HypeAugment(const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& tau, const at::Tensor& mu,
                                               int64_t copies, const std::vector<int64_t>& axes,
                                               const c10::SymInt& query_offset);

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_HYPE_AUGMENT_H_
