#ifndef GNOMON_OPS_LINEAR_LINEAR_ATTENTION_H_
#define GNOMON_OPS_LINEAR_LINEAR_ATTENTION_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <string>

#include "ops/operators/argument_list.h"

namespace gnomon {

struct LinearArguments {
  std::string feature;
  std::optional<std::string> rope;  // a component
  bool causal = false;
  OptionalTensor key_lengths;
  OptionalSymInt query_offset;
  std::optional<int64_t> num_features;
  std::optional<int64_t> seed;
  OptionalTensor projection;
};

at::Tensor LinearAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const LinearArguments& arguments);

}  // namespace gnomon

#endif  // GNOMON_OPS_LINEAR_LINEAR_ATTENTION_H_
