// The diffusion transformer (Peebles and Xie 2023, DiT): patches of a noisy image as tokens, blocks
// whose norms are modulated by the timestep and the class (adaLN-Zero), any similarity and any
// position of the catalogue; and the noise that it is trained on (Ho et al. 2020).
#ifndef GNOMON_MODELS_DIFFUSION_TRANSFORMER_H_
#define GNOMON_MODELS_DIFFUSION_TRANSFORMER_H_

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gnomon/torch/nn.h"
#include "models/transformer.h"
#include "ops/coordinates/token_grid.h"
#include "training/options.h"
#include "training/terms.h"

namespace gnomon::models {

// Steps from an image to noise.
inline constexpr int64_t kTimesteps = 1000;

#define GNOMON_DIFFUSION_MODEL_OPTIONS(OPTION)                                             \
  /* Of the images: height and width. */                                                   \
  OPTION(std::vector<int64_t>, size, {}, .lowest = 1, .highest = 65536, .has_flag = false) \
  OPTION(int64_t, channels, 1, .lowest = 1, .highest = 4096, .has_flag = false)            \
  OPTION(int64_t, classes, 1, .lowest = 1, .has_flag = false)                              \
  OPTION(int64_t, patch, 4,                                                                \
         .help = "Side of a patch (a token) in pixels; must divide each side of an image", \
         .lowest = 1, .highest = 65536)                                                    \
  GNOMON_TRANSFORMER_SIZES(OPTION, 128, 4, 4, 512)

struct DiffusionModelOptions {
  GNOMON_OPTIONS(GNOMON_DIFFUSION_MODEL_OPTIONS)

  // That of the tokens. Throws Error unless images have two axes and patches divide them.
  TokenGrid grid() const;
};

// x -> x + gate attention((1 + scale) norm(x) + shift), then the same of the MLP: shift, scale and
// gate of both are a linear map of SiLU(condition) that starts at 0, so that the block starts as
// the identity (section 3.2). The norms have no weights of their own.
class DiffusionBlockImpl : public torch::nn::Module {
 public:
  // `position` is that of this layer; the options' is not read.
  DiffusionBlockImpl(const TransformerOptions& options, const std::string& position);
  // x (B, L, dim), condition (B, dim).
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& condition,
                        const std::optional<BatchRows>& rows = std::nullopt);

 private:
  double dropout_;
  std::string norm_;
  torch::nn::Linear modulation_{nullptr};
  nn::MultiheadAttention attention_{nullptr};
  FeedForward mlp_;
};
TORCH_MODULE(DiffusionBlock);

class DiffusionTransformerImpl : public torch::nn::Module {
 public:
  // Throws gnomon::Error or c10::Error where an option or a term is wrong.
  DiffusionTransformerImpl(const DiffusionModelOptions& options, const Terms& terms);

  // The noise in images (B, C, H, W) at timesteps (B,) from 0 to kTimesteps - 1; labels (B,) from 0
  // to `classes`, which is no class.
  torch::Tensor forward(const torch::Tensor& images, const torch::Tensor& timesteps,
                        const torch::Tensor& labels,
                        const std::optional<BatchRows>& rows = std::nullopt);

  const DiffusionModelOptions& options() const { return options_; }
  int64_t tokens() const { return grid_.tokens(); }
  // Where it is, and takes what it is given to.
  torch::Device device() const { return labels_->weight.device(); }
  // The most tokens that the position is defined for; none if any number will do.
  std::optional<int64_t> max_length() const { return token_position_->max_length(); }

 private:
  DiffusionModelOptions options_;
  TokenGrid grid_;
  torch::nn::Linear patches_{nullptr};
  torch::nn::Linear time_in_{nullptr};
  torch::nn::Linear time_out_{nullptr};
  torch::nn::Embedding labels_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::Linear modulation_{nullptr};
  torch::nn::Linear out_{nullptr};
  nn::TokenPosition token_position_{nullptr};
};
TORCH_MODULE(DiffusionTransformer);

// How much of an image is left at each timestep, the product of 1 - beta up to it (Ho et al. 2020,
// section 4: beta from 1e-4 to 0.02 along a line), (kTimesteps,) doubles.
torch::Tensor NoiseSchedule();

// Images (B, C, H, W) with noise of the same shape at timesteps (B,): sqrt(a) x + sqrt(1 - a)
// noise.
torch::Tensor AddNoise(const torch::Tensor& images, const torch::Tensor& noise,
                       const torch::Tensor& timesteps);

struct DiffusionSampling {
  int64_t steps = 50;
  // Fresh noise in each step: 0, none (DDIM); 1, as in DDPM, which has all of the timesteps.
  double eta = 0;
  // The noise without a class and what a class adds, this many times (Ho and Salimans 2022): 1 is
  // the class alone.
  double guidance = 1;
};

// Images of `labels` (B,) from normal noise by the steps of Song et al. 2021, equations 12 and 16;
// what is predicted of an image is clipped to [-1, 1]. The noise (B, C, H, W), and that of each
// step where eta is not 0, is drawn from `generator`. `proceed` is asked before each step;
// undefined where it said no.
torch::Tensor SampleImages(DiffusionTransformer& model, const torch::Tensor& labels,
                           const DiffusionSampling& options, at::Generator generator,
                           const std::function<bool()>& proceed);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_DIFFUSION_TRANSFORMER_H_
