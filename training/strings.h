// Text for messages.
#ifndef GNOMON_TRAINING_STRINGS_H_
#define GNOMON_TRAINING_STRINGS_H_

#include <sstream>
#include <string>
#include <vector>

namespace gnomon::models {

template <class... T>
std::string StrCat(const T&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

inline std::string Join(const std::vector<std::string>& parts, const std::string& separator) {
  std::string joined;
  for (const std::string& part : parts) {
    if (!joined.empty()) joined += separator;
    joined += part;
  }
  return joined;
}

// A text without the mark of its byte order, with which some editors begin UTF-8.
inline std::string WithoutMark(std::string text) {
  if (text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);
  return text;
}

}  // namespace gnomon::models

#endif  // GNOMON_TRAINING_STRINGS_H_
