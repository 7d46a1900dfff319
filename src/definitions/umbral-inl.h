// Umbral cone (Tseng et al. 2023, "Coneheads: Hierarchy Aware Attention"):
//   h = (u + v + max(|u - v|, D)) / 2,  D = |X_i - X_j| / sinh r
// with heights u of the query and v of the key; the token map divides X by sinh r. Similarity
// -gamma h = gamma/2 (f - 2u): f = (u - v) - max(|u - v|, D), c = gamma / 2, row constant -2u dropped.
// Scalars: (|X|^2, height) of the query and of the key.
struct Umbral {
  static constexpr int kRowScalars = 2;
  static constexpr int kColumnScalars = 2;
  static constexpr int kHeadScalars = 0;
  static constexpr bool kInnerProduct = true;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    const V s = a[0] + b[0] - (g + g);
    const V difference = a[1] - b[1];
    return difference - Sqrt(Max(s, difference * difference));
  }

  template <class V, class D>
  static V Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V half = Splat(g, 0.5f);
    const V one = Splat(g, 1.0f);
    const V s = a[0] + b[0] - (g + g);
    const V difference = a[1] - b[1];
    const V square = difference * difference;
    const V larger = Max(s, square);
    const V inverse = Select(larger > zero, Rsqrt(Max(larger, Splat(g, 1e-30f))), zero);
    // The share of the maximum that is the distance's: 1, 0, or a half each at a tie.
    const V share = Select(s > square, one, Select(s < square, zero, half));
    const V ds = zero - half * share * inverse;
    const V dd = one - (one - share) * difference * inverse;
    d.g = zero - (ds + ds);
    d.a[0] = ds;
    d.b[0] = ds;
    d.a[1] = dd;
    d.b[1] = zero - dd;
    return difference - larger * inverse;
  }
};
