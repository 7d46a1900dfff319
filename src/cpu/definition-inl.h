// The definitions of GNOMON_DEFINITION_FILE in the kernels' number type: on vectors in
// namespace GNOMON_KERNELS and on dual numbers in its namespace duals. Each has a namespace
// `derived` with the same definitions after `Gradient` was derived. Included once per instruction
// set, so it has no include guard.
#include "cpu/dual_rows-inl.h"
#include "cpu/pair_rows-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {
namespace duals {
namespace {

#include GNOMON_DEFINITION_FILE

namespace derived {
namespace vocabulary = ::gnomon::GNOMON_KERNELS::duals;
#include "base/derived_gradient-inl.h"
#include GNOMON_DEFINITION_FILE
}  // namespace derived

}  // namespace
}  // namespace duals

namespace {

// For vectors, the vocabulary uses Highway's Abs and Sqrt.
using hn::Abs;
using hn::Sqrt;

#include GNOMON_DEFINITION_FILE

namespace derived {
namespace vocabulary = ::gnomon::GNOMON_KERNELS;
#include "base/derived_gradient-inl.h"
#include GNOMON_DEFINITION_FILE
}  // namespace derived

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS
}  // namespace gnomon
HWY_AFTER_NAMESPACE();
