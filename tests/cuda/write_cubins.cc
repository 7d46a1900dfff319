// Compiles the kernels of plain causal calls in bf16 (64 query heads on one key head) and describes
// each in one line of JSON:
//   gnomon_write_cubins FOLDER CAPABILITY [KERNEL...]
// Writes FOLDER/KERNEL.sm_CAPABILITY.cubin; a kernel is named "forward-dot-64" after its pass, pair
// function and head dimension. Calls have gradients of factors ("backward_factor") or not, and
// store unrounded outputs, for which the forward pass may split weights ("forward_split"), or not.
// Without them, the backward pass takes two passes ("backward_queries" and "backward_keys").
// Without KERNEL, writes all.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/cuda_program.h"
#include "cuda/attention.h"
#include "gnomon/attention.h"
#include "installed_nvrtc.h"
#include "launched_kernels.h"

namespace gnomon::testing {
namespace {

void Write(const std::string& folder, int capability, const LaunchedKernel& kernel,
           const std::string& label) {
  const CompiledKernel compiled = CompileFor(capability, CudaProgram(kernel.name));
  const std::string path = folder + "/" + label + ".sm_" + std::to_string(capability) + ".cubin";
  std::ofstream file(path, std::ios::binary);
  file << compiled.cubin;
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
  std::printf(
      "{\"kernel\": \"%s\", \"capability\": %d, \"path\": \"%s\", \"threads\": %u, "
      "\"shared_bytes\": %u, \"registers\": %d, \"spilled_bytes\": %d, \"rows\": %d, \"step\": %d, "
      "\"producers\": %d}\n",
      label.c_str(), capability, path.c_str(), kernel.shape.threads, kernel.shape.shared_bytes,
      compiled.registers, compiled.spilled,
      static_cast<int>(16 * ConstantOf(kernel.name, "kRowTiles")),
      static_cast<int>(ConstantOf(kernel.name, "kStep")),
      static_cast<int>(ConstantOf(kernel.name, "kProducers")));
}

void Run(const std::vector<std::string>& words) {
  if (words.size() < 2) throw std::runtime_error("expected a folder and a compute capability");
  if (InstalledNvrtc() == nullptr) {
    throw std::runtime_error("NVRTC not found; set GNOMON_NVRTC to its library");
  }
  const std::vector<std::string> chosen(words.begin() + 2, words.end());
  std::set<std::string> written;
  for (const char* name : {"dot", "laplacian", "umbral", "penumbral"}) {
    for (const int64_t dim : {64, 128}) {
      const auto write = [&](const Form& form, Passes passes) {
        for (const LaunchedKernel& kernel : KernelsOf(FindPairFunction(name), form, passes)) {
          std::string kind = kernel.name.kind;
          if (!kind.starts_with("forward") && !kind.starts_with("backward")) continue;
          if (kind == "backward" && form.factor) kind += "_factor";
          if (ConstantOf(kernel.name, "kSplit") != 0) kind += "_split";
          const std::string label = kind + "-" + name + "-" + std::to_string(dim);
          if (!chosen.empty() && std::ranges::find(chosen, label) == chosen.end()) continue;
          if (!written.insert(label).second) continue;
          Write(words[0], std::stoi(words[1]), kernel, label);
        }
      };
      const Form plain{.name = "", .element = cuda::Element::kBFloat16, .dim = dim, .heads = 64};
      Form fixed = plain;
      fixed.factor = false;
      Form rounded = plain;
      rounded.exact = false;
      for (const Form& form : {plain, fixed, rounded}) write(form, Passes::kBoth);
      if (words[1] != "90") continue;
      for (Form form : {plain, rounded}) {
        form.hopper = true;
        write(form, Passes::kForward);
      }
    }
  }
  if (!chosen.empty() && written.size() != chosen.size()) {
    throw std::runtime_error("unknown kernel; expected names such as forward-dot-64");
  }
}

}  // namespace
}  // namespace gnomon::testing

int main(int count, char** words) {
  try {
    gnomon::testing::Run({words + 1, words + count});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gnomon_write_cubins: %s\n", error.what());
    return 1;
  }
}
