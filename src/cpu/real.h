// The number type of the kernels: float or, in sources that define GNOMON_DOUBLE, double. Both use
// the same headers, each in a separate namespace.
#ifndef GNOMON_SRC_CPU_REAL_H_
#define GNOMON_SRC_CPU_REAL_H_

#ifdef GNOMON_DOUBLE
#define GNOMON_KERNELS HWY_CONCAT(HWY_NAMESPACE, Double)
#define GNOMON_REAL double
#else
#define GNOMON_KERNELS HWY_NAMESPACE
#define GNOMON_REAL float
#endif

// For functions that call a pair function, which the compiler may consider too large to inline: a
// function call per vector would be slow. For doubles, pair functions are never inlined.
#ifdef GNOMON_DOUBLE
#define GNOMON_FLATTEN
#else
#define GNOMON_FLATTEN HWY_FLATTEN
#endif

#endif  // GNOMON_SRC_CPU_REAL_H_
