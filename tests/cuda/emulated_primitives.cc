// The kernel that calls the primitives, compiled for the emulator.
#include "emulation.h"
// Must follow emulation.h:
#include "primitive_calls.cuh"

namespace gnomon::device {
namespace {

const bool kAdded = [] {
  testing::AddEmulatedKernel("primitives", "", calls::CallPrimitives<Constants>);
  return true;
}();

}  // namespace
}  // namespace gnomon::device
