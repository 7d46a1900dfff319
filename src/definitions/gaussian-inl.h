// Gaussian: -gamma |x_i - x_j|^2. f = 2 g - |x_j|^2, c = gamma; the row constant -|x_i|^2 is dropped.
// Scalar: the squared norm of the key.
struct Gaussian {
  static constexpr int kRowScalars = 0;
  static constexpr int kColumnScalars = 1;
  static constexpr int kHeadScalars = 0;
  static constexpr bool kInnerProduct = true;

  template <class V>
  static V Value(V g, const V* /*a*/, const V* b, const V* /*t*/) {
    return (g + g) - b[0];
  }

  template <class V, class D>
  static V Gradient(V g, const V* /*a*/, const V* b, const V* /*t*/, D& d) {
    d.g = Splat(g, 2.0f);
    d.b[0] = Splat(g, -1.0f);
    return (g + g) - b[0];
  }
};
