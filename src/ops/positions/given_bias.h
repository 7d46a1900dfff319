// The bias of a position whose one tensor is the bias itself.
#ifndef GNOMON_OPS_POSITIONS_GIVEN_BIAS_H_
#define GNOMON_OPS_POSITIONS_GIVEN_BIAS_H_

#include <vector>

#include "ops/coordinates/offset_range.h"

namespace gnomon {

inline at::Tensor GivenBias(const Component& /*component*/, const std::vector<at::Tensor>& tensors,
                            const OffsetRange& /*range*/) {
  return tensors[0];
}

}  // namespace gnomon

#endif  // GNOMON_OPS_POSITIONS_GIVEN_BIAS_H_
