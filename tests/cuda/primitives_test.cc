// Compares the kernels' primitives (src/cuda/primitives.cuh) with plain host code: in the emulator,
// through the CUDA runtime on a mock driver and, if there is one, on a GPU. This file repeats the
// operand layouts of tensor-core products from the PTX manual. Otherwise, the emulator's order of
// numbers in fragments would be compared only with itself.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/driver.h"
#include "cuda/nvrtc.h"
#include "cuda/runtime.h"
#include "cuda_problem.h"
#include "emulation.h"
#include "gtest/gtest.h"
#include "installed_nvrtc.h"
#include "primitives_program.h"
// Must follow emulation.h:
#include "primitive_calls.cuh"
#include "wgmma_calls.cuh"

namespace gnomon::testing {
namespace {

namespace calls = device::calls;
using Words = std::vector<uint32_t>;

constexpr uint32_t kSharedBytes = 24 * 1024;
// Results are filled with this number before a launch, to detect elements that are not written.
constexpr uint32_t kUntouched = 0xabcdabcdu;

struct Launch {
  calls::Call call;
  int count = 0;  // Parameters::queries
  std::array<int64_t, 3> stride = {};
  std::array<uint32_t, 3> grid = {1, 1, 1};
  uint32_t threads = calls::kThreads;
  uint32_t shared_bytes = kSharedBytes;
};

// A device that runs the kernel that calls the primitives.
class Machine {
 public:
  virtual ~Machine() = default;
  // Whether it has the instructions of compute capability 9.0.
  virtual bool IsHopper() { return true; }
  // Returns the `size` words that the kernel writes.
  Words Run(const cuda::KernelName& name, const Launch& launch, const Words& in, size_t size) {
    cuda::Parameters parameters{};
    parameters.batch = launch.call;
    parameters.queries = launch.count;
    std::copy(launch.stride.begin(), launch.stride.end(), parameters.x.stride);
    return RunWith(name, launch, parameters, in, Words(size, kUntouched));
  }

 protected:
  virtual Words RunWith(const cuda::KernelName& name, const Launch& launch,
                        cuda::Parameters& parameters, const Words& in, Words out) = 0;
};

class Emulation final : public Machine {
 protected:
  Words RunWith(const cuda::KernelName& name, const Launch& launch, cuda::Parameters& parameters,
                const Words& in, Words out) override {
    Words first;
    for (const size_t order : {0, 3, 5, 6}) {
      Words from = in;
      Words to = out;
      parameters.x.data = from.data();
      parameters.o.data = to.data();
      EmulatedBackend(Order(order))
          .Launch(name, {launch.grid, launch.threads, launch.shared_bytes}, &parameters,
                  sizeof(parameters));
      if (order == 0) first = to;
      EXPECT_EQ(to, first) << "in order " << order;
    }
    return first;
  }
};

// A GPU, used through its driver and NVRTC.
class Gpu final : public Machine {
 public:
  // Throws cuda::CudaError if there is no GPU for which kernels can be compiled.
  explicit Gpu(const cuda::RuntimeOptions& options)
      : driver_(options.driver), library_(options.driver), runtime_(options) {
    (void)cuda::Nvrtc(options.nvrtc);
    if (driver_.Attribute(0, cuda::Driver::kComputeCapabilityMajor) < 8) {
      throw cuda::CudaError("CUDA: a device before compute capability 8.0");
    }
    library_.Bind("cuMemAlloc_v2", allocate_);
    library_.Bind("cuMemFree_v2", free_);
    library_.Bind("cuMemcpyHtoD_v2", to_device_);
    library_.Bind("cuMemcpyDtoH_v2", to_host_);
  }
  bool IsHopper() override { return runtime_.IsHopper(0); }

 protected:
  Words RunWith(const cuda::KernelName& name, const Launch& launch, cuda::Parameters& parameters,
                const Words& in, Words out) override {
    const cuda::CurrentContext context(driver_, 0);
    const Memory from(*this, in);
    const Memory to(*this, out);
    parameters.x.data = from.data();
    parameters.o.data = to.data();
    runtime_.Launch(0, nullptr, name, {launch.grid, launch.threads, launch.shared_bytes},
                    &parameters, sizeof(parameters));
    // The copy waits for the launch.
    driver_.Check(to_host_(out.data(), to.address(), 4 * out.size()), "copying to the host");
    return out;
  }

 private:
  using Address = unsigned long long;

  // Device memory, in words.
  class Memory {
   public:
    Memory(const Gpu& gpu, const Words& words) : gpu_(gpu) {
      gpu.driver_.Check(gpu.allocate_(&address_, 4 * words.size()), "asking for memory");
      gpu.driver_.Check(gpu.to_device_(address_, words.data(), 4 * words.size()),
                        "copying to the GPU");
    }
    ~Memory() { gpu_.free_(address_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    Address address() const { return address_; }
    void* data() const { return reinterpret_cast<void*>(address_); }

   private:
    const Gpu& gpu_;
    Address address_ = 0;
  };

  cuda::Driver driver_;
  cuda::SharedLibrary library_;
  cuda::Runtime runtime_;
  int (*allocate_)(Address* address, size_t bytes);
  int (*free_)(Address address);
  int (*to_device_)(Address to, const void* from, size_t bytes);
  int (*to_host_)(void* to, Address from, size_t bytes);
};

struct Place {
  const char* name;
  // Returns the machine that all tests share; throws cuda::CudaError if there is none.
  Machine& (*machine)();
};

Machine& TheEmulation() {
  static Emulation emulation;
  return emulation;
}
Machine& TheGpu() {
  static Gpu gpu([] {
    cuda::RuntimeOptions options = InstalledCuda();
    options.cache = "";
    options.program = PrimitivesProgram;
    return options;
  }());
  return gpu;
}
// A mock driver that runs launches in the emulator.
Machine& TheFakeGpu() {
  static Gpu gpu({.driver = GNOMON_EMULATED_GPU,
                  .nvrtc = {GNOMON_EMULATED_GPU},
                  .cache = "",
                  .program = PrimitivesProgram,
                  .warn = nullptr});
  return gpu;
}

class PrimitivesTest : public ::testing::TestWithParam<std::tuple<Place, Element>> {
 protected:
  void SetUp() override {
    try {
      machine_ = &std::get<0>(GetParam()).machine();
    } catch (const cuda::CudaError& error) {
      GTEST_SKIP() << error.what();
    }
  }

  Element element() const { return std::get<1>(GetParam()); }
  size_t bytes() const { return element() == Element::kFloat32 ? 4 : 2; }

  Words Run(const Launch& launch, const Words& in, size_t size, bool aligned = true) {
    return machine_->Run(PrimitivesName(element(), aligned), launch, in, size);
  }

  Machine& machine() { return *machine_; }

  std::mt19937 random_{5};

 private:
  Machine* machine_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(All, PrimitivesTest,
                         ::testing::Combine(::testing::Values(Place{"Emulated", TheEmulation},
                                                              Place{"OnAFakeGpu", TheFakeGpu},
                                                              Place{"OnAGpu", TheGpu}),
                                            ::testing::ValuesIn(kElements)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param).name) +
                                  NameOf(std::get<1>(test.param));
                         });

// Functions for the values of 16-bit numbers.

double Value(uint16_t bits, Element element) {
  if (element == Element::kBFloat16) return std::bit_cast<float>(uint32_t{bits} << 16);
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 31) return mantissa == 0 ? sign * HUGE_VAL : std::nan("");
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24)
                               : std::ldexp(1 + mantissa / 1024.0, exponent - 15));
}

// Returns the nearest number of the element type, ties to even.
uint16_t Nearest(double x, Element element) {
  const uint16_t infinity = element == Element::kBFloat16 ? 0x7f80 : 0x7c00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return infinity + 1;
  x = std::abs(x);
  // Positive numbers are ordered like their bits. Numbers that would round to the next number after
  // the largest become infinity.
  const double largest = Value(infinity - 1, element);
  const double behind = 2 * largest - Value(infinity - 2, element);
  uint16_t below = 0;
  for (uint16_t bit = 0x4000; bit != 0; bit /= 2) {
    if (below + bit < infinity && Value(below + bit, element) <= x) below += bit;
  }
  const double low = Value(below, element);
  const double high = below + 1 == infinity ? behind : Value(below + 1, element);
  const bool up = x - low > high - x || (x - low == high - x && below % 2 == 1);
  return sign | (up ? below + 1 : below);
}

// Rounds to ten bits after the leading one, ties away from zero.
double NearestTf32(double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int last = std::ilogb(x) - 10;
  const double rounded = std::ldexp(std::round(std::ldexp(x, -last)), last);
  return std::abs(rounded) > std::numeric_limits<float>::max() ? std::copysign(HUGE_VAL, x)
                                                               : rounded;
}

uint32_t BitsOf(double x) { return std::bit_cast<uint32_t>(static_cast<float>(x)); }
float FloatOf(uint32_t bits) { return std::bit_cast<float>(bits); }

double RoundedTo(double x, Element element) {
  return element == Element::kFloat32 ? static_cast<float>(x) : Value(Nearest(x, element), element);
}

// Packs consecutive elements into words.
Words AsWords(const std::vector<double>& numbers, Element element) {
  if (element == Element::kFloat32) {
    Words words(numbers.size());
    std::transform(numbers.begin(), numbers.end(), words.begin(), BitsOf);
    return words;
  }
  Words words((numbers.size() + 1) / 2);
  for (size_t n = 0; n < numbers.size(); ++n) {
    words[n / 2] |= uint32_t{Nearest(numbers[n], element)} << (16 * (n % 2));
  }
  return words;
}
double ElementAt(const Words& words, size_t n, Element element) {
  if (element == Element::kFloat32) return FloatOf(words.at(n));
  return Value(static_cast<uint16_t>(words.at(n / 2) >> (16 * (n % 2))), element);
}

// Whether both are NaN, or equal except for the sign of zero.
bool Same(double actual, double expected) {
  return std::isnan(expected) ? std::isnan(actual) : actual == expected;
}
bool Near(double actual, double expected, double relative) {
  if (!std::isfinite(expected)) return Same(actual, expected);
  return std::abs(actual - expected) <=
         relative * std::abs(expected) + std::numeric_limits<float>::min();
}

TEST_P(PrimitivesTest, ThreadsKnowWhoTheyAre) {
  constexpr uint32_t kColumns = calls::kGridColumns;
  const Words out = Run({.call = calls::kIndices, .grid = {kColumns, 2, 1}}, {0},
                        3 * 2 * kColumns * calls::kThreads);
  for (uint32_t y = 0; y < 2; ++y) {
    for (uint32_t x = 0; x < kColumns; ++x) {
      for (uint32_t t = 0; t < calls::kThreads; ++t) {
        const auto at = out.begin() + 3 * ((kColumns * y + x) * calls::kThreads + t);
        ASSERT_EQ(Words(at, at + 3), (Words{t, x, y}));
      }
    }
  }
}

// The approximate functions of a GPU have errors of a few ulps.
TEST_P(PrimitivesTest, FunctionsOfNumbers) {
  const float special[] = {0.0f,   -0.0f,    1.0f,  -1.0f,  0.5f,   127.5f,    -125.75f,   3e38f,
                           -3e38f, 1.5e-38f, 1e-6f, -1e-6f, 200.0f, kInfinity, -kInfinity, kNan};
  std::vector<float> a;
  std::vector<float> b;
  for (const float x : special) {
    for (const float y : special) {
      a.push_back(x);
      b.push_back(y);
    }
  }
  std::uniform_real_distribution<float> mantissa(1, 2);
  std::uniform_int_distribution<int> exponent(-20, 6);
  const auto number = [&] {
    const float size = std::ldexp(mantissa(random_), exponent(random_));
    return random_() % 2 == 0 ? size : -size;
  };
  while (a.size() < 4000) {
    a.push_back(number());
    b.push_back(number());
  }
  const size_t count = a.size();
  Words in;
  std::transform(a.begin(), a.end(), std::back_inserter(in), BitsOf);
  std::transform(b.begin(), b.end(), std::back_inserter(in), BitsOf);
  const Words out = Run({.call = calls::kFunctions, .count = static_cast<int>(count)}, in,
                        calls::kFunctionCount * count);
  constexpr double kFew = 1e-6;
  // Functions are in the order in which the kernel calls them; `at` is the index of the pair.
  struct Function {
    const char* name;
    double tolerance;
    std::function<double(double x, double y, size_t at)> expected;
  };
  const auto larger = [](double x, double y) {
    return std::isnan(x) || std::isnan(y) ? std::nan("") : std::max(x, y);
  };
  const Function functions[calls::kFunctionCount] = {
      {"Exp2", kFew, [](double x, double, size_t) { return std::exp2(x); }},
      {"Log2", kFew, [](double x, double, size_t) { return std::log2(x); }},
      {"Sqrt", kFew, [](double x, double, size_t) { return std::sqrt(x); }},
      {"Rsqrt", kFew, [](double x, double, size_t) { return 1 / std::sqrt(x); }},
      {"Exp", kFew, [](double x, double, size_t) { return std::exp(x); }},
      {"Log", kFew, [](double x, double, size_t) { return std::log(x); }},
      {"Log1p", kFew, [](double x, double, size_t) { return std::log1p(x); }},
      {"Tanh", kFew, [](double x, double, size_t) { return std::tanh(x); }},
      {"Abs", 0, [](double x, double, size_t) { return std::abs(x); }},
      {"Max", 0, [&](double x, double y, size_t) { return larger(x, y); }},
      {"Min", 0, [&](double x, double y, size_t) { return -larger(-x, -y); }},
      {"Larger", 0, [](double x, double y, size_t) { return std::fmax(x, y); }},
      {"Angle", kFew, [](double x, double y, size_t) { return std::atan2(y, x + 0.0); }},
      {"Fma", 0,
       [](double x, double y, size_t) {
         return std::fma(static_cast<float>(x), static_cast<float>(y), static_cast<float>(x));
       }},
      // The compiler must not fuse the operations: the product must be rounded.
      {"a b + a", 0,
       [](double x, double y, size_t) {
         return static_cast<float>(static_cast<float>(x * y) + x);
       }},
      {"a / b", kFew, [](double x, double y, size_t) { return static_cast<float>(x / y); }},
      {"Splat", 0, [](double, double y, size_t) { return y; }},
      {"Tiny", 0, [](double, double, size_t) { return 1e-30f; }},
      {"Select", 0, [](double x, double y, size_t) { return x < y ? x : y; }},
      {"Step", 0,
       [](double x, double, size_t) { return x > 0                    ? 1.0
                                             : x < 0 || std::isnan(x) ? 0.0
                                                                      : 0.5; }},
      {"Infinity", 0, [](double, double, size_t) { return HUGE_VAL; }},
      {"DivideUp", 0, [](double, double, size_t n) { return static_cast<double>((n + 6) / 7); }},
      {"Least and Most", 0,
       [](double, double, size_t n) {
         return static_cast<double>(std::min<size_t>(n, 50) + std::max<size_t>(n, 60));
       }},
  };
  for (size_t f = 0; f < calls::kFunctionCount; ++f) {
    const Function& function = functions[f];
    int wrong = 0;
    for (size_t n = 0; n < count; ++n) {
      // Approximate division does not support the largest divisors.
      if (std::string(function.name) == "a / b" && !(std::abs(b[n]) < 1e38f)) continue;
      const double expected = function.expected(a[n], b[n], n);
      const float actual = FloatOf(out[f * count + n]);
      const float limit = std::numeric_limits<float>::max();
      const bool overflows = std::isfinite(expected) && std::abs(expected) > limit;
      if (Near(actual, overflows ? std::copysign(HUGE_VAL, expected) : expected,
               function.tolerance)) {
        continue;
      }
      if (++wrong > 3) break;
      ADD_FAILURE() << function.name << " of " << a[n] << " and " << b[n] << " is " << actual
                    << ", not " << expected;
    }
  }
}

TEST_P(PrimitivesTest, ConversionsOfNumbers) {
  constexpr size_t kCount = 65536;
  Words in(2 * kCount);
  for (uint32_t& bits : in) {
    bits = random_();
    // Many numbers are at or near a tie between two bf16, tf32 or fp16 numbers.
    if (random_() % 4 == 0) bits = (bits & 0xffff0000u) + 0x7fff + random_() % 3;
    if (random_() % 4 == 0) bits = (bits & 0xffffe000u) + 0x0fff + random_() % 3;
    // Some numbers are in the range of fp16.
    if (random_() % 4 == 0) bits = (bits & 0x87ffffffu) | 0x38000000u;
    if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
  }
  const Words out = Run({.call = calls::kConversions, .count = static_cast<int>(kCount)}, in,
                        calls::kConversionCount * kCount);
  for (size_t n = 0; n < kCount; ++n) {
    const double a = FloatOf(in[n]);
    const double b = FloatOf(in[kCount + n]);
    const auto result = [&](size_t f) { return out[f * kCount + n]; };
    const double high = NearestTf32(a);
    ASSERT_TRUE(Same(FloatOf(result(0)), high)) << a;
    ASSERT_TRUE(Same(FloatOf(result(1)), high)) << a;
    // The remainder may be too small for full fp32 precision.
    if (std::isfinite(high) && std::abs(a) > 1e-30) {
      ASSERT_TRUE(Same(FloatOf(result(2)), NearestTf32(a - high))) << a;
    }
    const double rounded = FloatOf(result(5));
    ASSERT_TRUE(Same(rounded, RoundedTo(a, element()))) << a << " became " << rounded;
    if (element() == Element::kFloat32) continue;
    for (const auto& [number, half] : {std::pair(a, 0), std::pair(b, 1)}) {
      const auto bits = static_cast<uint16_t>(result(3) >> (16 * half));
      const uint16_t expected = Nearest(number, element());
      ASSERT_TRUE(std::isnan(number) ? std::isnan(Value(bits, element())) : bits == expected)
          << number << " became " << bits << ", not " << expected;
    }
    ASSERT_TRUE(Same(FloatOf(result(4)), Value(static_cast<uint16_t>(n), element()))) << n;
  }
}

TEST_P(PrimitivesTest, LanesGiveEachOtherNumbers) {
  Words in(calls::kThreads);
  std::vector<double> numbers(calls::kThreads);
  for (size_t t = 0; t < in.size(); ++t) {
    numbers[t] = static_cast<double>(random_() % 1000);
    in[t] = BitsOf(numbers[t]);
  }
  const Words out = Run({.call = calls::kLanes}, in, calls::kLaneCount * calls::kThreads);
  for (size_t t = 0; t < in.size(); ++t) {
    const auto result = [&](size_t f) { return FloatOf(out[f * calls::kThreads + t]); };
    const size_t warp = t / 32 * 32;
    for (size_t n = 0; n < 5; ++n) ASSERT_EQ(result(n), numbers[t ^ size_t{1} << n]);
    ASSERT_EQ(result(5), numbers[warp + (5 * (t - warp) + 3) % 32]);
    const auto sum = [&](size_t first, size_t count) {
      double total = 0;
      for (size_t n = first; n < first + count; ++n) total += numbers[n];
      return total;
    };
    ASSERT_EQ(result(6), sum(t / 4 * 4, 4));
    ASSERT_EQ(result(7), sum(warp, 32));
    const auto first = numbers.begin() + static_cast<ptrdiff_t>(warp);
    ASSERT_EQ(result(8), std::any_of(first, first + 32, [](double a) { return a < calls::kRare; }));
  }
}

TEST_P(PrimitivesTest, CopiesToSharedMemory) {
  Words in(calls::kCopiesIn);
  for (uint32_t& word : in) word = BitsOf(random_() % 100000 + 1);
  const Words out = Run({.call = calls::kCopies}, in, calls::kCopiesOut);
  Words expected(calls::kCopiesOut);
  for (int t = 0; t < calls::kThreads; ++t) {
    const auto copy = [&](int word, int bytes) {
      std::memcpy(&expected[static_cast<size_t>(word)], &in[static_cast<size_t>(word)],
                  static_cast<size_t>(bytes));
    };
    copy(4 * t, calls::BytesOfFirst(t));
    copy(4 * (calls::kThreads + t), calls::BytesOfSecond(t));
    copy(8 * calls::kThreads + t, t % 3 != 0 ? 4 : 0);
    const uint32_t word = in[static_cast<size_t>(t)];
    expected[static_cast<size_t>(9 * calls::kThreads + t)] = word & 0xffffu;
    expected[static_cast<size_t>(10 * calls::kThreads + t)] = word;
  }
  ASSERT_EQ(out, expected);
}

TEST_P(PrimitivesTest, RowsAndWordsToSharedMemory) {
  constexpr int64_t kHead = 20 * calls::kRowsStride;
  std::vector<double> numbers(6 * kHead);
  for (double& number : numbers) number = RoundedTo(1 + random_() % 1000, element());
  const Words in = AsWords(numbers, element());
  const size_t row_words = calls::kRowsPadded * bytes() / 4;
  for (const bool aligned : {true, false}) {
    const Words out = Run({.call = calls::kRows, .stride = {3 * kHead, kHead, calls::kRowsStride}},
                          in, calls::kRowsCount * row_words + calls::kWordsCount, aligned);
    for (size_t r = 0; r < calls::kRowsCount; ++r) {
      for (size_t column = 0; column < calls::kRowsPadded; ++column) {
        const size_t row = calls::kRowsFirst + r;
        const bool inside =
            row >= calls::kRowsLow && row < calls::kRowsHigh && column < calls::kRowsColumns;
        ASSERT_EQ(ElementAt(out, r * calls::kRowsPadded + column, element()),
                  inside ? numbers[5 * kHead + row * calls::kRowsStride + column] : 0)
            << "row " << row << " column " << column;
      }
    }
    for (size_t n = 0; n < calls::kWordsCount; ++n) {
      const bool inside = n >= calls::kWordsLow && n < calls::kWordsHigh;
      ASSERT_EQ(out[calls::kRowsCount * row_words + n], inside ? in[n] : 0) << n;
    }
  }
}

// ldmatrix: lane 8 m + r points to row r of matrix m. Lane l receives numbers 2 (l % 4) and 2 (l %
// 4) + 1 of row l / 4, or of column l / 4 if the load transposes.
TEST_P(PrimitivesTest, MatricesOfSharedMemory) {
  Words in(128);
  for (uint32_t& word : in) word = random_();
  const Words out = Run({.call = calls::kMatrices}, in, 8 * calls::kThreads);
  for (size_t t = 0; t < calls::kThreads; ++t) {
    const size_t lane = t % 32;
    for (size_t m = 0; m < 4; ++m) {
      const auto number = [&](size_t row, size_t column) {
        const size_t named = t < 32 ? 8 * m + row : 31 - (8 * m + row);
        return in[4 * named + column / 2] >> (16 * (column % 2)) & 0xffffu;
      };
      const size_t row = lane / 4;
      const size_t column = 2 * (lane % 4);
      ASSERT_EQ(out[8 * t + m], number(row, column) | number(row, column + 1) << 16);
      ASSERT_EQ(out[8 * t + 4 + m], number(column, row) | number(column + 1, row) << 16);
    }
  }
}

// The (row, column) of a lane's n-th number, from the PTX manual: "Matrix fragments for
// mma.m16n8k8" with .tf32, and "for mma.m16n8k16" with 16-bit types.
using Coordinates = std::pair<size_t, size_t>;
Coordinates OfA(size_t lane, size_t n, bool tf32) {
  const size_t group = lane >> 2;
  const size_t in_group = lane % 4;
  if (tf32) return {n == 0 || n == 2 ? group : group + 8, n < 2 ? in_group : in_group + 4};
  return {n < 2 || (4 <= n && n < 6) ? group : group + 8, in_group * 2 + (n & 1) + (n < 4 ? 0 : 8)};
}
Coordinates OfB(size_t lane, size_t n, bool tf32) {
  const size_t in_group = lane % 4;
  if (tf32) return {n == 0 ? in_group : in_group + 4, lane >> 2};
  return {in_group * 2 + (n & 1) + (n < 2 ? 0 : 8), lane >> 2};
}
Coordinates OfC(size_t lane, size_t n) {
  return {n < 2 ? lane >> 2 : (lane >> 2) + 8, lane % 4 * 2 + (n & 1)};
}

TEST_P(PrimitivesTest, AProductOfRegisters) {
  const bool tf32 = element() == Element::kFloat32;
  const size_t depth = tf32 ? 8 : 16;
  // Sums of integers are exact.
  std::uniform_int_distribution<int> integer(-50, 50);
  const auto matrix = [&](size_t rows, size_t columns) {
    std::vector<std::vector<double>> numbers(rows, std::vector<double>(columns));
    for (auto& row : numbers) {
      for (double& number : row) number = integer(random_);
    }
    return numbers;
  };
  Words in;
  std::vector<double> expected;
  for (int warp = 0; warp < calls::kWarps; ++warp) {
    const auto a = matrix(16, depth);
    const auto b = matrix(depth, 8);
    const auto c = matrix(16, 8);
    for (size_t lane = 0; lane < 32; ++lane) {
      std::vector<double> operands;
      for (size_t n = 0; n < (tf32 ? 4 : 8); ++n) {
        const auto [row, column] = OfA(lane, n, tf32);
        operands.push_back(a[row][column]);
      }
      for (size_t n = 0; n < (tf32 ? 2 : 4); ++n) {
        const auto [row, column] = OfB(lane, n, tf32);
        operands.push_back(b[row][column]);
      }
      for (const uint32_t word : AsWords(operands, element())) in.push_back(word);
      for (size_t n = 0; n < 4; ++n) {
        const auto [row, column] = OfC(lane, n);
        in.push_back(BitsOf(c[row][column]));
        double sum = c[row][column];
        for (size_t k = 0; k < depth; ++k) sum += a[row][k] * b[k][column];
        expected.push_back(sum);
      }
    }
  }
  const Words out = Run({.call = calls::kProduct}, in, 4 * calls::kThreads);
  for (size_t n = 0; n < out.size(); ++n) ASSERT_EQ(FloatOf(out[n]), expected[n]) << n;
}

// Computes enough products of tiles of integers and of arbitrary numbers to reveal the order of
// summation.
TEST_P(PrimitivesTest, ProductsOfTiles) {
  constexpr size_t kRows = calls::kTileRows;
  constexpr size_t kColumns = calls::kTileColumns;
  constexpr size_t kNumbers = calls::kTileNumbers;
  for (int draw = 0; draw < 24; ++draw) {
    SCOPED_TRACE(draw);
    const bool integers = draw == 0;
    std::normal_distribution<double> normal;
    std::vector<double> numbers(3 * kNumbers);
    for (double& number : numbers) {
      number = integers ? static_cast<int>(random_() % 9) - 4.0 : normal(random_);
      number = RoundedTo(number, element());
    }
    const auto x = [&](size_t row, size_t column) { return numbers[row * kColumns + column]; };
    const auto y = [&](size_t row, size_t column) { return x(kRows + row, column); };
    const auto v = [&](size_t row, size_t column) { return x(2 * kRows + row, column); };
    for (const bool aligned : {true, false}) {
      const Words out =
          Run({.call = calls::kTiles}, AsWords(numbers, element()), 4 * kNumbers, aligned);
      const auto result = [&](size_t n, size_t row, size_t column) {
        return FloatOf(out[n * kNumbers + row * kColumns + column]);
      };
      // The error from splitting fp32 into two tf32 numbers, and from the order of summation.
      const double rounding = integers ? 0 : 2e-6;
      for (size_t i = 0; i < kRows; ++i) {
        for (size_t j = 0; j < kRows; ++j) {
          double s = 0;
          double size = 0;
          for (size_t d = 0; d < kColumns; ++d) {
            s += x(i, d) * y(j, d);
            size += std::abs(x(i, d) * y(j, d));
          }
          ASSERT_NEAR(result(0, i, j), s, rounding * size) << i << " " << j;
          ASSERT_EQ(result(1, j, i), result(0, i, j)) << i << " " << j;
        }
        for (size_t d = 0; d < kColumns; ++d) {
          double o = 0;
          double size = 0;
          for (size_t j = 0; j < kRows; ++j) {
            const double weight = RoundedTo(result(0, i, j), element());
            o += weight * v(j, d);
            size += std::abs(weight * v(j, d));
          }
          ASSERT_NEAR(result(2, i, d), o, rounding * size) << i << " " << d;
          if (element() == Element::kFloat32) continue;
          double transposed = 0;
          size = 0;
          for (size_t j = 0; j < kRows; ++j) {
            transposed += x(j, i) * v(j, d);
            size += std::abs(x(j, i) * v(j, d));
          }
          ASSERT_NEAR(result(3, i, d), transposed, rounding * size) << i << " " << d;
        }
      }
    }
  }
}

TEST_P(PrimitivesTest, ElementsOfMemory) {
  constexpr size_t kCount = calls::kElementCount;
  std::vector<double> numbers(2 * kCount);
  std::normal_distribution<double> normal;
  for (double& number : numbers) number = RoundedTo(normal(random_), element());
  for (const bool aligned : {true, false}) {
    const Words out = Run({.call = calls::kElements}, AsWords(numbers, element()),
                          2 * kCount + 2 * kCount * bytes() / 4, aligned);
    const Words stored(out.begin() + 2 * kCount, out.end());
    for (size_t n = 0; n < 2 * kCount; ++n) {
      ASSERT_EQ(FloatOf(out[n]), numbers[n]);
      const bool is_stored = n % 2 < n / 2 % 3;
      const Words before(stored.size(), kUntouched);
      ASSERT_EQ(ElementAt(stored, n, element()),
                is_stored ? numbers[n] : ElementAt(before, n, element()))
          << n;
    }
  }
}

TEST_P(PrimitivesTest, SumsInTheOrderOfTickets) {
  constexpr size_t kNumbers = 4 * calls::kThreads;
  constexpr size_t kFirst = calls::kSumsFirst;
  Words in(kFirst + (1 + calls::kSumBlocks) * kNumbers + calls::kThreads, 0);
  std::vector<float> expected(kNumbers, 0.0f);
  std::normal_distribution<float> normal;
  for (size_t n = 0; n < calls::kSumBlocks * kNumbers; ++n) {
    const float number = normal(random_);
    expected[n % kNumbers] += number;
    in[kFirst + kNumbers + n] = std::bit_cast<uint32_t>(number);
  }
  const Words out = Run({.call = calls::kSums, .grid = {calls::kSumBlocks, 1, 1}}, in,
                        kNumbers + calls::kThreads);
  // The sums of a fragment are read as they were added.
  for (size_t n = 0; n < kNumbers; ++n) ASSERT_EQ(FloatOf(out[n]), expected[n]) << n;
  for (size_t t = 0; t < calls::kThreads; ++t) {
    ASSERT_EQ(FloatOf(out[kNumbers + t]), expected[4 * t]) << t;
  }
}

// Products by groups of warps, whose operands other warps copy. Sums of integers are exact.
TEST_P(PrimitivesTest, ProductsOfGroups) {
  if (element() == Element::kFloat32) GTEST_SKIP() << "the products are of 16-bit numbers";
  if (!machine().IsHopper()) GTEST_SKIP() << "needs compute capability 9.0";
  constexpr size_t kRounds = calls::kGroupRounds;
  constexpr size_t kRows = calls::kGroupRowsOfX;
  constexpr size_t kDim = calls::kGroupDim;
  for (const size_t columns : {64, 128}) {
    SCOPED_TRACE(columns);
    // X, then Y and V of each round. Scores are at most 128, so that bf16 represents them.
    std::vector<double> numbers(kRows * kDim + kRounds * columns * (kDim + columns));
    for (double& number : numbers) number = static_cast<int>(random_() % 3) - 1.0;
    const double* const x = numbers.data();
    const size_t scores = kRows * columns;
    const Launch launch = {.call = calls::kIndices,
                           .threads = 384,
                           .shared_bytes = static_cast<uint32_t>(calls::kGroupSharedBytes)};
    const Words out = machine().Run(WgmmaName(element(), static_cast<int>(columns)), launch,
                                    AsWords(numbers, element()), (kRounds + 1) * scores);
    std::vector<double> o(scores);
    for (size_t round = 0; round < kRounds; ++round) {
      const double* const y = x + kRows * kDim + round * columns * (kDim + columns);
      const double* const v = y + columns * kDim;
      for (size_t i = 0; i < kRows; ++i) {
        for (size_t j = 0; j < columns; ++j) {
          double s = 0;
          for (size_t d = 0; d < kDim; ++d) s += x[i * kDim + d] * y[j * kDim + d];
          ASSERT_EQ(FloatOf(out[round * scores + i * columns + j]), s) << i << " " << j;
          for (size_t d = 0; d < columns; ++d) o[i * columns + d] += s * v[j * columns + d];
        }
      }
    }
    for (size_t n = 0; n < scores; ++n) ASSERT_EQ(FloatOf(out[kRounds * scores + n]), o[n]) << n;
  }
}

// Compiles the kernel with NVRTC for each architecture. All arrays must be in registers, so that it
// needs no stack.
class CompiledPrimitivesTest : public ::testing::TestWithParam<std::tuple<int, Element>> {};

TEST_P(CompiledPrimitivesTest, FitIntoRegisters) {
  if (InstalledNvrtc() == nullptr)
    GTEST_SKIP() << "NVRTC not found; set GNOMON_NVRTC to its library";
  const auto& [architecture, element] = GetParam();
  // The cases alternate between aligned and unaligned memory for each element type.
  const bool aligned = (architecture / 10 + static_cast<int>(element)) % 2 == 0;
  const CompiledKernel compiled =
      CompileFor(architecture, PrimitivesProgram(PrimitivesName(element, aligned)));
  EXPECT_EQ(compiled.stack, 0);
  EXPECT_EQ(compiled.spilled, 0);
}

TEST(CompiledWgmmaTest, FitsIntoRegisters) {
  if (InstalledNvrtc() == nullptr)
    GTEST_SKIP() << "NVRTC not found; set GNOMON_NVRTC to its library";
  for (const auto& [element, columns] :
       {std::pair(Element::kBFloat16, 64), std::pair(Element::kFloat16, 128)}) {
    const CompiledKernel compiled = CompileFor(90, PrimitivesProgram(WgmmaName(element, columns)));
    EXPECT_EQ(compiled.stack, 0);
    EXPECT_EQ(compiled.spilled, 0);
    EXPECT_FALSE(compiled.serialized);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CompiledPrimitivesTest,
                         ::testing::Combine(::testing::ValuesIn(kArchitectures),
                                            ::testing::ValuesIn(kElements)),
                         [](const auto& test) {
                           return "Sm" + std::to_string(std::get<0>(test.param)) +
                                  NameOf(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace gnomon::testing
