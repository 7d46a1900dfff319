// Files: writing them so that they are never seen half written, in folders that one process at a
// time works in, and telling what they are.
#ifndef GNOMON_TRAINING_FILES_H_
#define GNOMON_TRAINING_FILES_H_

#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

namespace gnomon::models {

// Writes the parts one after the other to a file beside `path` whose name no other writer has,
// brings it to the disk, and renames it to `path`. Throws Error where it cannot. A link stays one:
// what it leads to is replaced; devices and pipes are written to as they are.
void WriteFileAtomically(const std::filesystem::path& path,
                         const std::vector<std::string_view>& parts);

// Whether a path leads to a device, such as /dev/zero, which may have no end.
bool IsDevice(const std::filesystem::path& path);

// The folder that a file is in.
std::filesystem::path FolderOf(const std::filesystem::path& path);

// Removes what writers of `path` that were killed have left beside it. For one who has the folder
// to himself.
void RemoveUnfinished(const std::filesystem::path& path);

// A folder that this process alone works in, until the lock is destroyed or the process ends,
// however it ends. It leaves nothing behind. On a file system that cannot lock folders there is no
// lock.
class FolderLock {
 public:
  FolderLock() = default;  // of no folder
  // Throws Error where another process holds it, or there is no such folder.
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

}  // namespace gnomon::models

#endif  // GNOMON_TRAINING_FILES_H_
