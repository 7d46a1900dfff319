// Umbral cone (Tseng et al. 2023, "Coneheads: Hierarchy Aware Attention"):
//   h = (u + v + max(|u - v|, D)) / 2,  D = |X_i - X_j| / sinh r
// with heights u of the query and v of the key; the token map divides X by sinh r. Similarity
// -gamma h = gamma/2 (f - 2u): f = (u - v) - max(|u - v|, D), c = gamma / 2, row constant -2u
// dropped. Scalars: the heights u and v.
struct Umbral {
  static constexpr int kRowScalars = 1;
  static constexpr int kColumnScalars = 1;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    const V difference = a[0] - b[0];
    return difference - Sqrt(Max(difference * difference, g));
  }

  template <class V, class D>
  static V Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V half = Splat(g, 0.5f);
    const V one = Splat(g, 1.0f);
    const V difference = a[0] - b[0];
    const V square = difference * difference;
    const V larger = Max(square, g);
    const V inverse = Select(larger > zero, Rsqrt(Max(larger, Splat(g, 1e-30f))), zero);
    // The share of the maximum that is the distance's: 1, 0, or a half each at a tie.
    const V share = Select(g > square, one, Select(g < square, zero, half));
    const V ds = zero - half * share * inverse;
    const V dd = one - (one - share) * difference * inverse;
    d.g = ds;
    d.a[0] = dd;
    d.b[0] = zero - dd;
    return difference - larger * inverse;
  }
};
