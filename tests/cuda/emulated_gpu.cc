// The mock driver and compiler (tests/core/fakes), with launches that the emulator executes, so
// that GPU operators compute on CPU tensors. The library serves as both GNOMON_CUDA_DRIVER and
// GNOMON_NVRTC.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cuda/backend.h"
#include "emulation.h"
#include "primitives_program.h"

// The driver's callback for a launch.
using Run = int (*)(const char* image, const unsigned* grid, unsigned threads,
                    unsigned shared_bytes, const void* parameters, std::size_t bytes);
extern "C" Run fake_run;

namespace gnomon::testing {
namespace {

// The text between `prefix` and `end`; empty if there is no prefix.
std::string Between(std::string_view text, std::string_view prefix, std::string_view end) {
  const size_t at = text.find(prefix);
  if (at == std::string_view::npos) return "";
  const size_t begin = at + prefix.size();
  return std::string(text.substr(begin, text.find(end, begin) - begin));
}

// Returns the kernel whose source is at the start of a translation unit.
cuda::KernelName NameOf(const std::string& unit) {
  cuda::KernelName name;
  const std::string constants = Between(unit, "struct Constants {\n", "};");
  std::istringstream lines(constants);
  for (std::string line; std::getline(lines, line);) {
    name.constants.emplace_back(Between(line, "int ", " ="), std::stoll(Between(line, "= ", ";")));
  }
  const std::string structure = Between(unit, "derived::Complete<", ",");
  const std::string file = "definitions/" + Between(unit, "#include \"definitions/", "\"");
  for (const EmulatedKernelName& known : EmulatedKernelNames()) {
    if (known.structure != structure) continue;
    name.kind = known.kind;
    name.definition = known.definition;
    const std::string source = known.kind.ends_with("primitives")
                                   ? PrimitivesSource(name)
                                   : cuda::KernelSource(name, structure, file);
    if (unit.starts_with(source)) return name;
  }
  throw std::runtime_error("no emulated kernel of\n" + unit.substr(0, 400));
}

int RunEmulated(const char* image, const unsigned* grid, unsigned threads, unsigned shared_bytes,
                const void* parameters, std::size_t bytes) {
  constexpr int kLaunchFailed = 719;
  if (std::getenv("GNOMON_EMULATION_FAILS") != nullptr) return kLaunchFailed;
  try {
    static std::map<std::string, cuda::KernelName> names;
    // The mock compiler adds the first line; the rest is the source.
    const std::string text = image;
    const std::string unit = text.substr(text.find('\n') + 1);
    auto found = names.find(unit);
    if (found == names.end()) found = names.emplace(unit, NameOf(unit)).first;
    EmulatedBackend backend;
    backend.Launch(found->second, {{grid[0], grid[1], grid[2]}, threads, shared_bytes}, parameters,
                   bytes);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return kLaunchFailed;
  }
}

const bool kSet = [] {
  fake_run = RunEmulated;
  return true;
}();

}  // namespace
}  // namespace gnomon::testing
