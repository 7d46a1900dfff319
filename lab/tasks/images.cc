// The tasks `images` and `volumes`: a vision transformer classifies images or volumes.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "models/grid_position.h"
#include "models/png.h"
#include "models/transformer.h"
#include "models/vision_transformer.h"
#include "tasks/image_data.h"
#include "training/processes.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab {
namespace images {
namespace {

using nlohmann::json;

// The approximate number of tokens in an evaluation batch of any image size.
constexpr int64_t kEvaluationBatch = 16384;
constexpr int64_t kLongestSide = 65536;

#define GNOMON_IMAGE_TRAINING_OPTIONS(OPTION)                                                    \
  OPTION(int64_t, shift, 0,                                                                      \
         .help =                                                                                 \
             "Maximum random shift of a training image along each axis, in pixels; edge pixels " \
             "are repeated",                                                                     \
         .highest = kLongestSide)

#define GNOMON_IMAGE_EVALUATION_OPTIONS(OPTION)                                                   \
  OPTION(std::vector<std::string>, sizes, {},                                                     \
         .help =                                                                                  \
             "Additional evaluation sizes, comma-separated; each is one side length or all side " \
             "lengths (32 or 32x48). Images are resized, which changes the number of tokens",     \
         .may_lack = true, .may_change = true)                                                    \
  OPTION(std::optional<int64_t>, evaluation_examples, std::nullopt,                               \
         .help = "Number of validation images to evaluate, taken from the start; default: all",   \
         .lowest = 1, .may_lack = true, .may_change = true)

struct ImageTrainingOptions {
  GNOMON_OPTIONS(GNOMON_IMAGE_TRAINING_OPTIONS)
};

struct ImageEvaluationOptions {
  GNOMON_OPTIONS(GNOMON_IMAGE_EVALUATION_OPTIONS)
};

// Parses a size such as "32x48". A single number such as "32" applies to every axis.
std::vector<int64_t> ParseSize(const std::string& text, int64_t axes) {
  std::vector<int64_t> size;
  bool is_sound = !text.empty() && text.back() != 'x';
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, 'x');) {
    int64_t& length = size.emplace_back(0);
    const char* const end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data(), end, length);
    is_sound =
        is_sound && error == std::errc() && stop == end && length >= 1 && length <= kLongestSide;
  }
  if (size.size() == 1) size.resize(axes, size[0]);
  if (!is_sound || static_cast<int64_t>(size.size()) != axes) {
    throw Error(StrCat("--sizes: '", text, "' is invalid; expected a side length from 1 to ",
                       kLongestSide, ", or ", axes, " side lengths joined by x"));
  }
  return size;
}

// The size as an evaluation condition; a single number if all sides are equal.
json SizeName(const std::vector<int64_t>& size) {
  const bool is_even =
      std::all_of(size.begin(), size.end(), [&](int64_t length) { return length == size[0]; });
  return is_even ? json(size[0]) : json(SizesText(size));
}

double WeightBytes(const VisionTransformerOptions& model) {
  const auto dim = static_cast<double>(model.dim);
  double pixels = static_cast<double>(model.channels);
  if (model.stem == "patches") {
    pixels *= std::pow(static_cast<double>(model.patch), static_cast<double>(model.size.size()));
  }
  return sizeof(float) * (dim * (pixels + static_cast<double>(model.classes)) +
                          static_cast<double>(model.depth) * LayerWeights(model));
}

class ImageTask : public Task {
 public:
  // `noun` is a singular noun for messages. `patch` and `dim` are default option values.
  ImageTask(const char* name, const char* noun, int64_t axes, int64_t patch, int64_t dim)
      : kind_{name, axes}, noun_(noun) {
    model_.patch = patch;
    model_.dim = dim;
    model_.mlp = 4 * dim;
  }

  const VisionTransformerOptions& model() const { return model_; }
  const ImageTrainingOptions& augmentation() const { return augmentation_; }
  const ImageData& data() const { return data_; }
  // All sizes to evaluate; the first is the training size.
  std::vector<std::vector<int64_t>> EvaluatedSizes() const {
    std::vector<std::vector<int64_t>> sizes = {model_.size};
    for (const std::string& text : evaluation_.sizes) {
      sizes.push_back(ParseSize(text, kind_.axes));
    }
    return sizes;
  }
  const LabelledImages& EvaluatedPart() const {
    return evaluates_held_out() ? data_.held_out : data_.valid;
  }
  int64_t EvaluatedExamples() const {
    return std::min(evaluation_.evaluation_examples.value_or(kMany), EvaluatedPart().count());
  }

  const char* name() const override { return kind_.array; }

  TrainingOptions DefaultTraining(Command command) const override {
    TrainingOptions training;
    training.batch = 64;
    training.steps = command == Command::kCompare ? 400 : 2000;
    training.weight_decay = 0.05;
    return training;
  }
  std::vector<std::string> DefaultPositions() const override {
    return {"none",      "learned",          "sinusoidal:shape=grid",      "rope:shape=grid",
            "grid_bias", "alibi:shape=grid", "hype:tau=learned:shape=grid"};
  }

  OptionList Options(Command command) override {
    if (command == Command::kEval) return evaluation_.Options();
    OptionList model = InSection("model", model_.Options());
    const OptionList training = InSection("training", augmentation_.Options());
    if (command == Command::kCompare) {
      // Each run of a comparison sets its own terms.
      return evaluation_.Options() + WithoutFlags(model, {"similarity", "position"}) + training;
    }
    return InSection("run", evaluation_.Options()) +
           Without(std::move(model), {"similarity", "position"}) + training;
  }
  void Settle(Command command, bool /*is_resumed*/, const TrainingOptions* /*training*/) override {
    is_trained_ = command != Command::kEval;
    EvaluatedSizes();  // throws for an invalid size
  }

  std::string StepFlags(Command /*command*/, const TrainingOptions& training) const override {
    return StrCat("--batch ", training.batch, " and --patch ", model_.patch);
  }
  std::string EvaluationFlags(Command /*command*/) const override {
    return evaluation_.sizes.empty() ? StrCat("--patch ", model_.patch)
                                     : StrCat("--sizes ", Join(evaluation_.sizes, ","));
  }
  void CheckModelFits() const override {
    CheckMemoryHolds(ModelFlags(model_), WeightBytes(model_));
  }
  void CheckFits(const TrainingOptions& training, int64_t processes) const override {
    const double numbers = static_cast<double>(model_.depth) * LayerNumbers(model_);
    const double tokens = static_cast<double>(CountRows(training.batch, 0, processes)) *
                          static_cast<double>(model_.grid().tokens());
    CheckTrainingFits(ModelFlags(model_), WeightBytes(model_), StepFlags(Command::kTrain, training),
                      tokens * numbers);
  }

  void ReadData(const std::string& path) override {
    data_ = ReadImages(path, kind_, /*has_training=*/is_trained_, model_.classes);
    if (is_trained_) pixels_ = data_.DescribePixels();
    TakeSizes(data_, path, &model_);
  }
  std::string HoldOut() override {
    const int64_t count = data_.HoldOut(kind_.array);
    pixels_ = data_.DescribePixels();
    return StrCat(count, " ", kind_.array, " of the training split");
  }
  std::string data_sha256() const override { return data_.sha256; }
  json DescribeData() const override {
    const std::filesystem::path path = std::filesystem::absolute(data_.path).lexically_normal();
    json data = {{"path", path.string()},
                 {"sha256", data_.sha256},
                 {"valid", data_.valid.count()},
                 {"size", data_.valid.size()},
                 {"channels", data_.valid.channels()},
                 {"classes", model_.classes}};
    if (is_trained_) data["train"] = data_.train.count();
    return {{"data", data}};
  }
  std::string DescribeSize() const override {
    return StrCat(data_.train.count(), " ", kind_.array, " of ", SizesText(model_.size), " and ",
                  model_.classes, " classes");
  }
  void CheckData(const TrainingOptions* training) const override {
    if (data_.valid.channels() != model_.channels) {
      throw Error(StrCat(data_.path, ": the ", kind_.array, " have ", data_.valid.channels(),
                         " channels, but the model expects ", model_.channels));
    }
    if (training != nullptr &&
        augmentation_.shift >= *std::min_element(model_.size.begin(), model_.size.end())) {
      throw Error(StrCat("--shift is ", augmentation_.shift, ", but the ", kind_.array, " are ",
                         SizesText(model_.size), "; expected less than each side"));
    }
    std::set<std::vector<int64_t>> seen;
    for (const std::vector<int64_t>& size : EvaluatedSizes()) {
      for (const int64_t length : size) {
        if (length % model_.patch == 0) continue;
        throw Error(
            StrCat("--sizes: ", SizesText(size), " is not a multiple of --patch, ", model_.patch));
      }
      if (seen.insert(size).second) continue;
      throw Error(StrCat("--sizes: ", SizesText(size),
                         size == model_.size
                             ? " is the training size, which is always evaluated; leave it out"
                             : " is given twice"));
    }
  }

  Terms Complete(const Terms& terms) const override {
    return {terms.similarity, OnGrid(terms.position, model_.grid())};
  }
  std::unique_ptr<Learner> MakeLearner(const Terms& terms,
                                       const TrainingOptions& training) override;
  void CheckSizes(const StoredSizes& file) const override {
    VisionTransformerOptions model = model_;
    for (const Option& option : model.Options()) CheckRanges({option}, "model");
    if (static_cast<int64_t>(model.size.size()) != kind_.axes) {
      throw Error(
          StrCat("its ", kind_.array, " have ", model.size.size(), " axes; expected ", kind_.axes));
    }
    CheckPatches(model.patch, model.size);
    if (model.stem == "patches") {
      int64_t pixels = model.channels;
      for (int64_t axis = 0; axis < kind_.axes; ++axis) pixels *= model.patch;
      file.Expect("patches.projection.weight", {model.dim, pixels});
    }
    file.Expect("encoder.blocks.0.mlp_in.weight", {HiddenUnits(model), model.dim});
    file.Expect("head.weight", {model.classes, model.dim});
    file.ExpectLayers(model.depth);
  }

  std::vector<Metric> metrics() const override {
    return {
        {.key = "accuracy", .title = "accuracy", .column = "accuracy", .higher_is_better = true},
        {.key = "loss", .title = "loss, " + description().loss_unit, .column = "loss"}};
  }
  Conditions conditions() const override {
    Conditions conditions = {.key = "size", .title = StrCat(noun_, " size")};
    for (const std::vector<int64_t>& size : EvaluatedSizes()) {
      conditions.values.push_back(SizeName(size));
    }
    conditions.trained = 0;
    return conditions;
  }
  std::string TrainedAs(const TrainingOptions& training) const override {
    return StrCat("trained at ", SizesText(model_.size), " for ", training.steps, " steps of ",
                  training.batch, " ", kind_.array);
  }

 protected:
  TaskDescription Described(const char* summary, const char* data_help) const {
    return {.summary = summary,
            .data_help = data_help,
            .loss_unit = StrCat("nats per ", noun_),
            .examples = kind_.array};
  }

 private:
  ImageKind kind_;
  const char* noun_;
  VisionTransformerOptions model_;  // MakeLearner() sets similarity and position
  ImageTrainingOptions augmentation_;
  ImageEvaluationOptions evaluation_;
  bool is_trained_ = true;  // false if a model is only evaluated
  ImageData data_;
  ImageData::Pixels pixels_;  // statistics of the training images
};

class ImageLearner final : public Learner {
 public:
  ImageLearner(const ImageTask& task, VisionTransformer model, int64_t seed)
      : task_(task), model_(std::move(model)), seed_(static_cast<uint64_t>(seed)) {}

  torch::nn::Module& module() override { return *model_; }

  torch::Tensor Probe() override {
    const VisionTransformerOptions& options = model_->options();
    const int64_t tokens = options.grid().tokens();
    CheckReaches(model_->max_length(), tokens, StrCat("an image has ", tokens, " tokens"));
    std::vector<int64_t> shape = {1, options.channels};
    shape.insert(shape.end(), options.size.begin(), options.size.end());
    return model_->forward(torch::linspace(0, 1, c10::multiply_integers(shape)).view(shape));
  }

  torch::Tensor Loss(const Batch& batch) override {
    const LabelledImages& train = task_.data().train;
    std::vector<int64_t> rows;
    for (int64_t n = batch.first; n < batch.first + batch.count; ++n) {
      rows.push_back(RowOf(batch.step * batch.total + n));
    }
    const torch::Tensor chosen = torch::tensor(rows, torch::kLong);
    torch::Tensor images = train.Take(chosen);
    if (const int64_t shift = task_.augmentation().shift; shift > 0) {
      const torch::Tensor all =
          torch::randint(-shift, shift + 1, {batch.total, images.dim() - 2}, torch::kLong);
      images = Shifted(images, all.narrow(0, batch.first, batch.count));
    }
    return torch::nn::functional::cross_entropy(
               model_->forward(images, batch.rows()),
               train.labels.index_select(0, chosen).to(model_->device()),
               torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum)) /
           static_cast<double>(batch.total);
  }

  std::vector<Measurement> Evaluate(const std::function<bool()>& proceed) override {
    const torch::NoGradGuard no_grad;
    model_->eval();
    std::vector<Measurement> measured;
    std::vector<std::vector<int64_t>> sizes = task_.EvaluatedSizes();
    if (task_.evaluates_held_out()) sizes.resize(1);
    for (const std::vector<int64_t>& size : sizes) {
      const json condition = SizeName(size);
      std::optional<VisionTransformer> model = model_;
      if (size != model_->options().size) model = ForSize(model_, size);
      if (!model) {
        measured.push_back({condition, {std::nullopt, std::nullopt}, 0});
        continue;
      }
      const std::optional<Measurement> at = EvaluateAt(*model, size, proceed);
      if (!at) return {};
      measured.push_back(*at);
    }
    return measured;
  }

  std::optional<Picture> Draw(const std::function<bool()>& /*proceed*/) override {
    const VisionTransformerOptions& options = model_->options();
    const int64_t channels = options.channels;
    if (options.size.size() < 2 || (channels != 1 && channels != 3)) return std::nullopt;
    const torch::NoGradGuard no_grad;
    model_->eval();
    constexpr int64_t kImages = 8;
    const LabelledImages& valid = task_.data().valid;
    torch::Tensor images = valid.Take(0, std::min(kImages, valid.count()));
    std::vector<int64_t> shape = {images.size(0), 1};
    const std::vector<int64_t> places = options.grid().shape;
    shape.insert(shape.end(), places.begin(), places.end());
    torch::Tensor map = Scaled(model_->attention_map(images).cpu().view(shape));
    images = Scaled(images);
    map = Resized(map, options.size);
    if (options.size.size() == 3) {  // shows the middle slice
      images = images.select(2, options.size[0] / 2);
      map = map.select(2, options.size[0] / 2);
    }
    // The upper row contains the images; the lower row shows them in grey with attention in red.
    const torch::Tensor colours = images.expand({-1, 3, -1, -1});
    const torch::Tensor grey = images.mean(1, /*keepdim=*/true) * 0.4;
    const torch::Tensor shown = torch::cat({grey + 0.6 * map, grey, grey}, 1);
    // Transposes (2, B, 3, H, W) to (2 H, B W, 3).
    const torch::Tensor pixels = (torch::stack({colours, shown}) * 255)
                                     .round()
                                     .to(torch::kByte)
                                     .permute({0, 3, 1, 4, 2})
                                     .flatten(2, 3)
                                     .flatten(0, 1);
    constexpr int64_t kSide = 84;
    const int64_t times = std::max<int64_t>(kSide / options.size.back(), 1);
    return Picture{
        .title = StrCat(
            "The first ", task_.name(), " of the validation split. Red marks where ",
            options.pool == "class" ? "the class token attends" : "all tokens together attend",
            " in the last layer, averaged over the heads."),
        .png = EncodePng(Enlarged(pixels, times))};
  }

 private:
  // Scales each item of a batch (B, ...) to [0, 1].
  static torch::Tensor Scaled(const torch::Tensor& batch) {
    const torch::Tensor flat = batch.flatten(1);
    const torch::Tensor low = std::get<0>(flat.min(1, /*keepdim=*/true));
    const torch::Tensor range = std::get<0>(flat.max(1, /*keepdim=*/true)) - low;
    return ((flat - low) / range.clamp_min(1e-12)).view_as(batch);
  }

  // The row of the n-th training example. Each epoch visits all images once, in a different order.
  int64_t RowOf(int64_t n) {
    const int64_t images = task_.data().train.count();
    const int64_t epoch = n / images;
    if (epoch != epoch_) {
      at::Generator generator =
          at::detail::createCPUGenerator(seed_ * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(epoch));
      order_ = torch::randperm(images, generator, torch::kLong);
      epoch_ = epoch;
    }
    return order_.const_data_ptr<int64_t>()[n % images];
  }

  // Returns nullopt if `proceed` returned false.
  std::optional<Measurement> EvaluateAt(VisionTransformer& model, const std::vector<int64_t>& size,
                                        const std::function<bool()>& proceed) {
    const LabelledImages& part = task_.EvaluatedPart();
    const int64_t total = task_.EvaluatedExamples();
    const int64_t batch = std::max<int64_t>(kEvaluationBatch / model->options().grid().tokens(), 1);
    double loss = 0;
    int64_t correct = 0;
    for (int64_t at = 0; at < total; at += batch) {
      if (!proceed()) return std::nullopt;
      const int64_t count = std::min(batch, total - at);
      const torch::Tensor labels = part.labels.narrow(0, at, count);
      const torch::Tensor logits =
          model->forward(Resized(part.Take(at, count), size)).to(torch::kCPU, torch::kDouble);
      loss += torch::nn::functional::cross_entropy(
                  logits, labels,
                  torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum))
                  .item<double>();
      correct += logits.argmax(1).eq(labels).sum().item<int64_t>();
    }
    const auto number = static_cast<double>(total);
    Measurement measured = {SizeName(size), {std::nullopt, std::nullopt}, total};
    if (std::isfinite(loss))
      measured.values = {static_cast<double>(correct) / number, loss / number};
    return measured;
  }

  const ImageTask& task_;
  VisionTransformer model_;
  uint64_t seed_;
  int64_t epoch_ = -1;  // the epoch whose order is cached
  torch::Tensor order_;
};

std::unique_ptr<Learner> ImageTask::MakeLearner(const Terms& terms,
                                                const TrainingOptions& training) {
  VisionTransformerOptions options = model_;
  options.similarity = terms.similarity;
  options.position = terms.position;
  VisionTransformer model(options);
  if (pixels_.mean.defined()) model->SetPixels(pixels_.mean, pixels_.deviation);
  return std::make_unique<ImageLearner>(*this, model, training.seed);
}

class ImagesTask final : public ImageTask {
 public:
  ImagesTask() : ImageTask("images", "image", /*axes=*/2, /*patch=*/4, /*dim=*/64) {}
  TaskDescription description() const override {
    return Described("a vision transformer that classifies images; accuracy at several sizes",
                     "A file with the arrays SPLIT.images (N x H x W or N x H x W x C) and "
                     "SPLIT.labels (class indices, starting at 0) for the splits train and valid");
  }
};

class VolumesTask final : public ImageTask {
 public:
  // Sinusoids of three coordinates require a dimension that is a multiple of 6.
  VolumesTask() : ImageTask("volumes", "volume", /*axes=*/3, /*patch=*/7, /*dim=*/48) {}
  TaskDescription description() const override {
    return Described(
        "a vision transformer that classifies 3D volumes; accuracy at several sizes",
        "A file with the arrays SPLIT.volumes (N x D x H x W or N x D x H x W x C) and "
        "SPLIT.labels (class indices, starting at 0) for the splits train and valid");
  }
};

const RegisterTask<ImagesTask> registered_images;
const RegisterTask<VolumesTask> registered_volumes;

}  // namespace
}  // namespace images
}  // namespace gnomon::lab
