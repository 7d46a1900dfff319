#include "training/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gnomon/attention.h"
#include "gnomon/catalogue.h"
#include "lab/seeded_model.h"
#include "lab/values.h"
#include "models/evaluation.h"
#include "models/language_model.h"
#include "tasks/text.h"
#include "training/checkpoint.h"
#include "training/safetensors.h"

namespace gnomon::lab {
namespace {

using text::NeededTokens;
using text::TextLearner;
using text::TextOptions;
using text::TextTask;
using text::WindowOptions;

LanguageModelOptions Small(const std::string& similarity = "dot",
                           const std::string& position = "rope") {
  LanguageModelOptions options;
  options.dim = 16;
  options.depth = 1;
  options.heads = 2;
  options.mlp = 32;
  options.max_length = 32;
  options.similarity = similarity;
  options.position = position;
  return options;
}

// Returns the values of options in the form in which files store them.
template <class Struct>
nlohmann::json OptionsToJson(Struct options) {
  return ToJson(options.Options());
}

// The settings of a run of the task `text`.
struct TextTraining : TrainingOptions {
  int64_t length = 32;
  int64_t memory = 0;
};

TextTraining Short() {
  TextTraining options;
  options.batch = 4;
  options.steps = 60;
  options.warmup = 5;
  options.learning_rate = 1e-2;
  options.seed = 3;
  return options;
}

std::string Text() {
  std::string text;
  for (int n = 0; n < 400; ++n) text += "the cat sat on mat " + std::to_string(n % 10) + ".\n";
  return text;
}

TextData Data(const std::string& text = Text()) {
  TextData data;
  data.path = "text.txt";
  data.train = text;
  data.sha256 = "00";
  return data;
}

// A checkpoint, and the task to which its learner refers.
struct Loaded {
  std::unique_ptr<TextTask> task = std::make_unique<TextTask>();
  Checkpoint checkpoint;

  LanguageModel& model() { return static_cast<TextLearner&>(*checkpoint.learner).model(); }
  TrainingState& training() { return checkpoint.training.value(); }
};

Loaded Load(const std::filesystem::path& path) {
  Loaded loaded;
  loaded.checkpoint = LoadCheckpoint(path, *loaded.task);
  return loaded;
}

// Trains a language model on a text.
class TextTrainer {
 public:
  TextTrainer(const LanguageModel& model, const std::string& text, const TextTraining& options,
              const ProcessesPtr& processes = std::make_shared<Processes>(),
              const TokenOptions& tokens = {})
      : task_(std::make_unique<TextTask>(
            TextOptions{model->options(), {options.length, options.memory}, tokens})),
        terms_({model->options().similarity, model->options().position}) {
    task_->SetText(Data(text));
    task_->Prepare();
    trainer_ = std::make_unique<Trainer>(std::make_unique<TextLearner>(*task_, model, options),
                                         options, processes);
  }
  // Continues from a loaded checkpoint.
  TextTrainer(Loaded loaded, const std::string& text)
      : task_(std::move(loaded.task)), terms_(loaded.checkpoint.terms) {
    task_->SetText(Data(text));
    const TrainingState& training = loaded.checkpoint.training.value();
    trainer_ = std::make_unique<Trainer>(std::move(loaded.checkpoint.learner), training.options);
    trainer_->Restore(training.optimizer, training.step, training.learner);
  }

  double Step() { return trainer_->Step(); }
  int64_t step() const { return trainer_->step(); }
  Trainer& trainer() { return *trainer_; }
  TextTask& task() { return *task_; }
  LanguageModel& model() { return learner().model(); }
  const LanguageModelMemory& memory() { return learner().memory(); }

  void Save(const std::filesystem::path& path, const RunOptions& run = {}) {
    SaveCheckpoint(path, *trainer_, *task_, terms_, run, "text.txt");
  }

 private:
  TextLearner& learner() { return static_cast<TextLearner&>(trainer_->learner()); }

  std::unique_ptr<TextTask> task_;
  Terms terms_;
  std::unique_ptr<Trainer> trainer_;
};

std::vector<torch::Tensor> Values(TextTrainer& trainer) { return Values(*trainer.model()); }

TEST(LearningRateTest, WarmsUpAndDecays) {
  TrainingOptions options;
  options.steps = 110;
  options.warmup = 10;
  options.learning_rate = 1;
  options.final_fraction = 0.1;
  EXPECT_DOUBLE_EQ(LearningRate(options, 0, 110), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(options, 9, 110), 1.0);
  EXPECT_DOUBLE_EQ(LearningRate(options, 10, 110), 1.0);
  EXPECT_NEAR(LearningRate(options, 60, 110), 0.55, 1e-12);
  EXPECT_NEAR(LearningRate(options, 110, 110), 0.1, 1e-12);
  EXPECT_NEAR(LearningRate(options, 500, 110), 0.1, 1e-12);
  options.warmup = 0;
  EXPECT_DOUBLE_EQ(LearningRate(options, 0, 110), 1.0);
}

TEST(LearningRateTest, StaysConstantAndDecaysAtTheEnd) {
  TrainingOptions options;
  options.schedule = "constant";
  options.steps = 100;
  options.warmup = 10;
  options.learning_rate = 1;
  options.final_fraction = 0.1;
  EXPECT_DOUBLE_EQ(LearningRate(options, 0, 100), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(options, 10, 100), 1.0);
  EXPECT_DOUBLE_EQ(LearningRate(options, 80, 100), 1.0);
  EXPECT_NEAR(LearningRate(options, 90, 100), 0.55, 1e-12);
  EXPECT_NEAR(LearningRate(options, 100, 100), 0.1, 1e-12);
  // If training ends earlier, the learning rates before the decay stay the same.
  EXPECT_EQ(DecayBegin(100), 80);
  EXPECT_EQ(EndOfDecay(40), 50);
  EXPECT_DOUBLE_EQ(LearningRate(options, 40, 50), 1.0);
  EXPECT_NEAR(LearningRate(options, 45, 50), 0.55, 1e-12);
  for (int64_t begin = 1; begin < 200; ++begin) {
    EXPECT_LE(DecayBegin(EndOfDecay(begin)), begin);
    EXPECT_GT(EndOfDecay(begin), begin);
  }
}

TEST(TrainerTest, TwoStepsOfEverySimilarityAndPosition) {
  const std::string text = Text();
  TextTraining options = Short();
  options.steps = 2;
  options.warmup = 1;
  const auto train = [&](const std::string& similarity, const std::string& position) {
    TextTrainer trainer(NewModel(Small(similarity, position), 1), text, options);
    const std::vector<torch::Tensor> before = Values(trainer);
    for (int step = 0; step < 2; ++step) {
      const double loss = trainer.Step();
      EXPECT_TRUE(std::isfinite(loss)) << similarity << " " << position;
      EXPECT_LT(loss, 2 * std::log(256.0)) << similarity << " " << position;
    }
    const auto names = trainer.model()->named_parameters().keys();
    const std::vector<torch::Tensor> after = Values(trainer);
    for (size_t n = 0; n < names.size(); ++n) {
      // A common shift of all keys does not change the softmax of dot products.
      if (names[n].ends_with("k_proj.bias")) continue;
      EXPECT_FALSE(torch::equal(before[n], after[n]))
          << similarity << " " << position << " " << names[n];
    }
  };
  for (const CatalogueEntry& entry : SimilarityCatalogue()) train(entry.name, "none");
  for (const CatalogueEntry& entry : PositionCatalogue()) {
    // An offset bias has a table as long as the text, a grid has a fixed number of tokens, and
    // other positions need tensors in each call.
    const bool fits = entry.name != "offset_bias" && entry.name != "grid_bias" &&
                      entry.name != "relative2d" && entry.use() != "attention()";
    if (fits) train("dot", entry.name);
  }
  train("penumbral", "rope+hype:mu=learned:tau=learned");
}

TEST(TrainerTest, LossFalls) {
  const std::string text = Text();
  TextTrainer trainer(NewModel(Small(), 1), text, Short());
  std::vector<double> losses;
  while (trainer.step() < trainer.trainer().options().steps) losses.push_back(trainer.Step());
  const auto mean = [&](size_t from) {
    return std::accumulate(losses.begin() + from, losses.begin() + from + 5, 0.0) / 5;
  };
  EXPECT_LT(mean(losses.size() - 5), mean(0) - 2);
}

TEST(TrainerTest, OneSeedIsOneResultBitwise) {
  const std::string text = Text();
  const auto train = [&](int64_t seed) {
    TextTraining options = Short();
    options.seed = seed;
    LanguageModelOptions model = Small("penumbral", "rope+hype:tau=learned");
    model.dropout = 0.1;
    TextTrainer trainer(NewModel(model, seed), text, options);
    for (int step = 0; step < 5; ++step) trainer.Step();
    return Values(trainer);
  };
  EXPECT_TRUE(Equal(train(1), train(1)));
  EXPECT_FALSE(Equal(train(1), train(2)));
}

TEST(TrainerTest, DecaySparesBiasesNormsAndEncodings) {
  LanguageModel model = NewModel(Small("penumbral", "rope+hype:tau=learned+t5"), 1);
  int decayed = 0;
  for (const auto& entry : model->named_parameters()) {
    const std::string& name = entry.key();
    const bool matrix = name.ends_with("_proj.weight") || name.ends_with("mlp_in.weight") ||
                        name.ends_with("mlp_out.weight") || name == "embedding.weight";
    EXPECT_EQ(Decays(name, entry.value()), matrix) << name;
    decayed += matrix ? 1 : 0;
  }
  EXPECT_EQ(decayed, 7);
}

TEST(TrainerTest, DivergenceLeavesTheParametersAlone) {
  const std::string text = Text();
  LanguageModel model = NewModel(Small(), 1);
  {
    const torch::NoGradGuard no_grad;
    model->named_parameters()["embedding.weight"].fill_(std::nanf(""));
  }
  TextTrainer trainer(model, text, Short());
  const torch::Tensor before = model->named_parameters()["norm.weight"].detach().clone();
  EXPECT_FALSE(std::isfinite(trainer.Step()));
  EXPECT_TRUE(torch::equal(model->named_parameters()["norm.weight"], before));
  EXPECT_EQ(trainer.step(), 0);
}

TEST(TrainerTest, TextsThatAreTooShortAndWrongOptionsAreErrors) {
  const std::string text(32, 'a');
  EXPECT_THROW(TextTrainer(NewModel(Small(), 1), text, Short()), Error);
  TextTraining options = Short();
  options.steps = 0;
  EXPECT_THROW(CheckTrainingOptions(options), Error);
  options = Short();
  options.warmup = 61;
  EXPECT_THROW(CheckTrainingOptions(options), Error);
  options = Short();
  options.learning_rate = std::nan("");
  EXPECT_THROW(CheckTrainingOptions(options), Error);
}

TEST(ProcessesTest, SharesAreConsecutiveAndEven) {
  for (const int64_t size : {1, 2, 3, 5}) {
    int64_t next = 0;
    for (int64_t rank = 0; rank < size; ++rank) {
      EXPECT_EQ(FirstRow(13, rank, size), next);
      EXPECT_GE(CountRows(13, rank, size), 13 / size);
      EXPECT_LE(CountRows(13, rank, size), (13 + size - 1) / size);
      next += CountRows(13, rank, size);
    }
    EXPECT_EQ(next, 13);
  }
}

// Threads that act as processes.
class Threads {
 public:
  explicit Threads(int64_t size) : tensors_(size), barrier_(size) {}

  int64_t size() const { return static_cast<int64_t>(tensors_.size()); }

  // Gathers the tensors of all ranks, once each has provided its own.
  std::vector<torch::Tensor> Exchange(int64_t rank, const torch::Tensor& tensor) {
    tensors_[rank] = tensor.clone();
    barrier_.arrive_and_wait();
    std::vector<torch::Tensor> all = tensors_;
    barrier_.arrive_and_wait();
    return all;
  }

 private:
  std::vector<torch::Tensor> tensors_;
  std::barrier<> barrier_;
};

class OneThread : public Processes {
 public:
  OneThread(Threads* threads, int64_t rank) : threads_(threads), rank_(rank) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return threads_->size(); }
  void AllReduce(const at::Tensor& tensor) const override {
    const torch::NoGradGuard no_grad;
    tensor.copy_(AllGather(tensor).sum(0));
  }
  at::Tensor AllGather(const at::Tensor& tensor) const override {
    return torch::stack(threads_->Exchange(rank_, tensor));
  }
  void Broadcast(const at::Tensor& tensor) const override {
    const torch::NoGradGuard no_grad;
    tensor.copy_(threads_->Exchange(rank_, tensor)[0]);
  }

 private:
  Threads* threads_;
  int64_t rank_;
};

TEST(TrainerTest, ProcessesDoWhatOneDoes) {
  constexpr int64_t kProcesses = 3, kBegin = 3, kEnd = 6;
  const std::string text = Text();
  for (const int64_t memory : {0, 40}) {
    TextTraining options = Short();  // four windows: one, one and two per process
    options.memory = memory;
    const LanguageModelOptions model = Small("penumbral", "rope+hype:tau=learned");
    TextTrainer whole(NewModel(model, 1), text, options);
    for (int step = 0; step < kBegin; ++step) whole.Step();
    // The first steps use one process; the other steps use three.
    const std::map<std::string, torch::Tensor> moments = whole.trainer().OptimizerState();
    const LearnerState state = whole.trainer().GatherState();
    Threads threads(kProcesses);
    std::vector<LanguageModel> models;
    for (int64_t rank = 0; rank < kProcesses; ++rank) {
      // All processes must adopt the weights of process 0.
      models.push_back(NewModel(model, 10 + rank));
    }
    {
      const torch::NoGradGuard no_grad;
      const std::vector<torch::Tensor> values = Values(whole);
      for (size_t n = 0; n < values.size(); ++n) models[0]->parameters()[n].copy_(values[n]);
    }
    std::vector<std::vector<double>> losses(kProcesses);
    std::vector<LearnerState> gathered(kProcesses);
    std::vector<std::vector<torch::Tensor>> values(kProcesses);
    std::vector<std::thread> running;
    for (int64_t rank = 0; rank < kProcesses; ++rank) {
      running.emplace_back([&, rank] {
        TextTrainer trainer(models[rank], text, options,
                            std::make_shared<OneThread>(&threads, rank));
        trainer.trainer().Restore(moments, kBegin, state);
        for (int step = kBegin; step < kEnd; ++step) losses[rank].push_back(trainer.Step());
        gathered[rank] = trainer.trainer().GatherState();
        values[rank] = Values(trainer);
        if (memory > 0) {
          EXPECT_EQ(trainer.memory().layers[0].size(0), rank == 2 ? 2 : 1);
        }
      });
    }
    for (std::thread& thread : running) thread.join();
    for (int step = kBegin; step < kEnd; ++step) {
      EXPECT_NEAR(whole.Step(), losses[0][step - kBegin], 1e-5) << step;
    }
    const std::vector<torch::Tensor> expected = Values(whole);
    for (int64_t rank = 0; rank < kProcesses; ++rank) {
      EXPECT_EQ(losses[rank], losses[0]);
      EXPECT_TRUE(Equal(values[rank], values[0]));
      EXPECT_EQ(gathered[rank].fields["memory_tokens"], whole.memory().tokens.tokens);
      ASSERT_EQ(gathered[rank].tensors.size(), memory > 0 ? 1u : 0u);
      for (size_t n = 0; n < expected.size(); ++n) {
        EXPECT_TRUE(torch::allclose(values[rank][n], expected[n], 1e-4, 1e-5)) << n;
      }
      if (memory > 0) {
        EXPECT_TRUE(torch::allclose(gathered[rank].tensors.at("memory.layers.0"),
                                    whole.memory().layers[0], 1e-4, 1e-4));
      }
    }
  }
}

TEST(TrainerTest, EveryProcessNeedsAWindow) {
  EXPECT_NO_THROW(CheckTrainingOptions(Short(), 4));
  EXPECT_THROW(CheckTrainingOptions(Short(), 5), Error);
  Threads threads(5);
  const std::string text = Text();
  EXPECT_THROW(
      TextTrainer(NewModel(Small(), 1), text, Short(), std::make_shared<OneThread>(&threads, 0)),
      Error);
}

TEST(EvaluateTest, IsTheMeanOverBytesAndDashesBeyondTheTable) {
  const std::string text = Text().substr(0, 200);
  LanguageModel model = NewModel(Small("dot", "learned"), 1);
  const std::vector<LengthLoss> losses = Evaluate(model, text, {16, 32, 64}, 128);
  ASSERT_EQ(losses.size(), 3u);
  EXPECT_FALSE(losses[2].loss);
  EXPECT_FALSE(losses[2].last);
  EXPECT_EQ(losses[0].windows, 8);
  // In windows of 16 and 32 bytes, all bytes count as last bytes.
  EXPECT_DOUBLE_EQ(*losses[0].loss, *losses[0].last);

  // Computes the same loss in the simplest way, one window and one byte at a time.
  const torch::NoGradGuard no_grad;
  double sum = 0;
  for (const int64_t start : EvaluationStarts(200, 32, 64, 128)) {
    std::vector<int64_t> bytes;
    for (int64_t n = 0; n <= 32; ++n) bytes.push_back(text[start + n]);
    const torch::Tensor tokens = torch::tensor(bytes).unsqueeze(0);
    const torch::Tensor logs =
        torch::log_softmax(model->forward(tokens.narrow(1, 0, 32)).to(torch::kDouble), 2);
    for (int64_t n = 0; n < 32; ++n) sum -= logs[0][n][bytes[n + 1]].item<double>();
  }
  EXPECT_NEAR(*losses[1].loss, sum / (4 * 32), 1e-5);
}

// Returns the losses of the last `count` tokens up to `end`, each predicted from all tokens since
// `begin`.
torch::Tensor LastLosses(LanguageModel& model, const TokenText& text, int64_t begin, int64_t end,
                         int64_t count) {
  const torch::NoGradGuard no_grad;
  std::vector<int64_t> tokens;
  for (int64_t n = begin; n <= end; ++n) tokens.push_back(text[n]);
  const torch::Tensor row = torch::tensor(tokens).unsqueeze(0);
  const torch::Tensor logs =
      torch::log_softmax(model->forward(row.narrow(1, 0, end - begin)).to(torch::kDouble), 2);
  const torch::Tensor all = -logs[0].gather(1, row[0].narrow(0, 1, end - begin).unsqueeze(1));
  return all.squeeze(1).slice(0, end - begin - count);
}

TEST(EvaluateTest, BitsAByteCountTheBytesThatTokensStandFor) {
  std::string bytes;
  for (int n = 0; n < 60; ++n) bytes += " word" + std::to_string(n * n) + (n % 7 ? "  x" : "\n");
  const TokenizerPtr tokenizer = BuildTokenizer({"words"}, bytes);
  const TokenText text = tokenizer->Encode(bytes);
  LanguageModelOptions options = Small();
  options.vocabulary = tokenizer->size();
  LanguageModel model = NewModel(options, 1);
  const LengthLoss at = Evaluate(model, text, {16}, 48)[0];
  EXPECT_EQ(at.windows, 3);
  double nats = 0;
  int64_t spelled = 0;
  for (const int64_t start : EvaluationStarts(text.size(), 16, 16, 48)) {
    nats += LastLosses(model, text, start, start + 16, 16).sum().item<double>();
    spelled += text.CountBytes(start + 1, start + 17);
  }
  EXPECT_NEAR(*at.loss, nats / 48, 1e-5);
  EXPECT_NEAR(*at.bits_per_byte, nats / std::log(2.0) / static_cast<double>(spelled), 1e-5);
  // For bytes, bits per byte are the loss in a different unit.
  LanguageModel of_bytes = NewModel(Small(), 1);
  const LengthLoss plain = Evaluate(of_bytes, bytes, {16}, 48)[0];
  EXPECT_DOUBLE_EQ(*plain.bits_per_byte, *plain.loss / std::log(2.0));
}

TEST(EvaluateTest, MemoryIsFilledBeforeEachStretch) {
  const std::string text = Text().substr(0, 403);
  // With one layer, a memory is equivalent to reading the earlier tokens.
  LanguageModel model = NewModel(Small("dot", "rope+alibi"), 1);
  constexpr int64_t kLongest = 32, kBudget = 128;
  for (const int64_t memory : {8, 16, 40}) {
    const std::vector<LengthLoss> losses = Evaluate(model, text, {16, kLongest}, kBudget, memory);
    for (const LengthLoss& at : losses) {
      double sum = 0;
      double last = 0;
      const int64_t tail = std::min<int64_t>(at.length, 32);
      for (const int64_t stretch : EvaluationStarts(403, kLongest, kLongest, kBudget)) {
        // Entire windows before the stretch are read: enough to fill the memory, if the text has
        // that many.
        const int64_t windows = std::min((memory + at.length - 1) / at.length, stretch / at.length);
        const int64_t read_from = stretch - windows * at.length;
        for (int64_t begin = stretch; begin < stretch + kLongest; begin += at.length) {
          const int64_t from = std::max(begin - memory, read_from);
          const torch::Tensor window = LastLosses(model, text, from, begin + at.length, at.length);
          sum += window.sum().item<double>();
          last += window.slice(0, at.length - tail).sum().item<double>();
        }
      }
      EXPECT_EQ(at.windows, 4 * kLongest / at.length);
      EXPECT_NEAR(*at.loss, sum / (4 * kLongest), 1e-5) << memory << " " << at.length;
      EXPECT_NEAR(*at.last, last / static_cast<double>(at.windows * tail), 1e-5);
    }
  }
}

// The mean loss if the memory of each stretch is recomputed window by window. With `reads_on`,
// reading continues from the end of the previous stretch instead.
double LossByWindows(LanguageModel& model, const TokenText& text, int64_t length, int64_t longest,
                     int64_t budget, int64_t memory, bool reads_on) {
  const torch::NoGradGuard no_grad;
  double sum = 0;
  int64_t count = 0;
  LanguageModelMemory remembered;
  int64_t end = 0;  // end of the text read so far
  for (const int64_t stretch : EvaluationStarts(text.size(), longest, longest, budget)) {
    const int64_t windows = std::min((memory + length - 1) / length, stretch / length);
    int64_t begin = end;
    if (!reads_on) {
      remembered.reset();
      begin = stretch - windows * length;
    }
    remembered.max_length = memory;
    end = stretch + longest;
    for (int64_t read = 0; begin < end; begin += read) {
      read = begin < stretch ? std::min(length, stretch - begin) : length;
      std::vector<int64_t> bytes;
      for (int64_t n = begin; n <= begin + read; ++n) bytes.push_back(text[n]);
      const torch::Tensor tokens = torch::tensor(bytes).unsqueeze(0);
      const torch::Tensor logs = torch::log_softmax(
          model->forward(tokens.narrow(1, 0, read), nullptr, &remembered).to(torch::kDouble), 2);
      if (begin < stretch) continue;
      sum -= logs.gather(2, tokens.narrow(1, 1, read).unsqueeze(2)).sum().item<double>();
      count += read;
    }
  }
  return sum / static_cast<double>(count);
}

TEST(EvaluateTest, MemoryIsThatOfReadingOneWindowAfterTheOther) {
  const std::string text = Text().substr(0, 1203);  // 10 stretches, 98 bytes apart
  for (const char* position :
       {"none", "rope+alibi", "t5", "kerple", "sinusoidal", "cape", "conv:kernel=5:groups=4",
        "relative:max_offset=9:values=true", "transformer_xl"}) {
    LanguageModelOptions options = Small("dot", position);
    options.depth = 2;
    LanguageModel model = NewModel(options, 1);
    model->eval();
    for (const int64_t memory : {7, 24, 100, 5000}) {
      const std::vector<LengthLoss> losses = Evaluate(model, text, {8, 32}, 320, memory);
      for (const LengthLoss& at : losses) {
        const bool reads_on = memory == 5000;
        EXPECT_NEAR(*at.loss, LossByWindows(model, text, at.length, 32, 320, memory, reads_on),
                    2e-5)
            << position << " " << memory << " " << at.length;
      }
    }
  }
}

TEST(EvaluateTest, StretchesThatAdjoinAreReadOn) {
  const std::string text = Text().substr(0, 40 * 16 + 1);  // 40 contiguous stretches
  LanguageModelOptions options = Small("umbral", "rope+alibi");
  options.depth = 2;
  LanguageModel model = NewModel(options, 1);
  model->eval();
  for (const int64_t length : {8, 16}) {
    for (const int64_t memory : {100, 400}) {
      int64_t passes = 0;
      const auto count = [&] {
        ++passes;
        return true;
      };
      const LengthLoss at = Evaluate(model, text, {length, 16}, 640, memory, count)[0];
      EXPECT_NEAR(*at.loss, LossByWindows(model, text, length, 16, 640, memory, true), 2e-5)
          << memory << " " << length;
      EXPECT_EQ(passes, 640 / length + 640 / 16) << memory;  // one pass per window of each length
    }
  }
}

TEST(EvaluateTest, WhatForgetsNothingReadsTheTextOnceForAllLengths) {
  const std::string text = Text().substr(0, 4000);
  for (const int64_t budget : {320, 32}) {  // several stretches at once, or one
    LanguageModelOptions options = Small("umbral", "rope+alibi");
    options.depth = 2;
    LanguageModel model = NewModel(options, 1);
    model->eval();
    int64_t passes = 0;
    const auto count = [&] {
      ++passes;
      return true;
    };
    const std::vector<int64_t> lengths = {5, 8, 32};
    const std::vector<LengthLoss> losses = Evaluate(model, text, lengths, budget, 4000, count);
    EXPECT_EQ(passes, budget / 32);
    ASSERT_EQ(losses.size(), lengths.size());
    for (size_t n = 0; n < lengths.size(); ++n) {
      EXPECT_EQ(losses[n].length, lengths[n]);
      EXPECT_EQ(losses[n].windows, budget / 32 * (32 / lengths[n]));
    }
    // The windows of 8 and of 32 contain the same tokens; the windows of 5 omit the last two.
    EXPECT_DOUBLE_EQ(*losses[1].loss, *losses[2].loss);
    double sum = 0;
    double last = 0;
    double shorter = 0;
    for (const int64_t start : EvaluationStarts(4000, 32, 32, budget)) {
      const torch::Tensor stretch = LastLosses(model, text, 0, start + 32, 32);
      sum += stretch.sum().item<double>();
      last += stretch.view({4, 8}).sum().item<double>();
      shorter += stretch.narrow(0, 0, 30).sum().item<double>();
    }
    const auto stretches = static_cast<double>(budget / 32);
    EXPECT_NEAR(*losses[2].loss, sum / (32 * stretches), 2e-5);
    EXPECT_NEAR(*losses[1].last, last / (32 * stretches), 2e-5);
    EXPECT_NEAR(*losses[0].loss, shorter / (30 * stretches), 2e-5);
  }
}

TEST(EvaluateTest, MemoryEndsWithTheText) {
  const std::string text = Text().substr(0, 900);
  LanguageModel model = NewModel(Small("umbral", "rope"), 1);
  const LengthLoss whole = Evaluate(model, text, {16}, 200, 900)[0];
  const LengthLoss more = Evaluate(model, text, {16}, 200, int64_t{1} << 40)[0];
  EXPECT_EQ(*whole.loss, *more.loss);
  EXPECT_EQ(*whole.last, *more.last);
}

TEST(EvaluateTest, MemoryIsReadInFewPasses) {
  // There are 16 stretches of one window, up to 1000 windows into the text.
  const std::string text = Text().substr(0, 8010);
  LanguageModel model = NewModel(Small(), 1);
  int passes = 0;
  const auto count = [&] {
    ++passes;
    return true;
  };
  for (const int64_t memory : {2000, 100000}) {
    passes = 0;
    Evaluate(model, text, {8}, 128, memory, count);
    EXPECT_LE(passes, 2 * 16) << memory;
  }
}

TEST(TrainerTest, MemoryIsOfTheSegmentsBeforeInEachRow) {
  const std::string text = Text().substr(0, 300);
  TextTraining options = Short();
  options.length = 16;
  options.batch = 3;
  options.learning_rate = 0;  // keeps the model unchanged
  options.memory = 1000;      // covers all segments
  LanguageModelOptions small = Small("dot", "rope+alibi");
  small.depth = 2;
  TextTrainer trainer(NewModel(small, 1), text, options);
  LanguageModel model = NewModel(small, 1);
  const int64_t segments = StreamSegments(300, 16, 3);
  ASSERT_EQ(segments, 5);
  int64_t begun = 0;
  for (int64_t step = 0; step < 2 * segments + 1; ++step) {
    const StreamStep stream = TrainingStream(300, 16, 3, step, 3);
    if (stream.begins) begun = step;
    double sum = 0;
    for (const int64_t start : stream.starts) {
      const int64_t from = start - (step - begun) * 16;
      sum += LastLosses(model, text, from, start + 16, 16).sum().item<double>();
    }
    EXPECT_NEAR(trainer.Step(), sum / (3 * 16), 1e-5) << step;
    EXPECT_EQ(trainer.memory().length(), (step - begun + 1) * 16);
  }
}

TEST(TrainerTest, MemoryMayBeLongerThanTheWindow) {
  const std::string text = Text();
  TextTraining options = Short();
  options.length = 8;
  options.memory = 20;
  TextTrainer trainer(NewModel(Small("penumbral", "rope+hype:tau=learned"), 1), text, options);
  double first = 0;
  double last = 0;
  while (trainer.step() < trainer.trainer().options().steps) {
    const double loss = trainer.Step();
    if (trainer.step() == 1) first = loss;
    last = loss;
  }
  EXPECT_EQ(trainer.memory().length(), 20);
  EXPECT_LT(last, first - 2);
  // Evaluation may use a longer memory than training.
  EXPECT_TRUE(std::isfinite(*Evaluate(trainer.model(), text, {8}, 64, 200)[0].loss));
}

TEST(TrainerTest, PositionsThatEndAndTextsThatAreTooShortHaveNoMemory) {
  TextTraining options = Short();
  options.memory = 16;
  const std::string text = Text();
  EXPECT_THROW(TextTrainer(NewModel(Small("dot", "learned"), 1), text, options), Error);
  LanguageModel learned = NewModel(Small("dot", "learned"), 1);
  EXPECT_THROW(Evaluate(learned, text, {16}, 64, 8), Error);
  EXPECT_THROW(CheckMemory(NewModel(Small("dot", "absolute_keys"), 1), 8), Error);
  EXPECT_NO_THROW(CheckMemory(NewModel(Small("dot", "absolute_keys"), 1), 0));
  // The text must have one window of 32 tokens for each of four rows, and one more window.
  EXPECT_EQ(NeededTokens({options.length, options.memory}, options.batch), 160);
  EXPECT_THROW(TextTrainer(NewModel(Small(), 1), text.substr(0, 159), options), Error);
  const std::string enough = text.substr(0, 160);
  TextTrainer trainer(NewModel(Small(), 1), enough, options);
  for (int step = 0; step < 3; ++step) EXPECT_TRUE(std::isfinite(trainer.Step()));
  WindowOptions negative = {.memory = -1};
  EXPECT_THROW(CheckRanges(negative.Options(), "training"), Error);
}

TEST(TrainerTest, DivergenceLeavesTheMemoryAlone) {
  const std::string text = Text();
  TextTraining options = Short();
  options.memory = 16;
  LanguageModel model = NewModel(Small(), 1);
  TextTrainer trainer(model, text, options);
  trainer.Step();
  const torch::Tensor before = trainer.memory().layers[0].clone();
  {
    const torch::NoGradGuard no_grad;
    model->named_parameters()["embedding.weight"].fill_(std::nanf(""));
  }
  EXPECT_FALSE(std::isfinite(trainer.Step()));
  EXPECT_TRUE(torch::equal(trainer.memory().layers[0], before));
}

TEST(EvaluateTest, StopsWhenToldTo) {
  LanguageModel model = NewModel(Small(), 1);
  EXPECT_TRUE(Evaluate(model, Text(), {16}, 64, /*memory=*/0, [] { return false; }).empty());
  EXPECT_THROW(Evaluate(model, "short", {16}, 64), Error);
}

class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest()
      : path_(std::filesystem::path(testing::TempDir()) /
              (std::string("gnomon_") +
               testing::UnitTest::GetInstance()->current_test_info()->name())) {}
  ~CheckpointTest() override { std::filesystem::remove(path_); }

  std::string ErrorOf(const SafeTensors& file) {
    WriteSafeTensors(path_, file);
    try {
      Load(path_);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  std::filesystem::path path_;
};

TEST_F(CheckpointTest, ResumedTrainingIsTheWholeTraining) {
  const TextData data = Data();
  LanguageModelOptions model = Small("umbral", "rope+hype:tau=learned");
  model.dropout = 0.1;
  TextTrainer whole(NewModel(model, 3), data.train, Short());
  for (int step = 0; step < 12; ++step) whole.Step();

  TextTrainer half(NewModel(model, 3), data.train, Short());
  for (int step = 0; step < 7; ++step) half.Step();
  half.Save(path_);
  Loaded loaded = Load(path_);
  ASSERT_TRUE(loaded.checkpoint.training.has_value());
  const TrainingState& training = loaded.training();
  EXPECT_EQ(training.step, 7);
  EXPECT_EQ(training.data_sha256, "00");
  EXPECT_EQ(OptionsToJson(training.options), OptionsToJson(half.trainer().options()));
  EXPECT_EQ(OptionsToJson(loaded.task->options().window),
            OptionsToJson(half.task().options().window));
  EXPECT_EQ(OptionsToJson(loaded.model()->options()), OptionsToJson(model));
  EXPECT_EQ(training.run.checkpoint_every, RunOptions().checkpoint_every);
  TextTrainer resumed(std::move(loaded), data.train);
  EXPECT_EQ(resumed.step(), 7);
  for (int step = 7; step < 12; ++step) resumed.Step();
  EXPECT_TRUE(Equal(Values(whole), Values(resumed)));
}

TEST_F(CheckpointTest, HoldsWhatTheRunDoesBesideTraining) {
  TextTrainer trainer(NewModel(Small(), 3), Text(), Short());
  trainer.Save(path_, {.checkpoint_every = 7});
  EXPECT_EQ(Load(path_).training().run.checkpoint_every, 7);
  SafeTensors file = ReadSafeTensors(path_);
  nlohmann::json config = nlohmann::json::parse(file.metadata.at("gnomon"));
  EXPECT_EQ(config["task"], "text");
  const auto evaluation_bytes = [&] {
    file.metadata["gnomon"] = config.dump();
    WriteSafeTensors(path_, file);
    const Loaded loaded = Load(path_);
    loaded.task->Settle(Command::kTrain, /*is_resumed=*/true, nullptr);
    return loaded.task->evaluated().bytes;
  };
  config["run"]["evaluation_bytes"] = 99;
  EXPECT_EQ(evaluation_bytes(), 99);
  // Files without these fields were written before the fields, and tasks other than text, existed.
  config.erase("run");
  config.erase("task");
  config["tokens"].erase("vocabulary");
  EXPECT_EQ(evaluation_bytes(), 131072);
}

TEST_F(CheckpointTest, ResumedTrainingRemembers) {
  const TextData data = Data();
  LanguageModelOptions model = Small("dot", "rope+conv:kernel=5:groups=4");
  model.dropout = 0.1;
  model.depth = 2;
  TextTraining options = Short();
  options.memory = 40;
  TextTrainer whole(NewModel(model, 3), data.train, options);
  for (int step = 0; step < 9; ++step) whole.Step();

  TextTrainer half(NewModel(model, 3), data.train, options);
  for (int step = 0; step < 5; ++step) half.Step();
  half.Save(path_);
  TextTrainer resumed(Load(path_), data.train);
  EXPECT_EQ(resumed.memory().layers.size(), 2u);
  EXPECT_EQ(resumed.memory().tokens.length(), 5 * 32);
  for (int step = 5; step < 9; ++step) resumed.Step();
  EXPECT_TRUE(Equal(Values(whole), Values(resumed)));
  // Without the memory, the weights would differ.
  Loaded cleared = Load(path_);
  cleared.training().learner.tensors.at("memory.layers.0").zero_();
  TextTrainer forgetful(std::move(cleared), data.train);
  for (int step = 5; step < 9; ++step) forgetful.Step();
  EXPECT_FALSE(Equal(Values(whole), Values(forgetful)));
}

TEST_F(CheckpointTest, HoldsItsVocabularyAndMemory) {
  const TextData data = Data();
  const TokenizerPtr tokenizer = BuildTokenizer({"words"}, data.train);
  LanguageModelOptions model = Small();
  model.vocabulary = tokenizer->size();
  TextTraining options = Short();
  options.memory = 40;
  TextTrainer trainer(NewModel(model, 3), data.train, options, std::make_shared<Processes>(),
                      {.kind = "words"});
  for (int step = 0; step < 2; ++step) trainer.Step();
  trainer.Save(path_);
  Loaded loaded = Load(path_);
  EXPECT_EQ(loaded.task->tokens().tokenizer->kind(), "words");
  EXPECT_EQ(loaded.task->tokens().tokenizer->vocabulary(), tokenizer->vocabulary());
  EXPECT_EQ(OptionsToJson(loaded.model()->options()), OptionsToJson(model));
  EXPECT_EQ(OptionsToJson(loaded.training().options), OptionsToJson(trainer.trainer().options()));
  EXPECT_EQ(loaded.task->options().window.memory, 40);

  const SafeTensors sound = ReadSafeTensors(path_);
  const auto expect = [&](const SafeTensors& file, const std::string& part) {
    const std::string message = ErrorOf(file);
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  const auto with = [&](const char* pointer, const nlohmann::json& value) {
    nlohmann::json config = nlohmann::json::parse(sound.metadata.at("gnomon"));
    config[nlohmann::json::json_pointer(pointer)] = value;
    SafeTensors changed = sound;
    changed.metadata["gnomon"] = config.dump();
    return changed;
  };
  const auto without = [&](const char* name) {
    SafeTensors changed = sound;
    changed.tensors.erase(name);
    return changed;
  };
  expect(sound, "no error");
  expect(without("tokens.vocabulary"), "'tokens.vocabulary' is missing");
  expect(without("memory.layers.0"), "'memory.layers.0' is missing");
  expect(with("/tokens/kind", "letters"), "'letters'; expected one of bytes");
  expect(with("/tokens/kind", "bytes"), "byte tokens have none");
  expect(with("/tokens", 1), "'tokens' has the wrong type");
  expect(with("/task", "images"), "it belongs to the task 'images'; expected 'text'");
  expect(with("/memory_tokens", -1), "'memory_tokens' is negative");
  expect(with("/memory_tokens", 0), "but its model has");
  expect(with("/memory_tokens", 3), "'memory.layers.0' is");
  expect(with("/training/memory", 8), "'memory.layers.0' is");
  SafeTensors file = sound;
  const std::string fewer = "<unk>\n<eos>\ncat\n";
  torch::Tensor bytes = torch::empty({static_cast<int64_t>(fewer.size())}, torch::kByte);
  std::copy(fewer.begin(), fewer.end(), bytes.mutable_data_ptr<uint8_t>());
  file.tensors["tokens.vocabulary"] = bytes;
  expect(file,
         "its vocabulary has 3 tokens, but its model has " + std::to_string(tokenizer->size()));
  file.tensors["tokens.vocabulary"] = bytes.narrow(0, 0, 4);
  expect(file, "line 1 does not end with a line break");
  file.tensors["tokens.vocabulary"] = torch::zeros({3});
  expect(file, "'tokens.vocabulary' is Float [3]");
}

TEST_F(CheckpointTest, HostileCheckpointsAreErrors) {
  const TextData data = Data();
  TextTrainer trainer(NewModel(Small(), 3), data.train, Short());
  trainer.Step();
  trainer.Save(path_);
  const SafeTensors sound = ReadSafeTensors(path_);
  EXPECT_EQ(ErrorOf(sound), "no error");

  const auto expect = [&](const SafeTensors& file, const std::string& part) {
    const std::string message = ErrorOf(file);
    EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_NE(message.find(path_.string()), std::string::npos) << message;
  };
  SafeTensors file = sound;
  file.metadata.erase("gnomon");
  expect(file, "no gnomon configuration");
  file.metadata["gnomon"] = "{";
  expect(file, "its configuration is not valid JSON");
  file.metadata["gnomon"] = "[]";
  expect(file, "'format' is missing");

  const auto with = [&](const char* pointer, const nlohmann::json& value) {
    nlohmann::json config = nlohmann::json::parse(sound.metadata.at("gnomon"));
    config[nlohmann::json::json_pointer(pointer)] = value;
    SafeTensors changed = sound;
    changed.metadata["gnomon"] = config.dump();
    return changed;
  };
  expect(with("/format", 99), "its format is 99");
  expect(with("/step", -1), "'step' is negative");
  expect(with("/step", "1"), "'step' has the wrong type");
  expect(with("/model/dim", int64_t{1} << 40), "model.embedding.weight");
  expect(with("/model/mlp", int64_t{1} << 40), "mlp_in.weight");
  expect(with("/model/depth", int64_t{1} << 40), "layers");
  expect(with("/model/heads", 3), "expected a multiple of heads");
  expect(with("/model/position", "bogus"), "bogus");
  expect(with("/model/position", "learned"), "is missing");
  expect(with("/training/steps", 0), "steps is 0");
  expect(with("/training/batch", 1.5), "'batch' has the wrong type");
  expect(with("/run", 1), "'run' has the wrong type");
  expect(with("/run/evaluation_bytes", 0), "evaluation_bytes is 0");

  file = sound;
  file.tensors.erase("model.norm.weight");
  expect(file, "'model.norm.weight' is missing");
  file = sound;
  file.tensors["model.norm.weight"] = torch::zeros({17});
  expect(file, "'model.norm.weight' is Float [17]; expected Float [16]");
  file = sound;
  file.tensors["model.norm.weight"] = torch::zeros({16}, torch::kDouble);
  expect(file, "is Double [16]");
  file = sound;
  file.tensors["more"] = torch::zeros({1});
  expect(file, "but its model has");
}

TEST_F(CheckpointTest, AModelAloneIsACheckpoint) {
  const TextData data = Data();
  TextTrainer trainer(NewModel(Small("penumbral", "learned+hype"), 3), data.train, Short());
  trainer.Step();
  trainer.Save(path_);
  SafeTensors file = ReadSafeTensors(path_);
  const nlohmann::json whole = nlohmann::json::parse(file.metadata.at("gnomon"));
  nlohmann::json config;
  for (const char* field : {"format", "model", "tokens"}) config[field] = whole[field];
  file.metadata["gnomon"] = config.dump();
  // The file has optimizer moments without the training state that they need.
  EXPECT_NE(ErrorOf(file).find("but its model has"), std::string::npos);
  std::erase_if(file.tensors, [](const auto& entry) { return !entry.first.starts_with("model."); });
  ASSERT_EQ(ErrorOf(file), "no error");
  Loaded alone = Load(path_);
  EXPECT_FALSE(alone.checkpoint.training.has_value());
  EXPECT_EQ(alone.task->tokens().tokenizer->kind(), "bytes");
  EXPECT_EQ(OptionsToJson(alone.model()->options()), OptionsToJson(trainer.model()->options()));
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : alone.model()->parameters()) values.push_back(parameter);
  EXPECT_TRUE(Equal(values, Values(trainer)));

  // Each training field requires the others.
  for (const char* field : {"step", "training", "data", "memory_tokens"}) {
    nlohmann::json partial = config;
    partial[field] = whole[field];
    file.metadata["gnomon"] = partial.dump();
    const std::string message = ErrorOf(file);
    EXPECT_NE(message.find("is missing"), std::string::npos) << field << ": " << message;
  }
}

TEST_F(CheckpointTest, MissingMomentsAreAnError) {
  const TextData data = Data();
  TextTrainer trainer(NewModel(Small(), 3), data.train, Short());
  trainer.Step();
  std::map<std::string, torch::Tensor> state = trainer.trainer().OptimizerState();
  state.erase("exp_avg.norm.weight");
  EXPECT_THROW(trainer.trainer().Restore(state, 1, {}), Error);
}

}  // namespace
}  // namespace gnomon::lab
