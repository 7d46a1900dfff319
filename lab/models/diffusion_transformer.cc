#include "models/diffusion_transformer.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "models/vision_transformer.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

// Number of sinusoids that represent a timestep.
constexpr int64_t kTimeColumns = 256;
constexpr const char* kDiffusion = "diffusion transformer";
constexpr double kNormEpsilon = 1e-6;

// DiT's initialisation of linear maps (Glorot and Bengio 2010); biases are 0.
void InitializeGlorot(torch::nn::Linear& linear) {
  torch::nn::init::xavier_uniform_(linear->weight);
  if (linear->options.bias()) torch::nn::init::zeros_(linear->bias);
}

void InitializeNormal(torch::nn::Linear& linear) {
  torch::nn::init::normal_(linear->weight, 0, 0.02);
  torch::nn::init::zeros_(linear->bias);
}

void InitializeZero(torch::nn::Linear& linear) {
  torch::nn::init::zeros_(linear->weight);
  torch::nn::init::zeros_(linear->bias);
}

// Returns (1 + scale) norm(x) + shift; the norm has no weights.
torch::Tensor Modulate(const std::string& norm, const torch::Tensor& x, const torch::Tensor& shift,
                       const torch::Tensor& scale) {
  const int64_t dim = x.size(-1);
  const torch::Tensor normed = norm == "rms" ? torch::rms_norm(x, {dim}, {}, kNormEpsilon)
                                             : torch::layer_norm(x, {dim}, {}, {}, kNormEpsilon);
  return normed * (1 + scale) + shift;
}

// Returns the cosines, followed by the sines, of t 10000^(-i / (columns / 2)): (B, columns).
torch::Tensor TimeSinusoids(const torch::Tensor& timesteps) {
  constexpr int64_t kHalf = kTimeColumns / 2;
  const torch::Tensor frequencies =
      torch::exp(torch::arange(kHalf, timesteps.options().dtype(torch::kFloat)) *
                 (-std::log(10000.0) / kHalf));
  const torch::Tensor angles = timesteps.to(torch::kFloat).unsqueeze(1) * frequencies;
  return torch::cat({angles.cos(), angles.sin()}, 1);
}

torch::Tensor PerImage(const torch::Tensor& numbers) { return numbers.view({-1, 1, 1, 1}); }

}  // namespace

TokenGrid DiffusionModelOptions::grid() const {
  if (size.size() != 2) {
    throw Error(StrCat(kDiffusion, ": images have ", size.size(), " axes; expected 2"));
  }
  CheckPatches(patch, size);
  return {{size[0] / patch, size[1] / patch}, /*prefix=*/0};
}

DiffusionBlockImpl::DiffusionBlockImpl(const TransformerOptions& options,
                                       const std::string& position)
    : dropout_(options.dropout),
      norm_(options.norm),
      modulation_(register_module("modulation", torch::nn::Linear(options.dim, 6 * options.dim))),
      attention_(register_module("attention", MakeAttention(options, position))),
      mlp_(this, options) {
  InitializeZero(modulation_);
  InitializeGlorot(mlp_.in);
  InitializeGlorot(mlp_.out);
}

torch::Tensor DiffusionBlockImpl::forward(torch::Tensor x, const torch::Tensor& condition,
                                          const std::optional<BatchRows>& rows) {
  const auto drop_out = [&](const torch::Tensor& branch) {
    return is_training() ? DropOut(branch, dropout_, rows) : branch;
  };
  const std::vector<torch::Tensor> parts =
      modulation_->forward(torch::silu(condition)).unsqueeze(1).chunk(6, -1);
  x = x + parts[2] * drop_out(attention_->forward(Modulate(norm_, x, parts[0], parts[1])));
  return x + parts[5] * drop_out(mlp_.forward(Modulate(norm_, x, parts[3], parts[4])));
}

DiffusionTransformerImpl::DiffusionTransformerImpl(const DiffusionModelOptions& options,
                                                   const Terms& terms)
    : options_(options), grid_(options.grid()) {
  CheckRanges(options_.Options(), kDiffusion);
  CheckTransformer(kDiffusion, options_.dim, options_.heads, options_.dropout);
  const int64_t dim = options_.dim;
  const int64_t pixels = options_.patch * options_.patch * options_.channels;
  patches_ = register_module("patches", torch::nn::Linear(pixels, dim));
  time_in_ = register_module("time_in", torch::nn::Linear(kTimeColumns, dim));
  time_out_ = register_module("time_out", torch::nn::Linear(dim, dim));
  labels_ = register_module("labels", torch::nn::Embedding(options_.classes + 1, dim));
  modulation_ = register_module("modulation", torch::nn::Linear(dim, 2 * dim));
  out_ = register_module("out", torch::nn::Linear(dim, pixels));
  InitializeGlorot(patches_);
  InitializeNormal(time_in_);
  InitializeNormal(time_out_);
  torch::nn::init::normal_(labels_->weight, 0, 0.02);
  InitializeZero(modulation_);
  InitializeZero(out_);
  const TransformerOptions layers =
      ToTransformer(options_, terms.similarity, terms.position, tokens());
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (const std::string& position : LayerPositions(terms.position, options_.depth)) {
    blocks_->push_back(DiffusionBlock(layers, position));
  }
  token_position_ = register_module("token_position", MakeTokenPosition(layers, /*causal=*/false));
}

torch::Tensor DiffusionTransformerImpl::forward(const torch::Tensor& images,
                                                const torch::Tensor& timesteps,
                                                const torch::Tensor& labels,
                                                const std::optional<BatchRows>& rows) {
  torch::Tensor x = token_position_->forward(
      patches_->forward(Patches(images.to(device()), options_.patch)), TokenCallOf(rows));
  const torch::Tensor time =
      time_out_->forward(torch::silu(time_in_->forward(TimeSinusoids(timesteps.to(device())))));
  const torch::Tensor condition = time + labels_->forward(labels.to(device()));
  for (const auto& block : *blocks_) {
    x = block->as<DiffusionBlock>()->forward(x, condition, rows);
  }
  const std::vector<torch::Tensor> last =
      modulation_->forward(torch::silu(condition)).unsqueeze(1).chunk(2, -1);
  const int64_t patch = options_.patch;
  // The permutation inverts Patches().
  return out_->forward(Modulate(options_.norm, x, last[0], last[1]))
      .view({x.size(0), grid_.shape[0], grid_.shape[1], options_.channels, patch, patch})
      .permute({0, 3, 1, 4, 2, 5})
      .reshape(images.sizes());
}

torch::Tensor NoiseSchedule() {
  return (1 - torch::linspace(1e-4, 0.02, kTimesteps, torch::kDouble)).cumprod(0);
}

torch::Tensor AddNoise(const torch::Tensor& images, const torch::Tensor& noise,
                       const torch::Tensor& timesteps) {
  const torch::Tensor left = NoiseSchedule().index_select(0, timesteps);
  return PerImage(left.sqrt().to(torch::kFloat)) * images +
         PerImage((1 - left).sqrt().to(torch::kFloat)) * noise;
}

torch::Tensor SampleImages(DiffusionTransformer& model, const torch::Tensor& labels,
                           const DiffusionSampling& options, at::Generator generator,
                           const std::function<bool()>& proceed) {
  const torch::NoGradGuard no_grad;
  model->eval();
  const torch::Tensor left = NoiseSchedule();
  const auto left_at = [&](int64_t step) {
    // The fraction of the image (see NoiseSchedule) when `step` sampling steps remain.
    return step == 0 ? 1.0 : left[step * kTimesteps / options.steps - 1].item<double>();
  };
  const torch::Tensor none = torch::full_like(labels, model->options().classes);
  const DiffusionModelOptions& images = model->options();
  const std::vector<int64_t> shape = {labels.size(0), images.channels, images.size[0],
                                      images.size[1]};
  // Noise is drawn on the CPU, so that it is identical on all devices.
  const auto draw = [&] { return torch::randn(shape, generator).to(model->device()); };
  torch::Tensor x = draw();
  for (int64_t step = options.steps; step > 0; --step) {
    if (!proceed()) return {};
    const torch::Tensor times = torch::full_like(labels, step * kTimesteps / options.steps - 1);
    torch::Tensor predicted;
    if (options.guidance == 1) {
      predicted = model->forward(x, times, labels);
    } else {
      const torch::Tensor both = model->forward(torch::cat({x, x}), torch::cat({times, times}),
                                                torch::cat({labels, none}));
      const torch::Tensor without = both.narrow(0, labels.size(0), labels.size(0));
      predicted = without + options.guidance * (both.narrow(0, 0, labels.size(0)) - without);
    }
    const double now = left_at(step);
    const double next = left_at(step - 1);
    const torch::Tensor image =
        ((x - std::sqrt(1 - now) * predicted) / std::sqrt(now)).clamp(-1, 1);
    // The noise that corresponds to the clipped image.
    const torch::Tensor rest = (x - std::sqrt(now) * image) / std::sqrt(1 - now);
    const double fresh =
        options.eta * std::sqrt((1 - next) / (1 - now)) * std::sqrt(1 - now / next);
    x = std::sqrt(next) * image + std::sqrt(std::max(1 - next - fresh * fresh, 0.0)) * rest;
    if (fresh > 0) x = x + fresh * draw();
  }
  return x;
}

}  // namespace gnomon::lab
