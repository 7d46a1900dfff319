#include "core/rotation.h"

#include "core/targets.h"

namespace gnomon {

void RotatePairsOf(const PairRotation<float>& rotation, int64_t begin, int64_t end) {
  ChooseTargetOnce();
  PairRotationKernel(rotation, begin, end);
}

void RotatePairsOf(const PairRotation<double>& rotation, int64_t begin, int64_t end) {
  ChooseTargetOnce();
  PairRotationKernel(rotation, begin, end);
}

}  // namespace gnomon
