#include "cli/console.h"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <system_error>
#include <thread>

#include "build_info.h"
#include "gnomon/attention.h"
#include "models/sha256.h"
#include "models/strings.h"

namespace gnomon::cli {
namespace {

namespace fs = std::filesystem;
using models::StrCat;
using nlohmann::json;

constexpr double kSecondsBetweenLines = 10;
constexpr size_t kLongestLine = 600;

std::vector<std::string>& Words() {
  static std::vector<std::string> words;
  return words;
}

volatile std::sig_atomic_t interrupted = 0;

extern "C" void OnInterrupt(int) { interrupted = 1; }

std::string FormatTime(const char* format, bool local) {
  const std::time_t now = std::time(nullptr);
  std::tm parts;
  if (local) {
    localtime_r(&now, &parts);
  } else {
    gmtime_r(&now, &parts);
  }
  std::array<char, 64> text;
  return {text.data(), std::strftime(text.data(), text.size(), format, &parts)};
}

std::string CpuModel() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

bool IsProgram(const fs::path& path) { return ::access(path.c_str(), X_OK) == 0; }

// The interpreter beside the program, by the name that it was called by (a link in the folder of a
// virtual environment) or by its own; else the one it was built with.
std::string FindPython() {
  if (const char* chosen = std::getenv("GNOMON_PYTHON"); chosen != nullptr && *chosen != '\0') {
    return chosen;
  }
  std::vector<fs::path> programs;
  const std::string& called = Words().front();
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

// The words as execvp() takes them.
std::vector<char*> Pointers(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Runs a program and returns its exit code (-1: it could not be started) and what it wrote to its
// standard error.
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

void RememberCommand(int argc, char** argv) { Words().assign(argv, argv + argc); }

const std::vector<std::string>& CommandWords() { return Words(); }

void CatchInterrupts() {
  struct sigaction action = {};
  action.sa_handler = OnInterrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool Interrupted() { return interrupted != 0; }

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

std::string Now() { return FormatTime("%Y-%m-%dT%H:%M:%SZ", /*local=*/false); }

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

RunFolder CreateRunFolder(const std::string& out, const std::string& name) {
  RunFolder run = {out, {}};
  const fs::path& folder = run.path;
  std::error_code error;
  if (out.empty()) {
    const std::string stem = "runs/" + FormatTime("%Y%m%d-%H%M%S", /*local=*/true) + "-" + name;
    run.path = stem;
    fs::create_directories("runs", error);
    // Of processes that begin in the same second each makes its own.
    for (int n = 2; !error && !fs::create_directory(folder, error); ++n) {
      run.path = StrCat(stem, "-", n);
    }
  } else if (fs::exists(folder, error) && !fs::is_directory(folder, error)) {
    throw Error(StrCat("the output folder ", folder.string(), " is not a folder"));
  } else {
    fs::create_directories(folder, error);
  }
  const auto check = [&] {
    if (!error && ::access(folder.c_str(), W_OK | X_OK) == 0) return;
    throw Error(StrCat("cannot write to the output folder ", folder.string()));
  };
  check();
  run.lock = models::FolderLock(folder);
  const bool empty = fs::is_empty(folder, error);
  check();
  if (!empty) throw Error(StrCat("the output folder ", folder.string(), " is not empty"));
  return run;
}

std::string NameOfData(const std::string& path) {
  fs::path last = fs::path(path).lexically_normal();
  if (!last.has_filename()) last = last.parent_path();
  std::string name;
  for (const char c : last.stem().string()) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_';
    name += plain ? c : '-';
  }
  return name.empty() ? "text" : name;
}

void CheckTextHolds(const models::TextData& data, const models::TokenData& tokens,
                    int64_t training_needs, int64_t validation_needs) {
  const auto check = [&](const char* part, const models::TokenText& text, int64_t needed) {
    if (text.size() < needed) {
      throw Error(StrCat("the text is too short: the ", part, " part of ", data.path, " has ",
                         text.size(), " ", tokens.tokenizer->kind(), ", the windows need ",
                         needed));
    }
  };
  check("training", tokens.train, training_needs);
  check("validation", tokens.valid, validation_needs);
}

void SetThreads(int64_t threads) {
  if (threads > 0) at::set_num_threads(static_cast<int>(threads));
}

json DescribeMachine() {
  utsname system = {};
  ::uname(&system);
  return {{"cpu", CpuModel()},
          {"cores", std::thread::hardware_concurrency()},
          {"threads", at::get_num_threads()},
          {"instruction_set", CurrentTarget()},
          {"system", StrCat(system.sysname, " ", system.release, " ", system.machine)}};
}

json DescribeVersions() {
  return {{"gnomon", GNOMON_VERSION}, {"torch", TORCH_VERSION}, {"compiler", __VERSION__}};
}

std::string MachineLine() {
  return StrCat(CpuModel(), ", ", at::get_num_threads(), " threads, ", CurrentTarget(), ", torch ",
                TORCH_VERSION);
}

json DescribeData(const models::TextData& data) {
  return {{"path", fs::absolute(data.path).lexically_normal().string()},
          {"files", data.files},
          {"train_bytes", data.train.size()},
          {"valid_bytes", data.valid.size()},
          {"sha256", data.sha256}};
}

json DescribeTokens(const models::TokenData& tokens) {
  const models::Tokenizer& tokenizer = *tokens.tokenizer;
  const std::string vocabulary = tokenizer.vocabulary();
  models::Sha256 hash;
  hash.Update(vocabulary);
  const std::optional<int64_t> unknown = tokenizer.unknown();
  return {{"kind", tokenizer.kind()},
          {"size", tokenizer.size()},
          {"sha256", vocabulary.empty() ? json() : json(hash.Hex())},
          {"train_tokens", tokens.train.size()},
          {"valid_tokens", tokens.valid.size()},
          {"valid_unknown", unknown ? json(tokens.valid.Count(*unknown)) : json()}};
}

std::string DrawReport(const fs::path& folder) {
  const std::string python = FindPython();
  const auto [code, errors] = RunProgram({python, "-m", "gnomon.report", folder.string()});
  if (code == 0) return "";
  if (code < 0) return StrCat("no report.html: cannot run ", python);
  std::string last;
  std::istringstream lines(errors);
  for (std::string line; std::getline(lines, line);) {
    if (!OneLine(line).empty()) last = line;
  }
  return OneLine(StrCat("no report.html: ", python, " -m gnomon.report: ", last));
}

int BecomePython(const std::string& module, std::vector<std::string> words) {
  const std::string python = FindPython();
  words.insert(words.begin(), {python, "-m", module});
  ::execvp(python.c_str(), Pointers(words).data());
  throw Error(StrCat("cannot run ", python));
}

}  // namespace gnomon::cli
