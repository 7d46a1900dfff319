// Compiles the kernels of plain causal calls and describes each in one line of JSON:
//   gnomon_write_cubins FOLDER CAPABILITY...
// Writes FOLDER/KERNEL.sm_CAPABILITY.cubin, where KERNEL is "forward-dot-64" (with "-fp32" for
// float32; otherwise, tokens are bf16).
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/cuda_program.h"
#include "cuda/attention.h"
#include "gnomon/attention.h"
#include "installed_nvrtc.h"
#include "launched_kernels.h"

namespace gnomon::testing {
namespace {

int64_t ConstantOf(const cuda::KernelName& name, std::string_view constant) {
  for (const auto& [key, value] : name.constants) {
    if (key == constant) return value;
  }
  throw std::runtime_error("no constant " + std::string(constant));
}

void Write(const std::string& folder, int capability, const LaunchedKernel& kernel,
           const std::string& label) {
  const CompiledKernel compiled = CompileFor(capability, CudaProgram(kernel.name));
  const std::string path = folder + "/" + label + ".sm_" + std::to_string(capability) + ".cubin";
  std::ofstream file(path, std::ios::binary);
  file << compiled.cubin;
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
  std::printf(
      "{\"kernel\": \"%s\", \"capability\": %d, \"path\": \"%s\", \"threads\": %u, "
      "\"shared_bytes\": %u, \"registers\": %d, \"spilled\": %d, \"step\": %d}\n",
      label.c_str(), capability, path.c_str(), kernel.shape.threads, kernel.shape.shared_bytes,
      compiled.registers, compiled.spilled, static_cast<int>(ConstantOf(kernel.name, "kStep")));
}

int Run(int count, char** words) {
  if (count < 3) throw std::runtime_error("expected a folder and at least one compute capability");
  if (InstalledNvrtc() == nullptr) {
    throw std::runtime_error("NVRTC not found; set GNOMON_NVRTC to its library");
  }
  for (int n = 2; n < count; ++n) {
    for (const char* name : {"dot", "laplacian", "umbral", "penumbral"}) {
      for (const cuda::Element element : {cuda::Element::kBFloat16, cuda::Element::kFloat32}) {
        const bool is_wide = element == cuda::Element::kFloat32;
        if (is_wide && std::string_view(name) != "dot") continue;
        for (const int64_t dim : {64, 128}) {
          const Form form{.name = "", .element = element, .dim = dim, .heads = 64};
          for (const LaunchedKernel& kernel : KernelsOf(FindPairFunction(name), form)) {
            if (kernel.name.definition.empty()) continue;
            Write(words[1], std::stoi(words[n]), kernel,
                  kernel.name.kind + "-" + name + "-" + std::to_string(dim) +
                      (is_wide ? "-fp32" : ""));
          }
        }
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace gnomon::testing

int main(int count, char** words) {
  try {
    return gnomon::testing::Run(count, words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gnomon_write_cubins: %s\n", error.what());
    return 1;
  }
}
