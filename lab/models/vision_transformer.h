// The vision transformer (Dosovitskiy et al. 2021) in the form of DeiT (Touvron et al. 2021):
// patches, a class token and pre-norm layers, with any similarity and position of the catalogue.
// Images have one to three axes; volumes are images with three axes.
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

#define GNOMON_PATCH_OPTIONS(OPTION)                                                             \
  /* The length of each axis of a training image. */                                             \
  OPTION(std::vector<int64_t>, size, {}, .lowest = 1, .highest = 65536, .has_flag = false)       \
  OPTION(int64_t, channels, 1, .lowest = 1, .highest = 4096, .has_flag = false)                  \
  OPTION(int64_t, classes, 1, .lowest = 1, .has_flag = false)                                    \
  OPTION(int64_t, patch, 4,                                                                      \
         .help = "Patch size in pixels (a patch is a token); must divide each side of an image", \
         .lowest = 1, .highest = 65536)

#define GNOMON_VISION_TRANSFORMER_OPTIONS(OPTION)                                                  \
  GNOMON_PATCH_OPTIONS(OPTION)                                                                     \
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

  // The token grid for images of a given size; the prefix is the class token, if any.
  TokenGrid GridOf(const std::vector<int64_t>& image_size) const;
  TokenGrid grid() const { return GridOf(size); }
};

// Throws Error unless every side of an image is divisible by the patch size.
void CheckPatches(int64_t patch, const std::vector<int64_t>& size);

// Returns the patches (B, tokens, C patch^axes) of images (B, C, ...). Tokens are in row-major
// order; the pixels of a patch are ordered by channel, then in row-major order.
torch::Tensor Patches(const torch::Tensor& images, int64_t patch);

// Maps images (B, C, ...) to tokens (B, tokens, dim) by a linear map of each patch. Its submodule
// `projection` has the flattened weight of a convolution with stride `patch`.
class PatchEmbeddingImpl : public torch::nn::Module {
 public:
  PatchEmbeddingImpl(int64_t axes, int64_t channels, int64_t patch, int64_t dim);
  torch::Tensor forward(const torch::Tensor& images);

 private:
  int64_t patch_;
  torch::nn::Linear projection_{nullptr};
};
TORCH_MODULE(PatchEmbedding);

// Maps images to tokens by convolutions with stride 2, down to one token per patch (Xiao et al.
// 2021, Early Convolutions Help Transformers See Better). Its norms are GroupNorm with one group,
// which treats each image separately, so that a batch can be split over processes.
class ConvolutionStemImpl : public torch::nn::Module {
 public:
  // Throws Error unless there are two or three axes and `patch` is a power of two.
  ConvolutionStemImpl(int64_t axes, int64_t channels, int64_t patch, int64_t dim);
  torch::Tensor forward(const torch::Tensor& images);

 private:
  torch::nn::Sequential layers_;
};
TORCH_MODULE(ConvolutionStem);

// Weights are drawn from PyTorch's default generator; those of the encodings are drawn last. Throws
// gnomon::Error or c10::Error if an option or a specification is invalid.
class VisionTransformerImpl : public torch::nn::Module {
 public:
  explicit VisionTransformerImpl(VisionTransformerOptions options);

  // Returns the classification head's input (B, dim) for images (B, C, size). In training, random
  // numbers are drawn for the whole batch that contains `rows`; by default, `images` is the batch.
  torch::Tensor features(const torch::Tensor& images,
                         const std::optional<BatchRows>& rows = std::nullopt);
  // Returns logits (B, classes).
  torch::Tensor forward(const torch::Tensor& images,
                        const std::optional<BatchRows>& rows = std::nullopt);

  // Returns the last layer's attention weights (B, cells) over the grid, averaged over heads. They
  // are those of the class token or, without a class token, the mean over all tokens.
  torch::Tensor attention_map(const torch::Tensor& images);

  // Sets the mean and standard deviation of each channel over the training images. The model
  // normalises its input with them.
  void SetPixels(const torch::Tensor& mean, const torch::Tensor& deviation);

  const VisionTransformerOptions& options() const { return options_; }
  // The device of the model, to which images are moved.
  torch::Device device() const { return pixel_mean_.device(); }
  // The maximum number of tokens for which the position is defined; none if unlimited.
  std::optional<int64_t> max_length() const { return encoder_->max_length(); }

 private:
  // Returns the encoder's input: the class token, if any, followed by the patches.
  torch::Tensor Tokens(const torch::Tensor& images);

  VisionTransformerOptions options_;
  torch::Tensor pixel_mean_;       // buffer "pixel_mean" (C,)
  torch::Tensor pixel_deviation_;  // buffer "pixel_deviation" (C,)
  PatchEmbedding patches_{nullptr};
  ConvolutionStem stem_{nullptr};
  torch::Tensor class_token_;  // (1, 1, dim)
  torch::nn::Linear head_{nullptr};
  Encoder encoder_{nullptr};
};
TORCH_MODULE(VisionTransformer);

// Returns a copy of the model for images of a different size, whose tokens form a different grid.
// Returns nullopt if the position is not defined for that grid or has parameters for each cell.
std::optional<VisionTransformer> ForSize(const VisionTransformer& model,
                                         const std::vector<int64_t>& size);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_VISION_TRANSFORMER_H_
