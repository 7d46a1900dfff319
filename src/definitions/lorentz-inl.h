// The squared Lorentzian distance of points on the hyperboloid <x, x> = -c, where <x, y> = x.y - t
// t' with space part x and time t: -2 c - 2 <x, y> = |x - y|^2 - (t - t')^2. For points at distance
// |x| = sqrt(c) sinh rho from the axis in direction u, it equals
//   f = c (e^rho - e^rho')^2 / (e^rho e^rho') + |x| |y| |u - u'|^2,
// which is a sum of nonnegative terms. Far from the axis, the two squares above almost cancel, but
// this sum is accurate for points at different distances from the axis. c = -scale. Scalars:
// (sqrt(c) (e^rho - 1), e^-rho, |x|) of the query, the same for the key. The tokens are the
// directions u and u'.
struct Lorentz {
  static constexpr int kRowScalars = 3;
  static constexpr int kColumnScalars = 3;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    const V difference = a[0] - b[0];
    // The factors are multiplied separately, because the square of the difference may overflow.
    return (difference * a[1]) * (difference * b[1]) + g * (a[2] * b[2]);
  }

  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V difference = a[0] - b[0];
    const V query = difference * a[1];
    const V key = difference * b[1];
    const V by_radius = Splat(g, 2.0f) * query * b[1];
    d.g = a[2] * b[2];
    d.a[0] = by_radius;
    d.a[1] = difference * key;
    d.a[2] = g * b[2];
    d.b[0] = zero - by_radius;
    d.b[1] = difference * query;
    d.b[2] = g * a[2];
  }

  // The bounds hold because neither e^-rho nor |x| is negative.
  template <class R, class V>
  static R Bounds(R g, const V* a, const R* b, const V* /*t*/) {
    const V zero = Splat(a[0], 0.0f);
    const V low = a[0] - b[0].most;
    const V high = a[0] - b[0].least;
    const V farthest = Max(Abs(low), Abs(high));
    const V nearest = Max(zero, Max(low, zero - high));
    return {(nearest * a[1]) * (nearest * b[1].least) + g.least * (a[2] * b[2].least),
            (farthest * a[1]) * (farthest * b[1].most) + g.most * (a[2] * b[2].most)};
  }
};
