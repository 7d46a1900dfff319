#include "cli/python.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <system_error>
#include <utility>

#include "cli/build_info.h"
#include "cli/progress.h"
#include "cli/record.h"
#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {

namespace fs = std::filesystem;

bool IsProgram(const fs::path& path) { return ::access(path.c_str(), X_OK) == 0; }

// Returns the interpreter (see python.h). Looks for one next to the path by which the program was
// called (which may be a link in a virtual environment), then next to its real path.
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

// Converts words to the form that execvp() expects.
std::vector<char*> Pointers(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

struct Outcome {
  int code = -1;  // -1 if it could not be started or was killed
  std::string output;
  std::string errors;
};

// Runs a program until it exits.
Outcome RunProgram(std::vector<std::string> words) {
  std::array<int, 2> output;
  std::array<int, 2> errors;
  if (::pipe2(output.data(), O_CLOEXEC) != 0) return {};
  if (::pipe2(errors.data(), O_CLOEXEC) != 0) {
    for (const int end : output) ::close(end);
    return {};
  }
  const std::vector<char*> arguments = Pointers(words);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(::open("/dev/null", O_RDWR), STDIN_FILENO);
    ::dup2(output[1], STDOUT_FILENO);
    ::dup2(errors[1], STDERR_FILENO);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  ::close(output[1]);
  ::close(errors[1]);
  Outcome outcome;
  std::array<std::string*, 2> texts = {&outcome.output, &outcome.errors};
  std::array<pollfd, 2> ends = {pollfd{output[0], POLLIN, 0}, pollfd{errors[0], POLLIN, 0}};
  // A negative descriptor, which poll() ignores, marks a stream that has ended.
  while (child > 0 && (ends[0].fd >= 0 || ends[1].fd >= 0)) {
    if (::poll(ends.data(), ends.size(), -1) < 0 && errno != EINTR) break;
    for (size_t n = 0; n < ends.size(); ++n) {
      if (ends[n].fd < 0 || ends[n].revents == 0) continue;
      std::array<char, 4096> buffer;
      const ssize_t got = ::read(ends[n].fd, buffer.data(), buffer.size());
      if (got > 0) texts[n]->append(buffer.data(), static_cast<size_t>(got));
      if (got == 0 || (got < 0 && errno != EINTR)) ends[n].fd = -1;
    }
  }
  ::close(output[0]);
  ::close(errors[0]);
  if (child < 0) return {};
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  outcome.code = code == 127 ? -1 : code;
  return outcome;
}

std::string LastLine(const std::string& text) {
  std::string last;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!OneLine(line).empty()) last = line;
  }
  return last;
}

// Returns the interpreter's output. On failure, throws Error with the last line of its standard
// error.
std::string OutputOfPython(std::vector<std::string> words) {
  const std::string python = FindPython();
  words.insert(words.begin(), python);
  const Outcome outcome = RunProgram(std::move(words));
  if (outcome.code == 0) return outcome.output;
  if (outcome.code < 0) throw Error(StrCat("cannot run ", python));
  throw Error(LastLine(outcome.errors));
}

}  // namespace

Report DrawReport(const fs::path& folder) {
  const std::string python = FindPython();
  const Outcome drawn = RunProgram({python, "-m", "gnomon.report", folder.string()});
  Report report;
  if (drawn.code == 0) {
    report.verdicts = drawn.output;
    return report;
  }
  report.fault = StrCat("no report.html: cannot run ", python);
  if (drawn.code < 0) return report;
  // The module's exit code for invalid input; a failed import has a different one.
  constexpr int kRefused = 2;
  report.fault =
      OneLine(StrCat("no report.html: ", python, " -m gnomon.report: ", LastLine(drawn.errors)));
  report.is_refused = drawn.code == kRefused;
  return report;
}

std::string AskPython(const std::string& module, std::vector<std::string> words) {
  words.insert(words.begin(), {"-m", module});
  return OutputOfPython(std::move(words));
}

std::string AskPythonFile(const std::string& file, std::vector<std::string> words) {
  constexpr const char* kRun = R"(
import importlib.util, pathlib, runpy, sys
package = importlib.util.find_spec("gnomon") or sys.exit("No module named 'gnomon'")
runpy.run_path(str(pathlib.Path(package.origin).parent / sys.argv.pop(1)), run_name="__main__")
)";
  words.insert(words.begin(), {"-c", kRun, file});
  return OutputOfPython(std::move(words));
}

PythonChild::PythonChild(const std::string& module, std::vector<std::string> words) {
  const std::string python = FindPython();
  words.insert(words.begin(), {python, "-m", module});
  const std::vector<char*> arguments = Pointers(words);
  std::array<int, 2> ends;
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    throw Error(StrCat("cannot run ", python, ": ", std::strerror(errno)));
  }
  process_ = ::fork();
  if (process_ == 0) {
    ::setsid();
    ::dup2(ends[1], STDIN_FILENO);
    ::dup2(ends[1], STDOUT_FILENO);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  socket_ = ends[0];
  if (process_ < 0) {
    ::close(socket_);
    throw Error(StrCat("cannot run ", python, ": ", std::strerror(errno)));
  }
}

PythonChild::~PythonChild() {
  ::shutdown(socket_, SHUT_WR);
  while (!ended_) Read(1);
  ::close(socket_);
  while (::waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void PythonChild::Write(std::string_view line) {
  std::string text(line);
  text += '\n';
  for (size_t done = 0; done < text.size();) {
    const ssize_t sent = ::send(socket_, text.data() + done, text.size() - done, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return;
    done += static_cast<size_t>(sent);
  }
}

std::optional<std::string> PythonChild::Read(double seconds) {
  const Stopwatch clock;
  while (true) {
    if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    const double left = seconds - clock.seconds();
    if (ended_ || left <= 0) return std::nullopt;
    pollfd end = {socket_, POLLIN, 0};
    if (::poll(&end, 1, static_cast<int>(std::ceil(left * 1e3))) <= 0) continue;
    std::array<char, 4096> text;
    const ssize_t got = ::read(socket_, text.data(), text.size());
    if (got > 0) buffer_.append(text.data(), static_cast<size_t>(got));
    if (got == 0 || (got < 0 && errno != EINTR)) ended_ = true;
  }
}

int BecomePython(const std::string& module, std::vector<std::string> words) {
  const std::string python = FindPython();
  words.insert(words.begin(), {python, "-m", module});
  ::execvp(python.c_str(), Pointers(words).data());
  throw Error(StrCat("cannot run ", python));
}

}  // namespace gnomon::lab::cli
