// To keep the library small, sources that include this file first are compiled for fewer
// instruction sets: on x86, AVX3, AVX2 and the baseline. Highway then dispatches to the best of
// these that is not above the selected one. For doubles, the baseline has no kernels (real.h).
#ifndef GNOMON_SRC_CPU_FEW_TARGETS_H_
#define GNOMON_SRC_CPU_FEW_TARGETS_H_

#include "hwy/detect_targets.h"

#if HWY_ARCH_X86
// The bits in 0xff are extensions of AVX3. These sources use none of their instructions.
#define GNOMON_EXTENSIONS 0xff
#undef HWY_DISABLED_TARGETS
#ifdef GNOMON_DOUBLE
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | GNOMON_EXTENSIONS)
#else
// Kernels for floats call functions of other sources, so they must be compiled for the baseline,
// and read tables whose vectors have the selected length. Highway versions without SSE2 would fall
// back from SSE4 to scalars.
#ifdef HWY_SSE2
#define GNOMON_LOW_TARGETS HWY_SSE4
#else
#define GNOMON_LOW_TARGETS 0
#endif
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | ((GNOMON_LOW_TARGETS | GNOMON_EXTENSIONS) & ~(HWY_BASELINE_TARGETS)))
#endif
#endif

#endif  // GNOMON_SRC_CPU_FEW_TARGETS_H_
