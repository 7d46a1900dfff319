// Student's t: weights proportional to (1 + |x_i - y_j|^2)^-gamma. f = log(1 + |x_i - y_j|^2).
// The gradient is derived automatically from Value().
struct StudentT {
  static constexpr const char* kTitle = "Student's t";
  static constexpr const char* kFormula = "-gamma log(1 + |q - k|^2)";
  static constexpr const char* kLatex = R"(-\gamma_h \log\left(1 + |q - k|^2\right))";
  static constexpr const char* kSource =
      "van der Maaten and Hinton 2008, Visualizing Data using t-SNE";
  static constexpr const char* kFactor = "-gamma";

  static constexpr int kRowScalars = 0;
  static constexpr int kColumnScalars = 0;
  static constexpr int kHeadScalars = 0;
  static constexpr PairInput kInput = PairInput::kSquaredDistance;

  template <class V>
  static V Value(V g, const V* /*a*/, const V* /*b*/, const V* /*t*/) {
    return Log1p(g);
  }
};
