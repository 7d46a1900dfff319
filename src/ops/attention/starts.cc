#include "ops/attention/starts.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gnomon/attention.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/kept.h"
#include "ops/operators/kept_tensor.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

// The standard deviation of a query's logits for N(0, 1) tokens with gamma or beta = 1: the square
// root of the mean, over queries, of the variance over keys. Measured with the pair function, which
// works for any similarity.
double LogitSpread(const SimilarityEntry& entry, const Component& component, int64_t head_dim) {
  constexpr int64_t kTokens = 256;
  constexpr uint64_t kSeed = 20230906;
  // The caller's tracing and transforms must not affect these tokens.
  const c10::impl::ExcludeDispatchKeyGuard plain(
      c10::python_ks |
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                           c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::Functionalize}));
  const at::Generator generator = at::detail::createCPUGenerator(kSeed);
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor q = at::randn({1, 1, kTokens, head_dim}, generator, options);
  const at::Tensor k = at::randn({1, 1, kTokens, head_dim}, generator, options);
  std::vector<at::Tensor> others;
  for (const Parameter* parameter : entry.other_head_parameters()) {
    const Setting setting = SettingOf(component, *parameter);
    others.push_back(setting.kind == Setting::Kind::kNumber
                         ? at::full({1}, setting.number, options)
                         : parameter->tensor.start(component, {1, head_dim, 0, 0}).to(options));
  }
  const MappedTokens tokens = entry.Mapped(component, q, k, {at::ones({1}, options), others});
  const PairFunction& function = FindPairFunction(tokens.function);

  at::Tensor inputs = at::zeros({kTokens, kTokens}, options);
  if (function.input == PairInput::kInnerProduct) {
    inputs = at::matmul(tokens.x, tokens.y.transpose(2, 3)).contiguous();
  } else if (function.input == PairInput::kSquaredDistance) {
    inputs = at::cdist(tokens.x, tokens.y).square().contiguous();
  }
  const double* g = inputs.const_data_ptr<double>();
  // Converts (scalars, ...) to one row of scalars per token or head.
  const auto by_token = [](const at::Tensor& scalars) {
    return scalars.defined() ? scalars.reshape({scalars.size(0), -1}).t().contiguous() : scalars;
  };
  const at::Tensor rows = by_token(tokens.row_scalars);
  const at::Tensor columns = by_token(tokens.column_scalars);
  const at::Tensor heads = by_token(tokens.head_scalars);
  const auto scalars_of = [](const at::Tensor& scalars, int64_t token) {
    return scalars.defined() ? scalars.const_data_ptr<double>() + token * scalars.size(1) : nullptr;
  };
  double variance = 0;
  for (int64_t i = 0; i < kTokens; ++i) {
    double sum = 0;
    double squares = 0;
    for (int64_t j = 0; j < kTokens; ++j) {
      const double value = function.value(g[i * kTokens + j], scalars_of(rows, i),
                                          scalars_of(columns, j), scalars_of(heads, 0));
      sum += value;
      squares += value * value;
    }
    variance += squares / kTokens - (sum / kTokens) * (sum / kTokens);
  }
  // Rounding can make the variance of equal scores negative.
  return std::abs(tokens.factor.item<double>()) * std::sqrt(std::max(0.0, variance) / kTokens);
}

}  // namespace

Setting SettingOf(const Component& component, const Parameter& parameter) {
  using Kind = Setting::Kind;
  if (component.IsTensor(parameter.name)) return {&parameter, Kind::kTensor};
  const std::optional<std::string> value = component.Find(parameter.name);
  if (!value || !parameter.is_per_head()) return {&parameter};
  if (*value == "learned") return {&parameter, Kind::kLearned};
  if (*value == "fixed") return {&parameter, Kind::kFixed};
  return {&parameter, Kind::kNumber, component.Number(parameter.name)};
}

double HeadParameterStart(const SimilarityEntry& entry, const Component& component,
                          int64_t head_dim) {
  // Cached, because attention() calls use it as well.
  static Kept<std::pair<std::string, int64_t>, double> known;
  return known.Get({component.Text(), head_dim}, [&] {
    const double spread = LogitSpread(entry, component, head_dim);
    const Parameter* parameter = entry.head_parameter();
    TORCH_CHECK_VALUE(std::isfinite(spread) && spread > 0, "gnomon: the scores of ",
                      entry.catalogue.name, " for N(0, 1) tokens have a standard deviation of ",
                      spread, ", so ", parameter == nullptr ? "it" : parameter->name,
                      " has no initial value; pass a number or a tensor");
    return 1.0 / spread;
  });
}

at::Tensor StartOf(const Parameter& parameter, const Component& component,
                   const ModuleShape& shape) {
  const std::string& name = component.name();
  const CatalogueEntry* entry = FindCatalogueEntry(name);
  TORCH_CHECK_VALUE(entry == nullptr || !entry->needs_grid || component.Find("shape"),
                    "gnomon: ", name, " in a module needs a shape, as in ", name, ":shape=14x14");
  const at::Tensor start = parameter.tensor.start(component, shape);
  TORCH_CHECK_VALUE(start.defined() && (!parameter.is_per_head() ||
                                        (start.dim() == 1 && start.size(0) == shape.heads)),
                    "gnomon: the initial value of ", parameter.name, " of ", name, " has shape ",
                    start.defined() ? start.sizes() : at::IntArrayRef(), "; expected (H,) = (",
                    shape.heads, ",)");
  return start;
}

at::Tensor HeadValueIn(const at::Tensor& q, const Component& component, const Setting& setting,
                       const OptionalTensor& held) {
  if (setting.kind == Setting::Kind::kNumber) return HeadNumber(q, setting.number);
  if (held) return *held;
  // The initial values of per-head parameters do not depend on value_dim and max_length.
  const ModuleShape shape{SizeOf(q, 1), SizeOf(q, -1), /*value_dim=*/0, /*max_length=*/0};
  std::string key = component.Text() + "|" + setting.parameter->name;
  for (const int64_t number : {shape.heads, shape.head_dim}) {
    key.append("|").append(std::to_string(number));
  }
  return KeptTensor(key, q, [&] {
    return StartOf(*setting.parameter, component, shape).to(q.options().dtype(ComputingType(q)));
  });
}

}  // namespace gnomon
