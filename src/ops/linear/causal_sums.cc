// Causal linear attention, and the sums that compute it and its gradients. The gradients of such
// sums are sums of the same kind, reversed for keys and values:
//   d_x_i = sum_j (d_i . z_j) y_j, d_y_j = sum_i (z_j . d_i) x_i, d_z_j = sum_i (y_j . x_i) d_i.
// Autograd saves only arguments and outputs; features are recomputed.
#include "ops/linear/causal_sums.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>

#include "core/causal_sums.h"
#include "ops/operators/autograd.h"
#include "ops/operators/executor.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Repeats key heads for the query heads of their groups: (B, Hkv, ...) to (B, H, ...). SumGroups is
// the transpose.
at::Tensor Repeat(const at::Tensor& x, const c10::SymInt& heads) {
  return x.sym_size(1) == heads ? x : x.repeat_interleave_symint(heads / x.sym_size(1), 1);
}
at::Tensor SumGroups(const at::Tensor& x, const c10::SymInt& key_heads) {
  if (x.sym_size(1) == key_heads) return x;
  return x.unflatten_symint(1, {key_heads, x.sym_size(1) / key_heads}).sum(2);
}

View<const float> Rows(const at::Tensor& x) {
  return {x.const_data_ptr<float>(), {x.stride(0), x.stride(1), x.stride(2)}};
}

void Check(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z) {
  TORCH_CHECK_VALUE(x.dim() == 4 && y.dim() == 4 && z.dim() == 4 &&
                        (y.size(1) > 0 ? x.size(1) % y.size(1) == 0 : x.size(1) == 0),
                    kLinearAttention, ": x, y and z have shapes ", x.sizes(), ", ", y.sizes(),
                    " and ", z.sizes(),
                    "; expected four axes each, and the number of heads of x to be a multiple of "
                    "the number of heads of y");
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, kLinearAttention, ": x has dtype ",
                   dtype, "; expected float32 or float64");
  AxisLengths<int64_t> lengths;
  ExpectTensor(kLinearAttention, "x", x, "B H L D", dtype, lengths);
  ExpectTensor(kLinearAttention, "y", y, "B G L D", dtype, lengths);
  ExpectTensor(kLinearAttention, "z", z, "B G L V", dtype, lengths);
}

void Run(const at::Tensor& x_in, const at::Tensor& y_in, const at::Tensor& z_in, Feature feature,
         bool reverse, at::Tensor& out, float* denominator) {
  const at::Tensor x = WithRows(x_in);
  const at::Tensor y = WithRows(y_in);
  const at::Tensor z = WithRows(z_in);
  CausalSums sums;
  sums.batch = x.size(0);
  sums.heads = x.size(1);
  sums.key_heads = y.size(1);
  sums.rows = x.size(2);
  sums.dim = x.size(3);
  sums.value_dim = z.size(3);
  sums.x = Rows(x);
  sums.y = Rows(y);
  sums.z = Rows(z);
  sums.feature = feature;
  sums.reverse = reverse;
  sums.out = {MutableData<float>(out), {out.stride(0), out.stride(1), out.stride(2)}};
  sums.denominator = denominator;
  SumCausally(sums, TorchExecutor());
}

// Computes the sums with PyTorch operators, for float64 and GPUs: the products within each chunk,
// plus the sums over the previous chunks.
at::Tensor SumsByChunks(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z,
                        bool reverse) {
  constexpr int64_t kRows = 64;
  const int64_t length = x.size(2);
  at::Tensor out = at::empty({x.size(0), x.size(1), length, z.size(3)}, x.options());
  const at::Tensor keys = Repeat(y, x.size(1));
  const at::Tensor values = Repeat(z, x.size(1));
  at::Tensor state = at::zeros({x.size(0), x.size(1), x.size(3), z.size(3)}, x.options());
  const int64_t chunks = (length + kRows - 1) / kRows;
  for (int64_t n = 0; n < chunks; ++n) {
    const int64_t begin = (reverse ? chunks - 1 - n : n) * kRows;
    const int64_t rows = std::min(kRows, length - begin);
    const at::Tensor query = x.narrow(2, begin, rows);
    const at::Tensor turned = keys.narrow(2, begin, rows).transpose(2, 3);
    const at::Tensor value = values.narrow(2, begin, rows);
    const at::Tensor products = query.matmul(turned);
    out.narrow(2, begin, rows)
        .copy_((reverse ? products.triu() : products.tril()).matmul(value) + query.matmul(state));
    state += turned.matmul(value);
  }
  return out;
}

at::Tensor SumsCpu(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z, bool reverse) {
  Check(x, y, z);
  if (x.scalar_type() == at::kDouble) return SumsByChunks(x, y, z, reverse);
  at::Tensor out = at::empty({x.size(0), x.size(1), x.size(2), z.size(3)}, x.options());
  Run(x, y, z, Feature::kNone, reverse, out, nullptr);
  return out;
}

at::Tensor SumsMeta(const at::Tensor& x, const at::Tensor& /*y*/, const at::Tensor& z,
                    bool /*reverse*/) {
  return at::empty_symint({x.sym_size(0), x.sym_size(1), x.sym_size(2), z.sym_size(3)},
                          x.options());
}

std::tuple<at::Tensor, at::Tensor> LinearMeta(const at::Tensor& q, const at::Tensor& k,
                                              const at::Tensor& v, std::string_view /*feature*/) {
  return {SumsMeta(q, k, v, false),
          at::empty_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), 1}, q.options())};
}

std::tuple<at::Tensor, at::Tensor> LinearByChunks(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v, std::string_view feature) {
  const at::Tensor x = Features(q, feature);
  const at::Tensor y = Features(k, feature);
  const at::Tensor denominator = SumsByChunks(x, y, at::ones_like(k.narrow(3, 0, 1)), false);
  const at::Tensor o = SumsByChunks(x, y, v, false) / denominator;
  return {o.masked_fill(denominator == 0, 0), denominator};
}

std::tuple<at::Tensor, at::Tensor> LinearCpu(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, std::string_view feature) {
  Check(q, k, v);
  if (q.scalar_type() == at::kDouble) return LinearByChunks(q, k, v, feature);
  auto [o, denominator] = LinearMeta(q, k, v, feature);
  Run(q, k, v, feature == "relu" ? Feature::kRelu : Feature::kElu, /*reverse=*/false, o,
      MutableData<float>(denominator));
  return {o, denominator};
}

at::Tensor SumsCuda(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z, bool reverse) {
  Check(x, y, z);
  return SumsByChunks(x, y, z, reverse);
}

std::tuple<at::Tensor, at::Tensor> LinearCuda(const at::Tensor& q, const at::Tensor& k,
                                              const at::Tensor& v, std::string_view feature) {
  Check(q, k, v);
  return LinearByChunks(q, k, v, feature);
}

class SumsFunction : public torch::autograd::Function<SumsFunction> {
 public:
  // `call`: the output, and x, y and z with their tangents.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*x*/,
                            const at::Tensor& /*y*/, const at::Tensor& /*z*/, bool reverse,
                            const std::tuple<at::Tensor, variable_list>& call) {
    context->save_for_backward(std::get<1>(call));
    context->saved_data["reverse"] = reverse;
    return std::get<0>(call);
  }

  static variable_list backward(AutogradContext* context, const variable_list& d_outputs) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& d = d_outputs[0];
    const at::Tensor& x = saved[0];
    const at::Tensor& y = saved[1];
    const at::Tensor& z = saved[2];
    const bool reverse = context->saved_data["reverse"].toBool();
    const auto of_keys = [&](const at::Tensor& left, const at::Tensor& right,
                             const at::Tensor& value) {
      return SumGroups(CallCausalSums(Repeat(left, x.sym_size(1)), right, value, !reverse),
                       y.sym_size(1));
    };
    variable_list gradients(5);
    if (context->needs_input_grad(0)) gradients[0] = CallCausalSums(d, z, y, reverse);
    if (context->needs_input_grad(1)) gradients[1] = of_keys(z, d, x);
    if (context->needs_input_grad(2)) gradients[2] = of_keys(y, x, d);
    return gradients;
  }
};

// The gradient of a feature's argument, from the feature and its gradient.
at::Tensor FeatureGradient(const at::Tensor& d, const at::Tensor& feature, std::string_view name) {
  return name == "relu" ? d * (feature > 0) : d * feature.clamp_max(1);
}

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, std::string feature,
                               const std::tuple<at::Tensor, at::Tensor>& outputs) {
    const auto& [o, denominator] = outputs;
    context->save_for_backward({q, k, v, o, denominator});
    context->saved_data["feature"] = std::move(feature);
    context->set_materialize_grads(false);
    return {o, denominator};
  }

  static variable_list backward(AutogradContext* context, const variable_list& d_outputs) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& q = saved[0];
    const at::Tensor& k = saved[1];
    const at::Tensor& v = saved[2];
    const at::Tensor& o = saved[3];
    const at::Tensor& denominator = saved[4];
    const std::string& feature = context->saved_data["feature"].toStringRef();
    const at::Tensor d_o = d_outputs[0].defined() ? d_outputs[0] : at::zeros_like(o);
    const at::Tensor none_seen = denominator == 0;
    const at::Tensor d_numerator =
        d_o * denominator.masked_fill(none_seen, 1).reciprocal().masked_fill(none_seen, 0);
    at::Tensor d_denominator = -(d_numerator * o).sum(3, /*keepdim=*/true);
    if (d_outputs[1].defined()) d_denominator = d_denominator + d_outputs[1];

    const at::Tensor x = Features(q, feature);
    const at::Tensor y = Features(k, feature);
    const bool needs_query = context->needs_input_grad(0);
    const bool needs_key = context->needs_input_grad(1);
    const auto of_keys = [&](const at::Tensor& left, const at::Tensor& right,
                             const at::Tensor& value) {
      return SumGroups(CallCausalSums(Repeat(left, q.sym_size(1)), right, value, /*reverse=*/true),
                       k.sym_size(1));
    };
    variable_list gradients(5);
    if (needs_query || needs_key) {
      // The denominator equals the numerator with values of 1.
      const at::Tensor value = at::cat({v, at::ones_like(v.narrow(3, 0, 1))}, 3);
      const at::Tensor d = at::cat({d_numerator, d_denominator}, 3);
      if (needs_query) {
        gradients[0] = FeatureGradient(CallCausalSums(d, value, y, /*reverse=*/false), x, feature);
      }
      if (needs_key) gradients[1] = FeatureGradient(of_keys(value, d, x), y, feature);
    }
    if (context->needs_input_grad(2)) gradients[2] = of_keys(y, x, d_numerator);
    return gradients;
  }
};

std::array<bool, 3> Needed(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z) {
  return {x.requires_grad(), y.requires_grad(), z.requires_grad()};
}

at::Tensor SumsAutograd(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z,
                        bool reverse) {
  const bool has_tangents = HasTangent(x) || HasTangent(y) || HasTangent(z);
  const auto primal = [](const at::Tensor& tensor) {
    return HasTangent(tensor) ? tensor._fw_primal(/*level=*/0) : tensor;
  };
  const at::Tensor primals[] = {primal(x), primal(y), primal(z)};
  at::Tensor output =
      BelowAutograd([&] { return CallCausalSums(primals[0], primals[1], primals[2], reverse); });
  if (RecordsGradients(Needed(x, y, z))) {
    // The tuple hides the output from autograd, which would otherwise treat it as an input.
    output = ApplyFunction<SumsFunction>(primals[0], primals[1], primals[2], reverse,
                                         std::tuple(output, variable_list{x, y, z}));
  }
  if (!has_tangents) return output;
  // The sums are linear in each argument.
  at::Tensor tangent;
  for (size_t n = 0; n < 3; ++n) {
    const at::Tensor direction = (n == 0 ? x : n == 1 ? y : z)._fw_grad(/*level=*/0);
    if (!direction.defined()) continue;
    const at::Tensor term =
        CallCausalSums(n == 0 ? direction : primals[0], n == 1 ? direction : primals[1],
                       n == 2 ? direction : primals[2], reverse);
    tangent = tangent.defined() ? tangent + term : term;
  }
  output._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
  return output;
}

std::tuple<at::Tensor, at::Tensor> LinearAutograd(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v, std::string_view feature) {
  if (HasTangent(q) || HasTangent(k) || HasTangent(v)) {
    const at::Tensor x = Features(q, feature);
    const at::Tensor y = Features(k, feature);
    const at::Tensor one = at::ones_like(k.narrow(3, 0, 1));
    const at::Tensor denominator = CallCausalSums(x, y, one, /*reverse=*/false);
    const at::Tensor none_seen = denominator == 0;
    const at::Tensor o =
        CallCausalSums(x, y, v, /*reverse=*/false) / denominator.masked_fill(none_seen, 1);
    return {o.masked_fill(none_seen, 0), denominator};
  }
  const auto outputs = BelowAutograd([&] { return CallCausalLinear(q, k, v, feature); });
  if (!RecordsGradients(Needed(q, k, v))) return outputs;
  const variable_list recorded =
      ApplyFunction<LinearFunction>(q, k, v, std::string(feature), outputs);
  return {recorded[0], recorded[1]};
}

}  // namespace

at::Tensor Features(const at::Tensor& x, std::string_view feature) {
  if (feature == "relu") return x.relu();
  // Either the first term is 1 or the second is 0, so nothing cancels. exp_ can work in place,
  // because the clamped values are not needed later.
  return x.clamp_max(0).exp_() + x.relu();
}

at::Tensor CallCausalSums(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z,
                          bool reverse) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("gnomon::causal_sums", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool)>();
  return op.call(x, y, z, reverse);
}

std::tuple<at::Tensor, at::Tensor> CallCausalLinear(const at::Tensor& q, const at::Tensor& k,
                                                    const at::Tensor& v, std::string_view feature) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("gnomon::causal_linear", "")
          .typed<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                    const at::Tensor&, std::string_view)>();
  return op.call(q, k, v, feature);
}

TORCH_LIBRARY_IMPL(gnomon, CPU, m) {
  m.impl("causal_sums", SumsCpu);
  m.impl("causal_linear", LinearCpu);
}

TORCH_LIBRARY_IMPL(gnomon, CUDA, m) {
  m.impl("causal_sums", SumsCuda);
  m.impl("causal_linear", LinearCuda);
}

TORCH_LIBRARY_IMPL(gnomon, Meta, m) {
  m.impl("causal_sums", SumsMeta);
  m.impl("causal_linear", LinearMeta);
}

TORCH_LIBRARY_IMPL(gnomon, Autograd, m) {
  m.impl("causal_sums", SumsAutograd);
  m.impl("causal_linear", LinearAutograd);
}

}  // namespace gnomon
