// Penumbral cones (Tseng et al. 2023, eq. 23), with tokens scaled so that r = 1. For heights u, v,
// alpha = 1 - sqrt(1 - u^2), beta = 1 - sqrt(1 - v^2), D = |X_i - X_j| and
// B = alpha + beta + max(|alpha - beta|, D):
//   4 h^2 = B (4 - B)                                      if B <= 2 (a common cone exists)
//         = D^2 + 2 (u^2 + v^2) + (u^2 - v^2)^2 / D^2      otherwise
// Scalars: (alpha, u^2) of the query, (beta, v^2) of the key.
template <class V>
V PenumbralSquared(V g, const V* a, const V* b) {
  const V difference = a[0] - b[0];
  const V square = Max(Tiny(g), Max(difference * difference, g));
  const V inverse = Rsqrt(square);
  const V reach = a[0] + b[0] + square * inverse;
  const V e = (a[1] - b[1]) * inverse;
  const V sum = a[1] + b[1];
  const V inside = reach * (Splat(g, 4.0f) - reach);
  const V outside = square + (sum + sum) + e * e;
  return Select(reach <= Splat(g, 2.0f), inside, outside);
}

// Computes half the derivatives of 4 h^2, times `factor`.
template <class V, class D>
void PenumbralSlopes(V g, const V* a, const V* b, V factor, D& d) {
  const V zero = Splat(g, 0.0f);
  const V half = Splat(g, 0.5f);
  const V one = Splat(g, 1.0f);
  const V two = Splat(g, 2.0f);
  const V tiny = Tiny(g);
  const V difference = a[0] - b[0];
  const V tie = difference * difference;
  const V square = Max(tiny, Max(tie, g));
  const V inverse = Rsqrt(square);
  const V reach = a[0] + b[0] + square * inverse;
  const V e = (a[1] - b[1]) * inverse;
  const auto common = reach <= two;
  // The derivative of the maximum with respect to D, then the same divided by D (0 if D = 0).
  const V share = Select(g > tie, one, Select(g < tie, zero, half));
  const V by_distance = Select(g > tiny, share * inverse, zero);
  // Inside: d(4h^2)/dB = 4 - 2B. Outside: derivatives with respect to D^2 and the squared heights.
  const V slope = Select(common, (two - reach) * factor, zero);
  const V outside = Select(common, zero, factor);
  const V w = Select(common, zero, e * inverse);
  const V rest = one - share;
  // `turn` is exactly `rest` or its negative, so that an ancestor's alpha cancels in B.
  const V turn =
      Select(difference > zero, rest, Select(difference < zero, zero - rest, difference));
  d.g = half * (slope * by_distance + outside * (one - w * w));
  d.a[0] = slope * (one + turn);
  d.b[0] = slope * (one - turn);
  d.a[1] = outside * (one + w);
  d.b[1] = outside * (one - w);
}

// Returns f(4 h^2) and computes the slopes with the same roots. function(4 h^2, slope) returns f
// and stores twice its derivative.
template <class V, class D, class Function>
V PenumbralBoth(V g, const V* a, const V* b, const Function& function, D& d) {
  const V zero = Splat(g, 0.0f);
  const V one = Splat(g, 1.0f);
  const V two = Splat(g, 2.0f);
  const V difference = a[0] - b[0];
  const V tie = difference * difference;
  const V square = Max(Tiny(g), Max(tie, g));
  const V inverse = Rsqrt(square);
  const V reach = Fma(square, inverse, a[0] + b[0]);
  const V e = (a[1] - b[1]) * inverse;
  const V inside = reach * (Splat(g, 4.0f) - reach);
  const V outside = Fma(e, e, Fma(two, a[1] + b[1], square));
  const auto common = reach <= two;
  V by_f = zero;
  const V f = function(Select(common, inside, outside), by_f);

  const auto crossing = g > tie;
  const V by_distance = Select(crossing, inverse, zero);
  // 1, 0 or -1 with the sign of alpha - beta.
  const V sign = Fma(two, Step(difference), zero - one);
  const V turn = Select(crossing, zero, sign);
  const V w = e * inverse;
  const V slope = Select(common, (two - reach) * by_f, zero);
  const V by_height = Select(common, zero, by_f);
  const V of_distance = Select(common, (two - reach) * by_distance, Fma(-w, w, one));
  d.g = Splat(g, 0.5f) * by_f * of_distance;
  d.a[0] = Fma(slope, turn, slope);
  d.b[0] = Fma(-slope, turn, slope);
  d.a[1] = Fma(by_height, w, by_height);
  d.b[1] = Fma(-by_height, w, by_height);
  return f;
}

// Score -gamma h^2: f = 4 h^2, c = -gamma r^2 / 4.
struct PenumbralSquare {
  static constexpr int kRowScalars = 2;
  static constexpr int kColumnScalars = 2;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    return PenumbralSquared(g, a, b);
  }

  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    PenumbralSlopes(g, a, b, Splat(g, 2.0f), d);
  }

  template <class V, class D>
  static V Both(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const auto function = [](V square, V& slope) {
      slope = Splat(square, 2.0f);
      return square;
    };
    return PenumbralBoth(g, a, b, function, d);
  }

  // 4 h^2 is at least D^2 and u^2 + v^2, and at most the larger of 4 and D^2 + 2 (u^2 + v^2) + 1.
  template <class R, class V>
  static R Bounds(R g, const V* a, const R* b, const V* /*t*/) {
    const V four = Splat(g.least, 4.0f);
    const V low = a[1] + b[1].least;
    const V high = a[1] + b[1].most;
    return {Max(low, g.least), Max(four, g.most + (high + high) + Splat(four, 1.0f))};
  }
};

// Score -gamma h: f = 2h, c = -gamma r / 2.
struct Penumbral {
  static constexpr int kRowScalars = PenumbralSquare::kRowScalars;
  static constexpr int kColumnScalars = PenumbralSquare::kColumnScalars;
  static constexpr int kHeadScalars = PenumbralSquare::kHeadScalars;
  static constexpr PairInput kInput = PenumbralSquare::kInput;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    return Sqrt(PenumbralSquared(g, a, b));
  }

  // df = d(4h^2) / (2f).
  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V tiny = Tiny(g);
    const V square = PenumbralSquared(g, a, b);
    const V inverse = Select(square > tiny, Rsqrt(Max(tiny, square)), Splat(g, 0.0f));
    PenumbralSlopes(g, a, b, inverse, d);
  }

  template <class V, class D>
  static V Both(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const auto function = [](V square, V& slope) {
      // The root may be infinite if it is not used.
      slope = Select(square > Tiny(square), Rsqrt(square), Splat(square, 0.0f));
      return square * slope;
    };
    return PenumbralBoth(g, a, b, function, d);
  }

  template <class R, class V>
  static R Bounds(R g, const V* a, const R* b, const V* t) {
    const R f = PenumbralSquare::Bounds(g, a, b, t);
    return {Sqrt(f.least), Sqrt(f.most)};
  }
};

// Score gamma log(r / h): f = log 2h, c = -gamma. h is at least 3e-8 r in float32 and 1e-75 r in
// float64, even for two coinciding points of height 0.
struct PenumbralLog {
  static constexpr int kRowScalars = Penumbral::kRowScalars;
  static constexpr int kColumnScalars = Penumbral::kColumnScalars;
  static constexpr int kHeadScalars = Penumbral::kHeadScalars;
  static constexpr PairInput kInput = Penumbral::kInput;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* t) {
    return Log(Penumbral::Value(g, a, b, t));
  }

  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* t, D& d) {
    Penumbral::Gradient(g, a, b, t, d);
    const V inverse = Splat(g, 1.0f) / Penumbral::Value(g, a, b, t);
    d.g = d.g * inverse;
    for (int n = 0; n < kRowScalars; ++n) d.a[n] = d.a[n] * inverse;
    for (int n = 0; n < kColumnScalars; ++n) d.b[n] = d.b[n] * inverse;
  }

  template <class R, class V>
  static R Bounds(R g, const V* a, const R* b, const V* t) {
    const R f = Penumbral::Bounds(g, a, b, t);
    return {Log(Max(Tiny(f.least), f.least)), Log(f.most)};
  }
};
