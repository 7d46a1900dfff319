// Penumbral cone, score -gamma h^2 (Tseng et al. 2023, eq. 23), tokens scaled so that r = 1. With
// a = sqrt(1 - u^2), b = sqrt(1 - v^2), M = max(|a - b|, D) and t = a + b - M:
//   4 - 4 h^2 = t^2                                          if t >= 0 (a common cone exists)
//             = ((a + b)^2 - D^2) (1 - (a - b)^2 / D^2)      otherwise
// f = 4 - 4 h^2, c = gamma r^2 / 4, row constant -4. Scalars: a of the query, b of the key.
struct PenumbralSquare {
  static constexpr int kRowScalars = 1;
  static constexpr int kColumnScalars = 1;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    const V difference = a[0] - b[0];
    const V square = Max(Splat(g, 1e-30f), Max(difference * difference, g));
    const V inverse = Rsqrt(square);
    const V larger = square * inverse;
    const V sum = a[0] + b[0];
    const V t = sum - larger;
    const V w = difference * inverse;
    const V outside = (sum + larger) * (Splat(g, 1.0f) - w * w);
    return t * Select(t >= Splat(g, 0.0f), t, outside);
  }

  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V half = Splat(g, 0.5f);
    const V one = Splat(g, 1.0f);
    const V tiny = Splat(g, 1e-30f);
    const V difference = a[0] - b[0];
    const V tie = difference * difference;
    const V square = Max(tiny, Max(tie, g));
    const V inverse = Rsqrt(square);
    const V larger = square * inverse;
    const V sum = a[0] + b[0];
    const V t = sum - larger;
    const V w = difference * inverse;
    const V narrow = one - w * w;
    const auto common = t >= zero;
    // The share of the maximum that is the distance's; a distance of 0 has derivative 0.
    const V share = Select(g > tie, one, Select(g < tie, zero, half));
    const V by_distance = Select(g > tiny, share * inverse, zero);
    const V turn = Select(tie >= tiny, (one - share) * w, zero);
    const V q = sum * inverse;  // (a + b) / D
    const V u = q * w;
    const V outside_sum = (sum + sum) * narrow;
    const V outside_difference = (difference + difference) * (one - q * q);
    const V ds = Select(common, zero - t * by_distance, u * u - one);
    const V t2 = t + t;
    d.g = ds;
    d.a[0] = Select(common, t2 * (one - turn), outside_sum + outside_difference);
    d.b[0] = Select(common, t2 * (one + turn), outside_sum - outside_difference);
  }

  // Those of Penumbral: u^2 = 1 - a^2, and a and b are not negative.
  template <class R, class V>
  static R Bounds(R g, const V* a, const R* b, const V* /*t*/) {
    const V one = Splat(g.least, 1.0f);
    const V two = Splat(g.least, 2.0f);
    const V four = two + two;
    const V low = two - a[0] * a[0] - b[0].most * b[0].most;
    const V high = two - a[0] * a[0] - b[0].least * b[0].least;
    return {four - Max(four, g.most + (high + high) + one), four - Max(low, g.least)};
  }
};
