// Compiles the kernels with the NVRTC of the installed PyTorch, and checks their resource usage.
// The tests are skipped without NVRTC.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/cuda_program.h"
#include "core/definition_source.h"
#include "cuda/attention.h"
#include "cuda_problem.h"
#include "device_texts.h"
#include "gnomon/attention.h"
#include "gtest/gtest.h"
#include "installed_nvrtc.h"
#include "launched_kernels.h"

namespace gnomon::testing {
namespace {

using cuda::Element;
using cuda::KernelName;

constexpr Form kForms[] = {
    {"Plain", Element::kBFloat16, 64, false, false, false, false, false, 64},
    {"PlainFewHeads", Element::kFloat16, 64, false, false, false, false, false},
    {"PlainWide", Element::kBFloat16, 128, false, false, false, false, false, 64},
    {"BiasFp32", Element::kFloat32, 64, true, false, false, false, false},
    {"MaskWide", Element::kFloat16, 128, true, true, false, false, false},
    {"All", Element::kBFloat16, 64, true, true, true, false, true},
    {"AllFp32", Element::kFloat32, 64, true, true, true, false, true},
    {"AllWide", Element::kBFloat16, 128, true, true, true, false, true},
    {"AllWideFp32", Element::kFloat32, 128, true, true, true, false, true},
    {"Tables", Element::kBFloat16, 64, false, false, false, true, true},
    // Without gradients of factors.
    {"OnePass", Element::kBFloat16, 64, false, false, false, false, false, 64, false},
    {"OnePassWide", Element::kBFloat16, 128, false, false, false, false, false, 64, false},
    {"PlainWideFp16", Element::kFloat16, 128, false, false, false, false, false},
    {"TwoPasses", Element::kBFloat16, 64, false, false, false, false, false, 2, true, false, false},
    {"TwoPassesWide", Element::kFloat16, 128, false, false, false, false, false, 2, true, false,
     false},
};
constexpr size_t kFormCount = std::size(kForms);

// Limits on stack and spilled bytes.
constexpr int kMostStack = 64;
int MostStack(const Form& form) {
  return form.element == Element::kFloat32 && form.dim > 64 ? 2 * kMostStack : kMostStack;
}

void ExpectFits(const KernelName& name, int architecture, int most_stack) {
  SCOPED_TRACE(name.kind + " " + name.definition);
  const CompiledKernel compiled = CompileFor(architecture, CudaProgram(name));
  EXPECT_LE(compiled.stack, most_stack);
  EXPECT_LE(compiled.spilled, most_stack);
  EXPECT_LE(compiled.registers, 255);
}

struct CompiledCase {
  const PairFunction* function;
  size_t form;
  int architecture;
  Passes passes = Passes::kBoth;
};

class CompiledTest : public ::testing::TestWithParam<CompiledCase> {};

TEST_P(CompiledTest, FitsIntoRegisters) {
  if (InstalledNvrtc() == nullptr)
    GTEST_SKIP() << "NVRTC not found; set GNOMON_NVRTC to its library";
  const auto& [function, form, architecture, passes] = GetParam();
  for (const LaunchedKernel& kernel : KernelsOf(*function, kForms[form], passes)) {
    if (kernel.name.definition.empty()) continue;
    ExpectFits(kernel.name, architecture, MostStack(kForms[form]));
  }
}

// A pair function without CPU kernels.
PairFunction WithoutKernels(const char* name) {
  PairFunction function{};
  function.name = name;
  function.input = PairInput::kSquaredDistance;
  return function;
}

// The library's pair functions, and an external one from an example, registered as by
// gnomon_add_similarity() and gnomon_add_terms().
std::vector<const PairFunction*> Functions() {
  static const PairFunction kFunction = WithoutKernels("student_t");
  static const DefinitionSource kSource = {"StudentT", "student_t-inl.h", kStudentT};
  [[maybe_unused]] static const bool kAdded = [] {
    AddPairFunction(kFunction);
    AddDefinitionSource(kFunction, kSource);
    return true;
  }();
  std::vector<const PairFunction*> functions(PairFunctions().begin(), PairFunctions().end());
  functions.push_back(&kFunction);
  return functions;
}

// All pair functions in all forms for all architectures.
std::vector<CompiledCase> AllCases() {
  std::vector<CompiledCase> cases;
  for (const PairFunction* function : Functions()) {
    for (size_t form = 0; form < kFormCount; ++form) {
      for (const int architecture : kArchitectures) {
        cases.push_back({function, form, architecture});
        cases.push_back({function, form, architecture, Passes::kTangents});
      }
    }
  }
  return cases;
}

// Selects one pass of each form with a function that compiles fast, and of the first form with
// every third other function, and the derivatives of one function for each architecture.
std::vector<CompiledCase> SomeCases() {
  constexpr std::string_view kFast[] = {"dot", "softcap", "gaussian"};
  std::vector<CompiledCase> cases;
  const auto add = [&](const PairFunction& function, size_t form) {
    const size_t turn = cases.size();
    const Passes one = turn % 2 == 0 && kForms[form].factor ? Passes::kForward : Passes::kBackward;
    // With this step, each architecture gets both passes.
    const size_t architecture =
        (turn + turn / std::size(kArchitectures)) % std::size(kArchitectures);
    cases.push_back({&function, form, kArchitectures[architecture], one});
  };
  for (size_t form = 0; form < kFormCount; ++form) {
    add(FindPairFunction(kForms[form].factor ? kFast[form % std::size(kFast)] : "dot"), form);
  }
  size_t others = 0;
  for (const PairFunction* function : Functions()) {
    const bool is_other = std::ranges::find(kFast, function->name) == std::end(kFast);
    if (is_other && others++ % 3 == 0) add(*function, 0);
  }
  // The gradient of student_t is derived.
  constexpr std::pair<const char*, size_t> kTangents[] = {
      {"student_t", 0}, {"gaussian", 1}, {"dot", 3}, {"softcap", 7}};
  static_assert(std::size(kTangents) == std::size(kArchitectures));
  for (size_t n = 0; n < std::size(kTangents); ++n) {
    const auto& [name, form] = kTangents[n];
    cases.push_back({&FindPairFunction(name), form, kArchitectures[n], Passes::kTangents});
  }
  return cases;
}

// All cases take most of an hour.
std::vector<CompiledCase> ChosenCases() { return TestsAllForms() ? AllCases() : SomeCases(); }

TEST(CompiledCasesTest, SomeAreOfEachFormAndArchitecture) {
  std::set<size_t> forms;
  std::set<int> architectures;
  for (const CompiledCase& c : SomeCases()) {
    forms.insert(c.form);
    architectures.insert(c.architecture);
  }
  EXPECT_EQ(forms.size(), kFormCount);
  EXPECT_EQ(architectures.size(), std::size(kArchitectures));
}

std::string NameOfCase(const ::testing::TestParamInfo<CompiledTest::ParamType>& test) {
  const CompiledCase& c = test.param;
  return std::string(c.function->name) + kForms[c.form].name + "Sm" +
         std::to_string(c.architecture) + (c.passes == Passes::kTangents ? "Tangents" : "");
}

INSTANTIATE_TEST_SUITE_P(All, CompiledTest, ::testing::ValuesIn(ChosenCases()), NameOfCase);

TEST(CompiledPagesTest, FitIntoRegisters) {
  if (InstalledNvrtc() == nullptr)
    GTEST_SKIP() << "NVRTC not found; set GNOMON_NVRTC to its library";
  const std::pair<const char*, Form> calls[] = {
      {"dot", {.name = "", .element = Element::kBFloat16, .dim = 64, .heads = 64, .pages = true}},
      {"laplacian", {.name = "", .element = Element::kFloat16, .dim = 128, .pages = true}},
      {"gaussian",
       {.name = "", .element = Element::kFloat32, .dim = 64, .bias = true, .pages = true}},
      {"dot",
       {.name = "",
        .element = Element::kBFloat16,
        .dim = 128,
        .heads = 64,
        .hopper = true,
        .pages = true}}};
  for (const auto& [function, form] : calls) {
    int found = 0;
    for (const auto& [name, shape] :
         KernelsOf(FindPairFunction(function), form, Passes::kForward)) {
      if (name.kind != (form.hopper ? "forward_hopper" : "forward")) continue;
      EXPECT_EQ(ConstantOf(name, "kPages"), 1);
      ExpectFits(name, 90, kMostStack);
      ++found;
    }
    EXPECT_EQ(found, 1);
  }
}

// The forward pass on compute capability 9.0. Its register limits are those of hopper.cuh, so the
// compiler reports the average.
class CompiledHopperTest : public ::testing::TestWithParam<std::tuple<const char*, int64_t>> {};

TEST_P(CompiledHopperTest, FitsIntoRegisters) {
  if (InstalledNvrtc() == nullptr)
    GTEST_SKIP() << "NVRTC not found; set GNOMON_NVRTC to its library";
  const auto& [function, dim] = GetParam();
  const Form form{.name = "",
                  .element = dim == 64 ? Element::kBFloat16 : Element::kFloat16,
                  .dim = dim,
                  .heads = 64,
                  .hopper = true};
  int found = 0;
  for (const auto& [name, shape] : KernelsOf(FindPairFunction(function), form, Passes::kForward)) {
    if (name.definition.empty()) continue;
    EXPECT_EQ(name.kind, "forward_hopper");
    const CompiledKernel compiled = CompileFor(90, CudaProgram(name));
    EXPECT_LE(compiled.stack, kMostStack);
    EXPECT_LE(compiled.spilled, kMostStack);
    EXPECT_FALSE(compiled.serialized);
    ++found;
  }
  EXPECT_EQ(found, 1);
}

std::vector<std::tuple<const char*, int64_t>> HopperCases() {
  std::vector<std::tuple<const char*, int64_t>> cases = {
      {"dot", 64}, {"dot", 128}, {"penumbral", 64}};
  if (!TestsAllForms()) return cases;
  cases.clear();
  for (const PairFunction* function : PairFunctions()) {
    if (function->input == PairInput::kNone) continue;
    for (const int64_t dim : {64, 128}) cases.emplace_back(function->name, dim);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, CompiledHopperTest, ::testing::ValuesIn(HopperCases()),
                         [](const auto& test) {
                           return std::get<0>(test.param) + std::to_string(std::get<1>(test.param));
                         });

// Returns the compiler's error for the forward pass of a pair function.
std::string ErrorOfCompiling(const PairFunction& function) {
  for (const auto& [name, shape] : KernelsOf(function, kForms[0])) {
    if (name.kind != "forward") continue;
    try {
      InstalledNvrtc()->Compile(CudaProgram(name), "sm_90");
    } catch (const std::runtime_error& error) {
      return error.what();
    }
  }
  return "nothing was thrown";
}

TEST(CompiledErrorsTest, NameTheDefinition) {
  if (InstalledNvrtc() == nullptr)
    GTEST_SKIP() << "NVRTC not found; set GNOMON_NVRTC to its library";
  static const PairFunction kFunction = WithoutKernels("unfinished");
  static const DefinitionSource kSource = {"Unfinished", "unfinished-inl.h",
                                           "struct Unfinished {\n  static no_such_type a;\n};\n"};
  AddPairFunction(kFunction);
  EXPECT_NE(
      ErrorOfCompiling(kFunction).find("pair function 'unfinished' runs only on the CPU, because "
                                       "this build does not contain its source; add the function "
                                       "with gnomon_add_similarity() or gnomon_add_terms()"),
      std::string::npos)
      << ErrorOfCompiling(kFunction);
  AddDefinitionSource(kFunction, kSource);
  const std::string error = ErrorOfCompiling(kFunction);
  EXPECT_TRUE(
      error.starts_with("CUDA: the CUDA kernel forward of the definition Unfinished "
                        "(unfinished-inl.h) does not compile for sm_90 with NVRTC "))
      << error;
  EXPECT_NE(error.find("unfinished-inl.h(2): error: "), std::string::npos) << error;
  EXPECT_NE(error.find("no_such_type"), std::string::npos) << error;
}

// A definition's own gradient is compiled instead of a derived one. The Value of this definition
// does not compile for dual numbers.
TEST(CompiledGradientTest, OwnGradientsAreNotDerived) {
  if (InstalledNvrtc() == nullptr)
    GTEST_SKIP() << "NVRTC not found; set GNOMON_NVRTC to its library";
  static const PairFunction kFunction = WithoutKernels("own_gradient");
  static const DefinitionSource kSource = {"OwnGradient", "own_gradient-inl.h", R"(
struct OwnGradient {
  static constexpr int kRowScalars = 0;
  static constexpr int kColumnScalars = 0;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;
  template <class V>
  static V Value(V g, const V*, const V*, const V*) {
    return Larger(g, g);
  }
  template <class V, class D>
  static void Gradient(V g, const V*, const V*, const V*, D& d) {
    d.g = Splat(g, 1.0f);
  }
};
)"};
  AddPairFunction(kFunction);
  AddDefinitionSource(kFunction, kSource);
  for (const auto& [name, shape] : KernelsOf(kFunction, kForms[0], Passes::kBackward)) {
    if (!name.definition.empty()) EXPECT_NO_THROW(CompileFor(90, CudaProgram(name)));
  }
}

// Tests the kernels without a pair function.
class CompiledRowsTest : public ::testing::TestWithParam<int> {};

TEST_P(CompiledRowsTest, FitIntoRegisters) {
  if (InstalledNvrtc() == nullptr)
    GTEST_SKIP() << "NVRTC not found; set GNOMON_NVRTC to its library";
  std::set<std::string> kinds;
  const std::pair<const char*, size_t> calls[] = {{"laplacian", 6}, {"laplacian", 7}, {"dot", 10}};
  for (const auto& [function, form] : calls) {
    for (const Passes passes : {Passes::kBoth, Passes::kTangents}) {
      for (const auto& [name, shape] :
           KernelsOf(FindPairFunction(function), kForms[form], passes)) {
        if (!name.definition.empty() || !kinds.insert(name.kind).second) continue;
        ExpectFits(name, GetParam(), 0);
      }
    }
  }
  EXPECT_GE(kinds.size(), 9);
}

TEST_P(CompiledRowsTest, TokenMapsFitIntoRegisters) {
  if (InstalledNvrtc() == nullptr)
    GTEST_SKIP() << "NVRTC not found; set GNOMON_NVRTC to its library";
  const std::vector<LaunchedKernel> kernels = KernelsOfTokenMaps();
  EXPECT_EQ(kernels.size(), 12);
  // Half of the kernels for each architecture.
  const size_t step = TestsAllForms() ? 1 : 2;
  for (size_t n = GetParam() / 10 % step; n < kernels.size(); n += step) {
    ExpectFits(kernels[n].name, GetParam(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CompiledRowsTest, ::testing::ValuesIn(kArchitectures),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace gnomon::testing
