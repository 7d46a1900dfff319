#include <iostream>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/interrupts.h"
#include "cli/run_folder.h"
#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "models/language_model.h"
#include "tasks/text.h"
#include "training/checkpoint.h"
#include "training/strings.h"

namespace gnomon::cli {
namespace {

using models::StrCat;

struct GenerateFlags {
  std::string model;
  std::string prompt = "\n";
  models::GenerationOptions options;
  int64_t seed = 0;
  bool no_cache = false;
  int64_t threads = 0;
};

int Run(GenerateFlags flags) {
  SetThreads(flags.threads);
  if (flags.prompt.empty()) throw Error("generate: --prompt is empty");
  if (flags.options.temperature == 0 && flags.options.top_k != 0) {
    throw Error("generate: --temperature 0 takes the likeliest token and excludes --top-k");
  }
  models::TextTask task;
  const models::Checkpoint checkpoint = models::LoadCheckpoint(CheckpointFile(flags.model), task);
  models::LanguageModel& model = static_cast<models::TextLearner&>(*checkpoint.learner).model();
  const models::Tokenizer& tokenizer = *task.tokens().tokenizer;
  const std::string kind = tokenizer.kind();
  const models::TokenText prompt = tokenizer.Encode(flags.prompt);
  if (prompt.size() == 0) throw Error(StrCat("generate: --prompt holds no ", kind));
  if (flags.options.top_k > tokenizer.size()) {
    throw Error(StrCat("generate: --top-k is ", flags.options.top_k, ", the model knows ",
                       tokenizer.size(), " ", kind));
  }
  // The last token is never read.
  const int64_t needed = prompt.size() + flags.options.tokens - 1;
  const std::optional<int64_t> longest = model->max_length();
  if (longest && needed > *longest) {
    throw Error(StrCat("generate: the position '", model->options().position, "' is defined for ",
                       *longest, " ", kind, ", --prompt and --tokens need ", needed));
  }
  flags.options.use_cache = !flags.no_cache;
  flags.options.seed = static_cast<uint64_t>(flags.seed);
  CatchInterrupts();
  std::cout << flags.prompt << std::flush;
  int64_t before = prompt[prompt.size() - 1];
  const auto print = [&](int64_t token) {
    std::cout << tokenizer.Text(token, before) << std::flush;
    before = token;
    return !Interrupted();
  };
  NamingOptions("--prompt and --tokens",
                [&] { models::Generate(model, prompt, flags.options, print); });
  std::cout << std::endl;
  return Interrupted() ? kInterrupted : 0;
}

}  // namespace

void AddGenerate(CLI::App& app, Action* action) {
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a trained model");
  auto flags = std::make_shared<GenerateFlags>();
  flags->options.tokens = 512;
  flags->options.temperature = 0.8;
  command->add_option("--model", flags->model, "A checkpoint file, or the folder of a run")
      ->required();
  command->add_option("--prompt", flags->prompt, "Text to continue; default: a line break");
  AddNumber(command, "--tokens", &flags->options.tokens, 1, kMany,
            "Bytes, words or subwords to add, whichever the model reads")
      ->capture_default_str();
  AddReal(command, "--temperature", &flags->options.temperature, 0, 1e6,
          "Temperature of the softmax that tokens are drawn from; 0: always the likeliest")
      ->capture_default_str();
  AddNumber(command, "--top-k", &flags->options.top_k, 0, kMany,
            "Draw from this many of the likeliest tokens; 0: from all")
      ->capture_default_str();
  AddNumber(command, "--seed", &flags->seed, 0, kLargestSeed, "Seed of the draws")
      ->capture_default_str();
  command->add_flag("--no-cache", flags->no_cache,
                    "Read the whole text again for each token instead of keeping keys and values");
  AddThreadsFlag(command, &flags->threads);
  command->callback([action, flags] { *action = [flags] { return Run(*flags); }; });
}

}  // namespace gnomon::cli
