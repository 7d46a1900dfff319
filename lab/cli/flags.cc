#include "cli/flags.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <variant>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab::cli {

namespace {

// The range in the help text, such as "1 to 4096"; very large upper bounds are omitted.
std::string Span(double lowest, double highest) {
  constexpr double kFar = 1e9;
  return highest < kFar ? StrCat(lowest, " to ", highest) : StrCat(lowest, " or more");
}

[[noreturn]] void Refuse(const std::string& name, const std::string& word, const char* kind,
                         const std::string& lowest, const std::string& highest) {
  throw Error(StrCat(name, " is ", word.empty() ? "empty" : word, "; expected ", kind, " from ",
                     lowest, " to ", highest));
}

// Splits words at commas. Throws Error for empty and repeated items. Empty words are skipped here,
// because RefuseEmptyWords() reports them for all options.
std::vector<std::string> Items(const std::string& name, const std::vector<std::string>& words) {
  std::vector<std::string> items;
  for (const std::string& word : words) {
    if (word.empty()) continue;
    for (size_t begin = 0; begin <= word.size();) {
      const size_t end = std::min(word.find(',', begin), word.size());
      if (end == begin) {
        throw Error(StrCat(name, " has an empty item in '", word,
                           "'; expected items separated by single commas"));
      }
      items.push_back(word.substr(begin, end - begin));
      if (std::find(items.begin(), items.end() - 1, items.back()) != items.end() - 1) {
        throw Error(StrCat(name, ": ", items.back(), " is given twice"));
      }
      begin = end + 1;
    }
  }
  return items;
}

// These options are not stored in a run, so they may change when it is resumed.
constexpr std::string_view kOfMachine[] = {"--device",  "--threads", "--terms",
                                           "--workers", "--cluster", "--tensorboard"};

}  // namespace

std::optional<int64_t> ParseInteger(const std::string& word) {
  int64_t number = 0;
  const char* const end = word.data() + word.size();
  // from_chars does not accept a plus sign.
  const char* const begin = word.data() + (word.starts_with('+') && word.size() > 1 ? 1 : 0);
  const auto [stop, error] = std::from_chars(begin, end, number);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

CLI::Validator WholeNumber(const std::string& name, int64_t lowest, int64_t highest) {
  const auto check = [=](std::string& word) {
    const std::optional<int64_t> number = ParseInteger(word);
    if (!number || *number < lowest || *number > highest) {
      Refuse(name, word, "an integer", std::to_string(lowest), std::to_string(highest));
    }
    // CLI11 would parse a leading zero as octal.
    word = std::to_string(*number);
    return std::string();
  };
  return {check, Span(static_cast<double>(lowest), static_cast<double>(highest))};
}

CLI::Option* AddList(CLI::App* command, const std::string& name, std::vector<std::string>* items,
                     const std::string& help) {
  const auto set = [=](const std::vector<std::string>& words) { *items = Items(name, words); };
  return command->add_option_function<std::vector<std::string>>(name, set, help)
      ->default_str(Join(*items, ","));
}

CLI::Option* AddList(CLI::App* command, const std::string& name, std::vector<int64_t>* numbers,
                     int64_t lowest, int64_t highest, const std::string& help) {
  const auto set = [=](const std::vector<std::string>& words) {
    numbers->clear();
    for (const std::string& item : Items(name, words)) {
      const std::optional<int64_t> number = ParseInteger(item);
      if (!number || *number < lowest || *number > highest) {
        throw Error(
            StrCat(name, " contains ", item, "; expected integers from ", lowest, " to ", highest));
      }
      if (std::find(numbers->begin(), numbers->end(), *number) != numbers->end()) {
        throw Error(StrCat(name, ": ", *number, " is given twice"));
      }
      numbers->push_back(*number);
    }
  };
  std::vector<std::string> texts;
  for (const int64_t number : *numbers) texts.push_back(std::to_string(number));
  return command->add_option_function<std::vector<std::string>>(name, set, help)
      ->type_name("INT")
      ->default_str(Join(texts, ","));
}

CLI::Option* AddReal(CLI::App* command, const std::string& name, double* value, double lowest,
                     double highest, const std::string& help) {
  const auto check = [=](const std::string& word) {
    double number = 0;
    if (!CLI::detail::lexical_cast(word, number) || !(number >= lowest && number <= highest)) {
      Refuse(name, word, "a number", StrCat(lowest), StrCat(highest));
    }
    return std::string();
  };
  return command->add_option(name, *value, help)
      ->check(CLI::Validator(check, Span(lowest, highest)));
}

void AddFlags(CLI::App* command, const OptionList& list) {
  for (const Option& option : list) {
    const OptionInfo& info = option.info;
    if (!info.has_flag) continue;
    const std::string name = option.flag();
    const auto lowest = static_cast<int64_t>(info.lowest);
    const auto highest = static_cast<int64_t>(info.highest);
    CLI::Option* flag = std::visit(
        [&]<class T>(T* value) -> CLI::Option* {
          if constexpr (std::is_same_v<T, bool>) {
            return command->add_flag(name, *value, info.help);
          } else if constexpr (std::is_same_v<T, double>) {
            return AddReal(command, name, value, info.lowest, info.highest, info.help);
          } else if constexpr (std::is_same_v<T, std::string>) {
            return command->add_option(name, *value, info.help);
          } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
            if (!info.has_commas) return command->add_option(name, *value, info.help);
            return AddList(command, name, value, info.help);
          } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
            return AddList(command, name, value, lowest, highest, info.help);
          } else {
            return AddNumber(command, name, value, lowest, highest, info.help);
          }
        },
        option.value);
    if (std::string group = option.section; !group.empty()) {
      group[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(group[0])));
      flag->group(group);
    }
    const bool is_set = !std::holds_alternative<std::optional<int64_t>*>(option.value);
    if (info.shows_default && is_set) {
      flag->capture_default_str();
    } else {
      flag->default_str("");
    }
  }
}

void SetAgain(CLI::App& command, const OptionList& list) {
  for (const Option& option : list) {
    if (!option.info.has_flag) continue;
    CLI::Option* const flag = command.get_option_no_throw(option.flag());
    if (flag != nullptr && flag->count() > 0) flag->run_callback();
  }
}

void AddTaskFlag(CLI::App* command, std::string* name) {
  std::string help = "Task to train; --task NAME --help lists its options";
  const char* separator = ". Tasks: ";
  for (const std::unique_ptr<Task>& task : AllTasks()) {
    help += StrCat(separator, task->name(), " (", task->description().summary, ")");
    separator = ", ";
  }
  command->add_option("--task", *name, help)->capture_default_str();
}

void SetWarmup(const CLI::App& command, TrainingOptions* options) {
  if (command.count("--warmup") > 0) return;
  options->warmup = std::clamp<int64_t>(options->steps / 10, 0, 100);
}

void AddDataFlag(CLI::App* command, const Task& task, std::string* path, const std::string& more) {
  if (task.description().takes_data())
    command->add_option("--data", *path, task.description().data_help + more);
}

void AddDeviceFlag(CLI::App* command, std::string* device, const std::string& what) {
  command->add_option("--device", *device, StrCat("Device ", what, " on: cpu, cuda or cuda:N"))
      ->capture_default_str();
}

void AddThreadsFlag(CLI::App* command, int64_t* threads) {
  AddNumber(command, "--threads", threads, 0, 4096, "Number of threads; 0 means one per core")
      ->capture_default_str();
}

void SetThreads(int64_t threads) {
  if (threads > 0) at::set_num_threads(static_cast<int>(threads));
}

void CheckResumes(const CLI::App& command, const OptionList& list) {
  std::vector<std::string> allowed = {"--resume", "--task"};
  allowed.insert(allowed.end(), std::begin(kOfMachine), std::end(kOfMachine));
  for (const Option& option : list) {
    if (option.info.may_change) allowed.push_back(option.flag());
  }
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_name();
    // Options that are hidden from --help are internal and always allowed.
    if (option->get_group().empty()) continue;
    if (option->count() > 0 && std::find(allowed.begin(), allowed.end(), name) == allowed.end()) {
      throw Error(
          StrCat("--resume takes its settings from the run and cannot be combined with ", name));
    }
  }
}

std::string ResumeLine(const CLI::App& command, const std::string& folder) {
  std::string line = StrCat("gnomon ", command.get_name(), " --resume ", folder);
  for (const std::string_view name : kOfMachine) {
    const CLI::Option* const option = command.get_option_no_throw(std::string(name));
    if (option == nullptr) continue;
    const bool is_flag = option->get_items_expected_max() == 0;
    for (const std::string& value : option->results()) {
      line += is_flag ? StrCat(" ", name) : StrCat(" ", name, " ", value);
    }
  }
  return line;
}

}  // namespace gnomon::lab::cli
