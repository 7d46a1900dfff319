// The output folder of a run.
#ifndef GNOMON_CLI_RUN_FOLDER_H_
#define GNOMON_CLI_RUN_FOLDER_H_

#include <filesystem>
#include <string>

#include "training/files.h"

namespace gnomon::lab::cli {

// The folder of an active run, locked against other processes.
struct RunFolder {
  std::filesystem::path path;
  FolderLock lock;
};

// Creates the folder of a new run: `out` or, by default, runs/<date>-<time>-<name>. Throws Error if
// it cannot be written, is not empty, or is in use by another run.
RunFolder CreateRunFolder(const std::string& out, const std::string& name);

// The default run name for a data path: its last component.
std::string NameOfData(const std::string& path);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_RUN_FOLDER_H_
