// Entailment cones in the Poincare ball (Ganea et al. 2018, eq. 28): f = max(0, Xi - psi), where
// psi is the aperture of the query's cone, and Xi is the angle at the query between the cone's axis
// and the key. c = -gamma. With X = |x|^2, Y = |y|^2, s = |x - y|^2 and q = Y - X - s = 2 x.(y -
// x):
//   Xi = angle of (cosine, sine),  cosine = (1 - X) q - 2 X s,  sine = (1 - X) sqrt(4 X s - q^2),
// both scaled by 2 |x| |x - y| sqrt(1 + X Y - 2 x.y). No divisor can be 0, and the angle of a key
// on the axis is exact. If query and key coincide, the angle is 0. Scalars: (X, psi) of the query,
// Y of the key.
struct Entailment {
  static constexpr int kRowScalars = 2;
  static constexpr int kColumnScalars = 1;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    const V zero = Splat(g, 0.0f);
    const V narrow = Splat(g, 1.0f) - a[0];
    const V q = b[0] - a[0] - g;
    const V xs = (a[0] + a[0]) * g;
    const V area = Max(zero, (xs + xs) - q * q);
    const V xi = Angle(narrow * q - xs, Max(zero, narrow) * Sqrt(area));
    return Max(zero, xi - a[1]);
  }

  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V half = Splat(g, 0.5f);
    const V one = Splat(g, 1.0f);
    const V two = Splat(g, 2.0f);
    const V tiny = Tiny(g);
    const V narrow = one - a[0];
    const V q = b[0] - a[0] - g;
    const V xs = (a[0] + a[0]) * g;
    const V area = Max(zero, (xs + xs) - q * q);
    const V root = Sqrt(area);
    // The angle has a kink on the axis; its derivative with respect to the area is set to 0 there.
    const V inverse_root = Select(area > tiny, Rsqrt(Max(tiny, area)), zero);
    const V cosine = narrow * q - xs;
    const V sine = Max(zero, narrow) * root;
    const V energy = Angle(cosine, sine) - a[1];
    const V square = cosine * cosine + sine * sine;
    const V share = Select(energy > zero, one, Select(energy < zero, zero, half));
    // dXi = (cosine dsine - sine dcosine) / square.
    const V scale = Select(square > tiny, share / Max(tiny, square), zero);
    const V by_sine = scale * cosine;
    const V by_cosine = zero - scale * sine;
    const V by_area = by_sine * Max(zero, narrow) * (half * inverse_root);
    const V by_q = by_cosine * narrow - by_area * (q + q);
    const V by_narrow = by_cosine * q + by_sine * Select(narrow > zero, root, zero);
    const V by_xs = two * by_area - by_cosine;
    d.g = by_xs * (a[0] + a[0]) - by_q;
    d.a[0] = by_xs * (g + g) - by_q - by_narrow;
    d.a[1] = zero - share;
    d.b[0] = by_q;
  }

  // Xi is an angle from 0 to pi.
  template <class R, class V>
  static R Bounds(R g, const V* a, const R* /*b*/, const V* /*t*/) {
    const V zero = Splat(g.least, 0.0f);
    return {zero, Max(zero, Splat(zero, 3.15f) - a[1])};
  }
};
