// Reads labelled images or volumes from arrays, and transforms the pixels of a batch.
#ifndef GNOMON_TASKS_IMAGE_DATA_H_
#define GNOMON_TASKS_IMAGE_DATA_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "models/vision_transformer.h"
#include "training/options.h"

namespace gnomon::lab {

struct LabelledImages {
  torch::Tensor pixels;  // (N, axes..., C), bytes or floats
  torch::Tensor labels;  // (N,), int64

  int64_t count() const { return labels.defined() ? labels.size(0) : 0; }
  int64_t channels() const { return pixels.size(-1); }
  // The sizes of the spatial axes.
  std::vector<int64_t> size() const { return pixels.sizes().slice(1, pixels.dim() - 2).vec(); }
  // Returns the images `rows` (B,), or those starting at `first`, as floats (B, C, axes...). Bytes
  // are divided by 255.
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
  LabelledImages held_out;  // set by HoldOut()
  int64_t classes = 0;      // largest training label + 1

  // Mean and standard deviation (C,) of each channel over all training pixels; the deviation of a
  // constant channel is set to 1.
  struct Pixels {
    torch::Tensor mean;
    torch::Tensor deviation;
  };
  Pixels DescribePixels() const;

  // Holds out the rows of the training split that ChooseHeldOut() selects; returns their number.
  int64_t HoldOut(const std::string& noun);
};

// Reads the arrays `train.images` and `valid.images` (N, H, W) or (N, H, W, C), or `train.volumes`
// etc. with three spatial axes. Also reads `train.labels` and `valid.labels`, (N,) or (N, 1):
// class indices, starting at 0. Reads the training split only if `has_training`; otherwise, labels
// must be below `classes`. Throws an Error that names the file, the array and the fault.
ImageData ReadImages(const std::string& path, const ImageKind& kind, bool has_training,
                     int64_t classes);

// Sets the sizes of a model's images and its number of classes to those of the training split,
// unless the model was read from a file, which contains them. Checks them, and that patches fit.
// `path`: the data.
template <class Model>
void TakeSizes(const ImageData& data, const std::string& path, Model* model) {
  if (model->size.empty()) {
    model->size = data.train.size();
    model->channels = data.train.channels();
    model->classes = data.classes;
    CheckRanges(InSection("model", model->Options()), path);
  }
  CheckPatches(model->patch, model->size);
}

// Resizes images (B, C, axes...) by linear interpolation along each axis between pixel centres.
torch::Tensor Resized(const torch::Tensor& images, const std::vector<int64_t>& size);

// Shifts each image by its row of `offsets` (B, axes), in pixels, and repeats the edge pixels.
torch::Tensor Shifted(const torch::Tensor& images, const torch::Tensor& offsets);

}  // namespace gnomon::lab

#endif  // GNOMON_TASKS_IMAGE_DATA_H_
