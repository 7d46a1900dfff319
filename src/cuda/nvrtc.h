// NVRTC, the CUDA C++ compiler in PyTorch's CUDA wheels. As with the driver, gnomon builds and
// loads without NVRTC's header and library.
#ifndef GNOMON_SRC_CUDA_NVRTC_H_
#define GNOMON_SRC_CUDA_NVRTC_H_

#include <string>
#include <utility>
#include <vector>

#include "cuda/shared_library.h"

namespace gnomon::cuda {

// A translation unit and the files that it may include, by name.
struct Program {
  std::string text;
  std::vector<std::pair<std::string, std::string>> files;  // name, text
  std::vector<std::string> options;
  std::string entry;      // name of the kernel function
  std::string title;      // name used in messages
  bool specific = false;  // whether it needs the instructions of exactly one architecture
};

// The folders that may contain NVRTC, for a PyTorch wheel whose libraries are in `torch_lib`.
std::vector<std::string> NvrtcFoldersOfTorch(const std::string& torch_lib);

// The libraries named libnvrtc.so.* in a folder, newest first.
std::vector<std::string> NvrtcLibrariesIn(const std::string& folder);

class Nvrtc {
 public:
  // Loads the first of the libraries that can be loaded; throws CudaError if none can.
  explicit Nvrtc(const std::vector<std::string>& libraries);

  // The version of NVRTC, such as "13.2".
  std::string version() const;
  const std::string& path() const { return library_.path(); }

  // Returns the compilation target for a compute capability (90 for 9.0): "sm_90", or the closest
  // older target of the same family. If all targets of NVRTC are older, returns "compute_" and the
  // newest one; the driver then compiles the PTX. Throws CudaError if the capability is below 80.
  std::string TargetFor(int capability) const;

  // Returns the cubin, or PTX for a target such as "compute_90", and stores compiler messages in
  // `log`. If compilation fails, throws CudaError with the program's title and the compiler log.
  std::string Compile(const Program& program, const std::string& target,
                      std::string* log = nullptr) const;

 private:
  using Handle = struct ProgramTag*;
  // An NVRTC program that is destroyed with the object.
  class Open;

  static SharedLibrary Load(const std::vector<std::string>& libraries);

  SharedLibrary library_;
  int (*version_)(int* major, int* minor);
  int (*supported_count_)(int* count);
  int (*supported_)(int* architectures);
  int (*create_)(Handle* program, const char* text, const char* name, int files,
                 const char* const* file_texts, const char* const* file_names);
  int (*destroy_)(Handle* program);
  int (*compile_)(Handle program, int options, const char* const* option);
  int (*log_size_)(Handle program, size_t* bytes);
  int (*log_)(Handle program, char* log);
  int (*cubin_size_)(Handle program, size_t* bytes);
  int (*cubin_)(Handle program, char* cubin);
  int (*ptx_size_)(Handle program, size_t* bytes);
  int (*ptx_)(Handle program, char* ptx);
  const char* (*error_string_)(int result);
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_NVRTC_H_
