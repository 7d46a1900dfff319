#include "cuda/shared_library.h"

#include <dlfcn.h>

namespace gnomon::cuda {

SharedLibrary::SharedLibrary(const std::string& path)
    : path_(path), handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ != nullptr) return;
  const char* error = dlerror();
  error_ = error != nullptr ? error : path + ": cannot be loaded";
}

void* SharedLibrary::Symbol(const char* name) const { return dlsym(handle_, name); }

void SharedLibrary::ThrowWithout(const char* name) const {
  throw CudaError(path_ + " lacks the function " + name + "; install a newer version");
}

}  // namespace gnomon::cuda
