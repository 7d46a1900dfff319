// The kernels that call the primitives, compiled for the emulator.
#include "emulation.h"
// Must follow emulation.h:
#include "primitive_calls.cuh"
#include "wgmma_calls.cuh"

namespace gnomon::device {
namespace {

const bool kAdded = [] {
  testing::AddEmulatedKernel("primitives", "", calls::CallPrimitives<Constants>);
  testing::AddEmulatedKernel("wgmma_primitives", "", calls::CallWgmma<Constants>);
  return true;
}();

}  // namespace
}  // namespace gnomon::device
