#include "training/terms.h"

#include <algorithm>

namespace gnomon::models {

std::vector<std::string> PatternParts(const std::string& position) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= position.size();) {
    const size_t end = std::min(position.find_first_of(";,", begin), position.size());
    parts.push_back(position.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace gnomon::models
