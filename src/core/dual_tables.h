// The tables of pair functions for second derivatives and for float64.
#ifndef GNOMON_SRC_CORE_DUAL_TABLES_H_
#define GNOMON_SRC_CORE_DUAL_TABLES_H_

#include "cpu/dual_table.h"
#include "gnomon/attention.h"

namespace gnomon {

// Returns the table for the selected instruction set; null if the set has no kernels.
template <class T>
using GetDualTable = const DualTableOf<T>* (*)();

// Always return true, so that the initializer of a static variable can call them at load time. For
// doubles, only pair functions that are not part of the library are added.
bool AddDualTable(const PairFunction& function, GetDualTable<float> get);
bool AddDualTable(const PairFunction& function, GetDualTable<double> get);

// Returns null if there is no table: for doubles, on x86 processors without AVX2. The environment
// variable GNOMON_FLOAT64 can exclude the tables for doubles, so that tests can use the reference;
// Error is thrown if its value is invalid.
template <class T>
const DualTableOf<T>* FindDualTable(const PairFunction& function);
template <>
const DualTableOf<float>* FindDualTable(const PairFunction& function);
template <>
const DualTableOf<double>* FindDualTable(const PairFunction& function);
// The table that AddDualTable added, or null.
const DualTableOf<double>* FindAddedDoubles(const PairFunction& function);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_DUAL_TABLES_H_
