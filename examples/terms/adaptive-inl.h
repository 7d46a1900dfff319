// A Gaussian whose width depends on the query: f = a_i |x_i - y_j|^2, where a_i is the precision.
struct Adaptive {
  static constexpr int kRowScalars = 1;
  static constexpr int kColumnScalars = 0;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* a, const V* /*b*/, const V* /*t*/) {
    return a[0] * g;
  }

  template <class V, class D>
  static void Gradient(V g, const V* a, const V* /*b*/, const V* /*t*/, D& d) {
    d.g = a[0];
    d.a[0] = g;
  }
};
