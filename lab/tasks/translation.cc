// The task `translation`: an encoder-decoder Transformer translates sentences.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "gnomon/sha256.h"
#include "models/beam_search.h"
#include "models/seq2seq.h"
#include "models/transformer.h"
#include "text/bleu.h"
#include "text/parallel_text.h"
#include "text/tokens.h"
#include "training/files.h"
#include "training/processes.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab {
namespace translation {
namespace {

using nlohmann::json;

// The maximum numbers of tokens and of logits in an evaluation batch with several sentences.
constexpr int64_t kEvaluationTokens = 8192;
constexpr int64_t kEvaluationLogits = int64_t{1} << 25;

#define GNOMON_LANGUAGE_OPTIONS(OPTION)                                                            \
  OPTION(std::string, source_language, "",                                                         \
         .help =                                                                                   \
             "Suffix of the source files, such as de in train.de; default: src or source, or the " \
             "suffix other than --target-language",                                                \
         .shows_default = false)                                                                   \
  OPTION(std::string, target_language, "",                                                         \
         .help =                                                                                   \
             "Suffix of the target files; default: tgt or target, or the suffix other than "       \
             "--source-language",                                                                  \
         .shows_default = false)

struct LanguageOptions {
  GNOMON_OPTIONS(GNOMON_LANGUAGE_OPTIONS)
};

#define GNOMON_SMOOTHING_OPTIONS(OPTION)                                                \
  OPTION(double, label_smoothing, 0.1, .help = "Label smoothing (Szegedy et al. 2016)", \
         .highest = 1)

struct SmoothingOptions {
  GNOMON_OPTIONS(GNOMON_SMOOTHING_OPTIONS)
};

#define GNOMON_SEARCH_OPTIONS(OPTION, beam_default)                                            \
  OPTION(int64_t, beam, beam_default, .help = "Beam size; 1 means greedy search", .lowest = 1, \
         .highest = 1000, .may_change = true)                                                  \
  OPTION(double, length_penalty, 0.6,                                                          \
         .help =                                                                               \
             "Length penalty alpha of the beam search: the log-probability of n tokens is "    \
             "divided by ((5 + n) / 6)^alpha (Wu et al. 2016)",                                \
         .highest = 10, .may_change = true)
#define GNOMON_DECODING_OPTIONS(OPTION, beam_default)                                              \
  GNOMON_SEARCH_OPTIONS(OPTION, beam_default)                                                      \
  OPTION(int64_t, evaluation_sentences, 0,                                                         \
         .help = "Number of sentences to translate per split, taken from the start; default: all", \
         .shows_default = false, .may_change = true)                                               \
  OPTION(std::vector<std::string>, splits, {},                                                     \
         .help =                                                                                   \
             "Splits to evaluate, comma-separated; default: valid and all splits "                 \
             "whose names begin with test",                                                        \
         .shows_default = false, .may_change = true)
#define GNOMON_RUN_DECODING_OPTIONS(OPTION) GNOMON_DECODING_OPTIONS(OPTION, 4)
#define GNOMON_COMPARISON_DECODING_OPTIONS(OPTION) GNOMON_DECODING_OPTIONS(OPTION, 1)
#define GNOMON_EVALUATION_DECODING_OPTIONS(OPTION)                                                 \
  GNOMON_DECODING_OPTIONS(OPTION, 4)                                                               \
  OPTION(                                                                                          \
      std::string, translations, "",                                                               \
      .help = "Folder for the translations, written to SPLIT.LANGUAGE with one sentence per line", \
      .shows_default = false)

#define GNOMON_TRANSLATION_OPTIONS(OPTION)                                                        \
  OPTION(                                                                                         \
      std::string, source, "-",                                                                   \
      .help =                                                                                     \
          "File to translate, one sentence per line, optionally gzipped; - means standard input") \
  GNOMON_SEARCH_OPTIONS(OPTION, 4)

struct RunDecoding {
  GNOMON_OPTIONS(GNOMON_RUN_DECODING_OPTIONS)
};
struct ComparisonDecoding {
  GNOMON_OPTIONS(GNOMON_COMPARISON_DECODING_OPTIONS)
};
struct EvaluationDecoding {
  GNOMON_OPTIONS(GNOMON_EVALUATION_DECODING_OPTIONS)
};

struct TranslationOptions {
  GNOMON_OPTIONS(GNOMON_TRANSLATION_OPTIONS)
};

// The split that HoldOut() creates; no file can have this name.
constexpr const char* kHeldOutPart = "held_out";

// The evaluation settings.
struct Evaluated {
  BeamOptions search;
  int64_t sentences = 0;  // 0 means all
  std::vector<std::string> splits;
  std::string translations;  // output folder; empty if there is none

  template <class Decoding>
  explicit Evaluated(const Decoding& options)
      : search{options.beam, options.length_penalty},
        sentences(options.evaluation_sentences),
        splits(options.splits) {}
  Evaluated() = default;
};

// A split of the data as tokens. Each sentence ends with the end token.
struct Pairs {
  std::vector<Sentence> source;
  std::vector<Sentence> target;

  int64_t size() const { return std::ssize(source); }
};

int64_t CountTokens(const std::vector<Sentence>& sentences) {
  int64_t tokens = 0;
  for (const Sentence& sentence : sentences) tokens += std::ssize(sentence);
  return tokens;
}

int64_t LongestOf(const Pairs& pairs) {
  size_t longest = 0;
  for (const auto* sentences : {&pairs.source, &pairs.target}) {
    for (const Sentence& sentence : *sentences) longest = std::max(longest, sentence.size());
  }
  return static_cast<int64_t>(longest);
}

// A batch of pairs: the encoder's input, the decoder's input, and the labels.
struct PairBatch {
  PaddedTokens source;
  torch::Tensor input;   // (B, L): the end token, then all tokens but the last
  torch::Tensor labels;  // (B, L): the tokens, padded with -100
  int64_t tokens = 0;    // number of predicted tokens
};

PairBatch MakeBatch(const Pairs& pairs, const std::vector<int64_t>& rows, int64_t end) {
  std::vector<Sentence> source;
  std::vector<Sentence> target;
  for (const int64_t row : rows) {
    source.push_back(pairs.source[row]);
    target.push_back(pairs.target[row]);
  }
  PairBatch batch;
  batch.source = PadTokens(source, end);
  const PaddedTokens told = PadTokens(target, end);
  const int64_t length = told.tokens.size(1);
  batch.input = told.tokens.roll(1, /*dims=*/1);
  batch.input.select(1, 0).fill_(end);
  const torch::Tensor is_padding = torch::arange(length) >= told.lengths.unsqueeze(1);
  constexpr int64_t kIgnored = -100;  // the default ignore_index of cross_entropy
  batch.labels = told.tokens.masked_fill(is_padding, kIgnored);
  batch.tokens = CountTokens(target);
  return batch;
}

// The sum of the losses over the tokens, in nats.
torch::Tensor SumLosses(const torch::Tensor& logits, const torch::Tensor& labels,
                        double label_smoothing) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                              labels.flatten().to(logits.device()),
                                              torch::nn::functional::CrossEntropyFuncOptions()
                                                  .reduction(torch::kSum)
                                                  .label_smoothing(label_smoothing));
}

double WeightBytes(const Seq2SeqOptions& model) {
  const auto dim = static_cast<double>(model.dim);
  const auto layers = static_cast<double>(model.depth);
  // One encoder layer and one decoder layer; a decoder layer has two attention modules.
  const double layer = 2 * LayerWeights(model) + AttentionWeights(model);
  return sizeof(float) * (static_cast<double>(model.vocabulary) * dim + layers * layer);
}

class TranslationTask final : public Task {
 public:
  TranslationTask() {
    tokens_.kind = "subwords";
    model_.dropout = 0.2;
  }

  const Seq2SeqOptions& model() const { return model_; }
  const SmoothingOptions& smoothing() const { return smoothing_; }
  const ParallelText& text() const { return text_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const Pairs& train() const { return train_; }
  const Evaluated& evaluated() const { return evaluated_; }
  const TranslationOptions& translation() const { return translation_; }
  // The pairs of a split to evaluate, taken from its start.
  Pairs EvaluatedPairs(const std::string& split) const;

  const char* name() const override { return "translation"; }
  TaskDescription description() const override {
    return {.summary = "an encoder-decoder for parallel sentences; loss, BLEU and exact match",
            .data_help =
                "A folder with train.LANGUAGE, valid.LANGUAGE and test*.LANGUAGE for two "
                "languages, aligned line by line; files may be gzipped (.gz)",
            .data_noun = "parallel text",
            .loss_unit = "nats per token",
            .examples = "sentences"};
  }

  TrainingOptions DefaultTraining(Command command) const override;
  std::vector<std::string> DefaultPositions() const override {
    return {"sinusoidal", "rope", "t5", "relative", "rope+hype:tau=learned"};
  }
  OptionList Options(Command command) override;
  void Settle(Command command, bool is_resumed, const TrainingOptions* training) override;
  std::string StepFlags(Command command, const TrainingOptions& training) const override;
  std::string EvaluationFlags(Command command) const override;
  void CheckModelFits() const override;
  void CheckFits(const TrainingOptions& training, int64_t processes) const override;

  void ReadData(const std::string& path) override;
  std::string HoldOut() override;
  std::string data_sha256() const override { return text_.sha256; }
  json DescribeData() const override;
  std::string DescribeSize() const override;
  void Prepare() override;
  std::vector<Asset> Assets() const override;
  void TakeAssets(const std::vector<std::string>& bytes, bool is_stored) override;
  void CheckData(const TrainingOptions* training) const override;

  std::unique_ptr<Learner> MakeLearner(const Terms& terms,
                                       const TrainingOptions& training) override;
  void CheckSizes(const StoredSizes& file) const override;

  std::optional<Generation> generation() override {
    return Generation{.help = "Translate sentences and print one translation per line",
                      .options = translation_.Options(),
                      .memory_flags = "--beam"};
  }

  std::vector<Metric> metrics() const override;
  Conditions conditions() const override;
  json DescribeEvaluation() const override;
  std::string TrainedAs(const TrainingOptions& training) const override;

 private:
  const std::string& kind() const { return tokens_.kind; }
  void SetTokenizer(TokenizerPtr tokenizer);
  // Does nothing until both the text and the tokenizer are set.
  void Encode();
  // Does nothing until both the text and the evaluation settings are set.
  void ChooseSplits();
  // Throws Error if there are no training data.
  const ParallelPart& TrainPart() const;

  LanguageOptions languages_;
  TokenOptions tokens_;
  Seq2SeqOptions model_;  // MakeLearner() sets similarity and position
  SmoothingOptions smoothing_;
  RunDecoding run_;
  ComparisonDecoding comparison_;
  EvaluationDecoding evaluation_;
  TranslationOptions translation_;
  Command command_ = Command::kTrain;
  bool is_settled_ = false;
  Evaluated evaluated_;
  ParallelText text_;
  TokenizerPtr tokenizer_;
  Pairs train_;  // without pairs that are too long
};

class TranslationLearner final : public Learner {
 public:
  TranslationLearner(const TranslationTask& task, Seq2Seq model, const TrainingOptions& training)
      : task_(task), model_(std::move(model)), training_(training) {}

  torch::nn::Module& module() override { return *model_; }
  torch::Tensor Probe() override;
  torch::Tensor Loss(const Batch& batch) override;
  std::vector<Measurement> Evaluate(const std::function<bool()>& proceed) override;
  void Generate(const Output& output) override;

 private:
  // The mean loss over the tokens of all sentences; nullopt if `proceed` returned false.
  std::optional<double> MeanLoss(const Pairs& pairs, const std::function<bool()>& proceed);

  const TranslationTask& task_;
  Seq2Seq model_;
  TrainingOptions training_;
  std::optional<SentenceBatches> batches_;
};

const RegisterTask<TranslationTask> registered;

TrainingOptions TranslationTask::DefaultTraining(Command command) const {
  TrainingOptions training;
  training.batch = 128;
  training.steps = command == Command::kCompare ? 300 : 3000;
  training.learning_rate = 1e-3;
  return training;
}

OptionList TranslationTask::Options(Command command) {
  const OptionList languages = languages_.Options();
  if (command == Command::kEval) return evaluation_.Options() + languages;
  if (command == Command::kCompare) {
    // Each run of a comparison sets its own terms.
    return comparison_.Options() + languages + Renamed(tokens_.Options(), "kind", "tokens") +
           InSection("model", WithoutFlags(model_.Options(), {"similarity", "position"})) +
           InSection("training", smoothing_.Options());
  }
  return InSection("run", run_.Options()) + InSection("languages", languages) +
         InSection("tokens", tokens_.Options()) +
         InSection("model", Without(model_.Options(), {"similarity", "position"})) +
         InSection("training", smoothing_.Options());
}

void TranslationTask::Settle(Command command, bool /*is_resumed*/,
                             const TrainingOptions* /*training*/) {
  CheckTokenOptions(tokens_);
  if (smoothing_.label_smoothing == 1) {
    throw Error(
        "--label-smoothing is 1; expected a number in [0, 1), because with 1 the targets carry no "
        "information");
  }
  command_ = command;
  if (command == Command::kTrain) {
    evaluated_ = Evaluated(run_);
  } else if (command == Command::kCompare) {
    evaluated_ = Evaluated(comparison_);
  } else {
    evaluated_ = Evaluated(evaluation_);
    evaluated_.translations = evaluation_.translations;
  }
  is_settled_ = true;
  ChooseSplits();
}

std::string TranslationTask::StepFlags(Command /*command*/, const TrainingOptions& training) const {
  return StrCat("--batch ", training.batch, " and --max-length ", model_.max_length);
}

std::string TranslationTask::EvaluationFlags(Command /*command*/) const { return "--beam"; }

void TranslationTask::CheckModelFits() const {
  CheckMemoryHolds(ModelFlags(model_), WeightBytes(model_));
}

void TranslationTask::CheckFits(const TrainingOptions& training, int64_t processes) const {
  const auto dim = static_cast<double>(model_.dim);
  const auto depth = static_cast<double>(model_.depth);
  const auto vocabulary = static_cast<double>(model_.vocabulary);
  // A decoder layer has a third branch for cross-attention. The loss needs memory for the logits,
  // the log-probabilities and the gradient.
  const double source = depth * LayerNumbers(model_);
  const double target = source + depth * (3 * dim + ValueColumns(model_)) + 3 * vocabulary;
  // A sentence has at least two tokens, including the end token.
  const double rows = 2 * static_cast<double>(CountRows(training.batch, 0, processes));
  CheckTrainingFits(ModelFlags(model_), WeightBytes(model_), StepFlags(Command::kTrain, training),
                    rows * (source + target));
}

void TranslationTask::ReadData(const std::string& path) {
  text_ = ReadParallelText(path, languages_.source_language, languages_.target_language);
  languages_.source_language = text_.source_language;
  languages_.target_language = text_.target_language;
  ChooseSplits();
  Encode();
}

std::string TranslationTask::HoldOut() {
  const ParallelPart all = TrainPart();
  const HeldOutRows rows = ChooseHeldOut(std::ssize(all.source), "pairs");
  ParallelPart& train = *std::find_if(text_.parts.begin(), text_.parts.end(),
                                      [](const auto& part) { return part.name == kTrainPart; });
  const auto select = [&](const std::vector<std::string>& lines, const std::vector<int64_t>& of) {
    std::vector<std::string> selected;
    for (const int64_t row : of) selected.push_back(lines[row]);
    return selected;
  };
  train.source = select(all.source, rows.training);
  train.target = select(all.target, rows.training);
  text_.parts.push_back({.name = kHeldOutPart,
                         .source = select(all.source, rows.held_out),
                         .target = select(all.target, rows.held_out)});
  Encode();
  return StrCat(Counted(std::ssize(rows.held_out), "pair"), " of the training split");
}

const ParallelPart& TranslationTask::TrainPart() const {
  const ParallelPart* const train = text_.Find(kTrainPart);
  if (train == nullptr) {
    throw Error(StrCat(text_.path, " contains no training data: train.", text_.source_language,
                       " and train.", text_.target_language, " are missing"));
  }
  return *train;
}

void TranslationTask::ChooseSplits() {
  if (!is_settled_ || text_.parts.empty()) return;
  std::vector<std::string> names;
  for (const ParallelPart& part : text_.parts) {
    if (part.name != kTrainPart) names.push_back(part.name);
  }
  std::vector<std::string>& splits = evaluated_.splits;
  if (splits.empty()) splits = names;
  if (splits.empty()) {
    throw Error(StrCat(text_.path, " contains no evaluation data: valid.", text_.source_language,
                       " and valid.", text_.target_language, " are missing"));
  }
  for (auto split = splits.begin(); split != splits.end(); ++split) {
    if (text_.Find(*split) == nullptr) {
      names.insert(names.begin(), kTrainPart);
      throw Error(StrCat("--splits: '", *split, "' is not a split of ", text_.path, ", which has ",
                         Join(names, ", ")));
    }
    if (std::find(splits.begin(), split, *split) != split) {
      throw Error(StrCat("--splits: '", *split, "' is given twice"));
    }
  }
  // The chosen splits are stored, so that a resumed run evaluates the same ones.
  if (command_ == Command::kTrain) run_.splits = splits;
  if (command_ == Command::kCompare) comparison_.splits = splits;
}

json TranslationTask::DescribeData() const {
  const std::string vocabulary = tokenizer_->vocabulary();
  Sha256 hash;
  hash.Update(vocabulary);
  const std::filesystem::path path = std::filesystem::absolute(text_.path).lexically_normal();
  json data = {{"path", path.string()},
               {"files", text_.files},
               {"source_language", text_.source_language},
               {"target_language", text_.target_language},
               {"sha256", text_.sha256}};
  for (const ParallelPart& part : text_.parts) data[part.name + "_pairs"] = part.source.size();
  if (const ParallelPart* const train = text_.Find(kTrainPart)) {
    data["train_pairs_left_out"] = std::ssize(train->source) - train_.size();
  }
  return {{"data", data},
          {"tokens",
           {{"kind", tokenizer_->kind()},
            {"size", tokenizer_->size()},
            {"sha256", vocabulary.empty() ? json() : json(hash.Hex())},
            {"train_source_tokens", CountTokens(train_.source)},
            {"train_target_tokens", CountTokens(train_.target)}}}};
}

std::string TranslationTask::DescribeSize() const {
  return StrCat(train_.size(), " pairs of sentences");
}

void TranslationTask::SetTokenizer(TokenizerPtr tokenizer) {
  model_.vocabulary = tokenizer->size();
  tokenizer_ = std::move(tokenizer);
  Encode();
}

void TranslationTask::Encode() {
  const ParallelPart* const part = text_.Find(kTrainPart);
  if (tokenizer_ == nullptr || part == nullptr) return;
  train_ = {};
  for (size_t n = 0; n < part->source.size(); ++n) {
    Sentence source = EncodeSentence(*tokenizer_, part->source[n]);
    Sentence target = EncodeSentence(*tokenizer_, part->target[n]);
    if (std::max(std::ssize(source), std::ssize(target)) > model_.max_length) continue;
    train_.source.push_back(std::move(source));
    train_.target.push_back(std::move(target));
  }
}

Pairs TranslationTask::EvaluatedPairs(const std::string& split) const {
  const ParallelPart& part = *text_.Find(split);
  const auto all = std::ssize(part.source);
  const int64_t count = evaluated_.sentences == 0 ? all : std::min(evaluated_.sentences, all);
  Pairs pairs;
  for (int64_t n = 0; n < count; ++n) {
    pairs.source.push_back(EncodeSentence(*tokenizer_, part.source[n]));
    pairs.target.push_back(EncodeSentence(*tokenizer_, part.target[n]));
  }
  return pairs;
}

void TranslationTask::Prepare() {
  const ParallelPart& train = TrainPart();
  std::string lines;
  for (const auto* side : {&train.source, &train.target}) {
    for (const std::string& line : *side) lines += line + "\n";
  }
  SetTokenizer(BuildTokenizer(tokens_, lines));
}

std::vector<Asset> TranslationTask::Assets() const {
  return {{.name = "vocabulary",
           .tensor = "tokens.vocabulary",
           .file = VocabularyFile(kind()),
           .sha256_at = "/tokens/sha256",
           .bytes = tokenizer_ == nullptr ? "" : tokenizer_->vocabulary()}};
}

void TranslationTask::TakeAssets(const std::vector<std::string>& bytes, bool is_stored) {
  const auto size = is_stored ? std::optional(model_.vocabulary) : std::nullopt;
  SetTokenizer(RestoreTokenizer(kind(), bytes[0], size));
}

void TranslationTask::CheckData(const TrainingOptions* training) const {
  if (training == nullptr) return;
  const auto all = std::ssize(TrainPart().source);
  if (train_.size() >= training->batch) return;
  throw Error(StrCat("the parallel text is too short: only ", train_.size(), " of the ", all,
                     " pairs in ", text_.path, " have at most ", model_.max_length,
                     " tokens (--max-length), but --batch is ", training->batch));
}

std::unique_ptr<Learner> TranslationTask::MakeLearner(const Terms& terms,
                                                      const TrainingOptions& training) {
  Seq2SeqOptions model = model_;
  model.similarity = terms.similarity;
  model.position = terms.position;
  return std::make_unique<TranslationLearner>(*this, Seq2Seq(model), training);
}

void TranslationTask::CheckSizes(const StoredSizes& file) const {
  file.Expect("embedding.weight", {model_.vocabulary, model_.dim});
  file.Expect("decoder_blocks.0.mlp_in.weight", {HiddenUnits(model_), model_.dim});
  file.ExpectLayers(model_.depth);
}

std::vector<Metric> TranslationTask::metrics() const {
  std::vector<Metric> metrics = {
      {.key = "loss", .title = "loss, " + description().loss_unit, .column = "loss"},
      {.key = "bleu", .title = "BLEU", .column = "BLEU", .higher_is_better = true},
      {.key = "exact_match",
       .title = "exact match",
       .column = "exact match",
       .higher_is_better = true},
      {.key = "brevity_penalty",
       .title = "brevity penalty",
       .column = "brevity penalty",
       .higher_is_better = true,
       .is_compared = false}};
  for (size_t order = 1; order <= kBleuOrder; ++order) {
    const std::string title = StrCat("precision of ", order, "-grams");
    metrics.push_back({.key = StrCat("precision_", order),
                       .title = title,
                       .column = title,
                       .higher_is_better = true,
                       .is_compared = false});
  }
  return metrics;
}

Conditions TranslationTask::conditions() const {
  Conditions conditions = {.key = "split", .title = "split"};
  for (const std::string& split : evaluated_.splits) conditions.values.emplace_back(split);
  return conditions;
}

json TranslationTask::DescribeEvaluation() const {
  return {{"bleu", kBleuSignature},
          {"beam", evaluated_.search.beam},
          {"length_penalty", evaluated_.search.length_penalty}};
}

std::string TranslationTask::TrainedAs(const TrainingOptions& training) const {
  const BeamOptions& search = evaluated_.search;
  const std::string how = search.beam == 1
                              ? "greedily"
                              : StrCat("with a beam of ", search.beam, " and a length penalty of ",
                                       search.length_penalty);
  return StrCat("trained for ", training.steps, " steps of ", training.batch, " pairs, translated ",
                how, "; BLEU: ", kBleuSignature);
}

torch::Tensor TranslationLearner::Probe() {
  const Seq2SeqOptions& options = model_->options();
  CheckReaches(model_->max_length(), options.max_length,
               StrCat("--max-length is ", options.max_length), ", or a smaller --max-length");
  // The probe has two sentences of different lengths, with more target tokens than source tokens.
  const int64_t source = std::min<int64_t>(5, options.max_length);
  const int64_t target = std::min<int64_t>(7, options.max_length);
  const auto tokens = [&](int64_t length) {
    return torch::arange(2 * length).remainder(options.vocabulary).view({2, length});
  };
  return model_->forward({tokens(source), torch::tensor({source, int64_t{1}})}, tokens(target));
}

torch::Tensor TranslationLearner::Loss(const Batch& batch) {
  const Pairs& pairs = task_.train();
  if (!batches_) {
    const auto lengths = [](const std::vector<Sentence>& sentences) {
      std::vector<int64_t> sizes;
      for (const Sentence& sentence : sentences) sizes.push_back(std::ssize(sentence));
      return sizes;
    };
    batches_.emplace(lengths(pairs.source), lengths(pairs.target),
                     static_cast<uint64_t>(training_.seed), batch.total);
  }
  // Rows are padded to the longest row of the whole batch, so that all processes draw the same
  // random numbers.
  const PairBatch all =
      MakeBatch(pairs, batches_->Pairs(batch.step), EndOfSentence(task_.tokenizer()));
  const auto own = [&](const torch::Tensor& rows) {
    return rows.narrow(0, batch.first, batch.count);
  };
  const torch::Tensor logits = model_->forward({own(all.source.tokens), own(all.source.lengths)},
                                               own(all.input), batch.rows());
  return SumLosses(logits, own(all.labels), task_.smoothing().label_smoothing) /
         static_cast<double>(all.tokens);
}

std::optional<double> TranslationLearner::MeanLoss(const Pairs& pairs,
                                                   const std::function<bool()>& proceed) {
  const int64_t end = EndOfSentence(task_.tokenizer());
  const int64_t most =
      std::min(kEvaluationTokens, kEvaluationLogits / model_->options().vocabulary);
  std::vector<int64_t> order(pairs.size());
  std::iota(order.begin(), order.end(), 0);
  const auto length = [&](int64_t n) {
    return std::max(std::ssize(pairs.source[n]), std::ssize(pairs.target[n]));
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return length(a) < length(b); });
  double sum = 0;
  for (int64_t at = 0, count = 0; at < pairs.size(); at += count) {
    if (!proceed()) return std::nullopt;
    // Sentences are sorted, so the last one is the longest.
    count = 1;
    while (at + count < pairs.size() && (count + 1) * length(order[at + count]) <= most) ++count;
    const PairBatch batch = MakeBatch(pairs, {order.begin() + at, order.begin() + at + count}, end);
    const torch::Tensor losses =
        SumLosses(model_->forward(batch.source, batch.input), batch.labels, /*label_smoothing=*/0);
    sum += losses.item<double>();
  }
  return sum / static_cast<double>(CountTokens(pairs.target));
}

std::vector<Measurement> TranslationLearner::Evaluate(const std::function<bool()>& proceed) {
  const torch::NoGradGuard no_grad;
  model_->eval();
  Evaluated how = task_.evaluated();
  if (task_.evaluates_held_out()) how.splits = {kHeldOutPart};
  const std::filesystem::path folder = how.translations;
  if (!folder.empty()) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) throw Error(StrCat("--translations: cannot create the folder ", folder.string()));
  }
  std::vector<Measurement> measured;
  for (const std::string& split : how.splits) {
    const Pairs pairs = task_.EvaluatedPairs(split);
    Measurement& at = measured.emplace_back();
    at.condition = split;
    at.examples = pairs.size();
    at.values.resize(task_.metrics().size());
    const std::optional<int64_t> longest = model_->max_length();
    if (longest && LongestOf(pairs) > *longest) continue;
    const std::optional<double> loss = MeanLoss(pairs, proceed);
    if (!loss) return {};
    if (split == kHeldOutPart) {
      at.values[0] = loss;
      continue;
    }
    const auto translations =
        Translate(model_, task_.tokenizer(), pairs.source, how.search, proceed);
    if (!translations) return {};
    const std::vector<std::string>& references = task_.text().Find(split)->target;
    Bleu bleu;
    int64_t matches = 0;
    for (size_t n = 0; n < translations->size(); ++n) {
      const std::string& translation = (*translations)[n];
      bleu.Add(translation, references[n]);
      matches += SplitAtSpaces(translation) == SplitAtSpaces(references[n]) ? 1 : 0;
    }
    const BleuScore score = bleu.Score();
    at.values = {*loss, score.score,
                 static_cast<double>(matches) / static_cast<double>(pairs.size()),
                 score.brevity_penalty};
    at.values.insert(at.values.end(), score.precisions.begin(), score.precisions.end());
    if (!folder.empty()) {
      std::string lines;
      for (const std::string& translation : *translations) lines += translation + "\n";
      WriteFileAtomically(folder / StrCat(split, ".", task_.text().target_language), {lines});
    }
  }
  return measured;
}

void TranslationLearner::Generate(const Output& output) {
  const torch::NoGradGuard no_grad;
  model_->eval();
  const TranslationOptions& options = task_.translation();
  const std::vector<std::string> lines = ReadSentences(options.source);
  const std::optional<int64_t> most = model_->max_length();
  std::vector<Sentence> sentences;
  for (size_t n = 0; n < lines.size(); ++n) {
    sentences.push_back(EncodeSentence(task_.tokenizer(), lines[n]));
    const int64_t length = std::ssize(sentences.back());
    if (most && length > *most) {
      throw Error(
          StrCat("--source: line ", n + 1, " has ", length,
                 " tokens including its end token, but the position is defined only up to length ",
                 *most));
    }
  }
  // Batches are small, so that the first results appear soon.
  constexpr size_t kAtATime = 64;
  for (size_t first = 0; first < lines.size(); first += kAtATime) {
    const size_t last = std::min(first + kAtATime, lines.size());
    const auto translations =
        Translate(model_, task_.tokenizer(), {sentences.begin() + first, sentences.begin() + last},
                  {options.beam, options.length_penalty}, output.proceed);
    if (!translations) return;
    for (size_t n = first; n < last; ++n) {
      // The translation of a blank line is blank.
      output.print(StrCat(IsBlank(lines[n]) ? "" : (*translations)[n - first], "\n"));
    }
  }
}

}  // namespace
}  // namespace translation
}  // namespace gnomon::lab
