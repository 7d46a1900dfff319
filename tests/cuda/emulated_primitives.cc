// The kernel that calls the primitives, for the emulation.
#include "emulation.h"
// After it:
#include "primitive_calls.cuh"

namespace gnomon::device {
namespace {

const bool kAdded = [] {
  testing::AddEmulatedKernel("primitives", "", calls::CallPrimitives<Constants>);
  return true;
}();

}  // namespace
}  // namespace gnomon::device
