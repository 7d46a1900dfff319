// Atomic writes of files, folders locked by one process, and queries about files.
#ifndef GNOMON_TRAINING_FILES_H_
#define GNOMON_TRAINING_FILES_H_

#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

namespace gnomon::lab {

// Writes the parts to a uniquely named file next to `path`, flushes it to disk, and renames it to
// `path`. Throws Error on failure. Links are kept and their target is replaced; devices and pipes
// are written to directly.
void WriteFileAtomically(const std::filesystem::path& path,
                         const std::vector<std::string_view>& parts);

// Whether a path refers to a device, such as /dev/zero, which may be endless.
bool IsDevice(const std::filesystem::path& path);

// The folder that a file is in.
std::filesystem::path FolderOf(const std::filesystem::path& path);

// Removes files left behind by killed writers of `path`. Requires exclusive use of the folder.
void RemoveUnfinished(const std::filesystem::path& path);

// Exclusive use of a folder until the lock is destroyed or the process ends in any way. Leaves no
// files behind. Has no effect on file systems without folder locks.
class FolderLock {
 public:
  FolderLock() = default;  // locks nothing
  // Throws Error if another process holds the lock, or if the folder does not exist.
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  FolderLock& operator=(FolderLock&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }

 private:
  int file_ = -1;
};

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_FILES_H_
