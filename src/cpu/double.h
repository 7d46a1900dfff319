// Sources that compile kernels for doubles include this file first.
#ifndef GNOMON_SRC_CPU_DOUBLE_H_
#define GNOMON_SRC_CPU_DOUBLE_H_

#define GNOMON_DOUBLE

#include "cpu/few_targets.h"

#endif  // GNOMON_SRC_CPU_DOUBLE_H_
