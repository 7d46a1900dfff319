// The Python interpreter that draws reports, tests differences and runs workers.
#ifndef GNOMON_CLI_PYTHON_H_
#define GNOMON_CLI_PYTHON_H_

#include <sys/types.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gnomon::cli {

// The interpreter is that of the environment variable GNOMON_PYTHON, else the one beside the
// program, else the one that the program was built with, else python3.

struct Report {
  std::string fault;        // one line that says why there is none; empty: there is one
  bool is_refused = false;  // it was drawn, and could not be written, or the record is unreadable
  std::string verdicts;     // lines that sum them up; empty if the seeds are too few
};

// Draws report.html by `python -m gnomon.report FOLDER`. Without an interpreter, or without the
// packages that draw, there is no report.
Report DrawReport(const std::filesystem::path& folder);

// What `python -m MODULE WORDS` prints; throws Error with its last line of errors if it fails.
std::string AskPython(const std::string& module, std::vector<std::string> words);

// `python -m MODULE WORDS` at work beside this process, in a session of its own: Ctrl-C does not
// reach it. Lines go both ways; its errors go to the standard error.
class PythonChild {
 public:
  // Throws Error if it cannot be started.
  PythonChild(const std::string& module, std::vector<std::string> words);
  // Closes its standard input, which asks it to end, and waits for it.
  ~PythonChild();
  PythonChild(const PythonChild&) = delete;
  PythonChild& operator=(const PythonChild&) = delete;

  // Nothing happens if it has ended.
  void Write(std::string_view line);
  // The next line, or nothing within `seconds`.
  std::optional<std::string> Read(double seconds);
  // Whether it has closed its end; lines that came before can still be read.
  bool ended() const { return ended_ && buffer_.find('\n') == std::string::npos; }

 private:
  pid_t process_ = -1;
  int socket_ = -1;
  std::string buffer_;
  bool ended_ = false;
};

// Gives this process to `python -m MODULE WORDS`, of the same interpreter. Comes back only if that
// cannot be started, and throws Error then.
int BecomePython(const std::string& module, std::vector<std::string> words);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_PYTHON_H_
