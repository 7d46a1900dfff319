#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/checks.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/interrupts.h"
#include "cli/progress.h"
#include "cli/record.h"
#include "cli/results.h"
#include "cli/run_folder.h"
#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "models/checkpoint.h"
#include "models/evaluation.h"
#include "training/strings.h"

namespace gnomon::cli {
namespace {

using models::StrCat;

struct EvalFlags {
  std::string model;
  std::string data;
  std::vector<int64_t> lengths;
  int64_t bytes = 131072;
  std::optional<int64_t> memory;
  int64_t threads = 0;
  bool as_json = false;
};

int Run(const EvalFlags& flags) {
  SetThreads(flags.threads);
  CheckLengths(flags.lengths);
  models::Checkpoint checkpoint = models::LoadCheckpoint(CheckpointFile(flags.model));
  std::vector<int64_t> lengths = flags.lengths;
  const std::optional<models::TrainingState>& training = checkpoint.training;
  // The command line gives a model as many places as its training windows have.
  const int64_t trained =
      training ? training->options.length : checkpoint.model->options().max_length;
  if (lengths.empty()) lengths = {trained, 2 * trained, 4 * trained};
  if (flags.data.empty() && !training) {
    throw Error(StrCat("eval: ", flags.model,
                       " holds a model alone, without its data; --data is required"));
  }
  const models::TextData data =
      models::ReadText(flags.data.empty() ? training->data_path : flags.data);
  const models::TokenData tokens = models::Tokenize(checkpoint.tokenizer, data);
  CheckTextHolds(data, tokens, 0, *std::max_element(lengths.begin(), lengths.end()) + 1);
  // Unknown of a model alone.
  nlohmann::json same_text;
  if (training) same_text = data.sha256 == training->data_sha256;
  const int64_t memory = flags.memory.value_or(training ? training->options.memory : 0);
  CatchInterrupts();
  std::vector<models::LengthLoss> losses;
  NamingOptions("--lengths and --memory", [&] {
    losses = models::Evaluate(checkpoint.model, tokens.valid, lengths,
                              models::TokensOfBytes(tokens.valid, flags.bytes), memory,
                              [] { return !Interrupted(); });
  });
  if (losses.empty()) return kInterrupted;
  if (same_text == false) {
    std::cerr << "gnomon: "
              << OneLine(
                     StrCat("note: the text at ", data.path,
                            " is not the one that the model was trained on, ",
                            flags.data.empty() ? "which has changed since" : training->data_path))
              << std::endl;
  }
  if (flags.as_json) {
    nlohmann::json list = nlohmann::json::array();
    for (const models::LengthLoss& at : losses) list.push_back(ToJson(at));
    std::cout << nlohmann::json{{"data", DescribeData(data)},
                                {"tokens", DescribeTokens(tokens)},
                                {"trained_on_this_text", same_text},
                                {"step", training ? nlohmann::json(training->step) : nullptr},
                                {"memory", memory},
                                {"losses", list}}
                     .dump(2)
              << "\n";
    return 0;
  }
  const std::string kind = tokens.tokenizer->kind();
  std::cout << "| length | loss, nats per " << models::TokenUnit(kind) << " | last "
            << models::kLastTokens << " " << kind
            << " | bits per byte | windows |\n|--:|--:|--:|--:|--:|\n";
  for (const models::LengthLoss& at : losses) {
    std::cout << "| " << at.length << " | " << FormatLoss(at.loss) << " | " << FormatLoss(at.last)
              << " | " << FormatLoss(at.bits_per_byte) << " | " << at.windows << " |\n";
  }
  return 0;
}

}  // namespace

void AddEval(CLI::App& app, Action* action) {
  CLI::App* command = app.add_subcommand(
      "eval", "Measure a trained model's loss at several lengths, on validation text");
  auto flags = std::make_shared<EvalFlags>();
  command->add_option("--model", flags->model, "A checkpoint file, or the folder of a run")
      ->required();
  command->add_option("--data", flags->data,
                      "A text file or folder, as for train; default: what the model was trained "
                      "on, where the checkpoint holds its training");
  command
      ->add_option("--lengths", flags->lengths,
                   "Tokens per window, joined by commas; default 1, 2 and 4 times the training "
                   "length, or the max_length of a model alone")
      ->delimiter(',');
  AddNumber(command, "--bytes", &flags->bytes, 1, kMany, "Bytes of text to measure at each length")
      ->capture_default_str();
  AddNumber(command, "--memory", &flags->memory, 0, kMany,
            "Tokens of earlier windows that each layer also sees, as far as the text goes back; "
            "default: as in training");
  command->add_flag("--json", flags->as_json, "Print JSON");
  AddThreadsFlag(command, &flags->threads);
  command->callback([action, flags] { *action = [flags] { return Run(*flags); }; });
}

}  // namespace gnomon::cli
