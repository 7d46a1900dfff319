// Sums over the keys of phi(q_i).phi(k_j) times a value. For the numerator of linear attention, the
// value is v_j; for the denominator, it is 1, or 0 for a hidden key. Causal sums of features are
// separate operators (causal_sums.h), for which autograd saves only arguments and outputs.
#ifndef GNOMON_OPS_LINEAR_FEATURE_SUMS_H_
#define GNOMON_OPS_LINEAR_FEATURE_SUMS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <string>

namespace gnomon {

// The rotation of queries and keys by their positions; without a component, they stay unchanged.
struct Rotation {
  std::optional<std::string> rope;  // a component
  c10::SymInt query_offset;

  c10::SymInt length;  // one past the farthest position

  at::Tensor Query(const at::Tensor& x) const { return From(query_offset, x, /*of_keys=*/false); }
  at::Tensor Key(const at::Tensor& x) const { return From(0, x, /*of_keys=*/true); }

 private:
  at::Tensor From(const c10::SymInt& position, const at::Tensor& x, bool of_keys) const;
};

// The exponent of absent entries: its exp is 0 and, unlike for -inf, differences are not NaN.
inline constexpr double kNothing = -1e30;

// Appends `rows` rows filled with `value` to (B, H, L, ...).
at::Tensor PadRows(const at::Tensor& x, const c10::SymInt& rows, double value = 0);

// sum_j phi(q_i).phi(k_j) v_j of features (B, H, Lq, F) and (B, Hkv, Lk, F).
at::Tensor FeatureSums(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       bool causal);

// n_i, the largest sum of the exponents of a feature of query i and a visible key: (B, H, Lq, 1).
at::Tensor LargestMet(const at::Tensor& query, const at::Tensor& key, bool causal);

// exp(-n_i) sum_j phi(q_i).phi(k_j) v_j of features that are exponentials, from their exponents.
at::Tensor ExponentSums(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const at::Tensor& largest_met, bool causal, const Rotation& rotation);

}  // namespace gnomon

#endif  // GNOMON_OPS_LINEAR_FEATURE_SUMS_H_
