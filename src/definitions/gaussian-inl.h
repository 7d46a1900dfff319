// Gaussian: f = |x_i - y_j|^2. c = -gamma.
struct Gaussian {
  static constexpr const char* kTitle = "Gaussian";
  static constexpr const char* kFormula = "-gamma |q - k|^2";
  static constexpr const char* kLatex = R"(-\gamma_h\, |q - k|^2)";
  static constexpr const char* kSource = "Chen et al. 2021, Skyformer";
  static constexpr const char* kFactor = "-gamma";

  static constexpr int kRowScalars = 0;
  static constexpr int kColumnScalars = 0;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

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
