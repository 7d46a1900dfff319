// Pair functions of term libraries, without PyTorch.
#ifndef GNOMON_OPS_CATALOGUE_PAIR_FUNCTION_H_
#define GNOMON_OPS_CATALOGUE_PAIR_FUNCTION_H_

#include <gnomon/attention.h>

namespace gnomon {

// A static object of this type registers a pair function, like the types in registry.h, which
// register entries.
struct RegisterPairFunction {
  explicit RegisterPairFunction(const PairFunction& function);
};

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_PAIR_FUNCTION_H_
