// What is made once for each key, and kept for the calls that follow.
#ifndef GNOMON_BASE_KEPT_H_
#define GNOMON_BASE_KEPT_H_

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

namespace gnomon {

// For all threads. Values are copied: small ones, or pointers that share.
template <class Key, class Value>
class Kept {
 public:
  // make() runs outside the lock: it may take long, or ask for other keys.
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
  // More than any program needs that does not make keys without end.
  static constexpr size_t kMost = 1024;

  std::mutex mutex_;
  std::map<Key, Value> values_;
};

}  // namespace gnomon

#endif  // GNOMON_BASE_KEPT_H_
