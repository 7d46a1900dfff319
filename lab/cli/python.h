// The Python interpreter for reports, significance tests and workers.
#ifndef GNOMON_CLI_PYTHON_H_
#define GNOMON_CLI_PYTHON_H_

#include <sys/types.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gnomon::cli {

// The interpreter is, in this order, the one in GNOMON_PYTHON, the one next to the program, the one
// that the program was built with, or python3.

struct Report {
  std::string fault;        // the reason for a missing report, in one line; empty if there is one
  bool is_refused = false;  // the report could not be written, or the record is invalid
  std::string verdicts;     // lines with the verdicts; empty if there are too few seeds
};

// Writes report.html with `python -m gnomon.report FOLDER`. Writes none if the interpreter or a
// required package is missing.
Report DrawReport(const std::filesystem::path& folder);

// Returns the output of `python -m MODULE WORDS`. On failure, throws Error with the last line of
// its standard error.
std::string AskPython(const std::string& module, std::vector<std::string> words);

// Like AskPython(), for a self-contained file of the gnomon package. Does not import the package,
// because importing PyTorch takes seconds.
std::string AskPythonFile(const std::string& file, std::vector<std::string> words);

// A child process `python -m MODULE WORDS` in a separate session, so that Ctrl-C does not reach it.
// Lines are exchanged in both directions; its standard error is inherited.
class PythonChild {
 public:
  // Throws Error if the process cannot be started.
  PythonChild(const std::string& module, std::vector<std::string> words);
  // Closes the process's standard input, which makes it exit, and waits for it.
  ~PythonChild();
  PythonChild(const PythonChild&) = delete;
  PythonChild& operator=(const PythonChild&) = delete;

  // Has no effect if the process has ended.
  void Write(std::string_view line);
  // Returns the next line, or nothing if none arrives within `seconds`.
  std::optional<std::string> Read(double seconds);
  // Whether the process has closed its output and all lines have been read.
  bool ended() const { return ended_ && buffer_.find('\n') == std::string::npos; }

 private:
  pid_t process_ = -1;
  int socket_ = -1;
  std::string buffer_;
  bool ended_ = false;
};

// Replaces this process by `python -m MODULE WORDS` with the same interpreter. Returns only on
// failure, by throwing Error.
int BecomePython(const std::string& module, std::vector<std::string> words);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_PYTHON_H_
