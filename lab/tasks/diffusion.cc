// The task `diffusion`: a diffusion transformer (Peebles and Xie 2023) predicts the noise in
// images, conditioned on a class. `gnomon generate` samples images from the model.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "gnomon/sha256.h"
#include "models/diffusion_transformer.h"
#include "models/frechet.h"
#include "models/grid_position.h"
#include "models/png.h"
#include "models/transformer.h"
#include "models/vision_transformer.h"
#include "tasks/image_data.h"
#include "training/checkpoint.h"
#include "training/files.h"
#include "training/processes.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab {
namespace diffusion {
namespace {

using nlohmann::json;

// The approximate number of tokens in an evaluation batch.
constexpr int64_t kEvaluationTokens = 8192;
// The loss is measured over all timesteps, and separately over this many ranges of timesteps.
constexpr int64_t kRanges = 4;

#define GNOMON_DIFFUSION_TRAINING_OPTIONS(OPTION)                                                  \
  OPTION(double, label_dropout, 0.1,                                                               \
         .help =                                                                                   \
             "Fraction of training examples whose class is dropped, for classifier-free guidance", \
         .highest = 1)

struct DiffusionTrainingOptions {
  GNOMON_OPTIONS(GNOMON_DIFFUSION_TRAINING_OPTIONS)
};

#define GNOMON_DIFFUSION_RUN_OPTIONS(OPTION)                                                    \
  OPTION(int64_t, evaluation_images, 2000,                                                      \
         .help = "Number of validation images for the loss; each is evaluated at one timestep", \
         .lowest = kRanges, .may_lack = true, .may_change = true)                               \
  OPTION(std::string, classifier, "",                                                           \
         .help =                                                                                \
             "Run or checkpoint of --task images on the same data; its model provides the "     \
             "features for the Frechet distance between generated and validation images",       \
         .may_lack = true, .may_change = true)                                                  \
  OPTION(int64_t, frechet_images, 500,                                                          \
         .help =                                                                                \
             "Number of validation images for the Frechet distance; the same number of images " \
             "is generated, with the same classes",                                             \
         .lowest = 2, .may_lack = true, .may_change = true)

struct DiffusionRunOptions {
  GNOMON_OPTIONS(GNOMON_DIFFUSION_RUN_OPTIONS)
};

#define GNOMON_DIFFUSION_GENERATION_OPTIONS(OPTION)                                             \
  OPTION(int64_t, samples, 8,                                                                   \
         .help = "Number of samples per class, which form one row of the picture", .lowest = 1, \
         .highest = 1000)                                                                       \
  OPTION(int64_t, steps, 50, .help = "Number of sampling steps from noise to an image",         \
         .lowest = 1, .highest = kTimesteps)                                                    \
  OPTION(double, eta, 0,                                                                        \
         .help = "Amount of noise added in each step: 0 is DDIM; 1 with --steps 1000 is DDPM",  \
         .highest = 1)                                                                          \
  OPTION(double, guidance, 2, .help = "Classifier-free guidance scale; 1 disables guidance",    \
         .highest = 1e3)                                                                        \
  OPTION(int64_t, seed, 0, .help = "Random seed for the noise",                                 \
         .highest = static_cast<double>(kLargestSeed))

struct DiffusionGenerationOptions {
  GNOMON_OPTIONS(GNOMON_DIFFUSION_GENERATION_OPTIONS)
};

// Maps pixels from [0, 1] to [-1, 1].
torch::Tensor Centred(const torch::Tensor& pixels) { return 2 * pixels - 1; }

// Throws Error unless pixels are bytes or floats in [0, 1], because generated images have this
// range.
void CheckPixels(const std::string& path, const std::string& part, const LabelledImages& images) {
  if (images.pixels.scalar_type() == torch::kByte) return;
  const torch::Tensor wrong = (images.pixels < 0).logical_or(images.pixels > 1);
  if (!wrong.any().item<bool>()) return;
  throw Error(StrCat(path, ": the array '", part, ".images' contains ",
                     images.pixels.masked_select(wrong)[0].item<float>(), " in image ",
                     wrong.flatten(1).any(1).nonzero()[0].item<int64_t>(),
                     "; expected bytes, or numbers from 0 to 1"));
}

class DiffusionTask;

class DiffusionLearner final : public Learner {
 public:
  DiffusionLearner(const DiffusionTask& task, DiffusionTransformer model)
      : task_(task), model_(std::move(model)) {}

  torch::nn::Module& module() override { return *model_; }
  torch::Tensor Probe() override;
  torch::Tensor Loss(const Batch& batch) override;
  std::vector<Measurement> Evaluate(const std::function<bool()>& proceed) override;
  void Generate(const Output& output) override;
  std::optional<Picture> Draw(const std::function<bool()>& proceed) override;

 private:
  // The Frechet distance between generated and validation images; nullopt if `proceed` returned
  // false.
  std::optional<double> Frechet(const std::function<bool()>& proceed);
  // Generates images of the first `classes` classes: bytes (classes, samples, H, W, C), or
  // undefined if `proceed` returned false.
  torch::Tensor Images(int64_t classes, const DiffusionGenerationOptions& how,
                       const std::function<bool()>& proceed);
  bool IsPng() const { return model_->options().channels == 1 || model_->options().channels == 3; }

  const DiffusionTask& task_;
  DiffusionTransformer model_;
};

class DiffusionTask final : public Task {
 public:
  const ImageData& data() const { return data_; }
  const DiffusionTrainingOptions& trained() const { return trained_; }
  const DiffusionRunOptions& run() const { return run_; }
  const DiffusionGenerationOptions& generation() const { return generation_; }
  // The model that provides the features for the Frechet distance; null if the distance is not
  // measured.
  VisionTransformerImpl* classifier() const { return classifier_.model; }

  const char* name() const override { return "diffusion"; }
  TaskDescription description() const override {
    return {.summary = "a diffusion transformer that generates images; loss by timestep",
            .data_help =
                "A file with the arrays train.images, train.labels, valid.images and valid.labels, "
                "made by `gnomon data`",
            .data_noun = "images",
            .loss_unit = "mean squared error of the noise",
            .examples = "images"};
  }

  TrainingOptions DefaultTraining(Command command) const override {
    TrainingOptions training;
    training.batch = 64;
    training.steps = command == Command::kCompare ? 500 : 4000;
    training.learning_rate = 1e-3;
    training.weight_decay = 0;
    return training;
  }

  std::vector<std::string> DefaultPositions() const override {
    return {"none",
            "sinusoidal:shape=grid",
            "learned",
            "rope:shape=grid",
            "alibi:shape=grid",
            "hype:shape=grid:tau=learned"};
  }

  OptionList Options(Command command) override {
    if (command == Command::kEval) return run_.Options();
    const OptionList model =
        InSection("model", model_.Options()) + InSection("training", trained_.Options());
    return (command == Command::kTrain ? InSection("run", run_.Options()) : run_.Options()) + model;
  }

  void Settle(Command command, bool /*is_resumed*/, const TrainingOptions* /*training*/) override {
    reads_training_ = command != Command::kEval;
    if (run_.classifier.empty()) {
      if (run_.frechet_images == DiffusionRunOptions().frechet_images) return;
      throw Error("--frechet-images needs --classifier");
    }
    // The path is made absolute, because the run may be resumed from another folder.
    run_.classifier = std::filesystem::absolute(run_.classifier).lexically_normal().string();
  }

  std::string StepFlags(Command /*command*/, const TrainingOptions& training) const override {
    return StrCat("--batch ", training.batch, " and --patch ", model_.patch);
  }
  std::string EvaluationFlags(Command /*command*/) const override {
    return StrCat("--patch ", model_.patch);
  }

  void CheckModelFits() const override { CheckMemoryHolds(ModelFlags(model_), WeightBytes()); }

  void CheckFits(const TrainingOptions& training, int64_t processes) const override {
    const double numbers = static_cast<double>(model_.depth) * LayerNumbers(model_);
    const double tokens = static_cast<double>(CountRows(training.batch, 0, processes)) *
                          static_cast<double>(model_.grid().tokens());
    CheckTrainingFits(ModelFlags(model_), WeightBytes(), StepFlags(Command::kTrain, training),
                      tokens * numbers);
  }

  void ReadData(const std::string& path) override {
    data_ = ReadImages(path, {"images", 2}, reads_training_, model_.classes);
    if (reads_training_) CheckPixels(path, "train", data_.train);
    CheckPixels(path, "valid", data_.valid);
    TakeSizes(data_, path, &model_);
    if (data_.classes != model_.classes) {
      throw Error(StrCat(path, ": the array 'train.labels' has ", data_.classes,
                         " classes, but the model has ", model_.classes));
    }
    if (data_.valid.size() != model_.size || data_.valid.channels() != model_.channels) {
      throw Error(StrCat(path, ": the array 'valid.images' has images of ",
                         SizesText(data_.valid.size()), " with ",
                         Counted(data_.valid.channels(), "channel"), ", but the model needs ",
                         SizesText(model_.size), " with ", model_.channels));
    }
    if (run_.classifier.empty()) return;
    ReadClassifier();
    // Limit the number to the available images, so that records contain the actual number.
    run_.frechet_images = std::min(run_.frechet_images, data_.valid.count());
  }

  std::string HoldOut() override {
    return StrCat(data_.HoldOut("images"), " images of the training split");
  }

  std::string data_sha256() const override { return data_.sha256; }

  json DescribeData() const override {
    const std::filesystem::path path = std::filesystem::absolute(data_.path).lexically_normal();
    json data = {{"path", path.string()},        {"sha256", data_.sha256},
                 {"valid", data_.valid.count()}, {"size", model_.size},
                 {"channels", model_.channels},  {"classes", model_.classes}};
    if (reads_training_) data["train"] = data_.train.count();
    if (classifier_.model != nullptr) data["classifier_sha256"] = classifier_.sha256;
    return {{"data", data}};
  }
  void CheckResumes(const json& data) const override {
    if (classifier_.model == nullptr) return;
    if (data.value("classifier_sha256", "") == classifier_.sha256) return;
    throw Error(StrCat("--classifier: ", run_.classifier,
                       " differs from the classifier of the earlier distances; use the same one"));
  }
  std::string DescribeSize() const override {
    return StrCat(Counted(data_.train.count(), "image"), " of ", SizesText(model_.size), " and ",
                  model_.classes, " classes");
  }

  Terms Complete(const Terms& terms) const override {
    return {terms.similarity, OnGrid(terms.position, model_.grid())};
  }
  std::unique_ptr<Learner> MakeLearner(const Terms& terms,
                                       const TrainingOptions& /*training*/) override {
    return std::make_unique<DiffusionLearner>(*this, DiffusionTransformer(model_, terms));
  }

  void CheckSizes(const StoredSizes& file) const override {
    DiffusionModelOptions model = model_;
    CheckRanges(model.Options(), "model");
    model.grid();  // throws for an invalid size
    file.Expect("labels.weight", {model.classes + 1, model.dim});
    file.Expect("patches.weight", {model.dim, model.patch * model.patch * model.channels});
    file.Expect("blocks.0.mlp_in.weight", {HiddenUnits(model), model.dim});
    file.ExpectLayers(model.depth);
  }

  std::optional<Generation> generation() override {
    return Generation{.help = "Draw images of each class with a trained model",
                      .file = "The PNG file to write, with a row of images for each class",
                      .options = generation_.Options(),
                      .memory_flags = "--samples"};
  }

  std::vector<Metric> metrics() const override {
    std::vector<Metric> metrics = {
        {.key = "loss", .title = "loss, " + description().loss_unit, .column = "loss"}};
    if (!run_.classifier.empty()) {
      metrics.push_back(
          {.key = "frechet", .title = "Frechet distance", .column = "Frechet distance"});
    }
    return metrics;
  }

  Conditions conditions() const override {
    Conditions conditions = {.key = "timesteps", .title = "timesteps", .trained = 0};
    conditions.values.emplace_back(StrCat("0-", kTimesteps - 1));
    for (int64_t range = 0; range < kRanges; ++range) {
      conditions.values.emplace_back(
          StrCat(range * kTimesteps / kRanges, "-", (range + 1) * kTimesteps / kRanges - 1));
    }
    return conditions;
  }

  std::string TrainedAs(const TrainingOptions& training) const override {
    return StrCat("trained at all timesteps for ", training.steps, " steps of ", training.batch,
                  " images");
  }

 private:
  void ReadClassifier() {
    try {
      classifier_.task = NewTask("images");
      classifier_.learner =
          LoadCheckpoint(CheckpointFile(run_.classifier), *classifier_.task).learner;
    } catch (const Error& error) {
      throw Error(StrCat("--classifier: ", error.what()));
    }
    classifier_.model = dynamic_cast<VisionTransformerImpl*>(&classifier_.learner->module());
    const VisionTransformerOptions& options = classifier_.model->options();
    if (options.size != model_.size || options.channels != model_.channels) {
      throw Error(StrCat("--classifier: ", run_.classifier, " classifies images of ",
                         SizesText(options.size), " with ", Counted(options.channels, "channel"),
                         "; expected ", SizesText(model_.size), " with ",
                         Counted(model_.channels, "channel")));
    }
    classifier_.model->eval();
    Sha256 hash;
    for (const auto& tensors :
         {classifier_.model->named_parameters(), classifier_.model->named_buffers()}) {
      for (const auto& named : tensors) {
        const torch::Tensor values = named.value().detach().cpu().contiguous();
        hash.Update(named.key());
        hash.Update({static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
      }
    }
    classifier_.sha256 = hash.Hex();
  }

  struct Classifier {
    std::unique_ptr<Task> task;  // owns the data to which the learner refers
    std::unique_ptr<Learner> learner;
    VisionTransformerImpl* model = nullptr;
    std::string sha256;  // hash of its parameters and buffers
  };

  double WeightBytes() const {
    const auto dim = static_cast<double>(model_.dim);
    // The modulation has a linear map of size dim x 6 dim.
    const double layer = LayerWeights(model_) + 6 * dim * dim;
    return sizeof(float) *
           (static_cast<double>(model_.classes) * dim + static_cast<double>(model_.depth) * layer);
  }

  DiffusionModelOptions model_;
  DiffusionTrainingOptions trained_;
  DiffusionRunOptions run_;
  DiffusionGenerationOptions generation_;
  bool reads_training_ = true;  // false for evaluations
  ImageData data_;
  Classifier classifier_;
};

const RegisterTask<DiffusionTask> registered;

torch::Tensor DiffusionLearner::Probe() {
  const DiffusionModelOptions& options = model_->options();
  CheckReaches(model_->max_length(), model_->tokens(),
               StrCat("an image has ", model_->tokens(), " patches"));
  return model_->forward(torch::ones({1, options.channels, options.size[0], options.size[1]}),
                         torch::zeros({1}, torch::kLong), torch::zeros({1}, torch::kLong));
}

torch::Tensor DiffusionLearner::Loss(const Batch& batch) {
  const LabelledImages& part = task_.data().train;
  const DiffusionModelOptions& options = model_->options();
  // Every process draws random numbers for the whole batch, so that all draw the same ones.
  const torch::Tensor rows = torch::randint(part.count(), {batch.total}, torch::kLong);
  const torch::Tensor times = torch::randint(kTimesteps, {batch.total}, torch::kLong);
  const torch::Tensor unnamed = torch::rand({batch.total}) < task_.trained().label_dropout;
  const torch::Tensor all_noise =
      torch::randn({batch.total, options.channels, options.size[0], options.size[1]});
  const auto own = [&](const torch::Tensor& all) {
    return all.narrow(0, batch.first, batch.count);
  };
  const torch::Tensor noise = own(all_noise);
  const torch::Tensor images = Centred(part.Take(own(rows)));
  const torch::Tensor labels =
      part.labels.index_select(0, own(rows)).masked_fill(own(unnamed), options.classes);
  const torch::Tensor predicted =
      model_->forward(AddNoise(images, noise, own(times)), own(times), labels, batch.rows());
  return (predicted - noise.to(predicted.device())).square().sum() /
         static_cast<double>(all_noise.numel());
}

std::vector<Measurement> DiffusionLearner::Evaluate(const std::function<bool()>& proceed) {
  const torch::NoGradGuard no_grad;
  model_->eval();
  const bool is_held_out = task_.evaluates_held_out();
  const LabelledImages& part = is_held_out ? task_.data().held_out : task_.data().valid;
  const DiffusionModelOptions& options = model_->options();
  const int64_t total = std::min(task_.run().evaluation_images, part.count());
  // Each image has one timestep. The timesteps are evenly spaced and the same for every model.
  const torch::Tensor times =
      torch::div(torch::arange(total, torch::kLong) * kTimesteps, total, "floor");
  at::Generator generator = at::detail::createCPUGenerator(/*seed=*/0);
  std::vector<double> sums(kRanges + 1);
  std::vector<int64_t> counts(kRanges + 1);
  const int64_t batch = std::max<int64_t>(kEvaluationTokens / model_->tokens(), 1);
  for (int64_t first = 0; first < total; first += batch) {
    if (!proceed()) return {};
    const int64_t rows = std::min(batch, total - first);
    // Noise is drawn image by image, so that results do not depend on the batch size.
    std::vector<torch::Tensor> drawn;
    for (int64_t row = 0; row < rows; ++row) {
      drawn.push_back(
          torch::randn({options.channels, options.size[0], options.size[1]}, generator));
    }
    const torch::Tensor noise = torch::stack(drawn);
    const torch::Tensor at = times.narrow(0, first, rows);
    const torch::Tensor predicted =
        model_->forward(AddNoise(Centred(part.Take(first, rows)), noise, at), at,
                        part.labels.narrow(0, first, rows));
    const torch::Tensor losses = (predicted - noise.to(predicted.device()))
                                     .square()
                                     .flatten(1)
                                     .mean(1)
                                     .to(torch::kCPU, torch::kDouble);
    for (int64_t row = 0; row < rows; ++row) {
      const auto loss = losses[row].item<double>();
      const int64_t range = 1 + at[row].item<int64_t>() * kRanges / kTimesteps;
      for (const int64_t n : {int64_t{0}, range}) {
        sums[n] += loss;
        ++counts[n];
      }
    }
  }
  std::vector<Measurement> measured;
  std::vector<json> conditions = task_.conditions().values;
  if (is_held_out) conditions.resize(1);
  for (size_t n = 0; n < conditions.size(); ++n) {
    const double loss = sums[n] / static_cast<double>(counts[n]);
    Measurement at = {conditions[n], {std::nullopt}, counts[n]};
    if (std::isfinite(loss)) at.values = {loss};
    measured.push_back(at);
  }
  if (is_held_out || task_.classifier() == nullptr) return measured;
  const std::optional<double> distance = Frechet(proceed);
  if (!distance) return {};
  for (Measurement& at : measured) at.values.emplace_back(std::nullopt);
  if (std::isfinite(*distance)) measured[0].values[1] = *distance;
  return measured;
}

std::optional<double> DiffusionLearner::Frechet(const std::function<bool()>& proceed) {
  VisionTransformerImpl& classifier = *task_.classifier();
  const LabelledImages& part = task_.data().valid;
  const int64_t total = task_.run().frechet_images;
  const at::Generator generator = at::detail::createCPUGenerator(/*seed=*/0);
  std::vector<torch::Tensor> of_data;
  std::vector<torch::Tensor> of_model;
  const int64_t batch = std::max<int64_t>(kEvaluationTokens / model_->tokens(), 1);
  for (int64_t first = 0; first < total; first += batch) {
    const int64_t rows = std::min(batch, total - first);
    const torch::Tensor drawn =
        SampleImages(model_, part.labels.narrow(0, first, rows), {}, generator, proceed);
    if (!drawn.defined()) return std::nullopt;
    of_data.push_back(classifier.features(part.Take(first, rows)));
    // Converts to the data's pixel range, [0, 1].
    of_model.push_back(classifier.features((drawn.clamp(-1, 1) + 1) / 2));
  }
  return FrechetDistance(torch::cat(of_data).cpu(), torch::cat(of_model).cpu());
}

torch::Tensor DiffusionLearner::Images(int64_t classes, const DiffusionGenerationOptions& how,
                                       const std::function<bool()>& proceed) {
  const at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(how.seed));
  std::vector<torch::Tensor> lines;
  for (int64_t label = 0; label < classes; ++label) {
    const torch::Tensor images = SampleImages(
        model_, torch::full({how.samples}, label, torch::kLong),
        {.steps = how.steps, .eta = how.eta, .guidance = how.guidance}, generator, proceed);
    if (!images.defined()) return {};
    lines.push_back(images);
  }
  // Converts (classes, samples, C, H, W) to bytes with the channels last.
  return ((torch::stack(lines).cpu() + 1) * 127.5)
      .round()
      .clamp(0, 255)
      .to(torch::kByte)
      .permute({0, 1, 3, 4, 2});
}

void DiffusionLearner::Generate(const Output& output) {
  const DiffusionGenerationOptions& how = task_.generation();
  const int64_t classes = model_->options().classes;
  if (!IsPng()) {
    throw Error(StrCat("generate: the model's images have ",
                       Counted(model_->options().channels, "channel"), "; a PNG needs 1 or 3"));
  }
  const torch::Tensor images = Images(classes, how, output.proceed);
  if (!images.defined()) return;
  // Places the images of a class side by side: (classes H, samples W, C).
  const torch::Tensor pixels = images.permute({0, 2, 1, 3, 4}).flatten(2, 3).flatten(0, 1);
  WriteFileAtomically(output.path, {EncodePng(pixels)});
  output.print(StrCat(classes * how.samples, " images, ", output.path, "\n"));
}

std::optional<Picture> DiffusionLearner::Draw(const std::function<bool()>& proceed) {
  if (!IsPng()) return std::nullopt;
  const torch::NoGradGuard no_grad;
  model_->eval();
  constexpr int64_t kMostClasses = 10;
  DiffusionGenerationOptions how;
  how.samples = 3;
  how.steps = 25;
  const torch::Tensor images =
      Images(std::min(model_->options().classes, kMostClasses), how, proceed);
  if (!images.defined()) return std::nullopt;
  // Places the images of a class in a column: (samples H, classes W, C).
  const torch::Tensor pixels = images.permute({1, 2, 0, 3, 4}).flatten(2, 3).flatten(0, 1);
  return Picture{.title = "Images generated from the same noise, one column per class.",
                 .png = EncodePng(Enlarged(pixels, 2))};
}

}  // namespace
}  // namespace diffusion
}  // namespace gnomon::lab
