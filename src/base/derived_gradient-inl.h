// Derives the gradient of a definition that has none, by evaluating its Value with dual numbers
// (src/definitions/README.md).
//
// This file has no include guard. For each vocabulary, it is included in a separate namespace,
// after the namespace alias `vocabulary` and before the definition, which then uses the functions
// below. At kinks, the derivatives are the same as in src/reference/dual.h.

template <class V>
struct Tangent {
  // Not defaulted, because a defaulted constructor is not compiled for the target instruction set.
  Tangent() {}
  Tangent(V number, V derivative) : value(number), tangent(derivative) {}

  V value;
  V tangent;
};

template <class V>
inline Tangent<V> operator+(Tangent<V> a, Tangent<V> b) {
  return {a.value + b.value, a.tangent + b.tangent};
}
template <class V>
inline Tangent<V> operator-(Tangent<V> a, Tangent<V> b) {
  return {a.value - b.value, a.tangent - b.tangent};
}
template <class V>
inline Tangent<V> operator*(Tangent<V> a, Tangent<V> b) {
  return {a.value * b.value, a.tangent * b.value + a.value * b.tangent};
}
template <class V>
inline Tangent<V> operator/(Tangent<V> a, Tangent<V> b) {
  const V quotient = a.value / b.value;
  return {quotient, (a.tangent - quotient * b.tangent) / b.value};
}
template <class V>
inline auto operator<(Tangent<V> a, Tangent<V> b) {
  return a.value < b.value;
}
template <class V>
inline auto operator<=(Tangent<V> a, Tangent<V> b) {
  return a.value <= b.value;
}
template <class V>
inline auto operator>(Tangent<V> a, Tangent<V> b) {
  return a.value > b.value;
}
template <class V>
inline auto operator>=(Tangent<V> a, Tangent<V> b) {
  return a.value >= b.value;
}
template <class V>
inline auto operator==(Tangent<V> a, Tangent<V> b) {
  return a.value == b.value;
}

template <class V>
inline Tangent<V> Splat(Tangent<V> like, float value) {
  return {vocabulary::Splat(like.value, value), vocabulary::Splat(like.value, 0.0f)};
}
template <class V>
inline Tangent<V> Tiny(Tangent<V> like) {
  return {vocabulary::Tiny(like.value), vocabulary::Splat(like.value, 0.0f)};
}
template <class M, class V>
inline Tangent<V> Select(M mask, Tangent<V> yes, Tangent<V> no) {
  return {vocabulary::Select(mask, yes.value, no.value),
          vocabulary::Select(mask, yes.tangent, no.tangent)};
}
template <class V>
inline V MeanAtTie(Tangent<V> a, Tangent<V> b, V otherwise) {
  const V mean = (a.tangent + b.tangent) * vocabulary::Splat(a.value, 0.5f);
  return vocabulary::Select(a.value == b.value, mean, otherwise);
}
template <class V>
inline Tangent<V> Max(Tangent<V> a, Tangent<V> b) {
  const V larger = vocabulary::Select(a.value > b.value, a.tangent, b.tangent);
  return {vocabulary::Max(a.value, b.value), MeanAtTie(a, b, larger)};
}
template <class V>
inline Tangent<V> Min(Tangent<V> a, Tangent<V> b) {
  const V smaller = vocabulary::Select(a.value < b.value, a.tangent, b.tangent);
  return {vocabulary::Min(a.value, b.value), MeanAtTie(a, b, smaller)};
}
template <class V>
inline Tangent<V> Abs(Tangent<V> a) {
  const V zero = vocabulary::Splat(a.value, 0.0f);
  const V tangent = vocabulary::Select(a.value < zero, zero - a.tangent, a.tangent);
  return {vocabulary::Abs(a.value), vocabulary::Select(a.value == zero, zero, tangent)};
}
template <class V>
inline Tangent<V> Sqrt(Tangent<V> a) {
  const V zero = vocabulary::Splat(a.value, 0.0f);
  const V root = vocabulary::Sqrt(a.value);
  return {root, vocabulary::Select(root == zero, zero, a.tangent / (root + root))};
}
template <class V>
inline Tangent<V> Rsqrt(Tangent<V> a) {
  const V inverse = vocabulary::Rsqrt(a.value);
  // Multiply the tangent first, so that a tangent of 0 stays 0 even where inverse^3 overflows.
  const V half = inverse * vocabulary::Splat(a.value, -0.5f);
  return {inverse, ((a.tangent * inverse) * inverse) * half};
}
template <class V>
inline Tangent<V> Exp(Tangent<V> a) {
  const V value = vocabulary::Exp(a.value);
  return {value, a.tangent * value};
}
template <class V>
inline Tangent<V> Log(Tangent<V> a) {
  return {vocabulary::Log(a.value), a.tangent / a.value};
}
template <class V>
inline Tangent<V> Log1p(Tangent<V> a) {
  return {vocabulary::Log1p(a.value), a.tangent / (vocabulary::Splat(a.value, 1.0f) + a.value)};
}
template <class V>
inline Tangent<V> Tanh(Tangent<V> a) {
  const V value = vocabulary::Tanh(a.value);
  return {value, a.tangent * (vocabulary::Splat(a.value, 1.0f) - value * value)};
}
template <class V>
inline Tangent<V> Angle(Tangent<V> x, Tangent<V> y) {
  const V zero = vocabulary::Splat(x.value, 0.0f);
  const V square = x.value * x.value + y.value * y.value;
  const V turn = x.value * y.tangent - y.value * x.tangent;
  return {vocabulary::Angle(x.value, y.value),
          vocabulary::Select(square == zero, zero, turn / square)};
}

// Adds a gradient to a definition. `Derived` is the same definition in this namespace.
template <class Definition, class Derived>
struct WithGradient : Definition {
  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* t, D& d) {
    Arguments<V> at;
    at.g = Constant(g);
    for (int s = 0; s < Definition::kRowScalars; ++s) at.a[s] = Constant(a[s]);
    for (int s = 0; s < Definition::kColumnScalars; ++s) at.b[s] = Constant(b[s]);
    for (int s = 0; s < Definition::kHeadScalars; ++s) at.t[s] = Constant(t[s]);
    if constexpr (Definition::kInput != PairInput::kNone) d.g = Slope(at, at.g);
    for (int s = 0; s < Definition::kRowScalars; ++s) d.a[s] = Slope(at, at.a[s]);
    for (int s = 0; s < Definition::kColumnScalars; ++s) d.b[s] = Slope(at, at.b[s]);
    for (int s = 0; s < Definition::kHeadScalars; ++s) d.t[s] = Slope(at, at.t[s]);
  }

 private:
  template <class V>
  struct Arguments {
    Arguments() {}

    Tangent<V> g;
    Tangent<V> a[Definition::kRowScalars + 1];
    Tangent<V> b[Definition::kColumnScalars + 1];
    Tangent<V> t[Definition::kHeadScalars + 1];
  };

  template <class V>
  static Tangent<V> Constant(V value) {
    return {value, vocabulary::Splat(value, 0.0f)};
  }
  template <class V>
  static V Slope(Arguments<V>& at, Tangent<V>& argument) {
    argument.tangent = vocabulary::Splat(argument.value, 1.0f);
    const V slope = Derived::Value(at.g, at.a, at.b, at.t).tangent;
    argument.tangent = vocabulary::Splat(argument.value, 0.0f);
    return slope;
  }
};

template <class Definition, class Derived>
struct Complete {
  using Type = WithGradient<Definition, Derived>;
};
// NVRTC finds a template only in a call, and not by its address.
template <class Definition, class Derived>
  requires requires(float number, const float* numbers, float& slopes) {
    Definition::Gradient(number, numbers, numbers, numbers, slopes);
  }
struct Complete<Definition, Derived> {
  using Type = Definition;
};
