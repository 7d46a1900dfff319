#include "ops/positions/rope_frequencies.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>
#include <string>

namespace gnomon {
namespace {

// The value of a parameter that the scaling requires.
double Needed(const Component& component, const char* name) {
  const std::optional<double> number = component.FindNumber(name);
  TORCH_CHECK_VALUE(number, "gnomon.attention: RoPE has scaling=", component.Choice("scaling"),
                    ", which needs ", name, "; expected a number");
  return *number;
}

double NumberOr(const Component& component, const char* name, double otherwise) {
  return component.FindNumber(name).value_or(otherwise);
}

// Su et al. 2021, section 3.2.2.
at::Tensor Plain(double base, int64_t dims, const at::TensorOptions& options) {
  const double step = -2.0 / static_cast<double>(dims);
  return (at::arange(dims / 2, options) * step * std::log(base)).exp();
}

// A larger base, which slows the slowest pair by the factor `stretch` and leaves the fastest pair
// unchanged.
double NtkBase(double base, int64_t dims, double stretch) {
  const auto columns = static_cast<double>(dims);
  return dims > 2 ? base * std::pow(stretch, columns / (columns - 2)) : base;
}

// Peng et al. 2023, sections 3.2 and 3.4: pairs that rotate often within the original length keep
// their frequency, and pairs that complete less than one turn are slowed by the factor, with a ramp
// in between.
RotationFrequencies Yarn(const Component& component, double base, int64_t dims,
                         const at::TensorOptions& options) {
  const double factor = Needed(component, "factor");
  const double original = Needed(component, "original_max_position_embeddings");
  const auto columns = static_cast<double>(dims);
  // The pair that completes this many turns within the original length.
  const auto pair_of = [&](double turns) {
    return columns * std::log(original / (turns * 2 * std::numbers::pi)) / (2 * std::log(base));
  };
  double low = pair_of(component.Number("beta_fast"));
  double high = pair_of(component.Number("beta_slow"));
  if (component.Flag("truncate")) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, columns - 1);
  if (low == high) high += 0.001;
  const at::Tensor slowed = ((at::arange(dims / 2, options) - low) / (high - low)).clamp(0, 1);
  const auto scale = [&](double weight) {
    return factor <= 1 ? 1.0 : 0.1 * weight * std::log(factor) + 1;
  };
  const double mscale = NumberOr(component, "mscale", 0);
  const double mscale_all_dim = NumberOr(component, "mscale_all_dim", 0);
  const double by_default =
      mscale != 0 && mscale_all_dim != 0 ? scale(mscale) / scale(mscale_all_dim) : scale(1);
  return {Plain(base, dims, options) * (slowed / factor + (1 - slowed)),
          NumberOr(component, "attention_factor", by_default)};
}

// Ding et al. 2024: a factor per pair, found by search, with separate sets for short and long
// sequences.
RotationFrequencies LongRope(const Component& component, double base, int64_t dims, int64_t length,
                             const at::TensorOptions& options) {
  const double original = Needed(component, "original_max_position_embeddings");
  // Both sets are read, so that errors are found before a long sequence occurs.
  const auto read = [&](const char* name) {
    const std::optional<std::vector<double>> factors = component.FindNumbers(name);
    TORCH_CHECK_VALUE(factors && static_cast<int64_t>(factors->size()) == dims / 2,
                      "gnomon.attention: RoPE has scaling=longrope, but ", name, " has ",
                      factors ? factors->size() : 0, " elements; expected dims / 2 = ", dims / 2,
                      " numbers, joined by x");
    return *factors;
  };
  const std::vector<double> short_factor = read("short_factor");
  const std::vector<double> long_factor = read("long_factor");
  std::vector<at::Tensor> divisors;
  for (const double number : static_cast<double>(length) > original ? long_factor : short_factor) {
    divisors.push_back(at::scalar_tensor(number, options));
  }
  const double factor = NumberOr(component, "factor", 1);
  return {Plain(base, dims, options) / at::stack(divisors),
          NumberOr(component, "attention_factor",
                   factor <= 1 ? 1.0 : std::sqrt(1 + std::log(factor) / std::log(original)))};
}

// Grattafiori et al. 2024 (Llama 3.1): scales by wavelength, with a ramp between two thresholds.
RotationFrequencies Llama3(const Component& component, double base, int64_t dims,
                           const at::TensorOptions& options) {
  const double factor = Needed(component, "factor");
  const double original = Needed(component, "original_max_position_embeddings");
  const double low = component.Number("low_freq_factor");
  const double high = component.Number("high_freq_factor");
  TORCH_CHECK_VALUE(low < high, "gnomon.attention: RoPE has low_freq_factor ", low,
                    " and high_freq_factor ", high, "; expected low_freq_factor to be smaller");
  const at::Tensor frequencies = Plain(base, dims, options);
  const at::Tensor turns = frequencies * (original / (2 * std::numbers::pi));
  const at::Tensor kept = ((turns - low) / (high - low)).clamp(0, 1);
  return {frequencies * (kept + (1 - kept) / factor)};
}

// Gemma 4: only the fastest fraction of the pairs rotates.
RotationFrequencies Proportional(const Component& component, double base, int64_t dims,
                                 const at::TensorOptions& options) {
  const double share = component.Number("partial_rotary_factor");
  TORCH_CHECK_VALUE(share <= 1, "gnomon.attention: RoPE has partial_rotary_factor ", share,
                    "; expected at most 1");
  // Rounds as the published code does.
  const double turning = std::floor(share * static_cast<double>(dims) / 2);
  const at::Tensor turns = at::arange(dims / 2, options) < turning;
  return {Plain(base, dims, options) * turns / NumberOr(component, "factor", 1)};
}

}  // namespace

bool GoByLength(const Component& component) {
  const std::string scaling = component.Choice("scaling");
  return scaling == "dynamic" || scaling == "longrope";
}

RotationFrequencies FrequenciesOf(const Component& component, int64_t dims, int64_t length,
                                  const at::TensorOptions& options) {
  const double base = component.Number("base");
  const std::string scaling = component.Choice("scaling");
  if (scaling == "none") return {Plain(base, dims, options)};
  if (scaling == "yarn") return Yarn(component, base, dims, options);
  if (scaling == "longrope") return LongRope(component, base, dims, length, options);
  if (scaling == "llama3") return Llama3(component, base, dims, options);
  if (scaling == "proportional") return Proportional(component, base, dims, options);
  const double factor = Needed(component, "factor");
  if (scaling == "ntk") return {Plain(NtkBase(base, dims, factor), dims, options)};
  if (scaling == "dynamic") {
    const double original = Needed(component, "original_max_position_embeddings");
    const double stretch =
        factor * std::max(static_cast<double>(length), original) / original - (factor - 1);
    return {Plain(NtkBase(base, dims, stretch), dims, options)};
  }
  TORCH_INTERNAL_ASSERT(scaling == "linear", scaling);
  return {Plain(base, dims, options) / factor};
}

std::vector<Parameter> FrequencyParameters() {
  Parameter scaling = Choice("scaling", {"none", "linear", "ntk", "dynamic", "yarn", "longrope",
                                         "llama3", "proportional"});
  scaling.meaning =
      "how frequencies are scaled for sequences longer than the training length, with parameters "
      "named as in transformers: \"yarn:factor=4:original_max_position_embeddings=2048\". The "
      "frequencies of dynamic and longrope depend on the last position of the call";
  const std::vector<std::string> all(scaling.choices.begin() + 1, scaling.choices.end());
  const auto detail = [&](Parameter parameter, const std::vector<std::string>& read_by,
                          const std::string& meaning, const char* otherwise = "") {
    std::string readers;
    for (const std::string& name : read_by) readers += (readers.empty() ? "" : ", ") + name;
    parameter.meaning = read_by == all ? meaning : readers + ": " + meaning;
    parameter.otherwise = otherwise;
    parameter.detail_of = "scaling";
    parameter.read_by = read_by;
    parameter.argument = CatalogueParameter::Argument::kNone;
    return parameter;
  };
  return {
      scaling,
      detail(PositiveNumber("factor", ""), all, "ratio of the new length to the training length",
             "1 for longrope and proportional; otherwise, required"),
      detail(PositiveNumber("original_max_position_embeddings", ""),
             {"dynamic", "yarn", "longrope", "llama3"}, "the training length", "required"),
      detail(PositiveNumber("attention_factor", ""), {"yarn", "longrope"},
             "factor applied to the rotated coordinates of q and k", "derived from factor"),
      detail(PositiveNumber("beta_fast", "32"), {"yarn"},
             "pairs with at least this many rotations within the training length keep their "
             "frequency"),
      detail(PositiveNumber("beta_slow", "1"), {"yarn"},
             "for pairs with at most this many rotations within the training length, the frequency "
             "is divided by the factor"),
      detail(Flag("truncate", "true"), {"yarn"},
             "whether the limits set by beta_fast and beta_slow are rounded to whole pairs"),
      detail(PositiveNumber("mscale", ""), {"yarn"},
             "coefficient in the numerator of the attention factor", "none"),
      detail(PositiveNumber("mscale_all_dim", ""), {"yarn"},
             "coefficient in the denominator of the attention factor", "none"),
      detail(PositiveNumber("low_freq_factor", "1"), {"llama3"},
             "for pairs with fewer rotations than this within the training length, the frequency "
             "is divided by the factor"),
      detail(PositiveNumber("high_freq_factor", "4"), {"llama3"},
             "pairs with more rotations than this within the training length keep their frequency"),
      detail(PositiveNumber("partial_rotary_factor", "1"), {"proportional"},
             "fraction of pairs that are rotated"),
      detail(Numbers("short_factor"), {"longrope"},
             "divisors of the pairs' frequencies, for calls up to the training length", "required"),
      detail(Numbers("long_factor"), {"longrope"},
             "divisors of the pairs' frequencies, for longer calls", "required"),
  };
}

}  // namespace gnomon
