// Progress output: a status line, and formatting of times and numbers.
#ifndef GNOMON_CLI_PROGRESS_H_
#define GNOMON_CLI_PROGRESS_H_

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace gnomon::lab::cli {

// A message without line breaks, shortened to fit into a log line.
std::string OneLine(const std::string& message);

// Formats a duration, such as "42 s", "6 min" or "1 h 05 min".
std::string Duration(double seconds);

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// A status line on standard error: rewritten on a terminal, printed every ten seconds otherwise.
class Progress {
 public:
  // Prints nothing unless `shown`.
  explicit Progress(bool shown = true);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Update(const std::string& line);
  // Prints a permanent line.
  void Note(const std::string& line);
  // Removes the status line from a terminal.
  void Clear();

 private:
  bool shown_;
  bool terminal_;
  bool open_ = false;  // the terminal shows a status line
  double printed_ = -1e9;
  Stopwatch clock_;
};

// Returns the estimated remaining time, such as "6 min left", if `done` of `total` parts took
// `seconds`.
std::string TimeLeft(double seconds, double done, double total);

// Formats a number with a printf format; null becomes a dash.
std::string FormatNumber(const nlohmann::json& value, const char* format);

// Formats a loss, such as "1.234"; a missing loss becomes a dash.
std::string FormatLoss(const std::optional<double>& loss);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_PROGRESS_H_
