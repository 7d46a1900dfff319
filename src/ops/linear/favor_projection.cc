// The operator favor_projection: the random matrix of FAVOR+.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace gnomon {
namespace {

// Generates N(0, 1) numbers by the Box-Muller method. Unlike those of std::normal_distribution,
// they do not depend on the standard library.
class Normal {
 public:
  explicit Normal(uint64_t seed) : engine_(seed) {}

  double operator()() {
    constexpr double kTwoPi = 6.28318530717958647693;
    const double radius = std::sqrt(-2 * std::log(1 - Uniform()));
    return radius * std::cos(kTwoPi * Uniform());
  }

 private:
  // Uniform in [0, 1).
  double Uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }

  std::mt19937_64 engine_;
};

double Dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t k = 0; k < n; ++k) sum += a[k] * b[k];
  return sum;
}

void CheckArguments(const at::Tensor& like, int64_t num_features) {
  TORCH_CHECK_VALUE(num_features >= 1, "gnomon.favor_projection: num_features is ", num_features,
                    "; expected at least 1");
  TORCH_CHECK_VALUE(like.dim() >= 1 && like.sym_size(-1) >= 1,
                    "gnomon.favor_projection: head_dim is 0; expected at least 1");
}

// Blocks of D orthogonal rows, each with the norm of a row of N(0, 1) numbers (Choromanski et al.
// 2021, section 2.4).
at::Tensor ProjectionCpu(const at::Tensor& like, int64_t num_features, int64_t seed) {
  CheckArguments(like, num_features);
  const int64_t columns = like.size(-1);
  at::Tensor projection = at::empty({num_features, columns}, at::kDouble);
  double* rows = projection.data_ptr<double>();
  Normal normal(static_cast<uint64_t>(seed));
  const auto draw = [&](double* row) { std::generate_n(row, columns, [&] { return normal(); }); };
  std::vector<double> other(static_cast<size_t>(columns));
  for (int64_t i = 0; i < num_features; ++i) {
    double* row = rows + i * columns;
    draw(row);
    draw(other.data());
    // Two Gram-Schmidt passes make the rows orthogonal up to rounding.
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t j = i / columns * columns; j < i; ++j) {
        const double* before = rows + j * columns;
        const double share = Dot(row, before, columns) / Dot(before, before, columns);
        for (int64_t k = 0; k < columns; ++k) row[k] -= share * before[k];
      }
    }
    const double length =
        std::sqrt(Dot(other.data(), other.data(), columns) / Dot(row, row, columns));
    for (int64_t k = 0; k < columns; ++k) row[k] *= length;
  }
  return projection;
}

// The CPU generates the numbers, so that they are equal on all devices.
at::Tensor ProjectionCuda(const at::Tensor& like, int64_t num_features, int64_t seed) {
  return ProjectionCpu(like, num_features, seed).to(like.device());
}

at::Tensor ProjectionMeta(const at::Tensor& like, int64_t num_features, int64_t /*seed*/) {
  CheckArguments(like, num_features);
  return at::empty_symint({num_features, like.sym_size(-1)}, like.options().dtype(at::kDouble));
}

}  // namespace

TORCH_LIBRARY_IMPL(gnomon, CPU, m) { m.impl("favor_projection", ProjectionCpu); }
TORCH_LIBRARY_IMPL(gnomon, CUDA, m) { m.impl("favor_projection", ProjectionCuda); }
TORCH_LIBRARY_IMPL(gnomon, Meta, m) { m.impl("favor_projection", ProjectionMeta); }

}  // namespace gnomon
