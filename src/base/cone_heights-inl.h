// The formulas of the cones' token maps (base/cone_map.h). Like a definition, this file has no
// includes and is included by each target in its own namespace, after the vocabulary
// (src/definitions/README.md).

// The multiplier m and the scalars of a token, which are functions of its last column z, and their
// derivatives with respect to z. Umbral cones have one scalar.
template <class V>
struct HeightValues {
  // Not defaulted: g++ does not compile defaulted constructors for the instruction set (NEON).
  HeightValues() {}

  V m;
  V dm;
  V scalar[2];
  V d_scalar[2];
};

// by_sinh: 1 / sinh(r). If kAsIs, z is the height, and `most` is ignored.
template <bool kAsIs, class V>
void UmbralValues(V by_sinh, V most, V z, HeightValues<V>& values) {
  V h = z;
  V slope = Splat(z, 1.0f);
  if constexpr (kAsIs) {
    values.m = by_sinh;
    values.dm = Splat(z, 0.0f);
  } else {
    const V zero = Splat(z, 0.0f);
    h = Exp(Max(zero - most, Min(most, z)));
    slope = Select(Abs(z) <= most, h, zero);
    values.m = h * by_sinh;
    values.dm = slope * by_sinh;
  }
  values.scalar[0] = h;
  values.d_scalar[0] = slope;
}

template <bool kAsIs, class V>
void PenumbralValues(V r, V z, HeightValues<V>& values) {
  const V zero = Splat(z, 0.0f);
  const V one = Splat(z, 1.0f);
  // u (the height divided by r), its derivative, and 1 - u, which is accurate for u near 1.
  V u = z;
  V slope = one;
  V rest = one;
  if constexpr (kAsIs) {
    const V share = z / r;
    const V by_r = one / r;
    u = Max(zero, Min(one, share));
    slope = Select(share >= zero, Select(share <= one, by_r, zero), zero);
    rest = one - u;
    values.m = by_r;
    values.dm = zero;
  } else {
    // sigmoid(|z|) and sigmoid(-|z|).
    const V small = Exp(zero - Abs(z));
    const V above = one / (one + small);
    const V below = small * above;
    u = Select(z < zero, below, above);
    rest = Select(z < zero, above, below);
    slope = u * rest;
    values.m = u;
    values.dm = slope;
  }
  // sqrt(1 - u^2)
  const V a = Sqrt(rest * (one + u));
  const V a_slope = Select(a > zero, zero - u * slope / a, zero);
  const V square = u * u;
  const V d_square = (u + u) * slope;
  const V below = one / (one + a);
  values.scalar[0] = square * below;
  values.d_scalar[0] = (d_square - square * below * a_slope) * below;
  values.scalar[1] = square;
  values.d_scalar[1] = d_square;
}
