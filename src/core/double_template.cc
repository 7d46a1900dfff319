// Compiles definitions to float64 tables for every instruction set. The including file defines
// GNOMON_DEFINITION_FILE, the file that contains the definitions, and one of these:
//   GNOMON_DOUBLE_ENTRIES(X)  the definitions, X(Struct, name) for each, for DoubleTable(n)
//   GNOMON_DEFINITION         the name of one struct, whose table is added to its pair function
#include "cpu/double.h"
// Must follow double.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/double_template.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include "cpu/definition-inl.h"
#include "hwy/highway.h"

#if defined(GNOMON_DEFINITION) && !defined(GNOMON_DOUBLE_ENTRIES)
#define GNOMON_DOUBLE_ENTRIES(X) X(GNOMON_DEFINITION, )
#endif

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {
namespace {

// Table n is that of entry n; null if this instruction set has no kernels.
const DualTableOf<double>* Table([[maybe_unused]] size_t n) {
#if GNOMON_HAS_NO_KERNELS
  return nullptr;
#else
  using namespace GNOMON_KERNELS;  // NOLINT: the definitions
#define GNOMON_ENTRY(Struct, name)                               \
  {&TableOf<derived::Complete<Struct, derived::Struct>::Type>(), \
   duals::Slopes<duals::derived::Complete<duals::Struct, duals::derived::Struct>::Type>},
  static const DualTableOf<double> kTables[] = {GNOMON_DOUBLE_ENTRIES(GNOMON_ENTRY)};
#undef GNOMON_ENTRY
  return &kTables[n];
#endif
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cstddef>

#include "core/dual_tables.h"
#include "core/pair_function_name.h"
#include "gnomon/attention.h"

namespace gnomon {
namespace {

HWY_EXPORT(Table);

// Table n for the selected instruction set.
const DualTableOf<double>* DoubleTable(size_t n) { return HWY_DYNAMIC_DISPATCH(Table)(n); }

}  // namespace

#ifdef GNOMON_DEFINITION
const PairFunction& GNOMON_PAIR_FUNCTION(GNOMON_DEFINITION)();

namespace {

const DualTableOf<double>* OnlyTable() { return DoubleTable(0); }
[[maybe_unused]] const bool added =
    AddDualTable(GNOMON_PAIR_FUNCTION(GNOMON_DEFINITION)(), OnlyTable);

}  // namespace
#endif
}  // namespace gnomon
#endif
