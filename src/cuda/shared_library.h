// Libraries loaded on demand, and the exception for CUDA failures.
#ifndef GNOMON_SRC_CUDA_SHARED_LIBRARY_H_
#define GNOMON_SRC_CUDA_SHARED_LIBRARY_H_

#include <stdexcept>
#include <string>

namespace gnomon::cuda {

// An error caused by the machine or a kernel rather than by an argument.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A library that is never unloaded, because unloading drivers and compilers is unsafe.
class SharedLibrary {
 public:
  // Loads the library. On failure, loaded() is false and error() contains the reason.
  explicit SharedLibrary(const std::string& path);

  bool loaded() const { return handle_ != nullptr; }
  const std::string& path() const { return path_; }
  const std::string& error() const { return error_; }

  // Looks up a function; throws CudaError if the library does not have it.
  template <class Function>
  void Bind(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(Symbol(name));
    if (function == nullptr) ThrowWithout(name);
  }
  // Looks up a function; sets the pointer to null if the library does not have it.
  template <class Function>
  void BindIfThere(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(Symbol(name));
  }

 private:
  void* Symbol(const char* name) const;
  [[noreturn]] void ThrowWithout(const char* name) const;

  std::string path_;
  std::string error_;
  void* handle_;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_SHARED_LIBRARY_H_
