// Atomic file writes, folder locks, and queries about files.
#ifndef GNOMON_TRAINING_FILES_H_
#define GNOMON_TRAINING_FILES_H_

#include <cstddef>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

namespace gnomon::lab {

// Texts are held in memory, which a mistaken `--data /` would fill without this limit.
inline constexpr size_t kMostTextBytes = size_t{4} << 30;

// Writes the parts to a uniquely named file next to `path`, flushes it to disk, and renames it to
// `path`. If `path` is a link, its target is replaced. Devices and pipes are written to directly.
// Throws Error on failure.
void WriteFileAtomically(const std::filesystem::path& path,
                         const std::vector<std::string_view>& parts);

// Whether a path refers to a device, whose content may be endless (/dev/zero).
bool IsDevice(const std::filesystem::path& path);

// The folder that contains a file.
std::filesystem::path FolderOf(const std::filesystem::path& path);

// Removes unfinished files that killed writers of `path` left behind. Requires exclusive use of the
// folder.
void RemoveUnfinished(const std::filesystem::path& path);

// Gives exclusive use of a folder until the lock is destroyed or the process ends, even if it is
// killed. Leaves no files behind. Has no effect on file systems that cannot lock folders.
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
