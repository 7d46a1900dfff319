#include "cpu/double.h"
// Must follow double.h:
#include "cpu/graph_derivatives.cc"  // NOLINT: the same source for doubles
