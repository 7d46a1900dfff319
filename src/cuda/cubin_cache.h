// A folder of compiled kernels, safe for concurrent use by several processes.
#ifndef GNOMON_SRC_CUDA_CUBIN_CACHE_H_
#define GNOMON_SRC_CUDA_CUBIN_CACHE_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace gnomon::cuda {

// Returns $GNOMON_CACHE, or the folder gnomon in the user's cache folder ($XDG_CACHE_HOME or
// $HOME/.cache). Empty if none of these variables is set.
std::string DefaultCacheFolder();

// The SHA-256 of the parts. It depends on where the parts begin, not only on their concatenation.
std::string CacheKey(const std::vector<std::string>& parts);

class CubinCache {
 public:
  using Binary = std::shared_ptr<const std::string>;

  // With an empty folder, binaries are cached only in this process. `warn` is called once if the
  // folder cannot be written.
  explicit CubinCache(std::string folder, std::function<void(const std::string&)> warn = nullptr);

  // Returns the binary for a hexadecimal key. If it is not in the cache or is damaged there, calls
  // `compile` to create it. Threads and processes that request the same key concurrently compile
  // its kernel only once, unless the folder cannot be written or locked. Exceptions from `compile`
  // propagate, and the next call tries again.
  Binary Get(const std::string& key, const std::function<std::string()>& compile);

 private:
  struct Entry {
    std::mutex mutex;
    Binary binary;
  };

  std::string PathOf(const std::string& name) const { return folder_ + "/" + name; }
  void Warn(const std::string& problem);
  // Returns false if there is no intact entry.
  bool Read(const std::string& key, std::string* binary) const;
  void Write(const std::string& key, const std::string& binary);

  const std::string folder_;
  const std::function<void(const std::string&)> warn_;
  std::once_flag warned_;
  std::mutex mutex_;  // protects the map
  std::map<std::string, std::unique_ptr<Entry>> entries_;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_CUBIN_CACHE_H_
