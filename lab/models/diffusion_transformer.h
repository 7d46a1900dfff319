// The diffusion transformer DiT (Peebles and Xie 2023), with any similarity and any position in the
// catalogue. Tokens are patches of a noisy image; the timestep and the class modulate the norms of
// the blocks (adaLN-Zero). This file also declares the noise schedule for training (Ho et al. 2020)
// and the sampler.
#ifndef GNOMON_MODELS_DIFFUSION_TRANSFORMER_H_
#define GNOMON_MODELS_DIFFUSION_TRANSFORMER_H_

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gnomon/torch/nn.h"
#include "models/grid_position.h"
#include "models/transformer.h"
#include "models/vision_transformer.h"
#include "training/options.h"
#include "training/terms.h"

namespace gnomon::lab {

// Number of steps from an image to noise.
inline constexpr int64_t kTimesteps = 1000;

#define GNOMON_DIFFUSION_MODEL_OPTIONS(OPTION) \
  GNOMON_PATCH_OPTIONS(OPTION)                 \
  GNOMON_TRANSFORMER_SIZES(OPTION, 128, 4, 4, 512)

struct DiffusionModelOptions {
  GNOMON_OPTIONS(GNOMON_DIFFUSION_MODEL_OPTIONS)

  // The token grid. Throws Error unless images have two axes that are divisible by the patch size.
  TokenGrid grid() const;
};

// x -> x + gate attention((1 + scale) norm(x) + shift), followed by the same for the MLP. A linear
// map of SiLU(condition) computes the shift, scale and gate of both sublayers. It is initialised to
// 0, so that the block starts as the identity (section 3.2). The norms have no weights.
class DiffusionBlockImpl : public torch::nn::Module {
 public:
  // `position` is the position of this layer; options.position is ignored.
  DiffusionBlockImpl(const TransformerOptions& options, const std::string& position);
  // x has shape (B, L, dim); condition has shape (B, dim).
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
  // Throws gnomon::Error or c10::Error if an option or a term is invalid.
  DiffusionTransformerImpl(const DiffusionModelOptions& options, const Terms& terms);

  // Predicts the noise in images (B, C, H, W) at timesteps (B,) from 0 to kTimesteps - 1; labels
  // (B,) are from 0 to `classes`, where the value `classes` means no class.
  torch::Tensor forward(const torch::Tensor& images, const torch::Tensor& timesteps,
                        const torch::Tensor& labels,
                        const std::optional<BatchRows>& rows = std::nullopt);

  const DiffusionModelOptions& options() const { return options_; }
  int64_t tokens() const { return grid_.tokens(); }
  // The device of the model, to which inputs are moved.
  torch::Device device() const { return labels_->weight.device(); }
  // The maximum number of tokens for which the position is defined; none if unlimited.
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

// The fraction of the image that remains at each timestep, (kTimesteps,) doubles. This is the
// cumulative product of 1 - beta, where beta increases linearly from 1e-4 to 0.02 (Ho et al. 2020,
// section 4).
torch::Tensor NoiseSchedule();

// Adds noise to images (B, C, H, W) at timesteps (B,): sqrt(a) x + sqrt(1 - a) noise. `noise` has
// the shape of the images.
torch::Tensor AddNoise(const torch::Tensor& images, const torch::Tensor& noise,
                       const torch::Tensor& timesteps);

struct DiffusionSampling {
  int64_t steps = 50;
  // Amount of noise added per step: 0 is DDIM; 1 is DDPM if all timesteps are used.
  double eta = 0;
  // Classifier-free guidance scale (Ho and Salimans 2022): the noise is predicted as n + guidance *
  // (c - n), where c and n are the predictions with and without the class. 1 disables guidance.
  double guidance = 1;
};

// Generates images of the classes `labels` (B,) from normal noise with the steps of Song et al.
// 2021, equations 12 and 16. The predicted image is clipped to [-1, 1]. `generator` draws the
// initial noise (B, C, H, W) and, unless eta is 0, the noise of each step. `proceed` is called
// before each step; the result is undefined if it returned false.
torch::Tensor SampleImages(DiffusionTransformer& model, const torch::Tensor& labels,
                           const DiffusionSampling& options, at::Generator generator,
                           const std::function<bool()>& proceed);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_DIFFUSION_TRANSFORMER_H_
