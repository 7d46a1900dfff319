// Forward-mode differentiation: implements the vocabulary of the definitions
// (src/definitions/README.md) for dual numbers, which are a value and its derivative along one
// direction. Contains all definitions, including those of the tests.
#ifndef GNOMON_TESTS_CORE_DUAL_NUMBER_H_
#define GNOMON_TESTS_CORE_DUAL_NUMBER_H_

#include <cmath>

#include "gnomon/attention.h"

namespace gnomon::testing::dual {

template <class T>
struct Dual {
  T value = 0;
  T tangent = 0;
};

template <class T>
Dual<T> operator+(Dual<T> a, Dual<T> b) {
  return {a.value + b.value, a.tangent + b.tangent};
}
template <class T>
Dual<T> operator-(Dual<T> a, Dual<T> b) {
  return {a.value - b.value, a.tangent - b.tangent};
}
template <class T>
Dual<T> operator*(Dual<T> a, Dual<T> b) {
  return {a.value * b.value, a.tangent * b.value + a.value * b.tangent};
}
template <class T>
Dual<T> operator/(Dual<T> a, Dual<T> b) {
  const T quotient = a.value / b.value;
  return {quotient, (a.tangent - quotient * b.tangent) / b.value};
}
template <class T>
bool operator<(Dual<T> a, Dual<T> b) {
  return a.value < b.value;
}
template <class T>
bool operator<=(Dual<T> a, Dual<T> b) {
  return a.value <= b.value;
}
template <class T>
bool operator>(Dual<T> a, Dual<T> b) {
  return a.value > b.value;
}
template <class T>
bool operator>=(Dual<T> a, Dual<T> b) {
  return a.value >= b.value;
}
template <class T>
bool operator==(Dual<T> a, Dual<T> b) {
  return a.value == b.value;
}

template <class T>
Dual<T> Splat(Dual<T> /*like*/, T value) {
  return {value, 0};
}
template <class T>
Dual<T> Splat(Dual<T> /*like*/, float value) {
  return {static_cast<T>(value), 0};
}
template <class T>
Dual<T> Tiny(Dual<T> /*like*/) {
  return {static_cast<T>(sizeof(T) == 4 ? 1e-30 : 1e-300), 0};
}
template <class T>
Dual<T> Select(bool mask, Dual<T> yes, Dual<T> no) {
  return mask ? yes : no;
}
template <class T>
Dual<T> operator-(Dual<T> a) {
  return {-a.value, -a.tangent};
}
template <class T>
Dual<T> Fma(Dual<T> a, Dual<T> b, Dual<T> c) {
  return a * b + c;
}
template <class T>
Dual<T> Step(Dual<T> a) {
  return {static_cast<T>(a.value > 0 ? 1 : a.value < 0 ? 0 : 0.5), 0};
}
template <class T>
Dual<T> Max(Dual<T> a, Dual<T> b) {
  return Select(a > b, a, b);
}
template <class T>
Dual<T> Min(Dual<T> a, Dual<T> b) {
  return Select(a < b, a, b);
}
template <class T>
Dual<T> Abs(Dual<T> a) {
  return a.value < 0 ? Dual<T>{-a.value, -a.tangent} : a;
}
template <class T>
Dual<T> Sqrt(Dual<T> a) {
  const T root = std::sqrt(a.value);
  return {root, a.tangent / (2 * root)};
}
template <class T>
Dual<T> Rsqrt(Dual<T> a) {
  const T inverse = 1 / std::sqrt(a.value);
  return {inverse, -a.tangent * inverse / (2 * a.value)};
}
template <class T>
Dual<T> Exp(Dual<T> a) {
  const T exp = std::exp(a.value);
  return {exp, a.tangent * exp};
}
template <class T>
Dual<T> Log(Dual<T> a) {
  return {std::log(a.value), a.tangent / a.value};
}
template <class T>
Dual<T> Log1p(Dual<T> a) {
  return {std::log1p(a.value), a.tangent / (1 + a.value)};
}
template <class T>
Dual<T> Tanh(Dual<T> a) {
  const T tanh = std::tanh(a.value);
  return {tanh, a.tangent * (1 - tanh * tanh)};
}
template <class T>
Dual<T> Angle(Dual<T> x, Dual<T> y) {
  const T square = x.value * x.value + y.value * y.value;
  return {std::atan2(y.value, x.value), (x.value * y.tangent - y.value * x.tangent) / square};
}

#include "all_definitions-inl.h"

namespace derived {
namespace vocabulary = ::gnomon::testing::dual;
#include "all_definitions-inl.h"
#include "base/derived_gradient-inl.h"
}  // namespace derived

}  // namespace gnomon::testing::dual

#endif  // GNOMON_TESTS_CORE_DUAL_NUMBER_H_
