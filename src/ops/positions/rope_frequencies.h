// The frequencies by which RoPE turns pairs of coordinates, scaled for sequences longer than those
// of the training.
#ifndef GNOMON_OPS_POSITIONS_ROPE_FREQUENCIES_H_
#define GNOMON_OPS_POSITIONS_ROPE_FREQUENCIES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/catalogue/registry.h"

namespace gnomon {

struct RotationFrequencies {
  at::Tensor of_pairs;          // (dims / 2,), radians for each position
  double attention_factor = 1;  // multiplies q and k
};

// Of RoPE over `dims` columns, by the options of the component, in the type of `options`; `length`
// is one past the farthest position of the call, which "dynamic" and "longrope" go by. Throws
// c10::ValueError.
RotationFrequencies FrequenciesOf(const Component& component, int64_t dims, int64_t length,
                                  const at::TensorOptions& options);

// Whether they go by the length.
bool GoByLength(const Component& component);

// The parameters that it reads.
std::vector<Parameter> FrequencyParameters();

}  // namespace gnomon

#endif  // GNOMON_OPS_POSITIONS_ROPE_FREQUENCIES_H_
