// The token maps of cones, on plain views.
#ifndef GNOMON_SRC_CORE_CONE_MAP_H_
#define GNOMON_SRC_CORE_CONE_MAP_H_

#include <cstdint>

#include "cpu/cone_map.h"

namespace gnomon {

// Maps the tokens [begin, end), counted in (B, H, L) order, forward or backward. Each token is
// mapped independently.
void MapConeTokens(const MappedCones<float>& cones, int64_t begin, int64_t end);
void MapConeTokens(const MappedCones<double>& cones, int64_t begin, int64_t end);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_CONE_MAP_H_
