#include "cuda/cubin_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>

#include "gnomon/sha256.h"

namespace gnomon::cuda {
namespace {

namespace fs = std::filesystem;

// A cache file consists of this line, the SHA-256 of the binary in hexadecimal, and the binary.
constexpr std::string_view kMagic = "gnomon cubin 1\n";

std::string HashOf(std::string_view bytes) {
  Sha256 hash;
  hash.Update(bytes);
  return hash.Hex();
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// A file that is closed on destruction.
class File {
 public:
  File(const std::string& path, int flags) {
    do {
      descriptor_ = open(path.c_str(), flags | O_CLOEXEC, 0600);
    } while (descriptor_ < 0 && errno == EINTR);
  }
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }

  bool ReadAll(std::string* text) const {
    char buffer[1 << 16];
    while (true) {
      const ssize_t bytes = read(descriptor_, buffer, sizeof(buffer));
      if (bytes == 0) return true;
      if (bytes > 0) text->append(buffer, static_cast<size_t>(bytes));
      if (bytes < 0 && errno != EINTR) return false;
    }
  }

  bool WriteAll(std::string_view text) const {
    while (!text.empty()) {
      const ssize_t bytes = write(descriptor_, text.data(), text.size());
      if (bytes > 0) text.remove_prefix(static_cast<size_t>(bytes));
      if (bytes < 0 && errno != EINTR) return false;
    }
    return true;
  }

 private:
  int descriptor_ = -1;
};

// Holds a lock that excludes other processes and threads, if the file system supports locks.
class FileLock {
 public:
  explicit FileLock(const std::string& path) : file_(path, O_RDWR | O_CREAT) {
    if (!file_.is_open()) return;
    int result = 0;
    do {
      result = flock(file_.descriptor(), LOCK_EX);
    } while (result != 0 && errno == EINTR);
    held_ = result == 0;
  }
  // A child process may have inherited the file, so closing it here would not release the lock.
  ~FileLock() {
    if (held_) flock(file_.descriptor(), LOCK_UN);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  File file_;
  bool held_ = false;
};

}  // namespace

std::string DefaultCacheFolder() {
  if (const std::string own = Variable("GNOMON_CACHE"); !own.empty()) return own;
  if (const std::string caches = Variable("XDG_CACHE_HOME"); caches.starts_with("/")) {
    return caches + "/gnomon";
  }
  const std::string home = Variable("HOME");
  return home.empty() ? "" : home + "/.cache/gnomon";
}

std::string CacheKey(const std::vector<std::string>& parts) {
  Sha256 hash;
  for (const std::string& part : parts) {
    hash.Update(std::to_string(part.size()) + ":");
    hash.Update(part);
  }
  return hash.Hex();
}

CubinCache::CubinCache(std::string folder, std::function<void(const std::string&)> warn)
    : folder_(std::move(folder)), warn_(std::move(warn)) {}

void CubinCache::Warn(const std::string& problem) {
  std::call_once(warned_, [&] {
    if (!warn_) return;
    warn_("cannot cache compiled CUDA kernels in " + folder_ + " (" + problem +
          "), so every process compiles them again; set GNOMON_CACHE to a writable folder");
  });
}

bool CubinCache::Read(const std::string& key, std::string* binary) const {
  const File file(PathOf(key + ".cubin"), O_RDONLY);
  std::string text;
  if (!file.is_open() || !file.ReadAll(&text)) return false;
  constexpr size_t kDigits = 64;
  if (text.size() <= kMagic.size() + kDigits || !text.starts_with(kMagic)) return false;
  const std::string hash = text.substr(kMagic.size(), kDigits);
  text.erase(0, kMagic.size() + kDigits);
  if (HashOf(text) != hash) return false;
  *binary = std::move(text);
  return true;
}

void CubinCache::Write(const std::string& key, const std::string& binary) {
  // Writes to a temporary file and renames it, so that readers see either the complete file or
  // none. The temporary name is random, because processes in different containers may have equal
  // ids, and a killed process may have left its file behind.
  std::random_device random;
  const std::string path =
      PathOf(key + "." + std::to_string(random()) + "." + std::to_string(random()) + ".new");
  // The folder may have been deleted since the last call.
  std::error_code ignored;
  fs::create_directories(folder_, ignored);
  bool written = false;
  {
    const File file(path, O_WRONLY | O_CREAT | O_EXCL);
    if (!file.is_open()) return Warn(std::strerror(errno));
    written = file.WriteAll(kMagic) && file.WriteAll(HashOf(binary)) && file.WriteAll(binary);
  }
  if (written) written = std::rename(path.c_str(), PathOf(key + ".cubin").c_str()) == 0;
  if (written) return;
  const int error = errno;
  std::remove(path.c_str());
  Warn(std::strerror(error));
}

CubinCache::Binary CubinCache::Get(const std::string& key,
                                   const std::function<std::string()>& compile) {
  Entry* entry = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Entry>& held = entries_[key];
    if (!held) held = std::make_unique<Entry>();
    entry = held.get();
  }
  const std::lock_guard<std::mutex> lock(entry->mutex);
  if (entry->binary) return entry->binary;
  std::string binary;
  if (folder_.empty()) {
    binary = compile();
  } else if (!Read(key, &binary)) {
    std::error_code error;
    fs::create_directories(folder_, error);
    if (error) Warn(error.message());
    // All keys share sixteen lock files, so that the folder does not fill up with lock files.
    const FileLock file_lock(PathOf("lock." + key.substr(0, 1)));
    // Another process may have compiled the kernel while this one waited for the lock.
    if (!Read(key, &binary)) {
      binary = compile();
      Write(key, binary);
    }
  }
  entry->binary = std::make_shared<const std::string>(std::move(binary));
  return entry->binary;
}

}  // namespace gnomon::cuda
