// The orders of sines and cosines in the columns of sinusoid() (gnomon/torch/attention.h).
#ifndef GNOMON_OPS_COORDINATES_SINUSOID_H_
#define GNOMON_OPS_COORDINATES_SINUSOID_H_

#include <string>
#include <vector>

namespace gnomon {

// The first layout is the default.
inline std::vector<std::string> SinusoidLayouts() { return {"interleaved", "split", "split_xl"}; }

}  // namespace gnomon

#endif  // GNOMON_OPS_COORDINATES_SINUSOID_H_
