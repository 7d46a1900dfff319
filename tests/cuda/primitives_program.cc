#include "primitives_program.h"

#include <string_view>

#include "core/cuda_program.h"
#include "cuda/constants.h"
#include "device_texts.h"

namespace gnomon::testing {

cuda::KernelName PrimitivesName(cuda::Element element, bool aligned) {
  cuda::KernelName name{"primitives", "", {}};
#define GNOMON_ENTRY(constant) name.constants.emplace_back(#constant, 0);
  GNOMON_CUDA_CONSTANTS(GNOMON_ENTRY)
#undef GNOMON_ENTRY
  for (auto& [constant, value] : name.constants) {
    if (constant == "kType") value = static_cast<int64_t>(element);
    if (constant == "kAligned") value = aligned ? 1 : 0;
    if (constant == "kWarps") value = 2;
  }
  return name;
}

cuda::KernelName WgmmaName(cuda::Element element, int columns) {
  cuda::KernelName name = PrimitivesName(element, true);
  name.kind = "wgmma_primitives";
  for (auto& [constant, value] : name.constants) {
    if (constant == "kWarps") value = 12;
    if (constant == "kProducers") value = 4;
    if (constant == "kStep" || constant == "kValueDim") value = columns;
  }
  return name;
}

std::string PrimitivesSource(const cuda::KernelName& name) {
  const bool is_wgmma = name.kind == "wgmma_primitives";
  std::string text = std::string("#include \"") +
                     (is_wgmma ? "wgmma_calls.cuh" : "primitive_calls.cuh") +
                     "\"\n\nnamespace {\n\nstruct Constants {\n";
  int64_t warps = 0;
  for (const auto& [constant, value] : name.constants) {
    text += "  static constexpr int " + constant + " = " + std::to_string(value) + ";\n";
    if (constant == "kWarps") warps = value;
  }
  return text + "};\n\n}  // namespace\n\nextern \"C\" __global__ void __launch_bounds__(" +
         std::to_string(32 * warps) + ", 1) " + cuda::KernelEntry(name) +
         "(const __grid_constant__ gnomon::cuda::Parameters p) {\n"
         "  gnomon::device::calls::" +
         (is_wgmma ? "CallWgmma" : "CallPrimitives") + "<Constants>(p);\n}\n";
}

cuda::Program PrimitivesProgram(const cuda::KernelName& name) {
  cuda::Program program;
  program.title = "the CUDA kernel of the primitives";
  program.entry = cuda::KernelEntry(name);
  program.options = cuda::KernelCompilerOptions();
  for (const DeviceFile& file : DeviceFiles()) program.files.emplace_back(file.name, file.text);
  program.files.emplace_back("primitive_calls.cuh", kPrimitiveCalls);
  program.files.emplace_back("wgmma_calls.cuh", kWgmmaCalls);
  program.specific = name.kind == "wgmma_primitives";
  program.text = PrimitivesSource(name);
  return program;
}

}  // namespace gnomon::testing
