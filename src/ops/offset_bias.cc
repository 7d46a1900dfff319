#include "ops/offset_bias.h"

#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace gnomon {
namespace {

// (H) to (H, 1), to go with (entries).
at::Tensor OverEntries(const at::Tensor& heads) { return heads.unsqueeze(1); }

at::Tensor DistancesAs(const at::Tensor& like, const OffsetRange& range) {
  return range.Distances(like.options()).to(like.scalar_type());
}

}  // namespace

c10::SymInt OffsetRange::size() const { return (queries + keys - 1).max(0); }

at::Tensor OffsetRange::Distances(const at::TensorOptions& options) const {
  const c10::SymInt first = query_offset + queries - 1;
  const at::Tensor distances = at::arange(first, first - size(), -1, options.dtype(at::kLong));
  if (!query_offsets) return distances;
  return distances + query_offsets->reshape({-1, 1, 1});
}

// Press et al. 2022, section 3.
at::Tensor AlibiBias(const Component&, const std::vector<at::Tensor>& tensors,
                     const OffsetRange& range) {
  const at::Tensor& slopes = tensors[0];
  return -OverEntries(slopes) * DistancesAs(slopes, range).abs();
}

at::Tensor HypeAngle(const at::Tensor& mu, const at::Tensor& distance) {
  return (mu * distance).clamp(-80, 80);
}

// Angelotti 2023, with the sign that penalises distance: its eq. 12 and eq. 14 disagree. The
// paper's form is odd, which without a mask favours the last key of all.
at::Tensor HypeBias(const Component& component, const std::vector<at::Tensor>& tensors,
                    const OffsetRange& range) {
  const at::Tensor tau = OverEntries(tensors[0]);
  const at::Tensor mu = OverEntries(tensors[1]);
  const std::string mode = component.Choice("mode", {"abs", "odd", "cosh"});
  const at::Tensor distance = DistancesAs(mu, range);
  if (mode == "abs") return -tau * HypeAngle(mu, distance.abs()).sinh();
  if (mode == "odd") return -tau * HypeAngle(mu, distance).sinh();
  return tau * (1 - HypeAngle(mu, distance).cosh());
}

at::Tensor T5Bias(const Component& component, const std::vector<at::Tensor>& tensors,
                  const OffsetRange& range) {
  const at::Tensor& table = tensors[0];
  TORCH_CHECK_VALUE(table.dim() == 2 && table.sym_size(1) == range.heads,
                    "gnomon.attention: the table of T5 has shape ", table.sym_sizes(),
                    "; expected (buckets, H) with H = ", range.heads);
  const at::Tensor buckets = t5_bucket(-range.Distances(table.options()),
                                       component.FindFlag("bidirectional").value_or(true),
                                       table.size(0), component.Integer("max_distance", 128));
  if (!range.query_offsets) return table.index_select(0, buckets).t();
  // (B, 1, entries) to (B, H, entries).
  return table.index({buckets.squeeze(1)}).transpose(1, 2);
}

// Chi et al. 2022, eq. 6 and eq. 7.
at::Tensor KerpleBias(const Component& component, const std::vector<at::Tensor>& tensors,
                      const OffsetRange& range) {
  const at::Tensor r1 = OverEntries(tensors[0]);
  const at::Tensor r2 = OverEntries(tensors[1]);
  const at::Tensor distance = DistancesAs(r1, range).abs();
  if (component.Choice("kind", {"log", "power"}) == "log") return -r1 * (r2 * distance).log1p();
  return -r1 * distance.pow(r2);
}

namespace {

// The entries of a module's table, (H, 2 n - 1), whose middle is the offset 0 of positions.
at::Tensor CentredEntries(const at::Tensor& table, const OffsetRange& range) {
  const c10::SymInt columns = table.dim() == 2 ? table.sym_size(1) : c10::SymInt(0);
  TORCH_CHECK_VALUE(table.dim() == 2 && table.sym_size(0) == range.heads && columns % 2 == 1,
                    "gnomon.nn: the table of OffsetBias has shape ", table.sym_sizes(),
                    "; expected (H, 2 length - 1) with H = ", range.heads);
  const c10::SymInt most = (columns - 1) / 2;
  c10::SymInt first = range.query_offset;
  c10::SymInt last = range.query_offset;
  if (range.query_offsets && range.query_offsets->numel() > 0) {
    first = range.query_offsets->min().item<int64_t>();
    last = range.query_offsets->max().item<int64_t>();
  }
  const c10::SymInt back = last + range.queries - 1;
  const c10::SymInt ahead = range.keys - 1 - first;
  TORCH_CHECK_VALUE(range.size() == 0 || (back <= most && ahead <= most),
                    "gnomon.nn: offset_bias:length=", most + 1, " and offsets from ", -back, " to ",
                    ahead, "; expected them within +-", most);
  if (!range.query_offsets) return table.slice_symint(1, most - back, most - back + range.size());
  // (B, 1, entries) to (B, H, entries).
  const at::Tensor entries = -range.Distances(table.options()) + most;
  return table.t().index({entries.squeeze(1)}).transpose(1, 2);
}

}  // namespace

at::Tensor RawBias(const Component& component, const std::vector<at::Tensor>& tensors,
                   const OffsetRange& range) {
  const at::Tensor& table = tensors[0];
  if (component.FindFlag("centred").value_or(false)) return CentredEntries(table, range);
  TORCH_CHECK_VALUE(
      table.dim() == 2 && table.sym_size(0) == range.heads && table.sym_size(1) == range.size(),
      "gnomon.attention: the table of OffsetBias has shape ", table.sym_sizes(),
      "; expected (H, Lq + Lk - 1) = (", range.heads, ", ", range.size(), ")");
  return table;
}

at::Tensor alibi_slopes(int64_t num_heads) {
  TORCH_CHECK_VALUE(num_heads >= 1, "gnomon.alibi_slopes: num_heads is ", num_heads,
                    "; expected at least 1");
  int64_t below = 1;
  while (2 * below <= num_heads) below *= 2;
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  const auto slopes = [&](int64_t begin, int64_t step, int64_t count, int64_t of) {
    return (at::arange(count, options) * step + begin).mul(-8.0 / static_cast<double>(of)).exp2();
  };
  return at::cat({slopes(1, 1, below, below), slopes(1, 2, num_heads - below, 2 * below)});
}

// The arithmetic, in float32, of the published models: a bucket's edge must fall where theirs does.
at::Tensor t5_bucket(const at::Tensor& relative_position, bool bidirectional, int64_t num_buckets,
                     int64_t max_distance) {
  TORCH_CHECK_TYPE(at::isIntegralType(relative_position.scalar_type(), /*includeBool=*/false),
                   "gnomon.t5_bucket: relative_position has dtype ",
                   relative_position.scalar_type(), "; expected integers");
  const int64_t one_side = bidirectional ? num_buckets / 2 : num_buckets;
  const int64_t exact = one_side / 2;
  TORCH_CHECK_VALUE(exact >= 1, "gnomon.t5_bucket: num_buckets is ", num_buckets,
                    "; expected at least ", bidirectional ? 4 : 2);
  TORCH_CHECK_VALUE(max_distance > exact, "gnomon.t5_bucket: max_distance is ", max_distance,
                    "; expected more than ", exact, ", the number of exact buckets");
  // All far distances share a bucket; those near the ends of int64 have no absolute value.
  constexpr int64_t kFar = int64_t{1} << 40;
  const at::Tensor relative = relative_position.to(at::kLong).clamp(-kFar, kFar);
  const at::Tensor distance = bidirectional ? relative.abs() : -relative.clamp_max(0);
  const double log_range = std::log(static_cast<double>(max_distance) / static_cast<double>(exact));
  const at::Tensor far =
      ((distance.clamp_min(1).to(at::kFloat) / exact).log() / log_range * (one_side - exact))
          .to(at::kLong)
          .add(exact)
          .clamp_max(one_side - 1);
  const at::Tensor bucket = at::where(distance < exact, distance, far);
  return bidirectional ? bucket + (relative > 0).to(at::kLong) * one_side : bucket;
}

}  // namespace gnomon
