// A function that uses the whole vocabulary and is smooth except at ties. It has no Gradient.
struct EveryFunction {
  static constexpr int kRowScalars = 1;
  static constexpr int kColumnScalars = 1;
  static constexpr int kHeadScalars = 1;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* t) {
    const V one = Splat(g, 1.0f);
    const V half = Splat(g, 0.5f);
    // Both branches have the same slope at g = 1.
    const V distance = Select(g > one, Sqrt(g), half * (one + g));
    const V heights = Abs(a[0]) + Max(b[0], Splat(g, 0.1f)) + Min(b[0], half);
    const V decay = Exp(Splat(g, 0.0f) - Rsqrt(Max(Tiny(g), one + g))) / (one + heights * heights);
    return distance * Tanh(t[0]) + Log(one + heights * heights) * Log1p(g) + decay +
           Angle(a[0], Abs(b[0]) + half);
  }
};
