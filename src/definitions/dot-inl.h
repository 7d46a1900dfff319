// Dot product: f = g. c = 1/sqrt(D) (Vaswani et al. 2017, eq. 1).
struct Dot {
  static constexpr int kRowScalars = 0;
  static constexpr int kColumnScalars = 0;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kInnerProduct;

  template <class V>
  static V Value(V g, const V* /*a*/, const V* /*b*/, const V* /*t*/) {
    return g;
  }

  template <class V, class D>
  static void Gradient(V g, const V* /*a*/, const V* /*b*/, const V* /*t*/, D& d) {
    d.g = Splat(g, 1.0f);
  }

  template <class R, class V>
  static R Bounds(R g, const V* /*a*/, const R* /*b*/, const V* /*t*/) {
    return g;
  }
};
