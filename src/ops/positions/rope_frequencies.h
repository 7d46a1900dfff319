// The frequencies by which RoPE rotates pairs of coordinates, scaled for sequences longer than the
// training length.
#ifndef GNOMON_OPS_POSITIONS_ROPE_FREQUENCIES_H_
#define GNOMON_OPS_POSITIONS_ROPE_FREQUENCIES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/catalogue/registry.h"

namespace gnomon {

struct RotationFrequencies {
  at::Tensor of_pairs;          // (dims / 2,), radians per position
  double attention_factor = 1;  // multiplies q and k
};

// The frequencies of RoPE over `dims` columns, with the component's options and the dtype and
// device of `options`. `length` is one past the farthest position of the call, which "dynamic" and
// "longrope" use. Throws c10::ValueError.
RotationFrequencies FrequenciesOf(const Component& component, int64_t dims, int64_t length,
                                  const at::TensorOptions& options);

// Whether the frequencies depend on the length.
bool GoByLength(const Component& component);

// The parameters that FrequenciesOf reads.
std::vector<Parameter> FrequencyParameters();

}  // namespace gnomon

#endif  // GNOMON_OPS_POSITIONS_ROPE_FREQUENCIES_H_
