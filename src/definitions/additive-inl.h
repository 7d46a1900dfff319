// Additive attention (graph attention networks, Velickovic et al. 2018, eq. 3):
// f = LeakyReLU_t(a + b), c = 1. Scalars: the score a of the query, the score b of the key, and the
// slope t of the head.
struct Additive {
  static constexpr int kRowScalars = 1;
  static constexpr int kColumnScalars = 1;
  static constexpr int kHeadScalars = 1;
  static constexpr PairInput kInput = PairInput::kNone;

  template <class V>
  static V Value(V g, const V* a, const V* b, const V* t) {
    const V z = a[0] + b[0];
    return Select(z >= Splat(g, 0.0f), z, t[0] * z);
  }

  template <class V, class D>
  static void Gradient(V g, const V* a, const V* b, const V* t, D& d) {
    const V zero = Splat(g, 0.0f);
    const V one = Splat(g, 1.0f);
    const V z = a[0] + b[0];
    const V slope = Select(z > zero, one, Select(z < zero, t[0], Splat(g, 0.5f) * (one + t[0])));
    d.g = zero;
    d.a[0] = slope;
    d.b[0] = slope;
    d.t[0] = Min(zero, z);
  }

  // As a function of a + b, f is monotone, or decreases to 0 and then increases.
  template <class R, class V>
  static R Bounds(R g, const V* a, const R* b, const V* t) {
    const V zero = Splat(g.least, 0.0f);
    const V low = Value(zero, a, &b[0].least, t);
    const V high = Value(zero, a, &b[0].most, t);
    const V least = Min(low, high);
    return {Select(t[0] < zero, Min(zero, least), least), Max(low, high)};
  }
};
