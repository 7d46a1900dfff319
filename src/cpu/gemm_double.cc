#include "cpu/double.h"
// Must follow double.h:
#include "cpu/gemm.cc"  // NOLINT: the same source for doubles
