#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/backend.h"
#include "gnomon/attention.h"

namespace gnomon::cuda {
namespace {

struct Kind {
  std::string_view name;
  std::string_view file;
  std::string_view call;
  bool pairs;          // whether the kernel uses a pair function
  bool duals = false;  // whether it evaluates the gradient of the pair function with dual numbers
  bool specific = false;  // whether it runs only on the architecture that it is compiled for
};

constexpr Kind kKinds[] = {
    {"forward", "cuda/forward.cuh", "Forward<Definition, Constants>", true},
    {"forward_hopper", "cuda/hopper.cuh", "ForwardOnHopper<Definition, Constants>", true, false,
     true},
    {"merge", "cuda/forward.cuh", "Merge<Constants>", false},
    {"backward_queries", "cuda/backward.cuh", "Backward<Definition, Constants, false>", true},
    {"backward_keys", "cuda/backward.cuh", "Backward<Definition, Constants, true>", true},
    {"backward", "cuda/one_pass.cuh", "BackwardInOnePass<Definition, Constants>", true},
    {"clear_sums", "cuda/one_pass.cuh", "ClearSums<Constants>", false},
    {"finish_queries", "cuda/one_pass.cuh", "FinishQueries<Definition, Constants>", true},
    {"prepare_intervals", "cuda/rows.cuh", "PrepareIntervals<Constants>", false},
    {"prepare_places", "cuda/rows.cuh", "PreparePlaces<Constants>", false},
    {"find_visible_keys", "cuda/rows.cuh", "FindVisibleKeys<Constants>", false},
    {"ascend_intervals", "cuda/rows.cuh", "AscendIntervals<Constants>", false},
    {"bound_keys", "cuda/skipping.cuh", "BoundKeys<Definition, Constants>", true},
    {"bound_biases", "cuda/skipping.cuh", "BoundBiases<Constants>", false},
    {"narrow_intervals", "cuda/skipping.cuh", "NarrowIntervals<Definition, Constants>", true},
    {"prepare_queries", "cuda/rows.cuh", "PrepareQueries<Constants>", false},
    {"prepare_keys", "cuda/rows.cuh", "PrepareKeys<Constants>", false},
    {"prepare_delta", "cuda/rows.cuh", "PrepareDelta<Constants>", false},
    {"add_up", "cuda/rows.cuh", "AddUp<Constants>", false},
    {"add_up_all", "cuda/rows.cuh", "AddUpAll<Constants>", false},
    {"multiply", "cuda/relative.cuh", "Multiply<Constants>", false},
    {"clear_pairs", "cuda/rows.cuh", "ClearPairs<Constants>", false},
    {"map_tokens", "cuda/token_map.cuh", "MapTokens<Constants>", false},
    {"map_tokens_backward", "cuda/token_map.cuh", "MapTokensBackward<Constants>", false},
    {"prepare_norm_tangents", "cuda/derivatives.cuh", "PrepareNormTangents<Constants>", false},
    {"forward_tangents", "cuda/derivatives.cuh", "ForwardTangents<Definition, Constants>", true},
    {"row_tangents", "cuda/derivatives.cuh",
     "BackwardTangents<Definition, DualDefinition, DualNumber, Constants, kRowsPass>", true, true},
    {"query_tangents", "cuda/derivatives.cuh",
     "BackwardTangents<Definition, DualDefinition, DualNumber, Constants, kQueriesPass>", true,
     true},
    {"key_tangents", "cuda/derivatives.cuh",
     "BackwardTangents<Definition, DualDefinition, DualNumber, Constants, kKeysPass>", true, true},
};

const Kind& Find(const std::string& name) {
  for (const Kind& kind : kKinds) {
    if (kind.name == name) return kind;
  }
  throw Error("attention on CUDA: there is no kernel " + name);
}

}  // namespace

std::string KernelEntry(const KernelName& kernel) { return "gnomon_" + kernel.kind; }

bool IsArchitectureSpecific(const KernelName& kernel) { return Find(kernel.kind).specific; }

std::string KernelSource(const KernelName& kernel, std::string_view structure,
                         std::string_view file) {
  const Kind& kind = Find(kernel.kind);
  std::string text;
  const auto add = [&text](std::initializer_list<std::string_view> parts) {
    for (const std::string_view part : parts) text.append(part);
  };
  add({"#include \"", kind.file, "\"\n\nnamespace gnomon::device {\nnamespace {\n\n"});
  if (kind.pairs) {
    const std::string include = "#include \"" + std::string(file) + "\"\n";
    add({include, "\nnamespace derived {\nnamespace vocabulary = gnomon::device;\n",
         "#include \"base/derived_gradient-inl.h\"\n", include,
         "}  // namespace derived\n\nusing Definition = derived::Complete<", structure,
         ", derived::", structure, ">::Type;\n\n"});
    // Definitions without a gradient get one by nested dual numbers.
    if (kind.duals) {
      add({"namespace duals {\nnamespace vocabulary = derived;\n",
           "#include \"base/derived_gradient-inl.h\"\n", include,
           "}  // namespace duals\n\nusing DualDefinition = duals::Complete<derived::", structure,
           ", duals::", structure, ">::Type;\nusing DualNumber = derived::Tangent<float>;\n\n"});
    }
  }
  add({"struct Constants {\n"});
  int64_t warps = 1;
  int64_t resident = 1;
  for (const auto& [name, value] : kernel.constants) {
    add({"  static constexpr int ", name, " = ", std::to_string(value), ";\n"});
    if (name == "kWarps") warps = value;
    if (name == "kResident") resident = std::max<int64_t>(1, value);
  }
  add(
      {"};\n\n}  // namespace\n}  // namespace gnomon::device\n\nextern \"C\" __global__ void "
       "__launch_bounds__(",
       std::to_string(32 * warps), ", ", std::to_string(resident), ") ", KernelEntry(kernel),
       "(const __grid_constant__ gnomon::cuda::Parameters p) {\n  using namespace "
       "gnomon::device;\n  ",
       kind.call, "(p);\n}\n"});
  return text;
}

const std::vector<std::string>& KernelCompilerOptions() {
  static const std::vector<std::string> kOptions = {"-std=c++20", "-default-device", "-fmad=false",
                                                    "-prec-div=false", "-prec-sqrt=false"};
  return kOptions;
}

}  // namespace gnomon::cuda
