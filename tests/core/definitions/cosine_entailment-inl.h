// Entailment cones in the Poincare ball (Ganea et al. 2018, eq. 28), in terms of the cosines of
// angles, which the vocabulary can compute. Let psi be the aperture of the query's cone, and Xi the
// angle at the query between the cone's axis and the key:
//   cos Xi = (g (1 + |x|^2) - |x|^2 (1 + |y|^2)) / (|x| |x - y| sqrt(1 + |x|^2 |y|^2 - 2 g))
//   f = max(0, cos psi - cos Xi)
// Scalars: (|x|^2, cos psi) of the query, |y|^2 of the key. At x = y, the angle has no derivative,
// and Gradient uses 0.
struct CosineEntailment {
  static constexpr int kRowScalars = 2;
  static constexpr int kColumnScalars = 1;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kInnerProduct;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    const V one = Splat(g, 1.0f);
    const V s = a[0] + b[0] - (g + g);
    const V w = one + a[0] * b[0] - (g + g);
    const V top = g * (one + a[0]) - a[0] * (one + b[0]);
    const V cosine = top * Rsqrt(Max(Splat(g, 1e-12f), a[0] * s * w));
    return Max(Splat(g, 0.0f), a[1] - Min(one, Max(Splat(g, -1.0f), cosine)));
  }

  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V half = Splat(g, 0.5f);
    const V one = Splat(g, 1.0f);
    const V tiny = Splat(g, 1e-12f);
    const V s = a[0] + b[0] - (g + g);
    const V w = one + a[0] * b[0] - (g + g);
    const V top = g * (one + a[0]) - a[0] * (one + b[0]);
    const V square = a[0] * s * w;
    const V inverse = Rsqrt(Max(tiny, square));
    const V cosine = top * inverse;
    const V energy = a[1] - Min(one, Max(zero - one, cosine));
    const V share = Select(energy > zero, one, Select(energy < zero, zero, half));
    // d cosine = inverse (d top - top inverse^2 / 2 d square), unless clamped.
    const V scale = Select(Abs(cosine) < one, Select(square > tiny, share * inverse, zero), zero);
    const V bend = half * top * inverse * inverse;
    d.g = zero - scale * ((one + a[0]) + bend * (a[0] + a[0]) * (w + s));
    d.a[0] = zero - scale * ((g - one - b[0]) - bend * (s * w + a[0] * (w + s * b[0])));
    d.a[1] = share;
    d.b[0] = scale * (a[0] + bend * a[0] * (w + s * a[0]));
  }
};
