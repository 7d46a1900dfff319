#include "cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iostream>

#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {

using nlohmann::json;

constexpr double kSecondsBetweenLines = 10;
constexpr size_t kLongestLine = 600;

}  // namespace

std::string OneLine(const std::string& message) {
  std::string line;
  for (const char c : message) {
    const bool space = c == '\n' || c == '\r' || c == '\t' || c == ' ';
    if (!space) {
      line += c;
    } else if (!line.empty() && line.back() != ' ') {
      line += ' ';
    }
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  if (line.size() > kLongestLine) line = line.substr(0, kLongestLine) + "...";
  return line;
}

std::string Duration(double seconds) {
  const auto whole = static_cast<int64_t>(std::ceil(std::max(seconds, 0.0)));
  if (whole < 100) return StrCat(whole, " s");
  const int64_t minutes = (whole + 59) / 60;
  if (minutes < 100) return StrCat(minutes, " min");
  const int64_t rest = minutes % 60;
  return StrCat(minutes / 60, " h ", rest < 10 ? "0" : "", rest, " min");
}

Progress::Progress(bool shown) : shown_(shown), terminal_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (open_) std::cerr << std::endl;
}

void Progress::Update(const std::string& line) {
  if (!shown_) return;
  if (terminal_) {
    std::cerr << "\r\x1b[K" << line << std::flush;
    open_ = true;
  } else if (clock_.seconds() - printed_ >= kSecondsBetweenLines) {
    std::cerr << line << std::endl;
    printed_ = clock_.seconds();
  }
}

void Progress::Note(const std::string& line) {
  if (!shown_) return;
  Clear();
  std::cerr << line << std::endl;
}

void Progress::Clear() {
  if (open_) std::cerr << "\r\x1b[K" << std::flush;
  open_ = false;
}

std::string TimeLeft(double seconds, double done, double total) {
  if (done <= 0) return "time left unknown";
  return Duration(seconds / done * (total - done)) + " left";
}

std::string FormatNumber(const json& value, const char* format) {
  if (!value.is_number()) return "–";
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), format, value.get<double>());
  return text.data();
}

std::string FormatLoss(const std::optional<double>& loss) {
  if (!loss) return "–";
  return FormatNumber(*loss, "%.3f");
}

}  // namespace gnomon::lab::cli
