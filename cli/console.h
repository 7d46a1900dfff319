// What every command shares: interrupts, progress, the run's folder, and a record of the machine.
#ifndef GNOMON_CLI_CONSOLE_H_
#define GNOMON_CLI_CONSOLE_H_

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/files.h"
#include "models/text_data.h"
#include "models/tokens.h"

namespace gnomon::cli {

// The words of the command line, for the record of a run.
void RememberCommand(int argc, char** argv);
const std::vector<std::string>& CommandWords();

// From now on a first Ctrl-C (or SIGTERM) only sets Interrupted(); a second one kills.
void CatchInterrupts();
bool Interrupted();

// A message without line breaks, shortened to what a line of a log holds.
std::string OneLine(const std::string& message);

// "42 s", "6 min", "1 h 05 min".
std::string Duration(double seconds);

// "2026-01-31T12:00:00Z".
std::string Now();

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// One line about the work under way on the standard error: rewritten on a terminal, printed every
// ten seconds elsewhere.
class Progress {
 public:
  // Nothing of it where it is not shown.
  explicit Progress(bool shown = true);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Update(const std::string& line);
  // Prints a line that stays.
  void Note(const std::string& line);
  // Removes the unfinished line from a terminal.
  void Clear();

 private:
  bool shown_;
  bool terminal_;
  bool open_ = false;  // an unfinished line stands on the terminal
  double printed_ = -1e9;
  Stopwatch clock_;
};

// "x s" of work left when `done` of `total` parts took `seconds`.
std::string TimeLeft(double seconds, double done, double total);

// A number as printf does it, or a dash for null.
std::string FormatNumber(const nlohmann::json& value, const char* format);

// The folder of a run that is under way: no other process goes on with it or begins one there.
struct RunFolder {
  std::filesystem::path path;
  models::FolderLock lock;
};

// Creates the folder of a new run, `out` or by default runs/<date>-<time>-<name>; throws Error if
// it cannot be written, holds something already, or is that of a run under way.
RunFolder CreateRunFolder(const std::string& out, const std::string& name);

// The name of a run on this data: the last part of its path.
std::string NameOfData(const std::string& path);

// Throws Error unless the parts of the text hold that many tokens.
void CheckTextHolds(const models::TextData& data, const models::TokenData& tokens,
                    int64_t training_needs, int64_t validation_needs);

// 0 leaves Torch's own choice, the number of cores.
void SetThreads(int64_t threads);

nlohmann::json DescribeMachine();
nlohmann::json DescribeVersions();
// "AMD EPYC, 2 threads, AVX3, torch 2.15.0".
std::string MachineLine();
nlohmann::json DescribeData(const models::TextData& data);
nlohmann::json DescribeTokens(const models::TokenData& tokens);

// Draws report.html by `python -m gnomon.report FOLDER`. The interpreter is that of the environment
// variable GNOMON_PYTHON, else the one beside the program, else the one that the program was built
// with, else python3. Returns an empty string, or one line that says why there is no report.
std::string DrawReport(const std::filesystem::path& folder);

// Gives this process to `python -m MODULE WORDS`, of the same interpreter. Comes back only if that
// cannot be started, and throws Error then.
int BecomePython(const std::string& module, std::vector<std::string> words);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_CONSOLE_H_
