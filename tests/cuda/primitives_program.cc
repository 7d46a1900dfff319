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

std::string PrimitivesSource(const cuda::KernelName& name) {
  std::string text = "#include \"primitive_calls.cuh\"\n\nnamespace {\n\nstruct Constants {\n";
  for (const auto& [constant, value] : name.constants) {
    text += "  static constexpr int " + constant + " = " + std::to_string(value) + ";\n";
  }
  return text + "};\n\n}  // namespace\n\nextern \"C\" __global__ void __launch_bounds__(64, 1) " +
         cuda::KernelEntry(name) +
         "(const __grid_constant__ gnomon::cuda::Parameters p) {\n"
         "  gnomon::device::calls::CallPrimitives<Constants>(p);\n}\n";
}

cuda::Program PrimitivesProgram(const cuda::KernelName& name) {
  cuda::Program program;
  program.title = "the CUDA kernel of the primitives";
  program.entry = cuda::KernelEntry(name);
  program.options = cuda::KernelCompilerOptions();
  for (const DeviceFile& file : DeviceFiles()) program.files.emplace_back(file.name, file.text);
  program.files.emplace_back("primitive_calls.cuh", kPrimitiveCalls);
  program.text = PrimitivesSource(name);
  return program;
}

}  // namespace gnomon::testing
