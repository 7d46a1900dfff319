// Laplacian: f = |x_i - y_j|. c = -gamma.
struct Laplacian {
  static constexpr const char* kTitle = "Laplacian";
  static constexpr const char* kFormula = "-gamma |q - k|";
  static constexpr const char* kLatex = R"(-\gamma_h\, |q - k|)";
  static constexpr const char* kSource = "Tseng et al. 2023, Coneheads: Hierarchy Aware Attention";
  static constexpr const char* kFactor = "-gamma";

  static constexpr int kRowScalars = 0;
  static constexpr int kColumnScalars = 0;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* /*a*/, const V* /*b*/, const V* /*t*/) {
    return Sqrt(g);
  }

  template <class V, class D>
  static void Gradient(V g, const V* /*a*/, const V* /*b*/, const V* /*t*/, D& d) {
    const V zero = Splat(g, 0.0f);
    const V inverse = Rsqrt(Max(Tiny(g), g));
    d.g = Select(g > zero, Splat(g, 0.5f) * inverse, zero);
  }

  // The root may be infinite if it is not used.
  template <class V, class D>
  static V Both(V g, const V* /*a*/, const V* /*b*/, const V* /*t*/, D& d) {
    const V inverse = Select(g > Tiny(g), Rsqrt(g), Splat(g, 0.0f));
    d.g = Splat(g, 0.5f) * inverse;
    return g * inverse;
  }

  template <class R, class V>
  static R Bounds(R g, const V* /*a*/, const R* /*b*/, const V* /*t*/) {
    return {Sqrt(g.least), Sqrt(g.most)};
  }
};
