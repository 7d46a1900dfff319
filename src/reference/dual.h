// Arithmetic of dual numbers, and the definitions' vocabulary for them (src/definitions/README.md).
// Comparisons use only the values. At kinks, derivatives are the subgradients of the definitions:
// ties of a maximum are split evenly, and roots of 0 have derivative 0.
#ifndef GNOMON_SRC_REFERENCE_DUAL_H_
#define GNOMON_SRC_REFERENCE_DUAL_H_

#include <cmath>
#include <numbers>

#include "gnomon/derivatives.h"

namespace gnomon {

inline Dual operator+(Dual a, Dual b) { return {a.value + b.value, a.tangent + b.tangent}; }
inline Dual operator-(Dual a, Dual b) { return {a.value - b.value, a.tangent - b.tangent}; }
inline Dual operator-(Dual a) { return {-a.value, -a.tangent}; }
inline Dual operator*(Dual a, Dual b) {
  return {a.value * b.value, a.tangent * b.value + a.value * b.tangent};
}
// A constant has no tangent. The general product could add infinity times 0, which is NaN.
inline Dual operator*(Dual a, double b) { return {a.value * b, a.tangent * b}; }
inline Dual operator*(double a, Dual b) { return b * a; }
inline Dual operator/(Dual a, double b) { return {a.value / b, a.tangent / b}; }
inline Dual operator/(Dual a, Dual b) {
  const double quotient = a.value / b.value;
  return {quotient, (a.tangent - quotient * b.tangent) / b.value};
}
inline Dual& operator+=(Dual& a, Dual b) { return a = a + b; }
inline Dual& operator-=(Dual& a, Dual b) { return a = a - b; }
inline Dual& operator*=(Dual& a, Dual b) { return a = a * b; }
inline Dual& operator/=(Dual& a, Dual b) { return a = a / b; }

inline bool operator<(Dual a, Dual b) { return a.value < b.value; }
inline bool operator<=(Dual a, Dual b) { return a.value <= b.value; }
inline bool operator>(Dual a, Dual b) { return a.value > b.value; }
inline bool operator>=(Dual a, Dual b) { return a.value >= b.value; }
inline bool operator==(Dual a, Dual b) { return a.value == b.value; }
inline bool operator!=(Dual a, Dual b) { return a.value != b.value; }

inline Dual Splat(Dual /*like*/, double value) { return value; }
inline Dual Tiny(Dual /*like*/) { return 1e-300; }
inline Dual Select(bool mask, Dual yes, Dual no) { return mask ? yes : no; }
inline Dual Max(Dual a, Dual b) {
  if (a == b) return {a.value, (a.tangent + b.tangent) / 2};
  return a > b || a != a ? a : b;
}
inline Dual Min(Dual a, Dual b) {
  if (a == b) return {a.value, (a.tangent + b.tangent) / 2};
  return a < b || a != a ? a : b;
}
inline Dual Abs(Dual a) {
  return {std::fabs(a.value), a > 0 ? a.tangent : a < 0 ? -a.tangent : 0 * a.tangent};
}
inline Dual Sqrt(Dual a) {
  const double root = std::sqrt(a.value);
  return {root, root == 0 ? 0 : a.tangent / (2 * root)};
}
inline Dual Rsqrt(Dual a) {
  const double inverse = 1 / std::sqrt(a.value);
  return {inverse, -a.tangent * inverse / (2 * a.value)};
}
inline Dual Exp(Dual a) {
  const double value = std::exp(a.value);
  return {value, a.tangent * value};
}
inline Dual Log(Dual a) { return {std::log(a.value), a.tangent / a.value}; }
inline Dual Log1p(Dual a) { return {std::log1p(a.value), a.tangent / (1 + a.value)}; }
inline Dual Tanh(Dual a) {
  const double value = std::tanh(a.value);
  return {value, a.tangent * (1 - value * value)};
}
inline Dual Angle(Dual x, Dual y) {
  const double square = x.value * x.value + y.value * y.value;
  const double tangent = square == 0 ? 0 : (x.value * y.tangent - y.value * x.tangent) / square;
  return {std::atan2(y.value, x.value + 0.0), tangent};
}

inline double Exp2(double a) { return std::exp2(a); }
inline Dual Exp2(Dual a) {
  const double value = std::exp2(a.value);
  return {value, value == 0 ? 0 : a.tangent * (value * std::numbers::ln2)};
}
inline double Log2(double a) { return std::log2(a); }
inline Dual Log2(Dual a) { return {std::log2(a.value), a.tangent / (a.value * std::numbers::ln2)}; }

inline double ValueOf(double a) { return a; }
inline double ValueOf(Dual a) { return a.value; }

}  // namespace gnomon

#endif  // GNOMON_SRC_REFERENCE_DUAL_H_
