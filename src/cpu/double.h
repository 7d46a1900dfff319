// Sources that compile kernels for doubles include this file first.
#ifndef GNOMON_SRC_CPU_DOUBLE_H_
#define GNOMON_SRC_CPU_DOUBLE_H_

#define GNOMON_DOUBLE

// To keep the library small, kernels for doubles are compiled for fewer instruction sets: on x86,
// AVX3, AVX2 and the baseline. The bits in 0xff are extensions of AVX3 that doubles do not use.
#include "hwy/detect_compiler_arch.h"
#if HWY_ARCH_X86
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | 0xff)
#endif

#endif  // GNOMON_SRC_CPU_DOUBLE_H_
