// External term libraries.
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <gnomon/catalogue.h>

#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <vector>

#include "build_info.h"
#include "ops/catalogue/registry.h"
#include "terms_symbol.h"

// The symbol that a term library refers to (cmake/terms_library.cc.in).
extern "C" {
extern const char GNOMON_TERMS_SYMBOL;
const char GNOMON_TERMS_SYMBOL = 0;
}

namespace gnomon {
namespace {

// The names of the terms of loaded libraries.
struct Loaded {
  std::mutex mutex;
  std::map<void*, std::vector<std::string>> libraries;
};

Loaded& LoadedLibraries() {
  static Loaded loaded;
  return loaded;
}

void* Open(const std::string& file) {
  // With RTLD_NOW, missing symbols are detected before any term is registered.
  if (void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  const std::string reason = dlerror();
  TORCH_CHECK_VALUE(reason.find("gnomon_terms_for_") == std::string::npos,
                    "gnomon.load_terms: ", file, " was not built for the loaded gnomon ",
                    GNOMON_VERSION, " and PyTorch ", GNOMON_TORCH_RELEASE, "; rebuild it");
  TORCH_CHECK_VALUE(false, "gnomon.load_terms: cannot load ", reason);
}

}  // namespace

std::vector<std::string> LoadTerms(const std::string& path) {
  std::error_code error;
  const std::filesystem::path file = std::filesystem::canonical(path, error);
  TORCH_CHECK_VALUE(!error && std::filesystem::is_regular_file(file), "gnomon.load_terms: ", path,
                    " is not a file; expected a term library");
  Loaded& loaded = LoadedLibraries();
  const std::lock_guard<std::mutex> lock(loaded.mutex);
  void* handle = nullptr;
  std::vector<std::string> names;
  try {
    names = RegisterAllOrNone(file.string(), [&] {
      handle = Open(file.string());
      TORCH_CHECK_VALUE(
          dlsym(handle, "gnomon_terms") != nullptr, "gnomon.load_terms: ", file.string(),
          " is not a term library; build one with gnomon_add_terms() from the CMake package");
    });
  } catch (...) {
    if (handle != nullptr) dlclose(handle);
    throw;
  }
  // A library that was already loaded registers nothing.
  if (const auto known = loaded.libraries.find(handle); known != loaded.libraries.end()) {
    return known->second;
  }
  if (names.empty()) {
    dlclose(handle);
    TORCH_CHECK_VALUE(false, "gnomon.load_terms: ", file.string(),
                      " contains no terms; expected at least one");
  }
  loaded.libraries.emplace(handle, names);
  return names;
}

}  // namespace gnomon
