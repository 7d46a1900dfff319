#include "core/cuda_program.h"

#include <string>

#include "core/definition_source.h"
#include "gnomon/attention.h"

namespace gnomon {

cuda::Program CudaProgram(const cuda::KernelName& kernel) {
  cuda::Program program;
  program.title = "the CUDA kernel " + kernel.kind;
  program.entry = cuda::KernelEntry(kernel);
  program.options = cuda::KernelCompilerOptions();
  program.specific = cuda::IsArchitectureSpecific(kernel);
  for (const DeviceFile& file : DeviceFiles()) program.files.emplace_back(file.name, file.text);
  std::string structure;
  std::string file;
  if (!kernel.definition.empty()) {
    const PairFunction& function = FindPairFunction(kernel.definition);
    const DefinitionSource* text = FindDefinitionSource(function);
    if (text == nullptr) {
      throw Error("attention: pair function '" + kernel.definition +
                  "' runs only on the CPU, because this build does not contain its source; add "
                  "the function with gnomon_add_similarity() or gnomon_add_terms()");
    }
    structure = text->struct_name;
    file = std::string("definitions/") + text->file_name;
    program.files.emplace_back(file, text->text);
    program.title += " of the definition " + structure + " (" + text->file_name + ")";
  }
  program.text = cuda::KernelSource(kernel, structure, file);
  return program;
}

}  // namespace gnomon
