// The task `text`: a decoder-only Transformer predicts each token of a text from the preceding
// ones.
#ifndef GNOMON_TASKS_TEXT_H_
#define GNOMON_TASKS_TEXT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/language_model.h"
#include "models/sampling.h"
#include "text/text_data.h"
#include "text/tokens.h"
#include "training/options.h"
#include "training/task.h"
#include "training/training_options.h"

namespace gnomon::lab {
namespace text {

#define GNOMON_WINDOW_OPTIONS(OPTION)                                                        \
  OPTION(int64_t, length, 256, .help = "Number of tokens per window", .lowest = 1)           \
  OPTION(                                                                                    \
      int64_t, memory, 0,                                                                    \
      .help =                                                                                \
          "Transformer-XL memory: number of tokens of earlier windows that each layer also " \
          "attends to, without gradient. The windows of a row are then consecutive in the text")

// The content of a row in a training step.
struct WindowOptions {
  GNOMON_OPTIONS(GNOMON_WINDOW_OPTIONS)
};

// The minimum number of tokens in a training text: one window and the next token. With a memory: a
// window for each of `batch` rows, and one more window.
int64_t NeededTokens(const WindowOptions& window, int64_t batch);

#define GNOMON_TEXT_GENERATION_OPTIONS(OPTION)                                                    \
  OPTION(std::string, prompt, "\n", .help = "Text to continue; default: a line break",            \
         .shows_default = false)                                                                  \
  OPTION(int64_t, tokens, 512, .help = "Number of tokens (bytes, words or subwords) to generate", \
         .lowest = 1)

struct TextGenerationOptions {
  GNOMON_OPTIONS(GNOMON_TEXT_GENERATION_OPTIONS)
  SamplingOptions sampling;
};

struct TextOptions {
  LanguageModelOptions model;  // MakeLearner() sets similarity and position
  WindowOptions window;
  TokenOptions tokens;
};

class TextTask final : public Task {
 public:
  TextTask() = default;
  explicit TextTask(TextOptions options) : options_(std::move(options)) {}

  const TextOptions& options() const { return options_; }
  const TextData& data() const { return data_; }
  const TokenData& tokens() const { return tokens_; }
  // Sets the text, like ReadData().
  void SetText(TextData data);

  const char* name() const override { return kTextTask; }
  TaskDescription description() const override {
    return {.summary = "a language model over bytes, words or subwords; loss at several lengths",
            .data_help =
                "A text file or a folder of text files; the last tenth is used for validation "
                "unless the folder has files named train and valid",
            .data_noun = "text",
            .loss_unit = "nats per " + unit(),
            .examples = "windows"};
  }

  TrainingOptions DefaultTraining(Command command) const override;
  OptionList Options(Command command) override;
  void Settle(Command command, bool is_resumed, const TrainingOptions* training) override;
  std::string StepFlags(Command command, const TrainingOptions& training) const override;
  std::string EvaluationFlags(Command command) const override;
  void CheckModelFits() const override;
  void CheckFits(const TrainingOptions& training, int64_t processes) const override;

  void ReadData(const std::string& path) override;
  std::string HoldOut() override;
  const TokenText& held_out() const { return held_out_tokens_; }
  std::string data_sha256() const override { return data_.sha256; }
  nlohmann::json DescribeData() const override;
  std::string DescribeSize() const override;
  void Prepare() override;
  std::vector<Asset> Assets() const override;
  void TakeAssets(const std::vector<std::string>& bytes, bool is_stored) override;
  void CheckData(const TrainingOptions* training) const override;

  std::unique_ptr<Learner> MakeLearner(const Terms& terms,
                                       const TrainingOptions& training) override;
  void CheckSizes(const StoredSizes& file) const override;
  std::vector<std::string> state_fields() const override;

  std::vector<Metric> metrics() const override;
  Conditions conditions() const override;
  nlohmann::json DescribeEvaluation() const override;
  std::string TrainedAs(const TrainingOptions& training) const override;

  std::optional<Generation> generation() override {
    return Generation{.help = "Continue a text with a trained model",
                      .options = generation_.Options() + generation_.sampling.Options(),
                      .memory_flags = "--prompt and --tokens"};
  }

  // The evaluation settings.
  struct Evaluated {
    std::vector<int64_t> lengths;
    int64_t bytes = 0;   // of validation text, approximately
    int64_t memory = 0;  // tokens
  };
  const Evaluated& evaluated() const { return evaluated_; }
  const TextGenerationOptions& generation() const { return generation_; }

 private:
#define GNOMON_TEXT_RUN_OPTIONS(OPTION)                                                \
  OPTION(int64_t, evaluation_bytes, 131072,                                            \
         .help = "Number of bytes of validation text for the final loss", .lowest = 1, \
         .may_lack = true, .may_change = true)
  struct RunFields {
    GNOMON_OPTIONS(GNOMON_TEXT_RUN_OPTIONS)
  };

#define GNOMON_TEXT_COMPARISON_OPTIONS(OPTION)                                                     \
  OPTION(std::vector<int64_t>, lengths, std::vector<int64_t>({128, 256, 512}),                     \
         .help =                                                                                   \
             "Window lengths in tokens, comma-separated: the first is the training length; all "   \
             "are evaluated",                                                                      \
         .lowest = 1)                                                                              \
  OPTION(int64_t, evaluation_bytes, 65536,                                                         \
         .help = "Number of bytes of validation text to evaluate at each length", .lowest = 1)     \
  OPTION(std::optional<int64_t>, evaluation_memory, std::nullopt,                                  \
         .help =                                                                                   \
             "Number of tokens of earlier windows that each layer also attends to in evaluation; " \
             "default: as in training")
  struct ComparisonFields {
    GNOMON_OPTIONS(GNOMON_TEXT_COMPARISON_OPTIONS)
  };

#define GNOMON_TEXT_EVALUATION_OPTIONS(OPTION)                                                    \
  OPTION(std::vector<int64_t>, lengths, {},                                                       \
         .help =                                                                                  \
             "Window lengths in tokens, comma-separated; default: 1, 2 and 4 times the training " \
             "length, or the max_length of a checkpoint without training state",                  \
         .lowest = 1, .shows_default = false)                                                     \
  OPTION(int64_t, bytes, 131072, .help = "Number of bytes of text to evaluate at each length",    \
         .lowest = 1)                                                                             \
  OPTION(std::optional<int64_t>, memory, std::nullopt,                                            \
         .help =                                                                                  \
             "Number of tokens of earlier windows that each layer also attends to (fewer near "   \
             "the start of the text); default: as in training")
  struct EvaluationFields {
    GNOMON_OPTIONS(GNOMON_TEXT_EVALUATION_OPTIONS)
  };

  const std::string& kind() const { return options_.tokens.kind; }
  // The unit of the tokens: "byte", "word" or "subword".
  std::string unit() const { return TokenUnit(kind()); }
  void SetTokenizer(TokenizerPtr tokenizer);
  // Does nothing until both the text and the tokenizer are set.
  void Encode();

  TextOptions options_;
  RunFields run_;
  ComparisonFields comparison_;
  EvaluationFields evaluation_;
  TextGenerationOptions generation_;
  Evaluated evaluated_;
  bool is_trained_ = false;  // whether a model is trained, at the first evaluated length
  TextData data_;
  bool has_data_ = false;
  TokenData tokens_;
  std::string held_out_;
  TokenText held_out_tokens_;
};

class TextLearner final : public Learner {
 public:
  TextLearner(const TextTask& task, LanguageModel model, const TrainingOptions& training);

  LanguageModel& model() { return model_; }
  // The model's memory after the last step, for the rows of this process.
  const LanguageModelMemory& memory() const { return memory_; }

  torch::nn::Module& module() override { return *model_; }
  torch::Tensor Probe() override;
  void CheckTraining() const override;
  torch::Tensor Loss(const Batch& batch) override;
  void Keep() override;
  std::vector<Measurement> Evaluate(const std::function<bool()>& proceed) override;
  void Generate(const Output& output) override;
  LearnerState State(const Gather& gather) const override;
  size_t CheckState(const LearnerState& state) const override;
  void Restore(const LearnerState& state, int64_t first, int64_t count) override;

 private:
  const TextTask& task_;
  LanguageModel model_;
  TrainingOptions training_;
  LanguageModelMemory memory_;
  LanguageModelMemory next_;  // the memory after the current step
};

}  // namespace text
}  // namespace gnomon::lab

#endif  // GNOMON_TASKS_TEXT_H_
