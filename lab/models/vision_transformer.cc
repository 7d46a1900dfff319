#include "models/vision_transformer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

constexpr const char* kWhere = "vision transformer";
// Initial standard deviation of the class token (Touvron et al. 2021).
constexpr double kTokenDeviation = 0.02;

int64_t Power(int64_t base, int64_t exponent) {
  int64_t power = 1;
  for (int64_t n = 0; n < exponent; ++n) power *= base;
  return power;
}

TransformerOptions EncoderOptions(const VisionTransformerOptions& options) {
  return ToTransformer(options, options.similarity, options.position, options.grid().tokens());
}

void AddConvolution(torch::nn::Sequential& layers, int64_t axes, int64_t in, int64_t out,
                    int64_t kernel, int64_t stride) {
  const auto add = [&](auto layer) {
    const auto fan_in = static_cast<double>(layer->weight[0].numel());
    torch::nn::init::normal_(layer->weight, 0, 1 / std::sqrt(fan_in));
    torch::nn::init::zeros_(layer->bias);
    layers->push_back(layer);
  };
  const int64_t padding = kernel / 2;
  if (axes == 2) {
    add(torch::nn::Conv2d(
        torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(padding)));
  } else {
    add(torch::nn::Conv3d(
        torch::nn::Conv3dOptions(in, out, kernel).stride(stride).padding(padding)));
  }
}

}  // namespace

TokenGrid VisionTransformerOptions::GridOf(const std::vector<int64_t>& image_size) const {
  CheckPatches(patch, image_size);
  std::vector<int64_t> shape;
  for (const int64_t length : image_size) shape.push_back(length / patch);
  return {std::move(shape), pool == "class" ? 1 : 0};
}

void CheckPatches(int64_t patch, const std::vector<int64_t>& size) {
  for (const int64_t length : size) {
    if (length % patch == 0) continue;
    throw Error(StrCat("--patch is ", patch, ", but the images are ", SizesText(size),
                       "; expected a divisor of every side"));
  }
}

torch::Tensor Patches(const torch::Tensor& images, int64_t patch) {
  const int64_t axes = images.dim() - 2;
  // Transposes (B, C, rows, patch, columns, patch) to (B, rows, columns, C, patch, patch).
  std::vector<int64_t> split = {images.size(0), images.size(1)};
  std::vector<int64_t> order = {0};
  for (int64_t axis = 0; axis < axes; ++axis) {
    split.insert(split.end(), {images.size(2 + axis) / patch, patch});
    order.push_back(2 + 2 * axis);
  }
  order.push_back(1);
  for (int64_t axis = 0; axis < axes; ++axis) order.push_back(3 + 2 * axis);
  return images.reshape(split).permute(order).flatten(1 + axes).flatten(1, axes);
}

PatchEmbeddingImpl::PatchEmbeddingImpl(int64_t axes, int64_t channels, int64_t patch, int64_t dim)
    : patch_(patch) {
  projection_ =
      register_module("projection", torch::nn::Linear(channels * Power(patch, axes), dim));
  InitializeLinear(projection_, 1);
}

torch::Tensor PatchEmbeddingImpl::forward(const torch::Tensor& images) {
  return projection_->forward(Patches(images, patch_));
}

ConvolutionStemImpl::ConvolutionStemImpl(int64_t axes, int64_t channels, int64_t patch,
                                         int64_t dim) {
  if (axes != 2 && axes != 3) {
    throw Error(StrCat(kWhere, ": the convolutional stem supports 2 or 3 axes, not ", axes));
  }
  if (!std::has_single_bit(static_cast<uint64_t>(patch))) {
    throw Error(StrCat(kWhere,
                       ": --stem conv halves the sides of an image repeatedly, but --patch is ",
                       patch, "; expected a power of two"));
  }
  int64_t in = channels;
  // Each stage has twice the channels of the previous one, and the last has `dim`.
  for (int64_t left = patch; left > 1; left /= 2) {
    const int64_t out = std::max<int64_t>(dim / (left / 2), 1);
    AddConvolution(layers_, axes, in, out, /*kernel=*/3, /*stride=*/2);
    layers_->push_back(torch::nn::GroupNorm(torch::nn::GroupNormOptions(1, out)));
    layers_->push_back(torch::nn::GELU());
    in = out;
  }
  AddConvolution(layers_, axes, in, dim, /*kernel=*/1, /*stride=*/1);
  register_module("layers", layers_);
}

torch::Tensor ConvolutionStemImpl::forward(const torch::Tensor& images) {
  return layers_->forward(images).flatten(2).transpose(1, 2);
}

VisionTransformerImpl::VisionTransformerImpl(VisionTransformerOptions options)
    : options_(std::move(options)) {
  CheckRanges(options_.Options(), kWhere);
  CheckTransformer(kWhere, options_.dim, options_.heads, options_.dropout);
  const auto axes = static_cast<int64_t>(options_.size.size());
  if (axes < 1 || axes > 3) {
    throw Error(StrCat(kWhere, ": images have ", axes, " axes; expected 1 to 3"));
  }
  if (options_.stem == "conv") {
    stem_ = register_module("stem",
                            ConvolutionStem(axes, options_.channels, options_.patch, options_.dim));
  } else {
    patches_ = register_module(
        "patches", PatchEmbedding(axes, options_.channels, options_.patch, options_.dim));
  }
  if (options_.pool == "class") {
    class_token_ =
        register_parameter("class_token", torch::randn({1, 1, options_.dim}) * kTokenDeviation);
  }
  pixel_mean_ = register_buffer("pixel_mean", torch::zeros({options_.channels}));
  pixel_deviation_ = register_buffer("pixel_deviation", torch::ones({options_.channels}));
  head_ = register_module("head", torch::nn::Linear(options_.dim, options_.classes));
  InitializeLinear(head_, 1);
  encoder_ = register_module("encoder", Encoder(EncoderOptions(options_)));
}

void VisionTransformerImpl::SetPixels(const torch::Tensor& mean, const torch::Tensor& deviation) {
  pixel_mean_.copy_(mean);
  pixel_deviation_.copy_(deviation);
}

torch::Tensor VisionTransformerImpl::Tokens(const torch::Tensor& images) {
  std::vector<int64_t> of_channels(images.dim() - 1, 1);
  of_channels[0] = options_.channels;
  const torch::Tensor pixels =
      (images.to(device()) - pixel_mean_.view(of_channels)) / pixel_deviation_.view(of_channels);
  const torch::Tensor tokens =
      stem_.is_empty() ? patches_->forward(pixels) : stem_->forward(pixels);
  if (!class_token_.defined()) return tokens;
  return torch::cat({class_token_.expand({tokens.size(0), -1, -1}), tokens}, 1);
}

torch::Tensor VisionTransformerImpl::attention_map(const torch::Tensor& images) {
  const torch::Tensor tokens = Tokens(images);
  std::vector<int64_t> rows = {0};
  if (!class_token_.defined()) {
    rows.resize(tokens.size(1));
    std::iota(rows.begin(), rows.end(), 0);
  }
  const torch::Tensor weights = encoder_->last_attention_weights(tokens, rows).mean({1, 2});
  return class_token_.defined() ? weights.slice(1, 1) : weights;
}

torch::Tensor VisionTransformerImpl::features(const torch::Tensor& images,
                                              const std::optional<BatchRows>& rows) {
  const torch::Tensor read = encoder_->forward(Tokens(images), std::nullopt, rows);
  return class_token_.defined() ? read.select(1, 0) : read.mean(1);
}

torch::Tensor VisionTransformerImpl::forward(const torch::Tensor& images,
                                             const std::optional<BatchRows>& rows) {
  return head_->forward(features(images, rows));
}

std::optional<VisionTransformer> ForSize(const VisionTransformer& model,
                                         const std::vector<int64_t>& size) {
  VisionTransformerOptions options = model->options();
  const TokenGrid grid = options.GridOf(size);
  options.position = OnOtherGrid(options.position, options.grid(), grid);
  options.size = size;
  VisionTransformer made(options);
  if (made->max_length() && *made->max_length() < grid.tokens()) return std::nullopt;
  const torch::NoGradGuard no_grad;
  const auto copy = [](const auto& from, auto to) {
    for (const auto& entry : from) {
      torch::Tensor& tensor = to[entry.key()];
      if (tensor.sizes() != entry.value().sizes()) return false;
      tensor.copy_(entry.value());
    }
    return true;
  };
  if (!copy(model->named_parameters(), made->named_parameters()) ||
      !copy(model->named_buffers(), made->named_buffers())) {
    return std::nullopt;
  }
  made->to(model->device());
  made->train(model->is_training());
  return made;
}

}  // namespace gnomon::lab
