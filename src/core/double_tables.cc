// The float64 tables of the library's pair functions. User-defined pair functions have no such
// tables, so that their libraries are smaller.
#include "cpu/double.h"
// Must follow double.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/double_tables.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include "cpu/dual_rows-inl.h"
#include "cpu/pair_rows-inl.h"
#include "definition_list.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace GNOMON_KERNELS {
namespace duals {
namespace {

#include "definition_files.h"

namespace derived {
namespace vocabulary = ::gnomon::GNOMON_KERNELS::duals;
#include "base/derived_gradient-inl.h"
#include "definition_files.h"
}  // namespace derived

}  // namespace
}  // namespace duals

namespace {

// For vectors, the vocabulary uses Highway's Abs and Sqrt.
using hn::Abs;
using hn::Sqrt;

#include "definition_files.h"

namespace derived {
namespace vocabulary = ::gnomon::GNOMON_KERNELS;
#include "base/derived_gradient-inl.h"
#include "definition_files.h"
}  // namespace derived

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace GNOMON_KERNELS

namespace HWY_NAMESPACE {
namespace {

// Tables are in the order of PairFunctions().
const DualTableOf<double>* Table(size_t n) {
  using namespace GNOMON_KERNELS;  // NOLINT: the definitions
#define GNOMON_ENTRY(Struct, name)                               \
  {&TableOf<derived::Complete<Struct, derived::Struct>::Type>(), \
   duals::Slopes<duals::derived::Complete<duals::Struct, duals::derived::Struct>::Type>},
  static const DualTableOf<double> kTables[] = {GNOMON_FOR_EACH_DEFINITION(GNOMON_ENTRY)};
#undef GNOMON_ENTRY
  return &kTables[n];
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "core/dual_tables.h"
#include "core/engine.h"
#include "core/targets.h"

namespace gnomon {
namespace {

HWY_EXPORT(Table);

bool UsesReference() {
  const char* const value = std::getenv("GNOMON_FLOAT64");
  if (value == nullptr || *value == '\0') return false;
  if (std::string_view(value) == "reference") return true;
  throw Error("attention: GNOMON_FLOAT64 is '" + std::string(value) +
              "'; expected reference or an empty value");
}

}  // namespace

template <>
const DualTableOf<double>* FindDualTable(const PairFunction& function) {
  if (UsesReference()) return nullptr;
  ChooseTargetOnce();
  const std::vector<const PairFunction*>& own = PairFunctions();
  const auto found = std::find(own.begin(), own.end(), &function);
  if (found == own.end()) return nullptr;
  return HWY_DYNAMIC_DISPATCH(Table)(static_cast<size_t>(found - own.begin()));
}

const PairTableOf<double>* FindDoubleTable(const PairFunction& function) {
  const DualTableOf<double>* const table = FindDualTable<double>(function);
  return table == nullptr ? nullptr : table->pairs;
}

}  // namespace gnomon
#endif
