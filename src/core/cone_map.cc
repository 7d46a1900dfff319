#include "core/cone_map.h"

#include "core/targets.h"

namespace gnomon {

void MapConeTokens(const MappedCones<float>& cones, int64_t begin, int64_t end) {
  ChooseTargetOnce();
  ConeMapKernel(cones, begin, end);
}

void MapConeTokens(const MappedCones<double>& cones, int64_t begin, int64_t end) {
  ChooseTargetOnce();
  ConeMapKernel(cones, begin, end);
}

}  // namespace gnomon
