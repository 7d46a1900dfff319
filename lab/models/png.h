// Writes PNG files (ISO/IEC 15948).
#ifndef GNOMON_MODELS_PNG_H_
#define GNOMON_MODELS_PNG_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>

namespace gnomon::lab {

// Encodes uint8 pixels (height, width, C) as a PNG without compression; C is 1 for greyscale or 3
// for RGB.
std::string EncodePng(const torch::Tensor& pixels);

// Enlarges pixels (height, width, C) by repeating each one `times` times along both axes.
torch::Tensor Enlarged(const torch::Tensor& pixels, int64_t times);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_PNG_H_
