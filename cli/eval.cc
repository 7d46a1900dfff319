#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/flags.h"
#include "gnomon/attention.h"
#include "models/strings.h"
#include "models/training.h"

namespace gnomon::cli {
namespace {

using models::StrCat;

struct EvalFlags {
  std::string model;
  std::string data;
  std::vector<int64_t> lengths;
  int64_t bytes = 131072;
  int64_t threads = 0;
  bool as_json = false;
};

nlohmann::json OrNull(const std::optional<double>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json();
}

int Run(const EvalFlags& flags) {
  SetThreads(flags.threads);
  CheckLengths(flags.lengths);
  models::Checkpoint checkpoint = models::LoadCheckpoint(CheckpointFile(flags.model));
  std::vector<int64_t> lengths = flags.lengths;
  const int64_t trained = checkpoint.training.length;
  if (lengths.empty()) lengths = {trained, 2 * trained, 4 * trained};
  const models::TextData data =
      models::ReadText(flags.data.empty() ? checkpoint.data_path : flags.data);
  CheckTextHolds(data, 0, *std::max_element(lengths.begin(), lengths.end()));
  CatchInterrupts();
  const std::vector<models::LengthLoss> losses = models::Evaluate(
      checkpoint.model, data.valid, lengths, flags.bytes, [] { return !Interrupted(); });
  if (losses.empty()) return kInterrupted;
  if (flags.as_json) {
    nlohmann::json list = nlohmann::json::array();
    for (const models::LengthLoss& at : losses) {
      list.push_back({{"length", at.length},
                      {"loss", OrNull(at.loss)},
                      {"last", OrNull(at.last)},
                      {"windows", at.windows}});
    }
    std::cout << nlohmann::json{{"data", DescribeData(data)},
                                {"step", checkpoint.step},
                                {"losses", list}}
                     .dump(2)
              << "\n";
    return 0;
  }
  std::cout << "| length | loss, nats a byte | last " << models::kLastBytes
            << " bytes | windows |\n|--:|--:|--:|--:|\n";
  for (const models::LengthLoss& at : losses) {
    std::cout << "| " << at.length << " | " << FormatLoss(at.loss) << " | " << FormatLoss(at.last)
              << " | " << at.windows << " |\n";
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
                      "on");
  command
      ->add_option("--lengths", flags->lengths,
                   "Bytes a window, joined by commas; default 1, 2 and 4 times the training "
                   "length")
      ->delimiter(',');
  command->add_option("--bytes", flags->bytes, "Bytes of text to measure each length on")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  command->add_flag("--json", flags->as_json, "Print JSON");
  AddThreadsFlag(command, &flags->threads);
  command->callback([action, flags] { *action = [flags] { return Run(*flags); }; });
}

}  // namespace gnomon::cli
