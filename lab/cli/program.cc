#include "cli/program.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/build_info.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/record.h"
#include "cli/shortage.h"
#include "cli/task_choice.h"
#include "gnomon/attention.h"
#include "gnomon/catalogue.h"
#include "gnomon/specification.h"
#include "tasks/text.h"
#include "training/processes.h"
#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {

struct Failure {
  int code;
  std::string message;
};

// Describes the exception that is being handled.
Failure DescribeFailure() {
  const auto internal = [](const std::string& message) {
    return Failure{kInternalFailure, "internal failure: " + message};
  };
  try {
    throw;
  } catch (const CLI::ParseError& error) {
    return {kWrongInput, std::string(error.what()) + " (see --help)"};
  } catch (const Error& error) {
    return {kWrongInput, error.what()};
  } catch (const std::filesystem::filesystem_error& error) {
    return {kWrongInput, StrCat(error.path1().string(), ": ", error.code().message())};
  } catch (const std::ios_base::failure&) {
    // Only standard output is configured to throw.
    return {kWrongInput, StrCat("cannot write to standard output: ", std::strerror(errno))};
  } catch (const std::exception& error) {
    if (const auto what = DescribeShortage(error)) {
      return {kWrongInput, StrCat("not enough memory", *what)};
    }
  }
  try {
    throw;
  } catch (const c10::Error& error) {
    return internal(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return internal(error.what());
  }
}

// Empty option values are errors: they are usually unset shell variables.
void RefuseEmptyWords(const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands()) {
    for (const CLI::Option* option : command->get_options()) {
      for (const std::string& word : option->results()) {
        if (!word.empty()) continue;
        throw Error(StrCat(command->get_name(), ": ", option->get_name(), " is empty"));
      }
    }
  }
}

// Returns a suggestion such as "did you mean --position?" for the first word that resembles an
// option or command of `app`.
std::string Suggestion(const CLI::App& app, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    std::vector<std::string> known;
    if (word.starts_with('-')) {
      for (const CLI::Option* option : app.get_options()) known.push_back(option->get_name());
    } else {
      for (const CLI::App* command : app.get_subcommands({})) known.push_back(command->get_name());
    }
    // A word may contain a value: --option=value.
    const std::string near = DidYouMean(word.substr(0, word.find('=')), known);
    if (!near.empty()) return near;
  }
  return "";
}

// CLI11's own message lists the words in reverse, and does not say that options depend on the task.
[[noreturn]] void RefuseExtras(const CLI::App& app, const TaskChoice& choice) {
  const std::vector<std::string> words = app.remaining(/*recurse=*/true);
  std::string help = "--help";
  std::string near;
  for (const CLI::App* command : app.get_subcommands()) {
    // The command's options depend on the task, which is unknown. The exception is bench, whose
    // --model is not a file.
    if (!choice.fault.empty() && command->get_name() != "bench") throw Error(choice.fault);
    near = Suggestion(*command, words);
    if (command->get_option_no_throw("--task") != nullptr) {
      help = StrCat("--task ", choice.task->name(), " ", help);
    }
    help = StrCat(command->get_name(), " ", help);
  }
  if (app.get_subcommands().empty()) near = Suggestion(app, words);
  throw Error(StrCat("The following ", words.size() == 1 ? "argument was" : "arguments were",
                     " not expected: ", Join(words, " "), near.empty() ? "" : "; ", near, " (see ",
                     help, ")"));
}

// Throws Error if the working directory was deleted, unless the command only prints information.
void CheckWorkingFolder(const CLI::App& command) {
  if (!working_folder_is_deleted || command.get_name() == "list") return;
  for (const std::string& word : command.remaining()) {
    if (word == "--help" || word == "-h" || word == "--list") return;
  }
  throw Error(
      StrCat(command.get_name(), ": the working directory was deleted; change to an existing one"));
}

// While this object exists, failed writes to standard output throw std::ios_base::failure.
class ThrowingOutput {
 public:
  ThrowingOutput() {
    std::cout.clear();
    std::cout.exceptions(std::ios::badbit | std::ios::failbit);
    // If the streams were tied, writing to standard error would flush standard output and could
    // throw in the middle of a message.
    std::cerr.tie(nullptr);
  }
  ~ThrowingOutput() {
    std::cerr.tie(&std::cout);
    std::cout.exceptions(std::ios::goodbit);
  }
  ThrowingOutput(const ThrowingOutput&) = delete;
  ThrowingOutput& operator=(const ThrowingOutput&) = delete;
};

int Fail(const Failure& failure) {
  std::cerr << "gnomon: " << OneLine(failure.message) << std::endl;
  return failure.code;
}

// Adds --terms to a command. The libraries are loaded before the command runs.
void AddTermsFlag(CLI::App* command) {
  const auto load = [command](const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
      if (path.empty()) throw Error(command->get_name() + ": --terms is empty");
      try {
        LoadTerms(path);
      } catch (const c10::ValueError& error) {
        throw Error(error.what_without_backtrace());
      }
    }
  };
  command
      ->add_option_function<std::vector<std::string>>(
          "--terms", load,
          "A library of additional similarities, positions and encodings (terms), built with the "
          "CMake function gnomon_add_terms(); repeatable")
      ->allow_extra_args(false);
}

}  // namespace

bool working_folder_is_deleted = false;

void RunInEveryProcess(const Processes& processes, const std::function<void()>& part) {
  if (processes.size() == 1) return part();
  std::optional<Failure> failure;
  try {
    part();
  } catch (...) {
    failure = DescribeFailure();
  }
  const at::Tensor codes =
      processes.AllGather(at::full({1}, failure ? failure->code : 0, at::kLong)).flatten();
  for (int64_t rank = 0; rank < processes.size(); ++rank) {
    const auto code = static_cast<int>(codes[rank].item<int64_t>());
    if (code == 0) continue;
    if (rank == processes.rank()) Fail(*failure);
    // Launchers stop all processes as soon as one exits, so wait until the message has been
    // printed.
    processes.Any(true);
    throw Stopped{code};
  }
}

// CLI11 would use the next word as the value of "--out=", which is what --out=$EMPTY expands to.
void RefuseOptionsWithoutValue(int argc, char** argv) {
  for (int n = 1; n < argc; ++n) {
    const std::string_view word = argv[n];
    if (word.starts_with("--") && word.find('=') + 1 == word.size()) {
      throw Error(StrCat(word.substr(0, word.size() - 1), " is empty (see --help)"));
    }
  }
}

int RunProgram(int argc, char** argv, const Group& group) {
  const ProcessesPtr processes =
      group.name == nullptr ? std::make_shared<Processes>()
                            : std::make_shared<ProcessGroup>(group.name, group.rank, group.size);
  // Running out of memory is an ordinary error and must not abort the process.
  FLAGS_caffe2_use_fatal_for_enforce = false;
  CLI::App app("gnomon: exact attention with any combination of similarity and position.");
  app.name("gnomon");
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", std::string(GNOMON_VERSION));
  app.footer(
      "Exit codes: 0 success, 1 internal error, 2 invalid input or insufficient disk space or "
      "memory, 130 stopped by Ctrl-C (finished work is kept).");
  Action action;
  int code = 0;
  const ThrowingOutput throwing;
  try {
    RememberCommand(argc, argv);
    RunInEveryProcess(*processes, [&] {
      const TaskChoice choice = ChooseTask(argc, argv);
      const std::shared_ptr<Task>& task = choice.task;
      AddTrain(app, task, processes, &action);
      AddEval(app, task, &action);
      AddGenerate(app, task, &action);
      AddCompare(app, task, &action);
      AddData(app, &action);
      AddList(app, &action);
      AddInspect(app, &action);
      AddBench(app, &action);
      for (const char* name : {"train", "eval", "generate", "compare", "list", "bench"}) {
        AddTermsFlag(app.get_subcommand(name));
      }
      RefuseOptionsWithoutValue(argc, argv);
      try {
        app.parse(argc, argv);
      } catch (const CLI::Success& asked) {
        action = [&app, &processes, asked] { return processes->rank() == 0 ? app.exit(asked) : 0; };
        return;
      } catch (const CLI::ExtrasError&) {
        RefuseExtras(app, choice);
      } catch (const CLI::RequiredError&) {
        // A required option may be present under a misspelt name.
        const std::vector<std::string> words = app.remaining(/*recurse=*/true);
        for (const CLI::App* command : app.get_subcommands()) {
          if (!Suggestion(*command, words).empty()) RefuseExtras(app, choice);
        }
        throw;
      }
      RefuseEmptyWords(app);
      if (action == nullptr) throw Error("no command given (--help lists the commands)");
      CheckWorkingFolder(*app.get_subcommands().front());
      if (processes->size() > 1 && !app.got_subcommand("train")) {
        throw Error(StrCat(app.get_subcommands().front()->get_name(), " runs in one process, but ",
                           processes->size(), " were started; only train supports several"));
      }
    });
    code = action();
    std::cout.flush();
  } catch (const Stopped& stopped) {
    code = stopped.code;
  } catch (...) {
    Failure failure = DescribeFailure();
    if (processes->size() > 1) {
      failure.message = StrCat("process ", processes->rank(), ": ", failure.message);
    }
    code = Fail(failure);
  }
  return code;
}

std::string CheckpointOptions() {
  text::TextTask task;
  Terms terms;
  TrainingOptions training;
  RunOptions run;
  const OptionList list = InSection("model", terms.Options()) + InSection("run", run.Options()) +
                          task.Options(Command::kTrain) + InSection("training", training.Options());
  nlohmann::json sections;
  for (const Option& option : list) {
    sections[option.section].push_back(DescribeOption(option));
  }
  return sections.dump();
}

}  // namespace gnomon::lab::cli
