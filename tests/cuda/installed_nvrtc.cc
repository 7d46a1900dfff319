#include "installed_nvrtc.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace gnomon::testing {

cuda::RuntimeOptions InstalledCuda() {
  std::vector<std::string> folders;
#ifdef GNOMON_TORCH_FOLDER
  folders = cuda::NvrtcFoldersOfTorch(GNOMON_TORCH_FOLDER);
#endif
  return cuda::OptionsOfEnvironment(folders);
}

const cuda::Nvrtc* InstalledNvrtc() {
  static const std::unique_ptr<cuda::Nvrtc> compiler = [] {
    try {
      return std::make_unique<cuda::Nvrtc>(InstalledCuda().nvrtc);
    } catch (const cuda::CudaError&) {
      return std::unique_ptr<cuda::Nvrtc>();
    }
  }();
  return compiler.get();
}

namespace {

// Returns the number before the given words in the assembler's log.
int NumberBefore(const std::string& log, const std::string& words) {
  const size_t end = log.find(" " + words);
  if (end == std::string::npos) throw std::runtime_error("no '" + words + "' in\n" + log);
  const size_t begin = log.find_last_not_of("0123456789", end - 1) + 1;
  return std::stoi(log.substr(begin, end - begin));
}

}  // namespace

CompiledKernel CompileFor(int capability, cuda::Program program) {
  program.options.emplace_back("--ptxas-options=-v");
  std::string target = "sm_" + std::to_string(capability);
  if (InstalledNvrtc()->TargetFor(capability) != target) {
    throw std::runtime_error("NVRTC does not compile for " + target);
  }
  if (program.specific) target += "a";
  std::string log;
  std::string cubin = InstalledNvrtc()->Compile(program, target, &log);
  if (!cubin.starts_with("\x7f"
                         "ELF")) {
    throw std::runtime_error("NVRTC did not return a cubin for " + target);
  }
  return {.cubin = std::move(cubin),
          .registers = NumberBefore(log, "registers"),
          .stack = NumberBefore(log, "bytes stack frame"),
          .spilled = NumberBefore(log, "bytes spill stores"),
          .serialized = log.find("serialized") != std::string::npos};
}

}  // namespace gnomon::testing
