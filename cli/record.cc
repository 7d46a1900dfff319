#include "cli/record.h"

#include <ATen/Parallel.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <array>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "build_info.h"
#include "gnomon/attention.h"
#include "training/sha256.h"
#include "training/strings.h"

namespace gnomon::cli {
namespace {

namespace fs = std::filesystem;
using models::StrCat;
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

}  // namespace gnomon::cli
