// Random problems (core/random_problem.h), run by the CUDA kernels in the emulator.
#ifndef GNOMON_TESTS_CUDA_CUDA_PROBLEM_H_
#define GNOMON_TESTS_CUDA_CUDA_PROBLEM_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/random_problem.h"
#include "cuda/attention.h"
#include "emulation.h"
#include "gnomon/attention.h"
#include "gtest/gtest.h"

namespace gnomon::testing {

using cuda::Element;

inline constexpr Element kElements[] = {Element::kFloat32, Element::kBFloat16, Element::kFloat16};

inline const char* NameOf(Element element) {
  switch (element) {
    case Element::kFloat32:
      return "Float32";
    case Element::kBFloat16:
      return "Bfloat16";
    default:
      return "Float16";
  }
}

// Whether to test all cases, with GNOMON_CUDA_FORMS=all, rather than a selection.
inline bool TestsAllForms() {
  const char* const forms = std::getenv("GNOMON_CUDA_FORMS");
  return forms != nullptr && std::string_view(forms) == "all";
}

inline float Rounded(float x, Element element) {
  const int type = static_cast<int>(element);
  return type == 0 ? x : device::Widen(device::Narrow(x, type), type);
}

// The numbers of an Array, converted to the element type, with the same layout.
class Elements {
 public:
  Elements(const Array<float>& like, Element element)
      : element_(element), stride_(like.view().stride), floats_(like.data()) {
    if (element == Element::kFloat32) return;
    for (const float x : floats_) bits_.push_back(device::Narrow(x, static_cast<int>(element)));
  }

  cuda::Tensor tensor() { return {data(), stride_}; }
  Tokens tokens() { return {data(), stride_, element_}; }

  // Copies the numbers to an Array with the same sizes.
  void CopyTo(Array<float>* to) {
    std::vector<float> numbers = floats_;
    if (element_ != Element::kFloat32) {
      for (size_t n = 0; n < bits_.size(); ++n) {
        numbers[n] = device::Widen(bits_[n], static_cast<int>(element_));
      }
    }
    if (!numbers.empty()) {
      std::memcpy(to->view().data, numbers.data(), numbers.size() * sizeof(float));
    }
  }

 private:
  void* data() {
    return element_ == Element::kFloat32 ? static_cast<void*>(floats_.data()) : bits_.data();
  }

  Element element_;
  std::array<int64_t, 3> stride_;
  std::vector<float> floats_;
  std::vector<uint16_t> bits_;
};

// A page table with pages in any order, and keys or values in its pages. The first page is unused,
// entries whose keys are all hidden are no pages, and rows of hidden keys are NaN.
class PageTable {
 public:
  // `size` must divide the number of keys.
  PageTable(const ProblemOptions& options, int64_t size) : options_(options), size_(size) {
    for (int64_t b = 0; b < options.shape.batch; ++b) {
      for (int64_t n = 0; n < columns(); ++n) {
        const bool is_seen = n * size < high(b) && (n + 1) * size > low(b);
        const int64_t page = count() - 1 - (n * options.shape.batch + b);
        entries_.push_back(is_seen ? page : n % 2 == 0 ? -1 - n : count() + n);
      }
    }
  }

  cuda::Input::Pages pages() const { return {entries_.data(), count(), size_}; }

  Array<float> InPages(const Array<float>& tokens) const {
    const auto [batch, heads, keys, width] = tokens.size();
    Array<float> pages({count(), heads, size_, width}, tokens.padded(), kNan);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t j = low(b); j < high(b); ++j) {
        const int64_t page = entries_[static_cast<size_t>(b * columns() + j / size_)];
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t d = 0; d < width; ++d) {
            pages.at(page, h, j % size_, d) = tokens.at(b, h, j, d);
          }
        }
      }
    }
    return pages;
  }

 private:
  int64_t columns() const { return options_.shape.keys / size_; }
  int64_t count() const { return 1 + options_.shape.batch * columns(); }
  int64_t low(int64_t b) const {
    return options_.key_starts.empty() ? 0 : options_.key_starts[static_cast<size_t>(b)];
  }
  int64_t high(int64_t b) const {
    return options_.key_lengths.empty() ? options_.shape.keys
                                        : options_.key_lengths[static_cast<size_t>(b)];
  }

  const ProblemOptions& options_;
  int64_t size_;
  std::vector<int64_t> entries_;
};

struct CudaOptions {
  Element element = Element::kFloat32;
  EmulatedOrder order = {};
  bool fills = false;  // whether one block counts as enough to fill a GPU
  bool is_hopper = false;
  bool keeps_exact_o = true;
  bool precise = true;  // Output::precise
  bool keeps_statistics = true;
  bool forward_only = false;
  bool keeps_factor = false;                 // whether the gradient of the factor is not computed
  int64_t table_numbers = int64_t{1} << 24;  // Input::most_table_numbers
  int64_t skipping_keys = 4096;              // Input::least_skipping_keys
  int64_t page_size = 0;                     // if positive, keys and values are in pages
  std::vector<float>* statistics = nullptr;  // receives the forward pass's statistics
  std::string only = "";                     // the gradient to compute; if empty, all
};

// Like Problem::Run, with the CUDA kernels.
inline Results<float> RunCuda(const Problem<float>& p, const CudaOptions& how,
                              EmulatedBackend* used = nullptr) {
  const ProblemOptions& options = p.options;
  EmulatedBackend own(how.order, how.fills ? 1 : 264, how.is_hopper);
  EmulatedBackend& backend = used != nullptr ? *used : own;
  Elements x(p.x, how.element);
  Elements y(p.y, how.element);
  Elements v(p.v, how.element);
  Elements d_o(p.d_o, how.element);
  Elements relative_query(p.relative_query, how.element);
  Elements relative_key(p.relative_key, how.element);
  cuda::Input in(p.Input());
  in.x = x.tokens();
  in.y = y.tokens();
  in.v = v.tokens();
  in.relative_query = relative_query.tokens();
  in.relative_key = relative_key.tokens();
  in.most_table_numbers = how.table_numbers;
  in.least_skipping_keys = how.skipping_keys;
  const bool has_pages = how.page_size > 0;
  const PageTable table(options, has_pages ? how.page_size : 1);
  Elements y_pages(has_pages ? table.InPages(p.y) : Array<float>(), how.element);
  Elements v_pages(has_pages ? table.InPages(p.v) : Array<float>(), how.element);
  if (has_pages) {
    in.y = y_pages.tokens();
    in.v = v_pages.tokens();
    in.pages = table.pages();
  }

  Array<float> o(p.d_o.size(), options.padded, kNan);
  Elements o_elements(o, how.element);
  std::vector<float> lse(p.d_lse.size(), kNan);
  std::vector<float> statistics(3 * lse.size(), kNan);
  std::vector<float> exact_o(lse.size() * static_cast<size_t>(options.shape.value_dim), kNan);
  Forward(p.function, in,
          {o_elements.tensor(), how.keeps_exact_o ? exact_o.data() : nullptr, lse.data(),
           statistics.data(), how.precise},
          backend);
  if (how.statistics != nullptr) *how.statistics = statistics;
  Results<float> results;
  results["lse"] = lse;
  if (how.forward_only) {
    o_elements.CopyTo(&o);
    results["o"] = o.TakeOutput();
    return results;
  }

  const auto wanted = [&](const char* name) {
    if (how.keeps_factor &&
        (std::strcmp(name, "d_factor") == 0 || std::strcmp(name, "d_head") == 0)) {
      return false;
    }
    return how.only.empty() || how.only == name;
  };
  std::map<std::string, Array<float>> arrays;
  std::map<std::string, Elements> outputs;
  const auto tensor = [&](const char* name, const Array<float>& like) {
    if (!wanted(name)) return cuda::Tensor{};
    const Array<float>& nan = arrays[name] = Array<float>(like.size(), options.padded, kNan);
    return outputs.try_emplace(name, nan, how.element).first->second.tensor();
  };
  const auto pointer = [&](const char* name, const std::vector<float>& like) -> float* {
    if (!wanted(name)) return nullptr;
    return (results[name] = std::vector<float>(like.size(), kNan)).data();
  };
  cuda::Gradient gradient;
  gradient.x = tensor("d_x", p.x);
  gradient.y = tensor("d_y", p.y);
  gradient.v = tensor("d_v", p.v);
  gradient.row_scalars = pointer("d_row", p.row);
  gradient.column_scalars = pointer("d_column", p.column);
  gradient.head_scalars = pointer("d_head", p.head);
  gradient.factor = pointer("d_factor", p.factor);
  if (options.bias != ProblemOptions::kNoBias) {
    gradient.bias = {pointer("d_bias", p.bias), p.bias_stride(), options.layout};
  }
  if (options.key_bias) gradient.key_bias = pointer("d_key_bias", p.key_bias);
  if (options.temperature) gradient.temperature = pointer("d_temperature", p.temperature);
  if (in.relative.keys != nullptr) {
    gradient.relative_query = tensor("d_relative_query", p.relative_query);
    gradient.relative_keys = pointer("d_relative_keys", p.relative_keys);
  }
  if (in.relative.values != nullptr) {
    gradient.relative_values = pointer("d_relative_values", p.relative_values);
  }
  if (in.relative.queries != nullptr) {
    gradient.relative_key = tensor("d_relative_key", p.relative_key);
    gradient.relative_queries = pointer("d_relative_queries", p.relative_queries);
  }
  if (options.pair_bias.exists && wanted("d_pair_bias")) {
    Array<float>& pairs = arrays["d_pair_bias"] =
        Array<float>(p.pair_bias.size(), options.padded, kNan);
    gradient.pair_bias = Problem<float>::PairView(pairs.view(), options.pair_bias);
  }
  cuda::Saved saved;
  saved.o = o_elements.tokens();
  saved.exact_o = how.keeps_exact_o ? exact_o.data() : nullptr;
  saved.d_o = d_o.tokens();
  saved.d_lse = p.pass_d_lse ? p.d_lse.data() : nullptr;
  saved.statistics = how.keeps_statistics ? statistics.data() : nullptr;
  saved.precise = how.precise;
  Backward(p.function, in, saved, gradient, backend);
  o_elements.CopyTo(&o);
  results["o"] = o.TakeOutput();
  for (auto& [name, array] : arrays) {
    const auto output = outputs.find(name);
    if (output != outputs.end()) output->second.CopyTo(&array);
    results[name] = array.TakeOutput();
  }
  return results;
}

// A problem whose tokens, values and gradients are representable in the element type.
inline Problem<float> ProblemOf(const PairFunction& function, const ProblemOptions& options,
                                Element element) {
  Problem<float> p = RandomProblem(function, options);
  for (Array<float>* array : {&p.x, &p.y, &p.v, &p.d_o, &p.relative_query, &p.relative_key}) {
    array->ForEach([element](float& x) { x = Rounded(x, element); });
  }
  return p;
}

// The unit roundoff of numbers that are stored in the element type: weights, gradients of inner
// products, and outputs.
inline double Unit(Element element) {
  switch (element) {
    case Element::kFloat32:
      return 0;
    case Element::kBFloat16:
      return 1.0 / 512;
    default:
      return 1.0 / 4096;
  }
}

// Like ExpectClose. Outputs and gradients with the type of tokens are rounded sums of numbers that
// are rounded to the element type. Each of these numbers has an error of up to half an ulp; results
// may differ by up to 6 such units, relative to the largest result. All other results are fp32 for
// every element type.
inline void ExpectCloseTo(const Results<float>& actual, const Results<double>& expected,
                          Element element, double rate = 0, double tolerance = 2e-5) {
  const double rows = static_cast<double>(expected.at("lse").size()) /
                      std::max(1.0, static_cast<double>(expected.at("d_factor").size()));
  for (const auto& [name, values] : expected) {
    if (!actual.contains(name)) continue;
    const double least = name == "d_factor" || name == "d_head" ? std::max(1e-2, 0.1 * rows) : 1e-2;
    const bool rounded = name == "o" || name == "d_x" || name == "d_y" || name == "d_v" ||
                         name == "d_relative_query" || name == "d_relative_key";
    const double units = rounded ? 6 * Unit(element) / (1 - rate) : 0;
    EXPECT_LE(Difference(actual.at(name), values, least), tolerance + units) << name;
  }
}

inline const PairFunction& EmulatedPairFunction(std::string_view name) {
  for (const PairFunction* function : EmulatedPairFunctions()) {
    if (function->name == name) return *function;
  }
  throw std::runtime_error("no emulated pair function " + std::string(name));
}

// The n-th of the eight scheduling orders of a block's fibers, with one to three blocks at a time.
inline EmulatedOrder Order(size_t n) {
  return {(n & 1) != 0, (n & 2) != 0, (n & 4) != 0, 1 + static_cast<int>(n % 3)};
}

}  // namespace gnomon::testing

#endif  // GNOMON_TESTS_CUDA_CUDA_PROBLEM_H_
