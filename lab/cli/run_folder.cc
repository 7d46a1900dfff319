#include "cli/run_folder.h"

#include <unistd.h>

#include <cctype>
#include <system_error>

#include "cli/record.h"
#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {

namespace fs = std::filesystem;

}  // namespace

RunFolder CreateRunFolder(const std::string& out, const std::string& name) {
  RunFolder run = {out, {}};
  const fs::path& folder = run.path;
  std::error_code error;
  if (out.empty()) {
    const std::string stem = "runs/" + LocalTime() + "-" + name;
    run.path = stem;
    fs::create_directories("runs", error);
    // Runs that start in the same second need different folders.
    for (int n = 2; !error && !fs::create_directory(folder, error); ++n) {
      run.path = StrCat(stem, "-", n);
    }
  } else if (fs::exists(folder, error) && !fs::is_directory(folder, error)) {
    throw Error(StrCat("the output folder ", folder.string(), " is a file; choose another --out"));
  } else {
    fs::create_directories(folder, error);
  }
  const auto check = [&] {
    if (!error && ::access(folder.c_str(), W_OK | X_OK) == 0) return;
    throw Error(StrCat("cannot write to the output folder ", folder.string()));
  };
  check();
  run.lock = FolderLock(folder);
  const bool empty = fs::is_empty(folder, error);
  check();
  if (!empty)
    throw Error(
        StrCat("the output folder ", folder.string(), " is not empty; choose another --out"));
  return run;
}

std::string NameOfData(const std::string& path) {
  fs::path last = fs::path(path).lexically_normal();
  if (!last.has_filename()) last = last.parent_path();
  std::string name;
  for (const char c : last.stem().string()) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_';
    name += plain ? c : '-';
  }
  return name.empty() ? "text" : name;
}

}  // namespace gnomon::lab::cli
