// The interpreter that draws reports and pictures.
#ifndef GNOMON_CLI_PYTHON_H_
#define GNOMON_CLI_PYTHON_H_

#include <filesystem>
#include <string>
#include <vector>

namespace gnomon::cli {

struct Report {
  std::string fault;        // one line that says why there is none; empty: there is one
  bool is_refused = false;  // it was drawn, and could not be written, or the record is unreadable
};

// Draws report.html by `python -m gnomon.report FOLDER`. The interpreter is that of the environment
// variable GNOMON_PYTHON, else the one beside the program, else the one that the program was built
// with, else python3. Without one, or without the packages that draw, there is no report.
Report DrawReport(const std::filesystem::path& folder);

// Gives this process to `python -m MODULE WORDS`, of the same interpreter. Comes back only if that
// cannot be started, and throws Error then.
int BecomePython(const std::string& module, std::vector<std::string> words);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_PYTHON_H_
