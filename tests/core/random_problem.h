// Random problems for the operator, with every output and gradient, and with the same inputs in
// fp32 and fp64.
#ifndef GNOMON_TESTS_CORE_RANDOM_PROBLEM_H_
#define GNOMON_TESTS_CORE_RANDOM_PROBLEM_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <ostream>
#include <random>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/dual_tables.h"
#include "gnomon/attention.h"
#include "gtest/gtest.h"
#include "test_definitions.h"

namespace gnomon {

#define GNOMON_DECLARE(Struct, name) const PairFunction& PairFunctionOf##Struct();
GNOMON_FOR_EACH_TEST_DEFINITION(GNOMON_DECLARE)
#undef GNOMON_DECLARE

namespace testing {

// TestPairFunctions returns the pair functions that tests define; AllPairFunctions adds the
// library's.
inline std::vector<const PairFunction*> TestPairFunctions() {
#define GNOMON_ENTRY(Struct, name) &PairFunctionOf##Struct(),
  return {GNOMON_FOR_EACH_TEST_DEFINITION(GNOMON_ENTRY)};
#undef GNOMON_ENTRY
}
inline std::vector<const PairFunction*> AllPairFunctions() {
  std::vector<const PairFunction*> all = PairFunctions();
  for (const PairFunction* function : TestPairFunctions()) all.push_back(function);
  return all;
}

// Tests with many cases run all of them with the dot product, which is compiled into the engine,
// and with penumbral cones. The engine calls the other functions through tables and does not know
// which one it calls, so each case runs with a third of them, which depends on n.
inline bool RunsWith(const PairFunction& function, size_t n) {
  const std::string_view name = function.name;
  if (name == "dot" || name == "penumbral") return true;
  const std::vector<const PairFunction*> all = PairFunctions();
  return (n + static_cast<size_t>(std::ranges::find(all, &function) - all.begin())) % 3 == 0;
}

// Pairs of a function and a case that it runs with.
template <class Case>
std::vector<std::tuple<const PairFunction*, Case>> WithFunctions(
    const std::vector<const PairFunction*>& functions, const std::vector<Case>& cases) {
  std::vector<std::tuple<const PairFunction*, Case>> pairs;
  for (const PairFunction* function : functions) {
    for (size_t n = 0; n < cases.size(); ++n) {
      if (RunsWith(*function, n)) pairs.emplace_back(function, cases[n]);
    }
  }
  return pairs;
}

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A (batch, head, row, column) array. It is contiguous or, if `padded`, stored as (batch, row,
// head, column) with gaps after the columns.
template <class T>
class Array {
 public:
  Array() = default;
  Array(std::array<int64_t, 4> size, bool padded, T fill)
      : size_(size),
        padded_(padded),
        data_(static_cast<size_t>(size[0] * size[1] * size[2] * (size[3] + gap())), fill) {}
  template <class U>
  explicit Array(const Array<U>& other)
      : size_(other.size()),
        padded_(other.padded()),
        data_(other.data().begin(), other.data().end()) {}

  std::array<int64_t, 4> size() const { return size_; }
  bool padded() const { return padded_; }
  const std::vector<T>& data() const { return data_; }
  View<T> view() { return {data_.data(), Strides()}; }
  View<const T> view() const { return {data_.data(), Strides()}; }
  T& at(int64_t b, int64_t h, int64_t i, int64_t d) { return view().row(b, h, i)[d]; }
  T at(int64_t b, int64_t h, int64_t i, int64_t d) const { return view().row(b, h, i)[d]; }

  // Calls body(element) for each element in order.
  template <class Body>
  void ForEach(const Body& body) {
    for (int64_t b = 0; b < size_[0]; ++b) {
      for (int64_t h = 0; h < size_[1]; ++h) {
        for (int64_t i = 0; i < size_[2]; ++i) {
          for (int64_t d = 0; d < size_[3]; ++d) body(at(b, h, i, d));
        }
      }
    }
  }

  // Returns the elements without gaps.
  std::vector<T> Elements() const {
    std::vector<T> elements;
    Array(*this).ForEach([&](T element) { elements.push_back(element); });
    return elements;
  }

  // Returns the elements of an array that was filled with NaN; the test fails if a gap has been
  // overwritten.
  std::vector<T> TakeOutput() {
    const std::vector<T> elements = Elements();
    ForEach([](T& element) { element = std::numeric_limits<T>::quiet_NaN(); });
    EXPECT_TRUE(std::all_of(data_.begin(), data_.end(), [](T x) { return std::isnan(x); }))
        << "something was written between the rows";
    return elements;
  }

 private:
  int64_t gap() const { return padded_ ? 3 : 0; }
  std::array<int64_t, 3> Strides() const {
    const auto& [batch, heads, rows, columns] = size_;
    const int64_t row = columns + gap();
    if (padded_) return {rows * heads * row, row, heads * row};
    return {heads * rows * row, rows * row, row};
  }

  std::array<int64_t, 4> size_ = {0, 0, 0, 0};
  bool padded_ = false;
  std::vector<T> data_;
};

// An array of query-key pairs that batch elements or heads may share.
struct PairOptions {
  bool exists = false;
  bool shares_batch = false;
  bool shares_heads = false;
};

struct ProblemOptions {
  AttentionShape shape;
  int64_t left = kUnbounded;
  int64_t right = kUnbounded;
  Chunks chunks = {};
  std::vector<int64_t> key_starts = {};   // empty: none
  std::vector<int64_t> key_lengths = {};  // empty: none
  int64_t query_offset = 0;
  std::vector<int64_t> query_offsets = {};  // per batch; empty: query_offset
  // (B, Lq) and (B, Lk): explicit positions; empty: none.
  std::vector<int64_t> query_positions = {};
  std::vector<int64_t> key_positions = {};
  std::vector<int32_t> query_segments = {};  // (B, Lq); empty: none
  std::vector<int32_t> key_segments = {};    // (B, Lk)
  enum { kNoBias, kSharedBias, kBiasForEachBatch } bias = kNoBias;
  const TableLayout* layout = nullptr;
  bool key_bias = false;
  bool key_bias_base = false;  // whether the key bias has two parts and a base per row
  bool temperature = false;
  double softcap = 0;
  PairOptions pair_bias = {};
  PairOptions pair_mask = {};
  const TableLayout* relative = nullptr;  // null: no relative keys and values
  int64_t relative_dim = 5;               // 0: no relative keys
  bool relative_values = true;
  int64_t relative_key_dim = 0;  // 0: no relative queries
  bool relative_heads = false;   // whether tables are per head
  double dropout = 0;
  double tolerance = kDefaultTolerance;
  TokenType type = TokenType::kFloat32;  // types of tokens and values in float32 problems
  TokenType value_type = TokenType::kFloat32;
  bool padded = false;
  bool keeps_statistics = true;  // whether row statistics are saved for the backward pass
  // Whether tokens lie on the grid described at RandomProblem.
  bool on_grid = true;
  unsigned seed = 1;
};

inline std::string Describe(const char* name, const PairOptions& o) {
  if (!o.exists) return "";
  return name + std::string(o.shares_batch ? " of all batches" : "") +
         (o.shares_heads ? " of all heads" : "");
}

inline std::ostream& operator<<(std::ostream& out, const ProblemOptions& o) {
  const AttentionShape& n = o.shape;
  const auto list = [&](const char* name, const std::vector<int64_t>& values) {
    if (values.empty()) return;
    out << name;
    for (const int64_t value : values) out << ' ' << value;
  };
  out << "B " << n.batch << " H " << n.heads << "/" << n.key_heads << " L " << n.queries << "x"
      << n.keys << " D " << n.dim << " Dv " << n.value_dim;
  if (o.left != kUnbounded) out << " left " << o.left;
  if (o.right != kUnbounded) out << " right " << o.right;
  if (o.chunks.size > 0) {
    out << " chunks of " << o.chunks.size << " -" << o.chunks.before << " +" << o.chunks.after;
  }
  list(" starts", o.key_starts);
  list(" lengths", o.key_lengths);
  list(" offsets", o.query_offsets);
  if (!o.query_segments.empty()) out << " segments";
  if (!o.query_positions.empty()) out << " positions";
  return out << " offset " << o.query_offset << " bias " << o.bias << (o.layout ? " layout" : "")
             << (o.key_bias ? " key bias" : "") << (o.key_bias_base ? " with base" : "")
             << (o.temperature ? " temperature" : "") << (o.softcap != 0 ? " softcap" : "")
             << Describe(" pair bias", o.pair_bias) << Describe(" pair mask", o.pair_mask)
             << (o.relative && o.relative_dim > 0 ? " relative keys" : "")
             << (o.relative && o.relative_values ? " relative values" : "")
             << (o.relative && o.relative_key_dim > 0 ? " relative queries" : "")
             << (o.relative_heads ? " for each head" : "") << " dropout " << o.dropout
             << (o.padded ? " padded" : "") << " seed " << o.seed;
}

// The positions of query i and key j of batch b.
inline int64_t QueryAt(const ProblemOptions& o, int64_t b, int64_t i) {
  if (!o.query_positions.empty()) {
    return o.query_positions[static_cast<size_t>(b * o.shape.queries + i)];
  }
  return i + (o.query_offsets.empty() ? o.query_offset : o.query_offsets[static_cast<size_t>(b)]);
}
inline int64_t KeyAt(const ProblemOptions& o, int64_t b, int64_t j) {
  if (o.key_positions.empty()) return j;
  return o.key_positions[static_cast<size_t>(b * o.shape.keys + j)];
}

// Whether query i of batch b sees key j, ignoring biases of -inf and the pair mask. This function
// defines all other masks.
inline bool Sees(const ProblemOptions& o, int64_t b, int64_t i, int64_t j) {
  const auto batch = static_cast<size_t>(b);
  const int64_t offset = KeyAt(o, b, j) - QueryAt(o, b, i);
  const auto chunk = [&](int64_t p) {
    return static_cast<int64_t>(
        std::floor(static_cast<double>(p) / static_cast<double>(o.chunks.size)));
  };
  if (o.chunks.size > 0) {
    const int64_t distance = chunk(KeyAt(o, b, j)) - chunk(QueryAt(o, b, i));
    if (distance < -o.chunks.before || distance > o.chunks.after) return false;
  }
  const bool same_segment =
      o.query_segments.empty() || o.query_segments[static_cast<size_t>(b * o.shape.queries + i)] ==
                                      o.key_segments[static_cast<size_t>(b * o.shape.keys + j)];
  return same_segment && (o.left == kUnbounded || -offset <= o.left) &&
         (o.right == kUnbounded || offset <= o.right) &&
         (o.key_starts.empty() || j >= o.key_starts[batch]) &&
         (o.key_lengths.empty() || j < o.key_lengths[batch]);
}

// Returns the segment numbers of `batch` sequences of `count` tokens, packed from documents of
// `length` tokens that are numbered starting at `first`. In sequence b, the first document is b
// tokens shorter.
inline std::vector<int32_t> Documents(int64_t batch, int64_t count, int64_t length,
                                      int32_t first = 0) {
  std::vector<int32_t> segments;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < count; ++t) {
      segments.push_back(first + static_cast<int32_t>((t + b) / length));
    }
  }
  return segments;
}

// Outputs and gradients by name ("o", "lse", "d_x", ...), without gaps.
template <class T>
using Results = std::map<std::string, std::vector<T>>;

// GCC before 13 has no _Float16 for Arm, and Clang before 15 has none for x86.
#if defined(__aarch64__) || (defined(__clang__) && __clang_major__ < 15)
using Float16 = __fp16;
#else
using Float16 = _Float16;
#endif

// Rounds a finite number to the nearest bfloat16 number, ties to even.
inline float RoundToBfloat16(float number) {
  const auto bits = std::bit_cast<uint32_t>(number);
  return std::bit_cast<float>((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
}

// ToBits rounds a float to a 16-bit type, and FromBits widens the bits to float.
inline uint16_t ToBits(float number, TokenType type) {
  if (type == TokenType::kBFloat16) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(RoundToBfloat16(number)) >> 16);
  }
  const auto half = static_cast<Float16>(number);
  uint16_t bits = 0;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}
inline float FromBits(uint16_t bits, TokenType type) {
  if (type == TokenType::kBFloat16) return std::bit_cast<float>(uint32_t{bits} << 16);
  Float16 half;
  std::memcpy(&half, &bits, sizeof(half));
  return static_cast<float>(half);
}

// Converts a float array to tokens of a type that represents its values exactly, and owns the
// 16-bit copy.
class TokenArray {
 public:
  template <class T>
  TokensOf<T> Of(const Array<T>& array, TokenType type) {
    if constexpr (std::is_same_v<T, float>) {
      if (type == TokenType::kFloat32) return array.view();
      const std::vector<float> numbers = array.Elements();
      if (bits_.size() != array.size()) bits_ = Array<uint16_t>(array.size(), array.padded(), 0);
      auto number = numbers.begin();
      bits_.ForEach([&](uint16_t& bits) { bits = ToBits(*number++, type); });
      return {bits_.view().data, bits_.view().stride, type};
    } else {
      return array.view();
    }
  }

 private:
  Array<uint16_t> bits_;
};

// If `applies`, fp64 calls run on the reference while this object exists.
class ScopedReference {
 public:
  explicit ScopedReference(bool applies) : applies_(applies) {
    if (applies) setenv("GNOMON_FLOAT64", "reference", /*overwrite=*/1);
  }
  ~ScopedReference() {
    if (applies_) unsetenv("GNOMON_FLOAT64");
  }
  ScopedReference(const ScopedReference&) = delete;
  ScopedReference& operator=(const ScopedReference&) = delete;

 private:
  bool applies_;
};

template <class T>
struct Problem {
  const PairFunction& function;
  ProblemOptions options;
  Array<T> x = {}, y = {}, v = {}, d_o = {};
  std::vector<T> row = {}, column = {}, head = {}, factor = {}, bias = {}, d_lse = {};
  std::vector<T> key_bias = {}, key_bias_low = {}, key_bias_base = {}, temperature = {};
  std::vector<T> relative_keys = {}, relative_values = {}, relative_queries = {};
  Array<T> relative_query = {}, relative_key = {}, pair_bias = {};
  Array<uint8_t> pair_mask = {};
  mutable TokenArray x_tokens = {}, y_tokens = {}, v_tokens = {};
  T relative_factor = T(0.75);
  // For doubles only: whether the fused kernels compute the call instead of the reference.
  bool is_fused = false;
  bool pass_d_lse = true;

  int64_t bias_size() const {
    return options.layout != nullptr
               ? options.layout->size()
               : std::max<int64_t>(0, options.shape.queries + options.shape.keys - 1);
  }
  int64_t bias_stride() const {
    return options.bias == ProblemOptions::kBiasForEachBatch ? options.shape.heads * bias_size()
                                                             : 0;
  }
  T& bias_at(int64_t b, int64_t h, int64_t entry) {
    return bias[static_cast<size_t>(b * bias_stride() + h * bias_size() + entry)];
  }
  // A view of a pair array, with stride 0 along shared axes.
  template <class U>
  static View<U> PairView(View<U> view, const PairOptions& pairs) {
    if (pairs.shares_batch) view.stride[0] = 0;
    if (pairs.shares_heads) view.stride[1] = 0;
    return view;
  }
  // Whether the pair mask, if there is one, lets query i see key j.
  bool SeesPair(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return !options.pair_mask.exists ||
           PairView(pair_mask.view(), options.pair_mask).row(b, h, i)[j] != 0;
  }
  // Scalar s of a key.
  T& column_at(int s, int64_t b, int64_t h, int64_t j) {
    const AttentionShape& n = options.shape;
    return column[static_cast<size_t>(((s * n.batch + b) * n.key_heads + h) * n.keys + j)];
  }

  Problem<double> InDouble() const {
    const auto to = [](const std::vector<T>& from) {
      return std::vector<double>(from.begin(), from.end());
    };
    return {.function = function,
            .options = options,
            .x = Array<double>(x),
            .y = Array<double>(y),
            .v = Array<double>(v),
            .d_o = Array<double>(d_o),
            .row = to(row),
            .column = to(column),
            .head = to(head),
            .factor = to(factor),
            .bias = to(bias),
            .d_lse = to(d_lse),
            .key_bias = to(key_bias),
            .key_bias_low = to(key_bias_low),
            .key_bias_base = to(key_bias_base),
            .temperature = to(temperature),
            .relative_keys = to(relative_keys),
            .relative_values = to(relative_values),
            .relative_queries = to(relative_queries),
            .relative_query = Array<double>(relative_query),
            .relative_key = Array<double>(relative_key),
            .pair_bias = Array<double>(pair_bias),
            .pair_mask = pair_mask,
            .pass_d_lse = pass_d_lse};
  }

  AttentionInput<T> Input() const {
    AttentionInput<T> in;
    in.shape = options.shape;
    in.x = x_tokens.Of(x, options.type);
    in.y = y_tokens.Of(y, options.type);
    in.v = v_tokens.Of(v, options.value_type);
    in.row_scalars = row.data();
    in.column_scalars = column.data();
    in.head_scalars = head.data();
    in.factor = factor.data();
    if (options.bias != ProblemOptions::kNoBias) {
      in.bias = {bias.data(), bias_stride(), options.layout};
    }
    if (options.key_bias) in.key_bias = key_bias.data();
    if (options.key_bias_base) {
      in.key_bias_low = key_bias_low.data();
      in.key_bias_base = key_bias_base.data();
    }
    if (options.temperature) in.temperature = temperature.data();
    in.softcap = options.softcap;
    if (options.pair_bias.exists) in.pair_bias = PairView(pair_bias.view(), options.pair_bias);
    if (options.relative != nullptr) {
      in.relative.layout = options.relative;
      in.relative.query = relative_query.view();
      in.relative.dim = options.relative_dim;
      in.relative.factor = relative_factor;
      if (options.relative_dim > 0) in.relative.keys = relative_keys.data();
      if (options.relative_values) in.relative.values = relative_values.data();
      if (options.relative_key_dim > 0) {
        in.relative.key = relative_key.view();
        in.relative.key_dim = options.relative_key_dim;
        in.relative.queries = relative_queries.data();
        in.relative.query_heads = options.relative_heads;
      }
      in.relative.key_heads = in.relative.value_heads = options.relative_heads;
    }
    in.dropout = {options.dropout, options.seed};
    in.mask = {options.left,
               options.right,
               options.chunks,
               options.key_starts.empty() ? nullptr : options.key_starts.data(),
               options.key_lengths.empty() ? nullptr : options.key_lengths.data(),
               options.query_segments.empty() ? nullptr : options.query_segments.data(),
               options.key_segments.empty() ? nullptr : options.key_segments.data()};
    if (options.pair_mask.exists) in.mask.pairs = PairView(pair_mask.view(), options.pair_mask);
    in.tolerance = options.tolerance;
    in.query_offset = options.query_offset;
    if (!options.query_offsets.empty()) in.query_offsets = options.query_offsets.data();
    if (!options.query_positions.empty()) {
      in.query_positions = options.query_positions.data();
      in.key_positions = options.key_positions.data();
    }
    return in;
  }

  // Outputs start as NaN, so that unwritten elements are noticed.
  Results<T> Forward(const Executor& executor = SerialExecutor()) const {
    Array<T> o(d_o.size(), options.padded, kNan);
    std::vector<T> lse(d_lse.size(), kNan);
    const ScopedReference scope(std::is_same_v<T, double> && !is_fused);
    AttentionForward(function, Input(), {o.view(), lse.data()}, executor);
    return {{"o", o.TakeOutput()}, {"lse", lse}};
  }

  // Runs the forward and the backward pass, and computes the gradient named `only` or (if it is
  // empty) all gradients.
  Results<T> Run(const Executor& executor = SerialExecutor(), const std::string& only = "") const {
    Array<T> o(d_o.size(), options.padded, kNan);
    std::vector<T> lse(d_lse.size(), kNan);
    std::vector<T> statistics(options.keeps_statistics ? 3 * lse.size() : 0, kNan);
    const AttentionInput<T> in = Input();
    const ScopedReference scope(std::is_same_v<T, double> && !is_fused);
    AttentionForward(function, in, {o.view(), lse.data(), statistics.data()}, executor);
    AttentionBackwardInput<T> saved;
    saved.o = static_cast<const Array<T>&>(o).view();
    saved.lse = lse.data();
    saved.statistics = statistics.data();
    saved.d_o = d_o.view();
    saved.d_lse = pass_d_lse ? d_lse.data() : nullptr;

    const auto wanted = [&](const char* name) { return only.empty() || only == name; };
    std::map<std::string, Array<T>> arrays;
    Results<T> results;
    const auto view = [&](const char* name, const Array<T>& like) {
      if (!wanted(name)) return View<T>{};
      return (arrays[name] = Array<T>(like.size(), options.padded, kNan)).view();
    };
    const auto pointer = [&](const char* name, const std::vector<T>& like) -> T* {
      if (!wanted(name)) return nullptr;
      return (results[name] = std::vector<T>(like.size(), kNan)).data();
    };
    AttentionGradient<T> gradient;
    gradient.x = view("d_x", x);
    gradient.y = view("d_y", y);
    gradient.v = view("d_v", v);
    gradient.row_scalars = pointer("d_row", row);
    gradient.column_scalars = pointer("d_column", column);
    gradient.head_scalars = pointer("d_head", head);
    gradient.factor = pointer("d_factor", factor);
    if (options.bias != ProblemOptions::kNoBias) {
      gradient.bias = {pointer("d_bias", bias), bias_stride(), options.layout};
    }
    if (options.key_bias) gradient.key_bias = pointer("d_key_bias", key_bias);
    if (options.temperature) gradient.temperature = pointer("d_temperature", temperature);
    if (options.pair_bias.exists) {
      gradient.pair_bias = PairView(view("d_pair_bias", pair_bias), options.pair_bias);
    }
    if (in.relative.keys != nullptr) {
      gradient.relative_query = view("d_relative_query", relative_query);
      gradient.relative_keys = pointer("d_relative_keys", relative_keys);
    }
    if (in.relative.queries != nullptr) {
      gradient.relative_key = view("d_relative_key", relative_key);
      gradient.relative_queries = pointer("d_relative_queries", relative_queries);
    }
    if (in.relative.values != nullptr) {
      gradient.relative_values = pointer("d_relative_values", relative_values);
    }
    AttentionBackward(function, in, saved, gradient, executor);
    for (auto& [name, array] : arrays) results[name] = array.TakeOutput();
    results["o"] = o.TakeOutput();
    results["lse"] = lse;
    return results;
  }
};

// Whether the pair function uses angles, which have kinks at 0 and pi. Low-dimensional points are
// often nearly collinear, i.e. close to a kink, where finite differences are unreliable and
// rounding errors are large.
inline bool ReadsAngles(const PairFunction& f) {
  return std::string_view(f.name).ends_with("entailment");
}

// Returns a random problem with inner products and distances of about 1. If they were much larger
// or smaller, the tests would not be meaningful.
//
// The gradients of cones and distances jump where two of their terms are equal. To make fp32 and
// fp64 take the same side there, tokens are multiples of 1/16, whose squared distances are exact in
// fp32, and scalars lie between these multiples.
inline Problem<float> RandomProblem(const PairFunction& f, ProblemOptions options) {
  if (f.input == PairInput::kNone) options.shape.dim = 0;
  const AttentionShape& n = options.shape;
  Problem<float> p{.function = f, .options = options};
  std::mt19937 engine(options.seed);
  std::normal_distribution<float> normal;
  const bool smooth = f.input == PairInput::kInnerProduct && f.row_scalars == 0;
  const auto dim = static_cast<float>(std::max<int64_t>(1, n.dim));
  const auto token = [&] {
    if (smooth) return normal(engine) / std::sqrt(std::sqrt(dim));
    const float sixteenths = normal(engine) * 8 / std::sqrt(dim);
    return (options.on_grid ? std::round(sixteenths) : sixteenths) / 16;
  };
  // Draws numbers (n + shift) / 16 for integers n; they are positive if they represent heights.
  const auto between = [&](float shift) {
    const int least = f.input == PairInput::kNone ? -8 : 0;
    std::uniform_int_distribution<int> sixteenths(least, least + 15);
    return (static_cast<float>(sixteenths(engine)) + shift) / 16;
  };
  const auto array = [&](int64_t heads, int64_t rows, int64_t columns, auto draw) {
    Array<float> a({n.batch, heads, rows, columns}, options.padded, 0.0f);
    a.ForEach([&](float& element) { element = draw(); });
    return a;
  };
  const auto vector = [&](int64_t size, auto draw) {
    std::vector<float> values(static_cast<size_t>(size));
    for (float& value : values) value = draw();
    return values;
  };
  const auto unit = [&] { return normal(engine); };
  const auto positive = [&] { return std::uniform_real_distribution<float>(0.3f, 1.2f)(engine); };
  const auto set_norms = [&](std::vector<float>& scalars, const Array<float>& tokens) {
    const auto [batch, heads, rows, columns] = tokens.size();
    for (int64_t t = 0; t < batch * heads * rows; ++t) {
      const float* row = tokens.view().row(t / rows / heads, t / rows % heads, t % rows);
      double sum = 0;
      for (int64_t d = 0; d < columns; ++d) sum += static_cast<double>(row[d]) * row[d];
      scalars[static_cast<size_t>(t)] = static_cast<float>(sum);
    }
  };

  p.x = array(n.heads, n.queries, n.dim, token);
  p.y = array(n.key_heads, n.keys, n.dim, token);
  p.v = array(n.key_heads, n.keys, n.value_dim, unit);
  const auto round = [](Array<float>& tokens, TokenType type) {
    if (type == TokenType::kFloat32) return;
    tokens.ForEach([type](float& element) { element = FromBits(ToBits(element, type), type); });
  };
  round(p.x, options.type);
  round(p.y, options.type);
  round(p.v, options.value_type);
  p.d_o = array(n.heads, n.queries, n.value_dim, unit);
  p.d_lse = vector(n.batch * n.heads * n.queries, unit);
  p.row = vector(f.row_scalars * n.batch * n.heads * n.queries, [&] { return between(0.25f); });
  p.column =
      vector(f.column_scalars * n.batch * n.key_heads * n.keys, [&] { return between(0.5f); });
  p.head = vector(f.head_scalars * n.heads, positive);
  p.factor = vector(n.heads, [&] { return smooth ? positive() : -positive(); });
  if (options.bias != ProblemOptions::kNoBias) {
    const int64_t tables = options.bias == ProblemOptions::kBiasForEachBatch ? n.batch : 1;
    p.bias = vector(tables * n.heads * p.bias_size(), unit);
  }
  if (options.key_bias) p.key_bias = vector(n.batch * n.heads * n.keys, unit);
  if (options.key_bias_base) {
    p.key_bias_low = vector(n.batch * n.heads * n.keys, [&] { return unit() / 1024; });
    p.key_bias_base = vector(n.batch * n.heads * n.queries, unit);
  }
  if (options.temperature) p.temperature = vector(n.batch * n.heads * n.queries, positive);
  const auto pairs = [&](const PairOptions& of) {
    return std::array<int64_t, 4>{of.shares_batch ? std::min<int64_t>(1, n.batch) : n.batch,
                                  of.shares_heads ? std::min<int64_t>(1, n.heads) : n.heads,
                                  n.queries, n.keys};
  };
  if (options.pair_bias.exists) {
    p.pair_bias = Array<float>(pairs(options.pair_bias), options.padded, 0.0f);
    p.pair_bias.ForEach([&](float& element) { element = unit(); });
  }
  if (options.pair_mask.exists) {
    // A third of the blocks are fully visible, a third are hidden, and the rest are partially
    // visible.
    const std::array<int64_t, 4> size = pairs(options.pair_mask);
    p.pair_mask = Array<uint8_t>(size, options.padded, 0);
    const int64_t height = 1 + engine() % 60;
    const int64_t width = 1 + engine() % 130;
    std::vector<uint8_t> blocks(
        static_cast<size_t>((n.queries / height + 1) * (n.keys / width + 1)));
    for (int64_t b = 0; b < size[0]; ++b) {
      for (int64_t h = 0; h < size[1]; ++h) {
        for (uint8_t& block : blocks) block = static_cast<uint8_t>(engine() % 3);
        for (int64_t i = 0; i < n.queries; ++i) {
          for (int64_t j = 0; j < n.keys; ++j) {
            const uint8_t block =
                blocks[static_cast<size_t>(i / height * (n.keys / width + 1) + j / width)];
            // Any non-zero byte means visible.
            const auto seen = static_cast<uint8_t>(1 + engine() % 255);
            p.pair_mask.at(b, h, i, j) = block == 0 || (block == 2 && engine() % 2 == 0) ? 0 : seen;
          }
        }
      }
    }
  }
  if (options.relative != nullptr) {
    const int64_t rows = (options.relative_heads ? n.heads : 1) * options.relative->size();
    const auto some = [&] { return normal(engine) / 2; };
    if (options.relative_dim > 0) {
      p.relative_query = array(n.heads, n.queries, options.relative_dim, some);
      p.relative_keys = vector(rows * options.relative_dim, some);
    }
    if (options.relative_values) p.relative_values = vector(rows * n.value_dim, some);
    if (options.relative_key_dim > 0) {
      p.relative_key = array(n.key_heads, n.keys, options.relative_key_dim, some);
      p.relative_queries = vector(rows * options.relative_key_dim, some);
    }
  }
  // The squared height of a penumbral cone is determined by alpha, u^2 = alpha (2 - alpha). The
  // first scalar of an entailment cone is the squared norm of its token.
  const auto set_squared_heights = [](std::vector<float>& scalars) {
    const size_t tokens = scalars.size() / 2;
    for (size_t t = 0; t < tokens; ++t) scalars[tokens + t] = scalars[t] * (2 - scalars[t]);
  };
  if (f.row_scalars == 2 && f.column_scalars == 2) {
    set_squared_heights(p.row);
    set_squared_heights(p.column);
  }
  if (f.row_scalars == 2 && f.column_scalars == 1) {
    set_norms(p.row, p.x);
    set_norms(p.column, p.y);
  }
  return p;
}

// Like RandomProblem, with tokens spaced by 1 / fraction near (1, 1, ...), and scores of about 1.
// For large fractions, squared distances computed from norms would have no accurate digits.
inline Problem<float> NearTokensProblem(const PairFunction& f, ProblemOptions options,
                                        int fraction) {
  const float spread = 1.0f / static_cast<float>(fraction);
  options.on_grid = false;
  Problem<float> p = RandomProblem(f, std::move(options));
  for (Array<float>* tokens : {&p.x, &p.y}) {
    tokens->ForEach([&](float& element) { element = 1 + spread * element; });
  }
  const float scale = f.name == std::string("gaussian") ? spread * spread : spread;
  for (float& factor : p.factor) factor /= scale;
  return p;
}

// The largest difference, relative to the largest magnitude in `expected` (or to `least` if that is
// larger, because sums of cancelling terms have few accurate digits). Infinity if there is a NaN,
// or if infinities disagree.
template <class T, class Expected>
double Difference(const std::vector<T>& actual, const std::vector<Expected>& expected,
                  double least = 1e-2) {
  if (actual.size() != expected.size()) return kInfinity;
  double largest = least;
  double difference = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i];
    const double e = expected[i];
    if (std::isinf(e) && a == e) continue;
    if (!std::isfinite(a) || !std::isfinite(e)) return kInfinity;
    largest = std::max(largest, std::fabs(e));
    difference = std::max(difference, std::fabs(a - e));
  }
  return difference / largest;
}

template <class T>
void ExpectClose(const Results<T>& actual, const Results<double>& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  // The gradients of per-head numbers are sums over the rows of the head, with terms of about 1.
  const double rows = static_cast<double>(expected.at("lse").size()) /
                      std::max(1.0, static_cast<double>(expected.at("d_factor").size()));
  for (const auto& [name, values] : expected) {
    const double least = name == "d_factor" || name == "d_head" ? std::max(1e-2, 0.1 * rows) : 1e-2;
    EXPECT_LE(Difference(actual.at(name), values, least), tolerance) << name;
  }
}

// Compares bitwise, so that NaNs with the same bits are equal.
template <class T>
void ExpectSame(const Results<T>& actual, const Results<T>& expected) {
  const auto bits = [](const std::vector<T>& values) {
    const auto* bytes = reinterpret_cast<const char*>(values.data());
    return std::string(bytes, bytes + values.size() * sizeof(T));
  };
  for (const auto& [name, values] : actual) {
    EXPECT_TRUE(bits(values) == bits(expected.at(name))) << name << " differs";
  }
}

// Restores the instruction set on destruction.
class ScopedTarget {
 public:
  explicit ScopedTarget(const std::string& name) : before_(CurrentTarget()) { SetTarget(name); }
  ~ScopedTarget() { SetTarget(before_); }
  ScopedTarget(const ScopedTarget&) = delete;
  ScopedTarget& operator=(const ScopedTarget&) = delete;

 private:
  std::string before_;
};

// Calls body() on every instruction set.
template <class Body>
void OnEveryTarget(const Body& body) {
  for (const std::string& target : Targets()) {
    SCOPED_TRACE(target);
    const ScopedTarget scope(target);
    body();
  }
}

// Whether the current instruction set has kernels for doubles.
inline bool HasDoubles() { return FindDualTable<double>(FindPairFunction("dot")) != nullptr; }

// The rounding error of doubles relative to that of floats.
constexpr double kRoundingOfDoubles = 0x1p-29;

inline void ExpectKernelsMatchReference(const Problem<float>& problem, double tolerance = 2e-5) {
  Problem<double> doubles = problem.InDouble();
  const Results<double> expected = doubles.Run();
  doubles.is_fused = true;
  OnEveryTarget([&] {
    ExpectClose(problem.Run(), expected, tolerance);
    SCOPED_TRACE("doubles");
    ExpectClose(doubles.Run(), expected, tolerance * kRoundingOfDoubles);
  });
}

template <class T>
void ExpectSameForAnyNumberOfWorkers(const Problem<T>& problem) {
  OnEveryTarget([&] {
    const Results<T> serial = problem.Run();
    for (const int workers : {1, 2, 3, 5}) {
      SCOPED_TRACE(workers);
      ExpectSame(problem.Run(ThreadExecutor(workers)), serial);
    }
  });
}

}  // namespace testing
}  // namespace gnomon

#endif  // GNOMON_TESTS_CORE_RANDOM_PROBLEM_H_
