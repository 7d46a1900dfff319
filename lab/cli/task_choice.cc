#include "cli/task_choice.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "cli/results.h"
#include "gnomon/attention.h"
#include "training/checkpoint.h"
#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {

// The value of an option on the command line; none if the option is absent or empty.
std::optional<std::string> ValueOf(std::string_view option, int argc, char** argv) {
  for (int n = 1; n < argc; ++n) {
    const std::string_view word = argv[n];
    std::string value;
    if (word == option && n + 1 < argc) value = argv[n + 1];
    if (word.starts_with(option) && word.substr(option.size()).starts_with('=')) {
      value = word.substr(option.size() + 1);
    }
    if (!value.empty()) return value;
  }
  return std::nullopt;
}

std::optional<std::string> TaskOfRun(const std::string& path) {
  const std::filesystem::path record = std::filesystem::path(path) / kResultsName;
  std::error_code error;
  if (std::filesystem::exists(record, error)) return TaskOfRecord(record);
  return TaskOfCheckpoint(CheckpointFile(path));
}

}  // namespace

TaskChoice ChooseTask(int argc, char** argv) {
  std::optional<std::string> name = ValueOf("--task", argc, argv);
  std::string fault;
  for (const char* option : {"--resume", "--model"}) {
    const std::optional<std::string> path = ValueOf(option, argc, argv);
    if (name || !path) continue;
    try {
      name = TaskOfRun(*path);
      if (!name) fault = StrCat(option, ": ", *path, " does not state its task");
    } catch (const Error& error) {
      fault = error.what();
    }
  }
  return {NewTask(name.value_or(kTextTask)), name ? "" : fault};
}

}  // namespace gnomon::lab::cli
