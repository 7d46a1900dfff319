// Pair functions of libraries of terms, without PyTorch.
#ifndef GNOMON_OPS_CATALOGUE_PAIR_FUNCTION_H_
#define GNOMON_OPS_CATALOGUE_PAIR_FUNCTION_H_

#include <gnomon/attention.h>

namespace gnomon {

// An object of this in a file makes a pair function one of the library's, as those of registry.h do
// with entries.
struct RegisterPairFunction {
  explicit RegisterPairFunction(const PairFunction& function);
};

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_PAIR_FUNCTION_H_
