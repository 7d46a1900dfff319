// Libraries that are loaded when they are first needed, and what goes wrong with CUDA.
#ifndef GNOMON_SRC_CUDA_SHARED_LIBRARY_H_
#define GNOMON_SRC_CUDA_SHARED_LIBRARY_H_

#include <stdexcept>
#include <string>

namespace gnomon::cuda {

// What is wrong with the machine or with a kernel, rather than with an argument.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A library that stays loaded: drivers and compilers do not like to go.
class SharedLibrary {
 public:
  // Loads it; without success loaded() is false and error() says why.
  explicit SharedLibrary(const std::string& path);

  bool loaded() const { return handle_ != nullptr; }
  const std::string& path() const { return path_; }
  const std::string& error() const { return error_; }

  // Sets a pointer to the function; throws CudaError if the library has none of that name.
  template <class Function>
  void Bind(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(Symbol(name));
    if (function == nullptr) ThrowWithout(name);
  }
  // The same, null where there is none.
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
