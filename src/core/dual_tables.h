// The tables of pair functions for second derivatives.
#ifndef GNOMON_SRC_CORE_DUAL_TABLES_H_
#define GNOMON_SRC_CORE_DUAL_TABLES_H_

#include "cpu/dual_table.h"
#include "gnomon/attention.h"

namespace gnomon {

// Returns the table for the selected instruction set.
using GetDualTable = const DualTable& (*)();

// Always returns true, so that the initializer of a static variable can call it at load time.
bool AddDualTable(const PairFunction& function, GetDualTable get);

// Returns null if there is no table. For doubles, pair functions that are not part of the library
// have none. The environment variable GNOMON_FLOAT64 can also exclude the tables for doubles, so
// that tests can use the reference; Error is thrown if its value is invalid.
template <class T>
const DualTableOf<T>* FindDualTable(const PairFunction& function);
template <>
const DualTableOf<float>* FindDualTable(const PairFunction& function);
template <>
const DualTableOf<double>* FindDualTable(const PairFunction& function);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_DUAL_TABLES_H_
