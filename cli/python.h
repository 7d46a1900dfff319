// The Python interpreter that draws reports and pictures.
#ifndef GNOMON_CLI_PYTHON_H_
#define GNOMON_CLI_PYTHON_H_

#include <filesystem>
#include <string>
#include <vector>

namespace gnomon::cli {

struct Report {
  std::string fault;        // one line that explains why there is no report; empty on success
  bool is_refused = false;  // the report could not be written, or the record is unreadable
};

// Draws report.html by `python -m gnomon.report FOLDER`. The interpreter is that of the environment
// variable GNOMON_PYTHON, else the one beside the program, else the one that the program was built
// with, else python3. Without an interpreter or the plotting packages, no report is drawn.
Report DrawReport(const std::filesystem::path& folder);

// Replaces this process by `python -m MODULE WORDS` with the same interpreter. Throws Error if that
// cannot be started; otherwise, does not return.
int BecomePython(const std::string& module, std::vector<std::string> words);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_PYTHON_H_
