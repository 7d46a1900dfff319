// The number type of the kernels: float or, in sources that define GNOMON_DOUBLE, double. Both use
// the same headers, each in a separate namespace.
#ifndef GNOMON_SRC_CPU_REAL_H_
#define GNOMON_SRC_CPU_REAL_H_

#include "hwy/detect_targets.h"

#ifdef GNOMON_DOUBLE
#define GNOMON_KERNELS HWY_CONCAT(HWY_NAMESPACE, Double)
#define GNOMON_REAL double
#else
#define GNOMON_KERNELS HWY_NAMESPACE
#define GNOMON_REAL float
#endif

// Whether there are no kernels for the current instruction set: for doubles, for the baseline of
// x86 in a library for several sets, whose vectors hold at most two. The reference computes float64
// calls there. Sources define functions that are not called then.
#if defined(GNOMON_DOUBLE) && HWY_ARCH_X86 && !defined(HWY_COMPILE_ONLY_STATIC)
#define GNOMON_HAS_NO_KERNELS (HWY_TARGET == HWY_STATIC_TARGET && HWY_TARGET > HWY_AVX2)
#else
#define GNOMON_HAS_NO_KERNELS 0
#endif

// For functions that call a pair function, which the compiler may consider too large to inline: a
// function call per vector would be slow. For doubles, pair functions are never inlined.
#ifdef GNOMON_DOUBLE
#define GNOMON_FLATTEN
#else
#define GNOMON_FLATTEN HWY_FLATTEN
#endif

#endif  // GNOMON_SRC_CPU_REAL_H_
