// The Matern kernel of smoothness 3/2 as a similarity: weights proportional to (1 + u) e^-u, where
// u = t_h sqrt(3) |x_i - y_j| and t_h is the inverse length scale of the head (Rasmussen & Williams
// 2006, eq. 4.17). Therefore f = u - log(1 + u), with the factor -1.
struct Matern {
  static constexpr int kRowScalars = 0;
  static constexpr int kColumnScalars = 0;
  static constexpr int kHeadScalars = 1;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* /*a*/, const V* /*b*/, const V* t) {
    const V u = t[0] * Sqrt(Splat(g, 3.0f) * g);
    return u - Log1p(u);
  }

  // df/du = u / (1 + u), so sqrt(g) cancels in the derivative with respect to g.
  template <class V, class D>
  static void Gradient(V g, const V* /*a*/, const V* /*b*/, const V* t, D& d) {
    const V root = Sqrt(Splat(g, 3.0f) * g);
    const V u = t[0] * root;
    const V inverse = Splat(g, 1.0f) / (Splat(g, 1.0f) + u);
    d.g = Splat(g, 1.5f) * t[0] * t[0] * inverse;
    d.t[0] = root * u * inverse;
  }
};
