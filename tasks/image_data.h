// Labelled images, or volumes, from arrays, and what is done to the pixels of a batch.
#ifndef GNOMON_TASKS_IMAGE_DATA_H_
#define GNOMON_TASKS_IMAGE_DATA_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gnomon::models {

struct LabelledImages {
  torch::Tensor pixels;  // (N, axes..., C), bytes or floats
  torch::Tensor labels;  // (N,), int64

  int64_t count() const { return labels.defined() ? labels.size(0) : 0; }
  int64_t channels() const { return pixels.size(-1); }
  // The lengths of their axes.
  std::vector<int64_t> size() const { return pixels.sizes().slice(1, pixels.dim() - 2).vec(); }
  // Those of `rows` (B,), or from `first` on, as floats (B, C, axes...); bytes are divided by 255.
  torch::Tensor Take(const torch::Tensor& rows) const;
  torch::Tensor Take(int64_t first, int64_t number) const;
};

// How the arrays of a task are called, "images", and how many axes each of them has.
struct ImageKind {
  const char* array;
  int64_t axes;
};

struct ImageData {
  std::string path;
  std::string sha256;
  LabelledImages train;  // none where it was not asked for
  LabelledImages valid;
  int64_t classes = 0;  // one more than the largest label of the training part

  // Of each channel of the training part, over all pixels: (C,) each. The deviation of a constant
  // channel is 1.
  struct Pixels {
    torch::Tensor mean;
    torch::Tensor deviation;
  };
  Pixels DescribePixels() const;
};

// The arrays `train.images` and `valid.images` (N, H, W) or (N, H, W, C), or with three axes
// `train.volumes` and so on, and `train.labels` and `valid.labels`, (N,) or (N, 1): numbers from 0.
// The training part is read if `has_training`; else labels may be up to `classes` - 1. Throws Error
// naming the file, the array and what is wrong.
ImageData ReadImages(const std::string& path, const ImageKind& kind, bool has_training,
                     int64_t classes);

// Images (B, C, axes...) of another size, interpolated linearly along each axis between the centres
// of pixels.
torch::Tensor Resized(const torch::Tensor& images, const std::vector<int64_t>& size);

// Each image moved by its row of `offsets` (B, axes), in pixels; those at the edge are repeated.
torch::Tensor Shifted(const torch::Tensor& images, const torch::Tensor& offsets);

}  // namespace gnomon::models

#endif  // GNOMON_TASKS_IMAGE_DATA_H_
