// The folder that a run leaves its files in.
#ifndef GNOMON_CLI_RUN_FOLDER_H_
#define GNOMON_CLI_RUN_FOLDER_H_

#include <filesystem>
#include <string>

#include "training/files.h"

namespace gnomon::cli {

// The folder of a run that is under way: no other process goes on with it or begins one there.
struct RunFolder {
  std::filesystem::path path;
  models::FolderLock lock;
};

// Creates the folder of a new run, `out` or by default runs/<date>-<time>-<name>; throws Error if
// it cannot be written, holds something already, or is that of a run under way.
RunFolder CreateRunFolder(const std::string& out, const std::string& name);

// The name of a run on this data: the last part of its path.
std::string NameOfData(const std::string& path);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_RUN_FOLDER_H_
