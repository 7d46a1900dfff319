// A mock compiler for the mock driver. Its output is "fake TARGET TITLE" followed by the source,
// where TITLE is the source's first line. A source with "#error" does not compile. Each compilation
// appends a line to the file $FAKE_NVRTC_LOG.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Program {
  std::string text;
  std::string files;
  std::string log;
  std::string binary;
};

int Copy(const std::string& from, char* to) {
  std::memcpy(to, from.c_str(), from.size() + 1);
  return 0;
}

constexpr int kArchitectures[] = {75, 80, 86, 89, 90, 100, 120};

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  const char* given = std::getenv("FAKE_NVRTC_MINOR");
  *major = 13;
  *minor = given != nullptr ? std::atoi(given) : 2;
  return 0;
}
const char* nvrtcGetErrorString(int result) {
  return result == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_OTHER";
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(kArchitectures));
  return 0;
}
int nvrtcGetSupportedArchs(int* architectures) {
  std::memcpy(architectures, kArchitectures, sizeof(kArchitectures));
  return 0;
}
int nvrtcCreateProgram(Program** program, const char* text, const char*, int files,
                       const char* const* texts, const char* const* names) {
  *program = new Program{.text = text, .files = {}, .log = {}, .binary = {}};
  for (int n = 0; n < files; ++n) {
    (*program)->files += std::string(names[n]) + ": " + texts[n] + "\n";
  }
  return 0;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}
int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  const std::string title = program->text.substr(0, program->text.find('\n'));
  if (const char* path = std::getenv("FAKE_NVRTC_LOG")) {
    const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    const std::string line = title + "\n";
    if (file >= 0 && write(file, line.data(), line.size()) < 0) return 1;
    close(file);
  }
  // The delay is long enough to provoke races.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (program->text.find("#error") != std::string::npos) {
    program->log = "kernel.cu(1): error: #error directive\n";
    return 6;
  }
  std::string target;
  for (int n = 0; n < count; ++n) {
    constexpr const char* kOption = "--gpu-architecture=";
    if (std::strncmp(options[n], kOption, std::strlen(kOption)) == 0) {
      target = options[n] + std::strlen(kOption);
    }
  }
  program->binary = "fake " + target + " " + title + "\n" + program->text + program->files;
  program->log = "all is well\n";
  return 0;
}
int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
  *bytes = program->log.size() + 1;
  return 0;
}
int nvrtcGetProgramLog(Program* program, char* log) { return Copy(program->log, log); }
int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  *bytes = program->binary.size() + 1;
  return 0;
}
int nvrtcGetCUBIN(Program* program, char* cubin) { return Copy(program->binary, cubin); }
int nvrtcGetPTXSize(Program* program, size_t* bytes) { return nvrtcGetCUBINSize(program, bytes); }
int nvrtcGetPTX(Program* program, char* ptx) { return Copy(program->binary, ptx); }

}  // extern "C"
