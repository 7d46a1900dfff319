// Rotation of pairs of columns, on plain views.
#ifndef GNOMON_SRC_CORE_ROTATION_H_
#define GNOMON_SRC_CORE_ROTATION_H_

#include <cstdint>

#include "cpu/rotation.h"

namespace gnomon {

// Rotates the tokens [begin, end), counted in (B, H, L) order. Each token is rotated independently.
void RotatePairsOf(const PairRotation<float>& rotation, int64_t begin, int64_t end);
void RotatePairsOf(const PairRotation<double>& rotation, int64_t begin, int64_t end);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_ROTATION_H_
