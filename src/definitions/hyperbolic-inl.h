// Hyperbolic distance: f = arcosh(1 + t) = log(1 + t + sqrt(t (t + 2))), c = -beta, with
//   t = (u - v)^2 / (2 u v) + |x - y|^2 p q / 2.
// All terms are nonnegative, so distances between nearby points are accurate. The Minkowski product
// would not give accurate distances. The model of hyperbolic space determines u, v, p and q:
//   half-space: heights u and v, positions x and y, p = 1/u, q = 1/v
//     (Ratcliffe 2006, Foundations of Hyperbolic Manifolds, theorem 4.6.1);
//   ball: u = v = 1, points x and y, p = 2 / (1 - |x|^2), q likewise (theorem 4.5.1);
//   polar coordinates, at distance rho from the origin in direction x: u = e^rho, p = sinh rho,
//     because cosh f = cosh(rho - rho') + sinh rho sinh rho' (1 - x.y).
// Scalars: (u - u0, 1 / (u sqrt 2), p / sqrt 2) of the query, the same for the key, where u0 is any
// constant that keeps differences of u accurate.
struct Hyperbolic {
  static constexpr int kRowScalars = 3;
  static constexpr int kColumnScalars = 3;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    const V difference = a[0] - b[0];
    const V t = (difference * a[1]) * (difference * b[1]) + g * (a[2] * b[2]);
    // The roots are multiplied, because t (t + 2) could overflow.
    return Log1p(t + Sqrt(t) * Sqrt(t + Splat(g, 2.0f)));
  }

  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V two = Splat(g, 2.0f);
    const V tiny = Tiny(g);
    const V difference = a[0] - b[0];
    const V query = difference * a[1];
    const V key = difference * b[1];
    const V scale = a[2] * b[2];
    const V t = query * key + g * scale;
    // df/dt = 1 / sqrt(t (t + 2)); a distance of 0 has derivative 0.
    const V inverse = Select(t > tiny, Rsqrt(Max(tiny, t)), zero);
    const V slope = inverse * Rsqrt(t + two);
    const V by_height = slope * two * query * b[1];
    d.g = slope * scale;
    d.a[0] = by_height;
    d.a[1] = slope * difference * key;
    d.a[2] = slope * g * b[2];
    d.b[0] = zero - by_height;
    d.b[1] = slope * difference * query;
    d.b[2] = slope * g * a[2];
  }

  // The bounds hold for the scalars of points: only the first scalar may be negative.
  template <class R, class V>
  static R Bounds(R g, const V* a, const R* b, const V* /*t*/) {
    const V zero = Splat(g.least, 0.0f);
    const V low = a[0] - b[0].most;
    const V high = a[0] - b[0].least;
    // The distance depends only on t; Value is evaluated at the scalars (0, 0, 1), where t = g.
    const V one = Splat(zero, 1.0f);
    const V unit[3] = {zero, zero, one};
    const V near = Max(zero, Max(low, zero - high));
    const V far = Max(zero - low, high);
    const V least = (near * a[1]) * (near * b[1].least) + g.least * (a[2] * b[2].least);
    const V most = (far * a[1]) * (far * b[1].most) + g.most * (a[2] * b[2].most);
    return {Value(Max(zero, least), unit, unit, unit), Value(Max(zero, most), unit, unit, unit)};
  }
};
