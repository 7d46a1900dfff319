// Labelled images or volumes from arrays, and transformations of a batch's pixels.
#ifndef GNOMON_TASKS_IMAGE_DATA_H_
#define GNOMON_TASKS_IMAGE_DATA_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gnomon::lab {

struct LabelledImages {
  torch::Tensor pixels;  // (N, axes..., C), bytes or floats
  torch::Tensor labels;  // (N,), int64

  int64_t count() const { return labels.defined() ? labels.size(0) : 0; }
  int64_t channels() const { return pixels.size(-1); }
  // The sizes of the spatial axes.
  std::vector<int64_t> size() const { return pixels.sizes().slice(1, pixels.dim() - 2).vec(); }
  // The images in `rows` (B,), or those from `first` on, as floats (B, C, axes...). Bytes are
  // divided by 255.
  torch::Tensor Take(const torch::Tensor& rows) const;
  torch::Tensor Take(int64_t first, int64_t number) const;
};

// The name of a task's arrays, such as "images", and their number of spatial axes.
struct ImageKind {
  const char* array;
  int64_t axes;
};

struct ImageData {
  std::string path;
  std::string sha256;
  LabelledImages train;  // empty unless requested
  LabelledImages valid;
  LabelledImages held_out;  // after HoldOut()
  int64_t classes = 0;      // one more than the largest label of the training part

  // Mean and deviation of each channel over all training pixels: (C,) each. A constant channel has
  // deviation 1.
  struct Pixels {
    torch::Tensor mean;
    torch::Tensor deviation;
  };
  Pixels DescribePixels() const;

  // Sets rows of the training part aside (ChooseHeldOut); returns how many.
  int64_t HoldOut(const std::string& noun);
};

// Reads the arrays `train.images` and `valid.images` (N, H, W) or (N, H, W, C), or `train.volumes`
// etc. with three axes, and `train.labels` and `valid.labels`, (N,) or (N, 1), counted from 0. The
// training part is read if `has_training`; otherwise labels may be up to `classes` - 1. Throws
// Error with the file, the array and the reason.
ImageData ReadImages(const std::string& path, const ImageKind& kind, bool has_training,
                     int64_t classes);

// Resizes images (B, C, axes...) by linear interpolation along each axis between pixel centres.
torch::Tensor Resized(const torch::Tensor& images, const std::vector<int64_t>& size);

// Shifts each image by its row of `offsets` (B, axes), in pixels, repeating edge pixels.
torch::Tensor Shifted(const torch::Tensor& images, const torch::Tensor& offsets);

}  // namespace gnomon::lab

#endif  // GNOMON_TASKS_IMAGE_DATA_H_
