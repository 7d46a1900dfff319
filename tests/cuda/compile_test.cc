// Every kernel for GPUs compiles with the NVRTC of the installed PyTorch, for every family of GPUs
// that it is meant for, and fits into registers. No GPU, driver or toolkit is involved: the plan
// says which kernels it would launch, the library what they are compiled from, and ptxas what they
// need.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda_program.h"
#include "core/definition_source.h"
#include "cuda/attention.h"
#include "cuda/runtime.h"
#include "gmock/gmock.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::cuda {
namespace {

// Memory that is never looked at.
template <class T>
T* Somewhere() {
  return reinterpret_cast<T*>(uintptr_t{1} << 20);
}

// Notes which kernels are launched.
class Recorder final : public Backend {
 public:
  void Launch(const KernelName& kernel, const LaunchShape& shape, const void*, size_t) override {
    const bool is_known = std::any_of(kernels_.begin(), kernels_.end(),
                                      [&](const auto& known) { return known.name == kernel; });
    if (!is_known) kernels_.push_back({kernel, shape});
  }
  void* Scratch(size_t) override { return Somewhere<void>(); }

  struct Launched {
    KernelName name;
    LaunchShape shape;
  };
  const std::vector<Launched>& kernels() const { return kernels_; }

 private:
  std::vector<Launched> kernels_;
};

// A call, as large as those that most are trained with, of which `change` makes a special one.
struct Call {
  Input input;
  Gradient gradient;
};

void Record(const std::string& function_name, Element element, int64_t dim,
            const std::function<void(Call&)>& change, Recorder& recorder) {
  const PairFunction& function = FindPairFunction(function_name);
  constexpr int64_t kLength = 1024;
  Call call;
  Input& in = call.input;
  in.element = element;
  in.shape = {.batch = 2,
              .heads = 8,
              .key_heads = 8,
              .queries = kLength,
              .keys = kLength,
              .dim = function.input == PairInput::kNone ? 0 : dim,
              .value_dim = dim};
  in.row_scalars = function.row_scalars > 0 ? Somewhere<float>() : nullptr;
  in.column_scalars = function.column_scalars > 0 ? Somewhere<float>() : nullptr;
  in.head_scalars = function.head_scalars > 0 ? Somewhere<float>() : nullptr;
  in.factor = Somewhere<float>();
  in.mask.right = 0;
  Gradient& d = call.gradient;
  const auto of = [](int64_t columns) {
    return std::array<int64_t, 3>{8 * kLength * columns, kLength * columns, columns};
  };
  d.x = {Somewhere<void>(), of(dim)};
  d.y = {Somewhere<void>(), of(dim)};
  d.v = {Somewhere<void>(), of(dim)};
  d.row_scalars = const_cast<float*>(in.row_scalars);
  d.column_scalars = const_cast<float*>(in.column_scalars);
  d.head_scalars = const_cast<float*>(in.head_scalars);
  d.factor = Somewhere<float>();
  if (change) change(call);
  const int64_t columns = in.shape.value_dim;
  in.x = {Somewhere<void>(), of(in.shape.dim)};
  in.y = {Somewhere<void>(), of(in.shape.dim)};
  in.v = {Somewhere<void>(), of(columns)};
  ASSERT_EQ(Unsupported(function, in), "");
  Output out;
  out.o = {Somewhere<void>(), of(columns)};
  out.exact_o = element == Element::kFloat32 ? nullptr : Somewhere<float>();
  out.lse = Somewhere<float>();
  out.statistics = Somewhere<float>();
  Forward(function, in, out, recorder);
  const Saved saved = {.o = {Somewhere<void>(), of(columns)},
                       .exact_o = out.exact_o,
                       .d_o = {Somewhere<void>(), of(columns)},
                       .d_lse = Somewhere<float>(),
                       .statistics = Somewhere<float>()};
  Backward(function, in, saved, d, recorder);
}

void OffsetBias(Call& call) {
  call.input.bias.table = Somewhere<float>();
  call.gradient.bias.table = Somewhere<float>();
}

// What the kernels can do besides, one by one, and a few together.
const std::map<std::string, std::function<void(Call&)>>& Forms() {
  static const GridLayout grid({32, 32}, 0, GridLayout::Kind::kTable);
  static const std::map<std::string, std::function<void(Call&)>> forms = {
      {"plain", [](Call& call) { call.input.mask.right = kUnbounded; }},
      {"causal", nullptr},
      {"bias", OffsetBias},
      {"bias without gradient", [](Call& call) { call.input.bias.table = Somewhere<float>(); }},
      {"grid",
       [](Call& call) {
         call.input.bias = {Somewhere<float>(), 0, &grid};
         call.input.mask.right = kUnbounded;
       }},
      {"key bias",
       [](Call& call) {
         call.input.key_bias = Somewhere<float>();
         call.gradient.key_bias = Somewhere<float>();
       }},
      {"two-part key bias",
       [](Call& call) {
         call.input.key_bias = Somewhere<float>();
         call.input.key_bias_low = Somewhere<float>();
         call.input.key_bias_base = Somewhere<float>();
         call.gradient.key_bias = Somewhere<float>();
       }},
      {"pair bias",
       [](Call& call) {
         call.input.pair_bias = {Somewhere<float>(), {8 << 20, 1 << 20, 1 << 10}};
         call.gradient.pair_bias = {Somewhere<float>(), {8 << 20, 1 << 20, 1 << 10}};
       }},
      {"shared pair bias",
       [](Call& call) {
         call.input.pair_bias = {Somewhere<float>(), {0, 1 << 20, 1 << 10}};
         call.gradient.pair_bias = {Somewhere<float>(), {0, 1 << 20, 1 << 10}};
       }},
      {"mask", [](Call& call) { call.input.mask.pairs = {Somewhere<uint8_t>(), {0, 0, 1 << 10}}; }},
      {"segments",
       [](Call& call) {
         call.input.mask.query_segments = Somewhere<int32_t>();
         call.input.mask.key_segments = Somewhere<int32_t>();
       }},
      {"temperature",
       [](Call& call) {
         call.input.temperature = Somewhere<float>();
         call.gradient.temperature = Somewhere<float>();
       }},
      {"dropout", [](Call& call) { call.input.dropout = {.rate = 0.1, .seed = 1}; }},
      {"all of these",
       [](Call& call) {
         OffsetBias(call);
         call.input.key_bias = Somewhere<float>();
         call.input.mask.query_segments = Somewhere<int32_t>();
         call.input.mask.key_segments = Somewhere<int32_t>();
         call.input.temperature = Somewhere<float>();
         call.input.dropout = {.rate = 0.1, .seed = 1};
       }},
      {"generation",
       [](Call& call) {
         call.input.shape.queries = 1;
         call.input.query_offset = 1023;
       }},
  };
  return forms;
}

// All kernels that are compiled here: each definition in the form that most are used in, and each
// form of a definition with scalars; each number of columns that kernels differ by.
const std::vector<Recorder::Launched>& Kernels() {
  static const std::vector<Recorder::Launched> kernels = [] {
    Recorder recorder;
    for (const PairFunction* function : PairFunctions()) {
      for (const int64_t dim : {64, 128}) {
        Record(function->name, Element::kBfloat16, dim, OffsetBias, recorder);
      }
    }
    for (const auto& [name, change] : Forms()) {
      Record("penumbral", Element::kBfloat16, 64, change, recorder);
      if (name == "bias") {
        Record("penumbral", Element::kFloat32, 64, change, recorder);
        Record("penumbral", Element::kFloat16, 64, change, recorder);
      }
    }
    for (const int64_t dim : {8, 32, 96, 256}) {
      Record("dot", Element::kBfloat16, dim, nullptr, recorder);
    }
    Record("dot", Element::kFloat32, 128, nullptr, recorder);
    Record("dot", Element::kFloat32, 256, nullptr, recorder);
    Record(
        "dot", Element::kBfloat16, 128, [](Call& call) { call.input.shape.value_dim = 64; },
        recorder);
    return recorder.kernels();
  }();
  return kernels;
}

std::string Text(const KernelName& kernel) {
  std::string text = kernel.kind + " " + kernel.definition;
  for (const auto& [name, value] : kernel.constants) {
    if (value != 0) text += " " + name.substr(1) + "=" + std::to_string(value);
  }
  return text;
}

int64_t Constant(const KernelName& kernel, const std::string& name) {
  for (const auto& [constant, value] : kernel.constants) {
    if (constant == name) return value;
  }
  return 0;
}

RuntimeOptions Options() { return OptionsOfEnvironment(NvrtcFoldersOfTorch(GNOMON_TORCH_FOLDER)); }

struct Needs {
  int registers = 0;
  int stack = 0;
  int spilled = 0;  // bytes stored and loaded again
};

// What `--ptxas-options=-v` says.
Needs Parse(const std::string& log) {
  const auto number = [&](const char* pattern) {
    std::smatch match;
    if (!std::regex_search(log, match, std::regex(pattern))) {
      ADD_FAILURE() << "no " << pattern << " in: " << log;
      return 0;
    }
    return std::atoi(match[1].str().c_str());
  };
  return {.registers = number("Used ([0-9]+) registers"),
          .stack = number("([0-9]+) bytes stack frame"),
          .spilled = number("([0-9]+) bytes spill stores") + number("([0-9]+) bytes spill loads")};
}

class CudaCompile : public ::testing::TestWithParam<int> {};

TEST_P(CudaCompile, FitsIntoRegisters) {
  std::unique_ptr<Nvrtc> nvrtc;
  try {
    nvrtc = std::make_unique<Nvrtc>(Options().nvrtc);
  } catch (const CudaError& error) {
    GTEST_SKIP() << error.what();
  }
  const std::string target = nvrtc->TargetFor(GetParam());
  if (target != "sm_" + std::to_string(GetParam())) {
    GTEST_SKIP() << "NVRTC " << nvrtc->version() << " does not know sm_" << GetParam();
  }
  const std::vector<Recorder::Launched>& kernels = Kernels();
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::vector<std::string> table;
  const auto compile = [&] {
    for (size_t n = next++; n < kernels.size(); n = next++) {
      const KernelName& kernel = kernels[n].name;
      Needs needs;
      try {
        Program program = CudaProgram(kernel);
        program.options.emplace_back("--ptxas-options=-v");
        std::string log;
        nvrtc->Compile(program, target, &log);
        const std::lock_guard<std::mutex> lock(mutex);
        needs = Parse(log);
      } catch (const std::exception& error) {
        const std::lock_guard<std::mutex> lock(mutex);
        ADD_FAILURE() << Text(kernel) << ": " << error.what();
        continue;
      }
      const std::lock_guard<std::mutex> lock(mutex);
      const std::string text = Text(kernel) + ": " + std::to_string(needs.registers) +
                               " registers, " + std::to_string(needs.stack) + " bytes of stack, " +
                               std::to_string(needs.spilled) + " spilled";
      table.push_back(text);
      const int64_t columns = std::max(Constant(kernel, "kDim"), Constant(kernel, "kValueDim"));
      const int64_t bytes = columns * (Constant(kernel, "kType") == 0 ? 4 : 2);
      if (bytes <= 128) {
        EXPECT_EQ(needs.spilled, 0) << target << ": " << text;
        EXPECT_EQ(needs.stack, 0) << target << ": " << text;
      } else if (bytes <= 256) {
        EXPECT_LE(needs.stack, 64) << target << ": " << text;
      }
      // A block of so many threads must fit into a multiprocessor's 65536 registers.
      EXPECT_LE(needs.registers * static_cast<int>(kernels[n].shape.threads), 65536) << text;
      EXPECT_LE(kernels[n].shape.shared_bytes, 99u * 1024) << text;
    }
  };
  std::vector<std::thread> threads;
  for (unsigned n = 0; n < std::max(1u, std::thread::hardware_concurrency()); ++n) {
    threads.emplace_back(compile);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(table.size(), kernels.size());
  if (std::getenv("GNOMON_PRINT_KERNELS") == nullptr) return;
  std::sort(table.begin(), table.end());
  for (const std::string& line : table) std::printf("%s %s\n", target.c_str(), line.c_str());
}

INSTANTIATE_TEST_SUITE_P(Architectures, CudaCompile, ::testing::Values(80, 90, 100, 120),
                         [](const auto& of) { return "sm_" + std::to_string(of.param); });

TEST(CudaProgram, HasEveryDefinitionAndFile) {
  for (const PairFunction* function : PairFunctions()) {
    const DefinitionSource* const source = FindDefinitionSource(*function);
    ASSERT_NE(source, nullptr) << function->name;
    EXPECT_THAT(source->text,
                ::testing::HasSubstr(std::string("struct ") + source->struct_name + " {"));
  }
  std::set<std::string> embedded;
  for (const DeviceFile& file : DeviceFiles()) {
    embedded.insert(file.name);
    EXPECT_THAT(file.text, ::testing::HasSubstr("namespace gnomon")) << file.name;
  }
  EXPECT_THAT(embedded, ::testing::UnorderedElementsAreArray(KernelSourceFiles()));
}

TEST(CudaProgram, OfADefinitionWithoutSource) {
  static PairFunction function = FindPairFunction("dot");
  function.name = "without_source";
  AddPairFunction(function);
  try {
    CudaProgram({.kind = "forward", .definition = "without_source", .constants = {}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("'without_source' runs on the CPU only"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("gnomon_add_similarity()"));
  }
}

// A definition that does not compile is named, with the compiler's words.
TEST(CudaProgram, ErrorsOfADefinition) {
  static PairFunction function = FindPairFunction("dot");
  function.name = "mistaken";
  static const DefinitionSource source = {"Mistaken", "mistaken-inl.h",
                                          "struct Mistaken { oops };"};
  AddPairFunction(function);
  AddDefinitionSource(function, source);
  KernelName kernel;
  for (const Recorder::Launched& launched : Kernels()) {
    if (launched.name.kind == "forward") kernel = launched.name;
  }
  kernel.definition = "mistaken";
  RuntimeOptions options = Options();
  options.program = CudaProgram;
  options.cache = "";
  try {
    Runtime(options).Compile(kernel, 90);
    FAIL();
  } catch (const CudaError& error) {
    const std::string text = error.what();
    if (text.find("no NVRTC") != std::string::npos) GTEST_SKIP() << text;
    EXPECT_THAT(text,
                ::testing::HasSubstr(
                    "the CUDA kernel forward of the definition Mistaken (mistaken-inl.h) does "
                    "not compile for sm_90 with NVRTC"));
    EXPECT_THAT(text, ::testing::HasSubstr("definitions/mistaken-inl.h(1): error:"));
  }
}

}  // namespace
}  // namespace gnomon::cuda
