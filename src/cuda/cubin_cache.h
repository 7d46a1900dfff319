// Compiled kernels kept in a folder, for all processes that use it at the same time.
#ifndef GNOMON_SRC_CUDA_CUBIN_CACHE_H_
#define GNOMON_SRC_CUDA_CUBIN_CACHE_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace gnomon::cuda {

// $GNOMON_CACHE, else gnomon in the user's folder of caches ($XDG_CACHE_HOME, $HOME/.cache); empty
// if there is neither.
std::string DefaultCacheFolder();

// The SHA-256 of the parts, told apart from any other way to cut them.
std::string CacheKey(const std::vector<std::string>& parts);

class CubinCache {
 public:
  using Binary = std::shared_ptr<const std::string>;

  // An empty folder keeps binaries in this process alone. `warn` is told, once, that the folder
  // cannot be written.
  explicit CubinCache(std::string folder, std::function<void(const std::string&)> warn = nullptr);

  // What the key, in hexadecimal digits, stands for. It is made by `compile` where it is not there
  // or damaged: once, however many threads and processes ask for it at the same time, unless the
  // folder cannot be written or locked. What `compile` throws passes on, and the next call tries
  // again.
  Binary Get(const std::string& key, const std::function<std::string()>& compile);

 private:
  struct Entry {
    std::mutex mutex;
    Binary binary;
  };

  std::string PathOf(const std::string& name) const { return folder_ + "/" + name; }
  void Warn(const std::string& problem);
  // False if there is none that is whole.
  bool Read(const std::string& key, std::string* binary) const;
  void Write(const std::string& key, const std::string& binary);

  const std::string folder_;
  const std::function<void(const std::string&)> warn_;
  std::once_flag warned_;
  std::mutex mutex_;  // of the map
  std::map<std::string, std::unique_ptr<Entry>> entries_;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_CUBIN_CACHE_H_
