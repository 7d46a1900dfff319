#include "cli/python.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <sstream>
#include <system_error>
#include <utility>

#include "build_info.h"
#include "cli/progress.h"
#include "cli/record.h"
#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::cli {
namespace {

namespace fs = std::filesystem;
using models::StrCat;

bool IsProgram(const fs::path& path) { return ::access(path.c_str(), X_OK) == 0; }

// The interpreter next to the program, looked up by the name the program was called by (a link in a
// virtual environment) or by its real path; otherwise, the interpreter of the build.
std::string FindPython() {
  if (const char* chosen = std::getenv("GNOMON_PYTHON"); chosen != nullptr && *chosen != '\0') {
    return chosen;
  }
  std::vector<fs::path> programs;
  const std::string& called = CommandWords().front();
  if (called.find('/') != std::string::npos) {
    programs.emplace_back(called);
  } else if (const char* path = std::getenv("PATH"); path != nullptr) {
    std::istringstream folders(path);
    for (std::string folder; std::getline(folders, folder, ':');) {
      if (IsProgram(fs::path(folder) / called)) {
        programs.push_back(fs::path(folder) / called);
        break;
      }
    }
  }
  std::error_code error;
  programs.push_back(fs::read_symlink("/proc/self/exe", error));
  for (const fs::path& program : programs) {
    for (const char* name : {"python", "python3"}) {
      const fs::path beside = program.parent_path() / name;
      if (IsProgram(beside)) return beside.string();
    }
  }
  return IsProgram(GNOMON_PYTHON) ? GNOMON_PYTHON : "python3";
}

// The words in the form that execvp() expects.
std::vector<char*> Pointers(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Runs a program and returns its exit code (-1: it could not be started) and its standard error.
std::pair<int, std::string> RunProgram(std::vector<std::string> words) {
  std::array<int, 2> ends;
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return {-1, ""};
  const std::vector<char*> arguments = Pointers(words);
  const pid_t child = ::fork();
  if (child < 0) {
    ::close(ends[0]);
    ::close(ends[1]);
    return {-1, ""};
  }
  if (child == 0) {
    const int null = ::open("/dev/null", O_RDWR);
    ::dup2(null, STDIN_FILENO);
    ::dup2(null, STDOUT_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  std::string output;
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t got = ::read(ends[0], buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    output.append(buffer.data(), static_cast<size_t>(got));
  }
  ::close(ends[0]);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return {code == 127 ? -1 : code, output};
}

}  // namespace

Report DrawReport(const fs::path& folder) {
  const std::string python = FindPython();
  const auto [code, errors] = RunProgram({python, "-m", "gnomon.report", folder.string()});
  if (code == 0) return {};
  if (code < 0) return {StrCat("no report.html: cannot run ", python)};
  std::string last;
  std::istringstream lines(errors);
  for (std::string line; std::getline(lines, line);) {
    if (!OneLine(line).empty()) last = line;
  }
  // The module's exit code for invalid input; a failed import has another.
  constexpr int kRefused = 2;
  return {OneLine(StrCat("no report.html: ", python, " -m gnomon.report: ", last)),
          code == kRefused};
}

int BecomePython(const std::string& module, std::vector<std::string> words) {
  const std::string python = FindPython();
  words.insert(words.begin(), {python, "-m", module});
  ::execvp(python.c_str(), Pointers(words).data());
  throw Error(StrCat("cannot run ", python));
}

}  // namespace gnomon::cli
