#include "ops/geometry/geometry.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "ops/operators/argument_list.h"
#include "ops/operators/kept_tensor.h"
#include "ops/operators/tensors.h"

namespace gnomon {

std::pair<at::Tensor, at::Tensor> SplitLast(const at::Tensor& x) {
  const c10::SymInt last = x.sym_size(-1) - 1;
  return {x.narrow_symint(-1, 0, last), x.select_symint(-1, last)};
}

at::Tensor SafeSqrt(const at::Tensor& x) {
  const at::Tensor positive = x > 0;
  return at::where(positive, at::where(positive, x, 1.0).sqrt(), 0.0);
}

at::Tensor SquaredNorm(const at::Tensor& x) { return x.square().sum(-1); }

Radius RadiusOf(const at::Tensor& x) {
  const at::Tensor square = SquaredNorm(x);
  const at::Tensor norm = SafeSqrt(square);
  const at::Tensor divisor = norm.clamp_min(kOrigin);
  return {x / OverColumns(divisor),
          at::where(norm > kOrigin, norm, square * (0.5 / kOrigin) + kOrigin / 2), divisor};
}

namespace {

template <class T>
void Multiply(const at::Tensor& heads, double number, at::Tensor& product) {
  const T* const from = heads.const_data_ptr<T>();
  const int64_t stride = heads.stride(0);
  T* const to = product.data_ptr<T>();
  for (int64_t h = 0; h < heads.size(0); ++h) to[h] = from[h * stride] * static_cast<T>(number);
}

// Whether the tensor is a lazy negation or a ZeroTensor, whose memory does not contain its values.
bool IsPromised(const at::Tensor& heads) {
  return heads.key_set().has_any(
      c10::DispatchKeySet({c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor}));
}

}  // namespace

at::Tensor TimesNumber(const at::Tensor& heads, double number) {
  const at::ScalarType type = heads.scalar_type();
  const bool known =
      heads.is_cpu() && HasNumbers(heads) && (type == at::kFloat || type == at::kDouble);
  const bool plain =
      known && heads.dim() == 1 && !IsPromised(heads) &&
      c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality) &&
      // torch.func transforms also exclude this key, although their own layers still record
      // operations.
      !(heads.requires_grad() && at::GradMode::is_enabled());
  if (!plain) {
    if (number == -1) return -heads;
    return known ? heads * KeptNumber(heads, number) : heads * number;
  }
  at::Tensor product = EmptyOnCpu(heads.sym_sizes(), type, heads, false);
  if (type == at::kDouble) {
    Multiply<double>(heads, number, product);
  } else {
    Multiply<float>(heads, number, product);
  }
  return product;
}

at::Tensor OverRows(const at::Tensor& heads) { return heads.unsqueeze(1); }

at::Tensor OverColumns(const at::Tensor& x) { return x.unsqueeze(3); }

at::Tensor OntoHyperboloid(const at::Tensor& sums) {
  // Squares of small sums would underflow, so the sums are first scaled by a power of 2, which is
  // exact.
  const at::Tensor most = sums.detach().abs().amax(-1, /*keepdim=*/true);
  const at::Tensor scale =
      at::where((most > 0).logical_and(most.isfinite()), most.log2().floor().exp2(), 1.0);
  const at::Tensor scaled = sums / scale;
  const at::Tensor square =
      (SquaredNorm(scaled.slice(-1, 1)) - scaled.select(-1, 0).square()).abs();
  const at::Tensor known = square > 0;
  return scaled * at::where(known, at::where(known, square, 1.0).rsqrt(), 0.0).unsqueeze(-1);
}

at::Tensor InUnitBall(const at::Tensor& x) {
  const double most = 1 - (x.scalar_type() == at::kDouble ? 1e-12 : 1e-5);
  return x * (most / SafeSqrt(SquaredNorm(x)).clamp_min(most)).unsqueeze(-1);
}

}  // namespace gnomon
