#include "training/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <system_error>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

bool WriteAll(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

constexpr const char* kUnfinished = ".part";
constexpr size_t kDigits = 16;

// Creates a new file "PATH.<16 hexadecimal digits>.part" and opens it for writing.
int OpenBeside(const std::filesystem::path& path, std::string* name) {
  std::random_device random;
  while (true) {
    std::array<char, kDigits + 1> digits;
    std::snprintf(digits.data(), digits.size(), "%08x%08x", random(), random());
    *name = path.string() + "." + digits.data() + kUnfinished;
    const int file = ::open(name->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file >= 0 || errno != EEXIST) return file;
  }
}

}  // namespace

void WriteFileAtomically(const std::filesystem::path& given,
                         const std::vector<std::string_view>& parts) {
  // If the path is a link, its target is replaced. Devices and pipes are written to directly.
  std::error_code error;
  std::filesystem::path path = std::filesystem::weakly_canonical(given, error);
  if (error) path = given;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  const bool in_place = std::filesystem::is_other(status);
  std::string beside;
  const int file =
      in_place ? ::open(path.c_str(), O_WRONLY | O_CLOEXEC) : OpenBeside(path, &beside);
  bool good = file >= 0;
  for (const std::string_view part : parts) good = good && WriteAll(file, part);
  good = good && (in_place || ::fsync(file) == 0);
  int fault = errno;
  if (file >= 0 && ::close(file) != 0 && good) {
    fault = errno;
    good = false;
  }
  if (good && !in_place && ::rename(beside.c_str(), path.c_str()) != 0) {
    fault = errno;
    good = false;
  }
  if (!good) {
    if (file >= 0 && !in_place) ::unlink(beside.c_str());
    throw Error(StrCat("cannot write ", given.string(), ": ", std::strerror(fault)));
  }
}

bool IsDevice(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  return std::filesystem::is_character_file(status) || std::filesystem::is_block_file(status);
}

std::filesystem::path FolderOf(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : ".";
}

void RemoveUnfinished(const std::filesystem::path& path) {
  const std::string before = path.filename().string() + ".";
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(FolderOf(path), error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(before) || !name.ends_with(kUnfinished)) continue;
    const std::string digits =
        name.substr(before.size(), name.size() - before.size() - std::strlen(kUnfinished));
    const bool ours = digits.size() == kDigits &&
                      digits.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (ours) std::filesystem::remove(entry.path(), error);
  }
}

FolderLock::FolderLock(const std::filesystem::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) {
    throw Error(StrCat("cannot open the folder ", folder.string(), ": ", std::strerror(errno)));
  }
  // If a standard stream is closed, open() may return its descriptor, so a higher one is used.
  file_ = ::fcntl(file, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  ::close(file);
  if (::flock(file_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  ::close(file_);
  throw Error(StrCat("another process is using the folder ", folder.string(),
                     "; wait until it finishes, or choose another folder"));
}

FolderLock::~FolderLock() {
  if (file_ >= 0) ::close(file_);
}

}  // namespace gnomon::lab
