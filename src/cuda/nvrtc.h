// NVRTC, the compiler of CUDA C++ that PyTorch's CUDA wheels bring. As with the driver, neither its
// library nor its header is needed to build gnomon or to load it.
#ifndef GNOMON_SRC_CUDA_NVRTC_H_
#define GNOMON_SRC_CUDA_NVRTC_H_

#include <string>
#include <utility>
#include <vector>

#include "cuda/shared_library.h"

namespace gnomon::cuda {

// What is compiled: a translation unit, and the files that it may include, by name.
struct Program {
  std::string text;
  std::vector<std::pair<std::string, std::string>> files;  // name, text
  std::vector<std::string> options;
  std::string entry;  // the name of its kernel
  std::string title;  // what messages call it
};

// The folders that a wheel of PyTorch with its libraries in `torch_lib` may have NVRTC in.
std::vector<std::string> NvrtcFoldersOfTorch(const std::string& torch_lib);

// The libraries of the name libnvrtc.so.* in a folder, the newest first.
std::vector<std::string> NvrtcLibrariesIn(const std::string& folder);

class Nvrtc {
 public:
  // Takes the first of the libraries that loads; throws CudaError if none does.
  explicit Nvrtc(const std::vector<std::string>& libraries);

  // "13.2".
  std::string version() const;
  const std::string& path() const { return library_.path(); }

  // What to compile for, given a device's compute capability, 90 for 9.0: "sm_90", the same
  // family's nearest before it, or, if all that is known here is older, "compute_" and the newest,
  // which the driver compiles for its device. Throws CudaError below 80.
  std::string TargetFor(int capability) const;

  // The cubin, or PTX for "compute_90", and in `log` what the compiler says besides. Throws
  // CudaError with the program's title and the compiler's log.
  std::string Compile(const Program& program, const std::string& target,
                      std::string* log = nullptr) const;

 private:
  using Handle = struct ProgramTag*;
  // A program, destroyed at the end.
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
