// A cache of values that are created once per key.
#ifndef GNOMON_SRC_BASE_KEPT_H_
#define GNOMON_SRC_BASE_KEPT_H_

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

namespace gnomon {

// This class is thread-safe. Values are copied, so they should be small objects or shared pointers.
template <class Key, class Value>
class Kept {
 public:
  // make() runs outside the lock, because it may be slow or request other keys.
  template <class Make>
  Value Get(const Key& key, const Make& make) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (const auto found = values_.find(key); found != values_.end()) return found->second;
    }
    Value value = make();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (values_.size() >= kMost) values_.clear();
    return values_.emplace(key, std::move(value)).first->second;
  }

 private:
  // Only programs that create an unlimited number of keys exceed this limit.
  static constexpr size_t kMost = 1024;

  std::mutex mutex_;
  std::map<Key, Value> values_;
};

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_KEPT_H_
