#include "ops/attention/kept_tensor.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <tuple>

#include "base/kept.h"
#include "ops/attention/call_checks.h"
#include "ops/geometry/geometry.h"

namespace gnomon {

at::Tensor KeptTensor(const std::string& key, const at::Tensor& q,
                      const std::function<at::Tensor()>& make) {
  // Where a call is traced or transformed, its tensors are its own.
  if (!HasNumbers(q)) return make();
  static Kept<std::tuple<std::string, at::ScalarType, c10::DeviceType, c10::DeviceIndex>,
              at::Tensor>
      known;
  return known.Get({key, ComputingType(q), q.device().type(), q.device().index()}, [&] {
    // A tensor of inference mode would not serve a later call that records gradients.
    const c10::InferenceMode outside(false);
    const at::NoGradGuard no_grad;
    return make();
  });
}

at::Tensor HeadNumber(const at::Tensor& q, double number) {
  const auto make = [&] {
    return at::full_symint({q.sym_size(1)}, number, q.options().dtype(ComputingType(q)));
  };
  if (!HasNumbers(q)) return make();
  return KeptTensor(NumberText(number) + "|" + std::to_string(SizeOf(q, 1)), q, make);
}

}  // namespace gnomon
