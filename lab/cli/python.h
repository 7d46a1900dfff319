// Runs Python, for example for reports, significance tests and workers.
#ifndef GNOMON_CLI_PYTHON_H_
#define GNOMON_CLI_PYTHON_H_

#include <sys/types.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gnomon::lab::cli {

// The interpreter is GNOMON_PYTHON if that is set. Otherwise, it is the first of these that exists:
// one next to the program, the one that the program was built with, and python3.

struct Report {
  std::string fault;        // one line: why there is no report; empty if there is a report
  bool is_refused = false;  // the report could not be written, or the record is invalid
  std::string verdicts;     // lines with the verdicts; empty if there are too few seeds
};

// Writes report.html with `python -m gnomon.report FOLDER`, unless the interpreter or a required
// package is missing.
Report DrawReport(const std::filesystem::path& folder);

// Returns the output of `python -m MODULE WORDS`. On failure, throws Error with the last line of
// its standard error.
std::string AskPython(const std::string& module, std::vector<std::string> words);

// Like AskPython(), but runs a self-contained file of the gnomon package. This does not import the
// package, because importing PyTorch takes seconds.
std::string AskPythonFile(const std::string& file, std::vector<std::string> words);

// A child process `python -m MODULE WORDS` in a separate session, so that Ctrl-C does not reach it.
// Write() and Read() exchange lines with it; it inherits the standard error stream.
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

// Replaces this process with `python -m MODULE WORDS`, run by the same interpreter. Never returns;
// throws Error on failure.
int BecomePython(const std::string& module, std::vector<std::string> words);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_PYTHON_H_
