// Writes PNG files (ISO/IEC 15948).
#ifndef GNOMON_MODELS_PNG_H_
#define GNOMON_MODELS_PNG_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>

namespace gnomon::lab {

// The bytes of a PNG of pixels (height, width, C) of uint8, C = 1 for grey or 3 for red, green and
// blue. The data are stored without compression.
std::string EncodePng(const torch::Tensor& pixels);

// Repeats each pixel of (height, width, C) `times` times along both axes.
torch::Tensor Enlarged(const torch::Tensor& pixels, int64_t times);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_PNG_H_
