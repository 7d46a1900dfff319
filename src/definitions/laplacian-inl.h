// Laplacian: f = |x_i - x_j|. c = -gamma. Scalars: squared norms of the query and of the key.
struct Laplacian {
  static constexpr int kRowScalars = 1;
  static constexpr int kColumnScalars = 1;
  static constexpr int kHeadScalars = 0;
  static constexpr bool kInnerProduct = true;

  template <class V>
  static V SquaredDistance(V g, const V* a, const V* b) {
    return Max(Splat(g, 0.0f), a[0] + b[0] - (g + g));
  }

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* /*t*/) {
    return Sqrt(SquaredDistance(g, a, b));
  }

  template <class V, class D>
  static V Gradient(V g, const V* a, const V* b, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V s = SquaredDistance(g, a, b);
    const V inverse = Select(s > zero, Rsqrt(Max(s, Splat(g, 1e-30f))), zero);
    const V half = Splat(g, 0.5f) * inverse;  // df/ds
    d.g = zero - inverse;
    d.a[0] = half;
    d.b[0] = half;
    return s * inverse;
  }
};
