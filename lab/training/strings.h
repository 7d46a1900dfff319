// Formats text for messages.
#ifndef GNOMON_TRAINING_STRINGS_H_
#define GNOMON_TRAINING_STRINGS_H_

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace gnomon::lab {

template <class... T>
std::string StrCat(const T&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// A count with its noun: "1 channel", "3 channels".
inline std::string Counted(int64_t count, const char* what) {
  return StrCat(count, " ", what, count == 1 ? "" : "s");
}

inline std::string Join(const std::vector<std::string>& parts, const std::string& separator) {
  std::string joined;
  for (const std::string& part : parts) {
    if (!joined.empty()) joined += separator;
    joined += part;
  }
  return joined;
}

// Sizes joined by x: "3x14x14".
inline std::string SizesText(const std::vector<int64_t>& sizes) {
  std::vector<std::string> parts;
  for (const int64_t size : sizes) parts.push_back(std::to_string(size));
  return Join(parts, "x");
}

// Removes the byte-order mark that some editors write at the start of UTF-8 files.
inline std::string WithoutMark(std::string text) {
  if (text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);
  return text;
}

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_STRINGS_H_
