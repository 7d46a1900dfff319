#include "models/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "gnomon/attention.h"
#include "models/strings.h"

namespace gnomon::models {
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

}  // namespace

void WriteFileAtomically(const std::filesystem::path& path,
                         const std::vector<std::string_view>& parts) {
  const std::string beside = path.string() + ".part";
  const int file = ::open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  bool good = file >= 0;
  for (const std::string_view part : parts) good = good && WriteAll(file, part);
  good = good && ::fsync(file) == 0;
  int fault = errno;
  if (file >= 0 && ::close(file) != 0 && good) {
    fault = errno;
    good = false;
  }
  if (good && ::rename(beside.c_str(), path.c_str()) != 0) {
    fault = errno;
    good = false;
  }
  if (!good) {
    if (file >= 0) ::unlink(beside.c_str());
    throw Error(StrCat("cannot write ", path.string(), ": ", std::strerror(fault)));
  }
}

}  // namespace gnomon::models
