// What the autograd kernels of the operators have in common.
#ifndef GNOMON_OPS_AUTOGRAD_H_
#define GNOMON_OPS_AUTOGRAD_H_

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>

namespace gnomon {

// Whether a call is to be recorded. Where it is not, leaving the graph alone saves a tenth of the
// time of attention over a few tokens.
template <size_t kCount>
bool RecordsGradients(const std::array<bool, kCount>& needed) {
  return at::GradMode::is_enabled() &&
         std::find(needed.begin(), needed.end(), true) != needed.end();
}

template <class Call>
auto BelowAutograd(const Call& call) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return call();
}

}  // namespace gnomon

#endif  // GNOMON_OPS_AUTOGRAD_H_
