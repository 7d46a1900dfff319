// Suggestions for misspelt names of options, commands, terms, parameters and tasks.
#include <algorithm>
#include <cctype>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gnomon/specification.h"

namespace gnomon {
namespace {

// The Damerau-Levenshtein distance (optimal string alignment): insertions, deletions, substitutions
// and swaps of adjacent characters each count as one.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> above(b.size() + 1);
  std::vector<size_t> row(b.size() + 1);
  std::vector<size_t> next(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    next[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = row[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      next[j] = std::min({substituted, row[j] + 1, next[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        next[j] = std::min(next[j], above[j - 2] + 1);
      }
    }
    above.swap(row);
    row.swap(next);
  }
  return row.back();
}

// At most three names similar to a misspelt one, most similar first. A name is similar if it
// differs in at most a third of its letters, ignoring case, or if one is a prefix of the other.
std::vector<std::string> NearNames(std::string_view name, const std::vector<std::string>& known) {
  const auto letters = [](std::string_view text) {
    text.remove_prefix(std::min(text.find_first_not_of('-'), text.size()));
    std::string lower;
    for (const char letter : text) {
      lower +=
          letter == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    }
    return lower;
  };
  constexpr size_t kShortestPrefix = 3;
  const std::string wanted = letters(name);
  std::vector<std::pair<size_t, std::string>> near;
  for (const std::string& candidate : known) {
    const std::string other = letters(candidate);
    const size_t distance = EditDistance(wanted, other);
    const size_t longest = std::max(wanted.size(), other.size());
    const size_t shortest = std::min(wanted.size(), other.size());
    const bool is_prefix =
        shortest >= kShortestPrefix && wanted.compare(0, shortest, other, 0, shortest) == 0;
    const bool is_near = distance < longest && distance <= std::max<size_t>(1, longest / 3);
    if (is_near || is_prefix) near.emplace_back(distance, candidate);
  }
  std::stable_sort(near.begin(), near.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  constexpr size_t kMost = 3;
  std::vector<std::string> names;
  for (size_t n = 0; n < std::min(near.size(), kMost); ++n) names.push_back(near[n].second);
  return names;
}

}  // namespace

std::string DidYouMean(std::string_view name, const std::vector<std::string>& known) {
  const std::vector<std::string> names = NearNames(name, known);
  if (names.empty()) return "";
  std::string text = "did you mean " + names[0];
  for (size_t n = 1; n < names.size(); ++n) {
    text += (n + 1 == names.size() ? " or " : ", ") + names[n];
  }
  return text + "?";
}

}  // namespace gnomon
