#include "ops/operators/kept_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <bit>
#include <cstdint>
#include <tuple>
#include <utility>

#include "base/kept.h"
#include "ops/operators/tensors.h"

namespace gnomon {

namespace {

template <class Key>
using KeptTensors =
    Kept<std::tuple<Key, at::ScalarType, c10::DeviceType, c10::DeviceIndex>, at::Tensor>;

// Caches tensors only if the values of q can be read; traced or transformed calls create their own
// tensors.
template <class Key, class Make>
at::Tensor Keep(KeptTensors<Key>* known, const Key& key, const at::Tensor& q, const Make& make) {
  return known->Get({key, ComputingType(q), q.device().type(), q.device().index()}, [&] {
    // An inference-mode tensor would be unusable in a later call that records gradients.
    const c10::InferenceMode outside(false);
    const at::NoGradGuard no_grad;
    return make();
  });
}

// Keys compare the bits, so that 0 and -0 are distinct.
uint64_t Bits(double number) { return std::bit_cast<uint64_t>(number); }

}  // namespace

at::Tensor KeptTensor(const std::string& key, const at::Tensor& q,
                      const std::function<at::Tensor()>& make) {
  if (!HasNumbers(q)) return make();
  static KeptTensors<std::string> known;
  return Keep(&known, key, q, make);
}

at::Tensor HeadNumber(const at::Tensor& q, double number) {
  const auto make = [&] {
    return at::full_symint({q.sym_size(1)}, number, q.options().dtype(ComputingType(q)));
  };
  if (!HasNumbers(q)) return make();
  static KeptTensors<std::pair<uint64_t, int64_t>> known;
  return Keep(&known, {Bits(number), SizeOf(q, 1)}, q, make);
}

at::Tensor KeptNumber(const at::Tensor& q, double number) {
  const auto make = [&] { return at::full({}, number, q.options().dtype(ComputingType(q))); };
  if (!HasNumbers(q)) return make();
  static KeptTensors<uint64_t> known;
  return Keep(&known, Bits(number), q, make);
}

}  // namespace gnomon
