// Registration of pair functions by term libraries, which does not depend on PyTorch.
#ifndef GNOMON_OPS_CATALOGUE_PAIR_FUNCTION_H_
#define GNOMON_OPS_CATALOGUE_PAIR_FUNCTION_H_

#include <gnomon/attention.h>

namespace gnomon {

// A static object of this type registers a pair function, just as the types in registry.h register
// entries.
struct RegisterPairFunction {
  explicit RegisterPairFunction(const PairFunction& function);
};

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_PAIR_FUNCTION_H_
