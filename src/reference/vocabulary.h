// The vocabulary of the definitions in double precision (src/definitions/README.md).
#ifndef GNOMON_SRC_REFERENCE_VOCABULARY_H_
#define GNOMON_SRC_REFERENCE_VOCABULARY_H_

#include <cmath>

namespace gnomon::reference {

inline double Splat(double /*like*/, double value) { return value; }
inline double Tiny(double /*like*/) { return 1e-300; }
// Returns NaN if either operand is NaN.
inline double Max(double a, double b) { return a > b || a != a ? a : b; }
inline double Min(double a, double b) { return a < b || a != a ? a : b; }
inline double Abs(double a) { return std::fabs(a); }
inline double Sqrt(double a) { return std::sqrt(a); }
inline double Rsqrt(double a) { return 1.0 / std::sqrt(a); }
inline double Exp(double a) { return std::exp(a); }
inline double Log(double a) { return std::log(a); }
inline double Log1p(double a) { return std::log1p(a); }
inline double Tanh(double a) { return std::tanh(a); }
// Adding 0 turns -0 into 0, so the angle of the origin is 0.
inline double Angle(double x, double y) { return std::atan2(y, x + 0.0); }
inline double Select(bool mask, double yes, double no) { return mask ? yes : no; }

}  // namespace gnomon::reference

#endif  // GNOMON_SRC_REFERENCE_VOCABULARY_H_
