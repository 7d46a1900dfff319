#include "cli/record.h"

#include <ATen/Parallel.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <array>
#include <ctime>
#include <fstream>
#include <thread>

#include "cli/build_info.h"
#include "gnomon/attention.h"
#include "gnomon/torch/devices.h"
#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {

using nlohmann::json;

std::vector<std::string>& Words() {
  static std::vector<std::string> words;
  return words;
}

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

}  // namespace

void RememberCommand(int argc, char** argv) { Words().assign(argv, argv + argc); }

const std::vector<std::string>& CommandWords() { return Words(); }

std::string Now() { return FormatTime("%Y-%m-%dT%H:%M:%SZ", /*local=*/false); }

std::string LocalTime() { return FormatTime("%Y%m%d-%H%M%S", /*local=*/true); }

json DescribeMachine(c10::Device device) {
  utsname system = {};
  ::uname(&system);
  return {{"cpu", CpuModel()},
          {"cores", std::thread::hardware_concurrency()},
          {"threads", at::get_num_threads()},
          {"instruction_set", CurrentTarget()},
          {"device", DeviceName(device)},
          {"system", StrCat(system.sysname, " ", system.release, " ", system.machine)}};
}

json DescribeVersions() {
  return {{"gnomon", GNOMON_VERSION}, {"torch", TORCH_VERSION}, {"compiler", __VERSION__}};
}

std::string MachineLine(c10::Device device) {
  if (!device.is_cpu()) return StrCat(DeviceName(device), ", torch ", TORCH_VERSION);
  // AVX3 and its variants are Highway's names for AVX-512.
  const std::string target = CurrentTarget();
  return StrCat(CpuModel(), ", ", at::get_num_threads(), " threads, ",
                target.starts_with("AVX3") ? "AVX-512" : target, ", torch ", TORCH_VERSION);
}

}  // namespace gnomon::lab::cli
