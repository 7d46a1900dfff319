#include "text/bleu.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <utility>

#include "text/utf8.h"

namespace gnomon::lab {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsPoint(char c) { return c == '.' || c == ','; }

// Whether c is a printable ASCII character other than a letter, a digit, an apostrophe, a comma, a
// hyphen or a period.
bool IsSymbol(char c) {
  return (c >= ' ' && c <= '&') || (c >= '(' && c <= '+') || c == '/' || (c >= ':' && c <= '@') ||
         (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
}

bool IsWhiteSpace(uint32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

std::string Replace(const std::string& text, std::string_view from, std::string_view to) {
  std::string replaced;
  size_t at = 0;
  for (size_t found = 0; (found = text.find(from, at)) != std::string::npos;) {
    replaced.append(text, at, found - at).append(to);
    at = found + from.size();
  }
  return replaced.append(text, at);
}

// Adds spaces around the first or second character of each adjacent pair that `matches`, from left
// to right without overlaps. All patterns are ASCII, so that matching bytes is equivalent to
// matching characters.
template <class Matches>
std::string SpacePairs(const std::string& text, const Matches& matches, bool around_first) {
  std::string spaced;
  for (size_t at = 0; at < text.size(); ++at) {
    if (at + 1 < text.size() && matches(text[at], text[at + 1])) {
      spaced += around_first ? " " : "";
      spaced += text[at];
      spaced += ' ';
      spaced += text[++at];
      spaced += around_first ? "" : " ";
    } else {
      spaced += text[at];
    }
  }
  return spaced;
}

// The number of occurrences of each n-gram, for one n.
using Counts = std::map<std::vector<std::string_view>, int64_t>;

Counts CountNgrams(const std::vector<std::string>& tokens, size_t order) {
  Counts counts;
  for (size_t at = 0; at + order <= tokens.size(); ++at) {
    const auto first = tokens.begin() + static_cast<int64_t>(at);
    ++counts[{first, first + static_cast<int64_t>(order)}];
  }
  return counts;
}

}  // namespace

std::vector<std::string_view> SplitAtSpaces(std::string_view line) {
  std::vector<std::string_view> words;
  size_t begin = 0;
  const auto end_word = [&](size_t end) {
    if (end > begin) words.push_back(line.substr(begin, end - begin));
  };
  for (size_t at = 0; at < line.size();) {
    const CodePoint point = CodePointAt(line, at);
    const size_t next = at + std::max<size_t>(point.bytes, 1);
    if (point.bytes > 0 && IsWhiteSpace(point.value)) {
      end_word(at);
      begin = next;
    }
    at = next;
  }
  end_word(line.size());
  return words;
}

std::vector<std::string> Tokenize13a(std::string_view line) {
  std::string text = Replace(std::string(line), "<skipped>", "");
  // "&amp;" must be replaced before "&lt;", because "&amp;lt;" becomes "<".
  for (const auto& [entity, character] : {std::pair("&quot;", "\""), std::pair("&amp;", "&"),
                                          std::pair("&lt;", "<"), std::pair("&gt;", ">")}) {
    text = Replace(text, entity, character);
  }
  std::string spaced = " ";
  for (const char c : text) {
    if (IsSymbol(c)) {
      spaced += ' ';
      spaced += c;
      spaced += ' ';
    } else {
      spaced += c;
    }
  }
  spaced += ' ';
  // Splits off periods and commas not preceded by a digit, those not followed by a digit, and
  // dashes after digits.
  spaced = SpacePairs(
      spaced, [](char a, char b) { return !IsDigit(a) && IsPoint(b); }, /*around_first=*/false);
  spaced = SpacePairs(
      spaced, [](char a, char b) { return IsPoint(a) && !IsDigit(b); }, /*around_first=*/true);
  spaced = SpacePairs(
      spaced, [](char a, char b) { return IsDigit(a) && b == '-'; }, /*around_first=*/false);
  const std::vector<std::string_view> words = SplitAtSpaces(spaced);
  return {words.begin(), words.end()};
}

void Bleu::Add(std::string_view hypothesis, std::string_view reference) {
  const std::vector<std::string> said = Tokenize13a(hypothesis);
  const std::vector<std::string> expected = Tokenize13a(reference);
  hypothesis_tokens_ += std::ssize(said);
  reference_tokens_ += std::ssize(expected);
  for (size_t order = 1; order <= kBleuOrder; ++order) {
    const Counts there = CountNgrams(expected, order);
    for (const auto& [ngram, count] : CountNgrams(said, order)) {
      ngrams_[order - 1] += count;
      const auto found = there.find(ngram);
      if (found != there.end()) matches_[order - 1] += std::min(count, found->second);
    }
  }
}

BleuScore Bleu::Score() const {
  BleuScore result;
  const auto said = static_cast<double>(hypothesis_tokens_);
  const auto expected = static_cast<double>(reference_tokens_);
  if (said < expected) result.brevity_penalty = said > 0 ? std::exp(1 - expected / said) : 0;
  if (std::all_of(matches_.begin(), matches_.end(), [](int64_t count) { return count == 0; })) {
    return result;
  }
  // NIST smoothing: the n-th order without a match counts as 1 / 2^n matches.
  double smoothed = 1;
  double logarithms = 0;
  for (size_t n = 0; n < kBleuOrder; ++n) {
    if (ngrams_[n] == 0) return result;
    const double match = matches_[n] > 0 ? static_cast<double>(matches_[n]) : smoothed /= 2;
    result.precisions[n] = 100 * match / static_cast<double>(ngrams_[n]);
    logarithms += std::log(result.precisions[n]);
  }
  result.score = result.brevity_penalty * std::exp(logarithms / kBleuOrder);
  return result;
}

}  // namespace gnomon::lab
