// The vision transformer (Dosovitskiy et al. 2021) as DeiT builds it (Touvron et al. 2021): patches
// and a class token through pre-norm layers with GELU, with any similarity and any position of the
// catalogue. Images have any number of axes from one to three: volumes are images with three.
#ifndef GNOMON_MODELS_VISION_TRANSFORMER_H_
#define GNOMON_MODELS_VISION_TRANSFORMER_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/transformer.h"
#include "ops/coordinates/token_grid.h"
#include "training/options.h"
#include "training/terms.h"

namespace gnomon::models {

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

  // That of the tokens of images of a size, after the class token, if there is one.
  TokenGrid GridOf(const std::vector<int64_t>& image_size) const;
  TokenGrid grid() const { return GridOf(size); }
};

// Throws Error, naming what is wrong, unless images of that size are cut into patches evenly.
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

// The same by convolutions of stride 2, which end at a feature map of `dim` channels with a place
// for each patch, as in Xiao et al. 2021, Early Convolutions Help Transformers See Better. Norms
// are of each image alone, GroupNorm of one group, so that a batch may be split over processes.
class ConvolutionStemImpl : public torch::nn::Module {
 public:
  // Throws Error unless there are two or three axes and `patch` is a power of two.
  ConvolutionStemImpl(int64_t axes, int64_t channels, int64_t patch, int64_t dim);
  torch::Tensor forward(const torch::Tensor& images);

 private:
  torch::nn::Sequential layers_;
};
TORCH_MODULE(ConvolutionStem);

// Weights come from Torch's default generator, those of the encodings last. Throws gnomon::Error or
// c10::Error where an option or a specification is wrong.
class VisionTransformerImpl : public torch::nn::Module {
 public:
  explicit VisionTransformerImpl(VisionTransformerOptions options);

  // What the head reads of images (B, C, size), (B, dim). Training draws as for the batch that
  // `rows` are of, by default these.
  torch::Tensor features(const torch::Tensor& images,
                         const std::optional<BatchRows>& rows = std::nullopt);
  // Logits (B, classes).
  torch::Tensor forward(const torch::Tensor& images,
                        const std::optional<BatchRows>& rows = std::nullopt);

  // How much what the head reads attends to each place of the grid in the last layer, (B, places),
  // the mean over heads: the weights of the class token, or their mean over all tokens.
  torch::Tensor attention_map(const torch::Tensor& images);

  // Of each channel, over the pixels of the training images: what forward() brings to mean 0 and
  // deviation 1.
  void SetPixels(const torch::Tensor& mean, const torch::Tensor& deviation);

  const VisionTransformerOptions& options() const { return options_; }
  // Where it is, and takes images to.
  torch::Device device() const { return pixel_mean_.device(); }
  // The most tokens that the position is defined for; none if any number will do.
  std::optional<int64_t> max_length() const { return encoder_->max_length(); }

 private:
  // Before the encoder, with the class token in front, if there is one.
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

// The model with its weights for images of another size, whose tokens lie on another grid; none
// where its position is not defined there, since what it learned is of the first grid's places.
std::optional<VisionTransformer> ForSize(const VisionTransformer& model,
                                         const std::vector<int64_t>& size);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_VISION_TRANSFORMER_H_
