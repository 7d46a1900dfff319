// The tables of pair functions for second derivatives in fp32.
#ifndef GNOMON_SRC_CORE_DUAL_TABLES_H_
#define GNOMON_SRC_CORE_DUAL_TABLES_H_

#include "cpu/dual_table.h"
#include "gnomon/attention.h"

namespace gnomon {

// Returns the table for the selected instruction set.
using GetDualTable = const DualTable& (*)();

// AddDualTable always returns true, so that the initializer of a static variable can call it at
// load time. FindDualTable returns null if there is no table.
bool AddDualTable(const PairFunction& function, GetDualTable get);
const DualTable* FindDualTable(const PairFunction& function);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_DUAL_TABLES_H_
