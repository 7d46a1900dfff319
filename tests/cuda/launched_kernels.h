// The kernels that calls of the operator launch.
#ifndef GNOMON_TESTS_CUDA_LAUNCHED_KERNELS_H_
#define GNOMON_TESTS_CUDA_LAUNCHED_KERNELS_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "cuda/attention.h"
#include "cuda/backend.h"
#include "gnomon/attention.h"

namespace gnomon::testing {

// A causal call.
struct Form {
  const char* name;
  cuda::Element element;
  int64_t dim;
  bool bias = false;
  bool mask = false;         // segments, pair mask and dropout
  bool biases = false;       // two-part key biases and pair biases
  bool tables = false;       // layouts: biases, relative keys, values and queries
  bool temperature = false;  // and a soft cap
  int64_t heads = 2;         // with few heads, the keys are divided into parts
  bool factor = true;        // whether the gradients of factors and scalars of heads are computed
  bool hopper = false;       // whether the GPU has compute capability 9.0
  bool exact = true;         // whether precise outputs are stored; otherwise there are two passes
  bool pages = false;        // whether keys and values are in pages; forward only
};

// kTangents: the derivatives of both passes.
enum class Passes { kBoth, kForward, kBackward, kTangents };

struct LaunchedKernel {
  cuda::KernelName name;
  cuda::LaunchShape shape;
};

// Returns the kernels that the passes launch, each once.
std::vector<LaunchedKernel> KernelsOf(const PairFunction& function, const Form& form,
                                      Passes passes = Passes::kBoth);

// Returns a constant of constants.h.
int64_t ConstantOf(const cuda::KernelName& name, std::string_view constant);

// Kernels of token maps (cuda/token_map.h): each element type, map, rotation and alignment.
std::vector<LaunchedKernel> KernelsOfTokenMaps();

}  // namespace gnomon::testing

#endif  // GNOMON_TESTS_CUDA_LAUNCHED_KERNELS_H_
