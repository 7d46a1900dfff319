// The definitions' vocabulary for numbers that count operations. The count is the cost of a pair in
// addition to the inner product, the scale and the exponential.
#ifndef GNOMON_SRC_CORE_COUNTING_H_
#define GNOMON_SRC_CORE_COUNTING_H_

#include "gnomon/attention.h"

namespace gnomon::counting {

// The operation count of the calling thread.
inline thread_local OperationCount count;

struct Number {
  double value;
};
struct Mask {
  bool value;
};

// The results may be arbitrary, because no branch depends on them.
inline Number Simple(double value) {
  ++count.simple;
  return {value};
}
inline Number Special(double value) {
  ++count.special;
  return {value};
}
inline Mask Compare(bool value) {
  ++count.simple;
  return {value};
}

inline Number operator+(Number a, Number b) { return Simple(a.value + b.value); }
inline Number operator-(Number a, Number b) { return Simple(a.value - b.value); }
inline Number operator*(Number a, Number b) { return Simple(a.value * b.value); }
inline Number operator/(Number a, Number b) { return Special(a.value / b.value); }
inline Mask operator<(Number a, Number b) { return Compare(a.value < b.value); }
inline Mask operator<=(Number a, Number b) { return Compare(a.value <= b.value); }
inline Mask operator>(Number a, Number b) { return Compare(a.value > b.value); }
inline Mask operator>=(Number a, Number b) { return Compare(a.value >= b.value); }
inline Mask operator==(Number a, Number b) { return Compare(a.value == b.value); }

// Constants are free.
inline Number Splat(Number /*like*/, float value) { return {value}; }
inline Number Tiny(Number like) { return like; }
inline Number Max(Number a, Number /*b*/) { return Simple(a.value); }
inline Number Min(Number a, Number /*b*/) { return Simple(a.value); }
inline Number Abs(Number a) { return Simple(a.value); }
inline Number Select(Mask /*mask*/, Number yes, Number /*no*/) { return Simple(yes.value); }
inline Number Sqrt(Number a) { return Special(a.value); }
inline Number Rsqrt(Number a) { return Special(a.value); }
inline Number Exp(Number a) { return Special(a.value); }
inline Number Log(Number a) { return Special(a.value); }
inline Number Log1p(Number a) { return Special(a.value); }
inline Number Tanh(Number a) { return Special(a.value); }
inline Number Angle(Number x, Number /*y*/) { return Special(x.value); }

// Counts the operations of the forward pass.
template <class Definition>
OperationCount Count() {
  count = {};
  const Number one = {1};
  const Number scalars[] = {one, one, one};
  Definition::Value(one, scalars, scalars, scalars);
  // The operations of a squared distance: the norms minus twice the product, and the check whether
  // the tokens are too close for this formula to be accurate.
  constexpr int kOfSquaredDistance = 5;
  if (Definition::kInput == PairInput::kSquaredDistance) count.simple += kOfSquaredDistance;
  return count;
}

}  // namespace gnomon::counting

#endif  // GNOMON_SRC_CORE_COUNTING_H_
