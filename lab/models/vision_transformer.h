// The vision transformer (Dosovitskiy et al. 2021) as in DeiT (Touvron et al. 2021): patches and a
// class token, pre-norm layers with GELU, and any similarity and position of the catalogue. Images
// have one to three axes; volumes are images with three.
#ifndef GNOMON_MODELS_VISION_TRANSFORMER_H_
#define GNOMON_MODELS_VISION_TRANSFORMER_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/grid_position.h"
#include "models/transformer.h"
#include "training/options.h"
#include "training/terms.h"

namespace gnomon::lab {

#define GNOMON_VISION_TRANSFORMER_OPTIONS(OPTION)                                                  \
  /* Of the images that it is trained on: the lengths of their axes. */                            \
  OPTION(std::vector<int64_t>, size, {}, .lowest = 1, .highest = 65536, .has_flag = false)         \
  OPTION(int64_t, channels, 1, .lowest = 1, .highest = 4096, .has_flag = false)                    \
  OPTION(int64_t, classes, 1, .lowest = 1, .has_flag = false)                                      \
  OPTION(int64_t, patch, 4,                                                                        \
         .help = "Side of a patch (a token) in pixels; must divide each side of an image",         \
         .lowest = 1, .highest = 65536)                                                            \
  OPTION(std::string, stem, "patches",                                                             \
         .help =                                                                                   \
             "Stem: patches (a linear map of each patch) or conv (3 x 3 convolutions with stride " \
             "2, down to one token per patch)",                                                    \
         .choices = {"patches", "conv"})                                                           \
  OPTION(std::string, pool, "class",                                                               \
         .help =                                                                                   \
             "Input of the classifier: class (a class token) or mean (the mean of the image's "    \
             "tokens)",                                                                            \
         .choices = {"class", "mean"})                                                             \
  GNOMON_TRANSFORMER_SIZES(OPTION, 64, 4, 4, 256)                                                  \
  GNOMON_TERM_OPTIONS(OPTION)

struct VisionTransformerOptions {
  GNOMON_OPTIONS(GNOMON_VISION_TRANSFORMER_OPTIONS)

  // The grid of the tokens of images with a given size, after the class token, if any.
  TokenGrid GridOf(const std::vector<int64_t>& image_size) const;
  TokenGrid grid() const { return GridOf(size); }
};

// Throws a descriptive Error unless the size is divisible by the patch size.
void CheckPatches(int64_t patch, const std::vector<int64_t>& size);

// The patches of images (B, C, ...), (B, tokens, C patch^axes): tokens in row-major order, the
// pixels of each by channel and then in row-major order.
torch::Tensor Patches(const torch::Tensor& images, int64_t patch);

// A linear map of each patch: images (B, C, ...) to tokens (B, tokens, dim). Submodule
// `projection`, whose weight is that of a convolution of stride `patch`, flattened.
class PatchEmbeddingImpl : public torch::nn::Module {
 public:
  PatchEmbeddingImpl(int64_t axes, int64_t channels, int64_t patch, int64_t dim);
  torch::Tensor forward(const torch::Tensor& images);

 private:
  int64_t patch_;
  torch::nn::Linear projection_{nullptr};
};
TORCH_MODULE(PatchEmbedding);

// The same by convolutions of stride 2, whose output has `dim` channels and one place per patch, as
// in Xiao et al. 2021, Early Convolutions Help Transformers See Better. The norms are GroupNorm
// with one group, which treat each image separately, so that a batch can be split over processes.
class ConvolutionStemImpl : public torch::nn::Module {
 public:
  // Throws Error unless there are two or three axes and `patch` is a power of two.
  ConvolutionStemImpl(int64_t axes, int64_t channels, int64_t patch, int64_t dim);
  torch::Tensor forward(const torch::Tensor& images);

 private:
  torch::nn::Sequential layers_;
};
TORCH_MODULE(ConvolutionStem);

// Weights are drawn from Torch's default generator, those of the encodings last. Throws
// gnomon::Error or c10::Error if an option or a specification is invalid.
class VisionTransformerImpl : public torch::nn::Module {
 public:
  explicit VisionTransformerImpl(VisionTransformerOptions options);

  // The input (B, dim) of the head for images (B, C, size). In training, random numbers are drawn
  // as for the batch that contains `rows`, by default this one.
  torch::Tensor features(const torch::Tensor& images,
                         const std::optional<BatchRows>& rows = std::nullopt);
  // Logits (B, classes).
  torch::Tensor forward(const torch::Tensor& images,
                        const std::optional<BatchRows>& rows = std::nullopt);

  // Attention of the head's input to each place of the grid in the last layer, (B, places),
  // averaged over heads: the weights of the class token, or their mean over all tokens.
  torch::Tensor attention_map(const torch::Tensor& images);

  // Mean and deviation of each channel over the pixels of the training images, by which forward()
  // normalises.
  void SetPixels(const torch::Tensor& mean, const torch::Tensor& deviation);

  const VisionTransformerOptions& options() const { return options_; }
  // The device of the model, to which images are moved.
  torch::Device device() const { return pixel_mean_.device(); }
  // The maximum number of tokens for which the position is defined; none if unlimited.
  std::optional<int64_t> max_length() const { return encoder_->max_length(); }

 private:
  // The encoder's input, preceded by the class token, if any.
  torch::Tensor Tokens(const torch::Tensor& images);

  VisionTransformerOptions options_;
  torch::Tensor pixel_mean_;       // buffers (C,)
  torch::Tensor pixel_deviation_;  // of that name
  PatchEmbedding patches_{nullptr};
  ConvolutionStem stem_{nullptr};
  torch::Tensor class_token_;  // (1, 1, dim)
  torch::nn::Linear head_{nullptr};
  Encoder encoder_{nullptr};
};
TORCH_MODULE(VisionTransformer);

// The model with its weights for images of another size, whose tokens lie on another grid; none if
// its position is not defined there, because its parameters belong to the places of the first grid.
std::optional<VisionTransformer> ForSize(const VisionTransformer& model,
                                         const std::vector<int64_t>& size);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_VISION_TRANSFORMER_H_
