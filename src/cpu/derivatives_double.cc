#include "cpu/double.h"
// Must follow double.h:
#include "cpu/derivatives.cc"  // NOLINT: the same source for doubles
