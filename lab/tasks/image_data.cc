#include "tasks/image_data.h"

#include <algorithm>

#include "gnomon/attention.h"
#include "training/arrays.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab {
namespace {

// The number of images that are converted to floats at once when all images are processed.
constexpr int64_t kChunk = 1024;

[[noreturn]] void Fail(const std::string& path, const std::string& array,
                       const std::string& fault) {
  throw Error(StrCat(path, ": the array '", array, "' ", fault));
}

torch::Tensor AsPixels(const torch::Tensor& rows) {
  const torch::Tensor floats = rows.to(torch::kFloat);
  const torch::Tensor pixels = rows.scalar_type() == torch::kByte ? floats.div(255) : floats;
  return pixels.movedim(-1, 1).contiguous();
}

// Reads pixels, and adds a channel axis if there is none.
torch::Tensor ReadPixels(const Arrays& arrays, const std::string& name, int64_t axes) {
  const std::string lengths = name + "_lengths";
  if (arrays.Has(lengths)) {
    Fail(arrays.path(), lengths,
         "indicates rows of different sizes; expected one array with images of one size");
  }
  const bool has_channels = arrays.CountAxes(name) == axes + 2;
  const int64_t expected = has_channels ? axes + 2 : axes + 1;
  // Bytes are not converted, because floats need four times as much memory.
  const torch::Tensor& stored = arrays.Get(name, expected);
  const torch::Tensor pixels =
      stored.scalar_type() == torch::kByte ? stored : arrays.Numbers(name, expected);
  return has_channels ? pixels : pixels.unsqueeze(-1);
}

// Maximum number of classes; larger labels are probably not class indices.
constexpr int64_t kMostClasses = 65536;

torch::Tensor ReadLabels(const Arrays& arrays, const std::string& name, int64_t highest) {
  const bool is_column = arrays.CountAxes(name) == 2;
  const torch::Tensor labels = arrays.Integers(name, is_column ? 2 : 1, 0, highest);
  if (is_column && labels.size(1) != 1) {
    Fail(arrays.path(), name,
         StrCat("has shape ", labels.sizes(), "; expected one label per image"));
  }
  return labels.flatten();
}

}  // namespace

torch::Tensor LabelledImages::Take(const torch::Tensor& rows) const {
  return AsPixels(pixels.index_select(0, rows));
}

torch::Tensor LabelledImages::Take(int64_t first, int64_t number) const {
  return AsPixels(pixels.narrow(0, first, number));
}

ImageData::Pixels ImageData::DescribePixels() const {
  const int64_t channels = train.channels();
  torch::Tensor sum = torch::zeros({channels}, torch::kDouble);
  torch::Tensor squares = torch::zeros({channels}, torch::kDouble);
  for (int64_t at = 0; at < train.count(); at += kChunk) {
    const torch::Tensor values = train.Take(at, std::min(kChunk, train.count() - at))
                                     .transpose(0, 1)
                                     .flatten(1)
                                     .to(torch::kDouble);
    sum += values.sum(1);
    squares += values.square().sum(1);
  }
  const auto number = static_cast<double>(train.pixels.numel() / channels);
  const torch::Tensor mean = sum / number;
  const torch::Tensor variance = (squares / number - mean.square()).clamp_min(0);
  // Due to rounding, a constant channel has a variance of about 1e-16 times its squared value.
  const torch::Tensor is_constant = variance <= 1e-12 * mean.square();
  return {mean.to(torch::kFloat),
          torch::where(is_constant, torch::ones_like(variance), variance.sqrt()).to(torch::kFloat)};
}

int64_t ImageData::HoldOut(const std::string& noun) {
  const HeldOutRows rows = ChooseHeldOut(train.count(), noun);
  const auto select = [&](const std::vector<int64_t>& chosen) {
    const torch::Tensor index = torch::tensor(chosen, torch::kLong);
    return LabelledImages{train.pixels.index_select(0, index), train.labels.index_select(0, index)};
  };
  held_out = select(rows.held_out);
  train = select(rows.training);
  return held_out.count();
}

ImageData ReadImages(const std::string& path, const ImageKind& kind, bool has_training,
                     int64_t classes) {
  const Arrays arrays(path);
  ImageData data;
  data.path = path;
  data.sha256 = arrays.sha256();
  const auto read = [&](const std::string& part, int64_t highest) {
    const std::string images = StrCat(part, ".", kind.array);
    const std::string labels = part + ".labels";
    LabelledImages found;
    found.pixels = ReadPixels(arrays, images, kind.axes);
    found.labels = ReadLabels(arrays, labels, highest < 0 ? kMostClasses - 1 : highest);
    arrays.CheckRows(images, labels);
    return found;
  };
  if (has_training) {
    data.train = read("train", -1);
    data.classes = data.train.labels.max().item<int64_t>() + 1;
  } else {
    data.classes = classes;
  }
  data.valid = read("valid", data.classes - 1);
  if (has_training &&
      (data.valid.size() != data.train.size() || data.valid.channels() != data.train.channels())) {
    const auto describe = [](const LabelledImages& part) {
      return StrCat(SizesText(part.size()), " with ", Counted(part.channels(), "channel"));
    };
    Fail(path, StrCat("valid.", kind.array),
         StrCat("has images of ", describe(data.valid), ", but 'train.", kind.array, "' has ",
                describe(data.train), "; expected the same size"));
  }
  return data;
}

torch::Tensor Resized(const torch::Tensor& images, const std::vector<int64_t>& size) {
  if (images.sizes().slice(2) == torch::IntArrayRef(size)) return images;
  using torch::nn::functional::interpolate;
  auto options = torch::nn::functional::InterpolateFuncOptions().size(size).align_corners(false);
  if (size.size() == 2) return interpolate(images, options.mode(torch::kBilinear));
  return interpolate(images, options.mode(torch::kTrilinear));
}

torch::Tensor Shifted(const torch::Tensor& images, const torch::Tensor& offsets) {
  torch::Tensor moved = images;
  for (int64_t axis = 2; axis < images.dim(); ++axis) {
    const int64_t length = images.size(axis);
    std::vector<int64_t> along(images.dim(), 1);
    along[axis] = length;
    std::vector<int64_t> by_image(images.dim(), 1);
    by_image[0] = images.size(0);
    const torch::Tensor from =
        (torch::arange(length).view(along) - offsets.select(1, axis - 2).view(by_image))
            .clamp(0, length - 1);
    moved = moved.gather(axis, from.expand(images.sizes()));
  }
  return moved;
}

}  // namespace gnomon::lab
