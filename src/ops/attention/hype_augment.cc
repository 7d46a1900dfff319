#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <cmath>
#include <utility>

#include "ops/attention/call_checks.h"
#include "ops/attention/hype_augment.h"
#include "ops/coordinates/token_grid.h"

namespace gnomon {

// Angelotti 2023, section 3: sinh is a difference of two exponentials. Each is the product of a
// query's factor and a key's factor, and so requires one additional column in q and k. On a grid,
// each axis requires two such columns.
std::tuple<at::Tensor, at::Tensor> HypeAugment(const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& tau, const at::Tensor& mu,
                                               int64_t copies, const std::vector<int64_t>& axes,
                                               const c10::SymInt& query_offset) {
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4, "gnomon.hype_augment: q has shape ",
                    q.sym_sizes(), " and k has shape ", k.sym_sizes(),
                    "; expected four axes, (batch, heads, length, head_dim)");
  CheckTokenType("gnomon.hype_augment", "q", q, q);
  CheckTokenType("gnomon.hype_augment", "k", k, q);
  TORCH_CHECK_VALUE(k.sym_size(0) == q.sym_size(0) && k.sym_size(3) == q.sym_size(3),
                    "gnomon.hype_augment: k has shape ", k.sym_sizes(),
                    "; expected (B, Hkv, Lk, D) with B and D as in q ", q.sym_sizes());
  TORCH_CHECK_VALUE(copies >= 1, "gnomon.hype_augment: copies is ", copies,
                    "; expected at least 1");
  const c10::SymInt heads = q.sym_size(1);
  const c10::SymInt key_heads = k.sym_size(1);
  TORCH_CHECK_VALUE(
      key_heads >= 1 && heads % key_heads == 0, "gnomon.hype_augment: q has ", heads,
      " heads and k has ", key_heads,
      "; expected the number of heads of q to be a multiple of the number of heads of k");
  for (const auto& [name, value] : {std::pair("tau", &tau), std::pair("mu", &mu)}) {
    TORCH_CHECK_VALUE(value->dim() == 0 || (value->dim() == 1 && value->sym_size(0) == heads),
                      "gnomon.hype_augment: ", name, " has shape ", value->sym_sizes(),
                      "; expected () or (H,) = (", heads, ",)");
    TORCH_CHECK_TYPE(value->is_floating_point(), "gnomon.hype_augment: ", name, " has dtype ",
                     value->scalar_type(), "; expected a floating-point dtype");
    TORCH_CHECK_TYPE(value->device() == q.device(), "gnomon.hype_augment: ", name, " is on ",
                     value->device(), ", but q is on ", q.device(), "; expected the same device");
  }
  const at::ScalarType dtype = q.scalar_type();
  const double head_dim = static_cast<double>(q.sym_size(3).guard_int(__FILE__, __LINE__));
  const auto over_tokens = [](const at::Tensor& heads_value) {
    return heads_value.to(at::kDouble).reshape({-1, 1});
  };
  // Returns mu times the coordinates, one tensor per axis.
  const auto angles = [&](const c10::SymInt& first, const at::Tensor& tokens) {
    std::vector<at::Tensor> coordinates;
    if (axes.empty()) {
      coordinates.push_back(
          at::arange(first, first + tokens.sym_size(2), tokens.options().dtype(at::kDouble)));
    } else {
      coordinates = TokenGrid(axes, 0).Coordinates("gnomon.hype_augment", first, tokens.sym_size(2),
                                                   tokens.options());
    }
    for (at::Tensor& coordinate : coordinates) coordinate = over_tokens(mu) * coordinate;
    return coordinates;
  };
  const auto with_columns = [&](const at::Tensor& tokens, const at::Tensor& columns) {
    const at::Tensor repeated = columns.repeat({1, 1, copies}).to(dtype).unsqueeze(0);
    return at::cat(
        {tokens, repeated.expand_symint({tokens.sym_size(0), tokens.sym_size(1), -1, -1})}, 3);
  };
  const at::Tensor factor =
      over_tokens(tau) * (std::sqrt(head_dim) / (2 * static_cast<double>(copies)));
  std::vector<at::Tensor> query_columns;
  for (const at::Tensor& angle : angles(query_offset, q)) {
    query_columns.push_back(-factor * angle.exp());
    query_columns.push_back(factor * (-angle).exp());
  }
  std::vector<at::Tensor> key_columns;
  for (const at::Tensor& angle : angles(0, k)) {
    key_columns.push_back((-angle).exp());
    key_columns.push_back(angle.exp());
  }
  const at::Tensor keys = mu.dim() == 0 ? k : k.repeat_interleave_symint(heads / key_heads, 1);
  return {with_columns(q, at::stack(query_columns, 2)),
          with_columns(keys, at::stack(key_columns, 2))};
}

std::tuple<torch::Tensor, torch::Tensor> hype_augment(const torch::Tensor& q,
                                                      const torch::Tensor& k, const HeadValue& tau,
                                                      const HeadValue& mu, int64_t copies,
                                                      const std::vector<int64_t>& axes,
                                                      int64_t query_offset) {
  const auto as_tensor = [&](const HeadValue& value) {
    return value.is_number() ? at::scalar_tensor(value.number(), q.options().dtype(at::kDouble))
                             : value.tensor();
  };
  return HypeAugment(q, k, as_tensor(tau), as_tensor(mu), copies, axes, query_offset);
}

}  // namespace gnomon
