// Umbral cones (Tseng et al. 2023, "Coneheads: Hierarchy Aware Attention"):
//   h = (u + v + M) / 2,  M = max(|u - v|, D),  D = |X_i - X_j| / sinh r
// with heights u of the query and v of the key; the token map divides X by sinh r.

// Returns M. For a descendant, M is exactly |u - v|, which cancels in u - v - M even if square
// roots of squares are wrong in the last bit, as on GPUs.
template <class V>
V UmbralMaximum(V g, V difference) {
  return Max(Abs(difference), Sqrt(g));
}

// The derivatives of M with respect to g = D^2 and u - v. At a tie, each side gets half.
template <class V>
void UmbralSlopes(V g, V difference, V& by_g, V& by_difference) {
  const V zero = Splat(g, 0.0f);
  const V half = Splat(g, 0.5f);
  const V one = Splat(g, 1.0f);
  const V square = difference * difference;
  const V larger = Max(square, g);
  const V inverse = Select(larger > zero, Rsqrt(Max(Tiny(g), larger)), zero);
  // The derivative of the maximum with respect to the distance: 1, 0, or 1/2 at a tie.
  const V share = Select(g > square, one, Select(g < square, zero, half));
  by_g = half * share * inverse;
  // by_difference is exactly `rest` or its negative, so an ancestor's height cancels in u + v + M.
  const V rest = one - share;
  by_difference =
      Select(difference > zero, rest, Select(difference < zero, zero - rest, difference));
}

// Similarity -gamma h = gamma/2 (f - 2u): f = (u - v) - M, c = gamma / 2, without the row constant
// -2u. Scalars: the heights u and v.
struct Umbral {
  static constexpr int kRowScalars = 1;
  static constexpr int kColumnScalars = 1;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    const V difference = a[0] - b[0];
    return difference - UmbralMaximum(g, difference);
  }

  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V difference = a[0] - b[0];
    V by_g = zero;
    V by_difference = zero;
    UmbralSlopes(g, difference, by_g, by_difference);
    const V dd = Splat(g, 1.0f) - by_difference;
    d.g = zero - by_g;
    d.a[0] = dd;
    d.b[0] = zero - dd;
  }

  // If D > |u - v|, f = u - v - D. Otherwise, f = s (u - v), where s is 0 for a descendant, 2 for
  // an ancestor and 1 at distance 0. The root may be infinite if it is not used.
  template <class V, class D>
  static V Both(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V two = Splat(g, 2.0f);
    const V difference = a[0] - b[0];
    const auto crossing = g > Fma(difference, difference, Tiny(g));
    const V inverse = Select(crossing, Rsqrt(g), zero);
    const V slope = Select(crossing, Splat(g, 1.0f), Fma(-two, Step(difference), two));
    d.g = Splat(g, -0.5f) * inverse;
    d.a[0] = slope;
    d.b[0] = -slope;
    return Fma(slope, difference, -(g * inverse));
  }

  template <class R, class V>
  static R Bounds(R g, const V* a, const R* b, const V* /*t*/) {
    const V low = a[0] - b[0].most;
    const V high = a[0] - b[0].least;
    const V largest = Max(Max(low * low, high * high), g.most);
    return {low - Sqrt(largest), Min(Min(Splat(high, 0.0f), high + high), high - Sqrt(g.least))};
  }
};

// Similarity -gamma log h: f = log(u + v + M) = log 2h, c = -gamma. If h is below 5e-16, it is
// raised to this value. Scalars: the heights u and v.
struct UmbralLog {
  static constexpr int kRowScalars = 1;
  static constexpr int kColumnScalars = 1;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    return Log(Max(Splat(g, 1e-15f), a[0] + b[0] + UmbralMaximum(g, a[0] - b[0])));
  }

  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V one = Splat(g, 1.0f);
    const V least = Splat(g, 1e-15f);
    V by_g = zero;
    V by_difference = zero;
    const V difference = a[0] - b[0];
    UmbralSlopes(g, difference, by_g, by_difference);
    const V sum = a[0] + b[0] + UmbralMaximum(g, difference);
    const V inverse = Select(sum > least, one / Max(least, sum), zero);
    d.g = by_g * inverse;
    d.a[0] = (one + by_difference) * inverse;
    d.b[0] = (one - by_difference) * inverse;
  }

  // The sum increases with g. It also increases with v, because M decreases by at most as much as v
  // increases.
  template <class R, class V>
  static R Bounds(R g, const V* a, const R* b, const V* t) {
    return {Value(g.least, a, &b[0].least, t), Value(g.most, a, &b[0].most, t)};
  }
};
