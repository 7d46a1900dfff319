// Included first by the sources that compile kernels for doubles.
#ifndef GNOMON_SRC_CPU_DOUBLE_H_
#define GNOMON_SRC_CPU_DOUBLE_H_

#define GNOMON_DOUBLE

// Fewer instruction sets, for a smaller library: of the x86 ones AVX3, AVX2 and the baseline. Lower
// bits are extensions of AVX3, which doubles do not use.
#include "hwy/detect_compiler_arch.h"
#if HWY_ARCH_X86
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | 0xff)
#endif

#endif  // GNOMON_SRC_CPU_DOUBLE_H_
