#ifndef GNOMON_OPS_ROPE_H_
#define GNOMON_OPS_ROPE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

#include "ops/component.h"

namespace gnomon {

// Rotates the first coordinates of x (B, H, L, D), whose first row stands at `position`, or at
// firsts[b] in each batch, as the component "rope:base=...:layout=...:dims=..." says (Su et al.
// 2021, eq. 34). The last coordinate stays where it is a height. Over a grid (shape and prefix)
// each axis rotates an equal part of the columns by its own coordinate.
at::Tensor Rotate(const Component& component, const at::Tensor& x, const c10::SymInt& position,
                  const std::optional<at::Tensor>& firsts, bool last_is_height);

}  // namespace gnomon

#endif  // GNOMON_OPS_ROPE_H_
