// Dot product with a soft cap (Gemma 2, Riviere et al. 2024, section 2): f = tanh(g t). c = cap.
// Scalar: t = 1 / (cap sqrt(D)) of the head.
struct Softcap {
  static constexpr int kRowScalars = 0;
  static constexpr int kColumnScalars = 0;
  static constexpr int kHeadScalars = 1;
  static constexpr PairInput kInput = PairInput::kInnerProduct;

  template <class V>
  static V Value(V g, const V* /*a*/, const V* /*b*/, const V* t) {
    return Tanh(g * t[0]);
  }

  template <class V, class D>
  static void Gradient(V g, const V* /*a*/, const V* /*b*/, const V* t, D& d) {
    const V f = Tanh(g * t[0]);
    const V slope = Splat(g, 1.0f) - f * f;
    d.g = slope * t[0];
    d.t[0] = slope * g;
  }

  template <class R, class V>
  static R Bounds(R g, const V* /*a*/, const R* /*b*/, const V* t) {
    const V low = g.least * t[0];
    const V high = g.most * t[0];
    return {Tanh(Min(low, high)), Tanh(Max(low, high))};
  }
};
