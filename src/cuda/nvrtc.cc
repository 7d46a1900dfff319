#include "cuda/nvrtc.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace gnomon::cuda {
namespace {

namespace fs = std::filesystem;

// Returns the major version in a file name: 13 for libnvrtc.so.13, or -1 for any other name.
int MajorOf(const std::string& file_name) {
  constexpr std::string_view kPrefix = "libnvrtc.so.";
  if (!file_name.starts_with(kPrefix)) return -1;
  const std::string digits = file_name.substr(kPrefix.size());
  const bool is_number = !digits.empty() && digits.size() < 6 &&
                         digits.find_first_not_of("0123456789") == std::string::npos;
  return is_number ? std::atoi(digits.c_str()) : -1;
}

}  // namespace

std::vector<std::string> NvrtcFoldersOfTorch(const std::string& torch_lib) {
  // The folders are .../torch/lib and those of the nvidia-*-nvrtc wheels next to it:
  // nvidia/cu13/lib, or nvidia/cuda_nvrtc/lib before CUDA 13.
  std::vector<std::string> folders;
  const fs::path packages = fs::path(torch_lib).parent_path().parent_path() / "nvidia";
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(packages, error)) {
    folders.push_back((entry.path() / "lib").string());
  }
  std::sort(folders.rbegin(), folders.rend());
  folders.push_back(torch_lib);
  return folders;
}

std::vector<std::string> NvrtcLibrariesIn(const std::string& folder) {
  std::vector<std::pair<int, std::string>> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const int major = MajorOf(entry.path().filename().string());
    if (major >= 0) found.emplace_back(-major, entry.path().string());
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> paths;
  paths.reserve(found.size());
  for (const auto& [order, path] : found) paths.push_back(path);
  return paths;
}

SharedLibrary Nvrtc::Load(const std::vector<std::string>& libraries) {
  std::string tried;
  for (const std::string& path : libraries) {
    // NVRTC loads its builtins library by its bare name, which succeeds if that library is already
    // loaded.
    std::error_code error;
    const fs::path folder = fs::path(path).parent_path();
    if (!folder.empty()) {
      for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
        if (entry.path().filename().string().starts_with("libnvrtc-builtins.so")) {
          (void)SharedLibrary(entry.path().string());
        }
      }
    }
    SharedLibrary library(path);
    if (library.loaded()) return library;
    tried += (tried.empty() ? "" : "; ") + library.error();
  }
  throw CudaError("CUDA: cannot load NVRTC, which compiles the kernels: " +
                  (tried.empty() ? "none found" : tried) +
                  "; install a CUDA build of PyTorch, which includes it, or set GNOMON_NVRTC to "
                  "the path of libnvrtc.so");
}

Nvrtc::Nvrtc(const std::vector<std::string>& libraries) : library_(Load(libraries)) {
  library_.Bind("nvrtcVersion", version_);
  library_.Bind("nvrtcGetNumSupportedArchs", supported_count_);
  library_.Bind("nvrtcGetSupportedArchs", supported_);
  library_.Bind("nvrtcCreateProgram", create_);
  library_.Bind("nvrtcDestroyProgram", destroy_);
  library_.Bind("nvrtcCompileProgram", compile_);
  library_.Bind("nvrtcGetProgramLogSize", log_size_);
  library_.Bind("nvrtcGetProgramLog", log_);
  library_.Bind("nvrtcGetCUBINSize", cubin_size_);
  library_.Bind("nvrtcGetCUBIN", cubin_);
  library_.Bind("nvrtcGetPTXSize", ptx_size_);
  library_.Bind("nvrtcGetPTX", ptx_);
  library_.Bind("nvrtcGetErrorString", error_string_);
}

std::string Nvrtc::version() const {
  int major = 0;
  int minor = 0;
  version_(&major, &minor);
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string Nvrtc::TargetFor(int capability) const {
  const std::string name = std::to_string(capability / 10) + "." + std::to_string(capability % 10);
  if (capability < 80) {
    throw CudaError("CUDA: the device has compute capability " + name + "; expected 8.0 or higher");
  }
  int count = 0;
  supported_count_(&count);
  std::vector<int> known(static_cast<size_t>(std::max(count, 0)));
  if (count > 0) supported_(known.data());
  int newest = 0;
  int nearest = 0;
  for (const int architecture : known) {
    newest = std::max(newest, architecture);
    // Within a family, code for an older device also runs on a newer one.
    const bool runs = architecture <= capability && architecture / 10 == capability / 10;
    if (runs) nearest = std::max(nearest, architecture);
  }
  if (nearest > 0) return "sm_" + std::to_string(nearest);
  if (newest < 80 || newest > capability) {
    throw CudaError("CUDA: NVRTC " + version() + " (" + path() +
                    ") cannot compile for compute capability " + name);
  }
  return "compute_" + std::to_string(newest);
}

class Nvrtc::Open {
 public:
  Open(const Nvrtc& nvrtc, const Program& program) : nvrtc_(nvrtc) {
    std::vector<const char*> names;
    std::vector<const char*> texts;
    for (const auto& [name, text] : program.files) {
      names.push_back(name.c_str());
      texts.push_back(text.c_str());
    }
    const int result =
        nvrtc.create_(&handle_, program.text.c_str(), (program.entry + ".cu").c_str(),
                      static_cast<int>(names.size()), texts.data(), names.data());
    if (result != 0) {
      throw CudaError("CUDA: NVRTC cannot read " + program.title + ": " +
                      nvrtc.error_string_(result));
    }
  }
  ~Open() { nvrtc_.destroy_(&handle_); }
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;

  Handle get() const { return handle_; }

  // Reads a string with a pair of NVRTC functions, which return its size and its content.
  std::string Read(int (*size_of)(Handle, size_t*), int (*get_into)(Handle, char*)) const {
    size_t bytes = 0;
    std::string read;
    if (size_of(handle_, &bytes) != 0) return read;
    read.resize(bytes);
    if (bytes > 0 && get_into(handle_, read.data()) != 0) read.clear();
    return read;
  }

 private:
  const Nvrtc& nvrtc_;
  Handle handle_ = nullptr;
};

std::string Nvrtc::Compile(const Program& program, const std::string& target,
                           std::string* log) const {
  const Open open(*this, program);
  const std::string architecture = "--gpu-architecture=" + target;
  std::vector<const char*> options = {architecture.c_str()};
  for (const std::string& option : program.options) options.push_back(option.c_str());
  const int result = compile_(open.get(), static_cast<int>(options.size()), options.data());
  std::string said = open.Read(log_size_, log_);
  while (!said.empty() && (said.back() == '\0' || said.back() == '\n')) said.pop_back();
  if (result != 0) {
    throw CudaError("CUDA: " + program.title + " does not compile for " + target + " with NVRTC " +
                    version() + ": " + error_string_(result) + (said.empty() ? "" : "\n" + said));
  }
  if (log != nullptr) *log = std::move(said);
  const bool is_cubin = target.starts_with("sm_");
  std::string binary = is_cubin ? open.Read(cubin_size_, cubin_) : open.Read(ptx_size_, ptx_);
  if (binary.empty()) {
    throw CudaError("CUDA: NVRTC " + version() + " produced no code for " + program.title + " on " +
                    target);
  }
  return binary;
}

}  // namespace gnomon::cuda
