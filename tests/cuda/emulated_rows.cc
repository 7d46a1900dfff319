// The kernels without a pair function, compiled for the emulator.
#include "emulation.h"
// Must follow emulation.h:
#include "cuda/derivatives.cuh"
#include "cuda/forward.cuh"
#include "cuda/one_pass.cuh"
#include "cuda/relative.cuh"
#include "cuda/rows.cuh"
#include "cuda/skipping.cuh"
#include "cuda/token_map.cuh"

namespace gnomon::device {
namespace {

const bool kAdded = [] {
  testing::AddEmulatedKernel("merge", "", Merge<Constants>);
  testing::AddEmulatedKernel("prepare_intervals", "", PrepareIntervals<Constants>);
  testing::AddEmulatedKernel("bound_biases", "", BoundBiases<Constants>);
  testing::AddEmulatedKernel("prepare_places", "", PreparePlaces<Constants>);
  testing::AddEmulatedKernel("find_visible_keys", "", FindVisibleKeys<Constants>);
  testing::AddEmulatedKernel("ascend_intervals", "", AscendIntervals<Constants>);
  testing::AddEmulatedKernel("prepare_queries", "", PrepareQueries<Constants>);
  testing::AddEmulatedKernel("prepare_keys", "", PrepareKeys<Constants>);
  testing::AddEmulatedKernel("prepare_delta", "", PrepareDelta<Constants>);
  testing::AddEmulatedKernel("prepare_norm_tangents", "", PrepareNormTangents<Constants>);
  testing::AddEmulatedKernel("add_up", "", AddUp<Constants>);
  testing::AddEmulatedKernel("add_up_all", "", AddUpAll<Constants>);
  testing::AddEmulatedKernel("multiply", "", Multiply<Constants>);
  testing::AddEmulatedKernel("clear_sums", "", ClearSums<Constants>);
  testing::AddEmulatedKernel("clear_pairs", "", ClearPairs<Constants>);
  testing::AddEmulatedKernel("map_tokens", "", MapTokens<Constants>);
  testing::AddEmulatedKernel("map_tokens_backward", "", MapTokensBackward<Constants>);
  return true;
}();

}  // namespace
}  // namespace gnomon::device
