#include "ops/attention/derivative_tiles.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <gnomon/attention.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>

#include "base/visible_keys.h"
#include "ops/attention/kernel_call.h"
#include "ops/operators/executor.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// Calls body(0) ... body(tasks - 1), in a parallel region if there are several threads. Each matrix
// product then runs on one thread, so its bits do not depend on the number of threads.
template <class Body>
void RunTasks(int64_t tasks, const Body& body) {
  const Executor& executor = TorchExecutor();
  const auto workers = std::min<int64_t>(executor.max_workers(), std::max<int64_t>(tasks, 2));
  std::atomic<int64_t> next{0};
  executor.Run(static_cast<int>(workers), [&](int) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1)) body(task);
  });
}

// A tensor and its tangent. An undefined one is 0, or not needed.
struct Pair {
  at::Tensor value, tangent;

  Pair Head(int64_t b, int64_t h) const {
    const auto of = [&](const at::Tensor& x) {
      return x.defined() ? x.select(0, b).select(0, h) : x;
    };
    return {of(value), of(tangent)};
  }
  Pair Rows(int64_t begin, int64_t end) const {
    const auto of = [&](const at::Tensor& x) {
      return x.defined() ? x.narrow(0, begin, end - begin) : x;
    };
    return {of(value), of(tangent)};
  }
  Pair Transposed() const {
    return {value.defined() ? value.t() : value, tangent.defined() ? tangent.t() : tangent};
  }
  bool any() const { return value.defined() || tangent.defined(); }
};

// Adds a product to out.value and its tangent to out.tangent, if they are defined.
void AddProduct(Pair& out, const Pair& a, const Pair& b) {
  if (out.value.defined() && a.value.defined()) out.value.addmm_(a.value, b.value);
  if (!out.tangent.defined()) return;
  if (a.tangent.defined() && b.value.defined()) out.tangent.addmm_(a.tangent, b.value);
  if (a.value.defined() && b.tangent.defined()) out.tangent.addmm_(a.value, b.tangent);
}

// The same, overwriting out.
void SetProduct(Pair& out, const Pair& a, const Pair& b) {
  if (out.value.defined()) at::mm_out(out.value, a.value, b.value);
  if (!out.tangent.defined()) return;
  if (a.tangent.defined()) at::mm_out(out.tangent, a.tangent, b.value);
  if (!b.tangent.defined()) {
    if (!a.tangent.defined()) out.tangent.zero_();
  } else if (a.tangent.defined()) {
    out.tangent.addmm_(a.value, b.tangent);
  } else {
    at::mm_out(out.tangent, a.value, b.tangent);
  }
}

bool IsFinite(const OptionalTensor& tensor) {
  return !tensor || !tensor->defined() || at::isfinite(*tensor).all().item<bool>();
}

OperatorArguments InFloat(const OperatorArguments& a) {
  OperatorArguments wide = a;
  AttentionOperator::ForEachTensor(wide, [&](size_t n, auto& member) {
    const OptionalTensor tensor = member;
    if (tensor && HasGradient(AttentionOperator::kFields[n].kind)) member = tensor->to(at::kFloat);
  });
  return wide;
}

class Tiles {
 public:
  Tiles(const Cotangents* cotangents, const OperatorArguments& a, const Tangents& tangents,
        const AttentionOperator::BothNeeded& needed)
      : given_(a),
        needed_(needed),
        wide_(InFloat(a)),
        call_(wide_),
        in_(call_.input()),
        n_(in_.shape),
        group_(n_.key_heads == 0 ? 1 : n_.heads / n_.key_heads) {
    const auto with_tangent = [&](std::string_view name, const OptionalTensor& value) {
      Pair pair{OrUndefined(value), {}};
      if (tangents.empty()) return pair;
      const at::Tensor tangent = OrUndefined(tangents.get(IndexOf<OperatorArguments>(name)));
      if (tangent.defined()) pair.tangent = tangent.to(at::kFloat);
      return pair;
    };
    x_ = with_tangent("x", wide_.x);
    y_ = with_tangent("y", wide_.y);
    v_ = with_tangent("v", wide_.v);
    factor_ = with_tangent("factor", wide_.factor.view({-1, 1, 1}));
    if (factor_.tangent.defined()) factor_.tangent = factor_.tangent.view({-1, 1, 1});
    bias_ = with_tangent("bias", wide_.bias);
    key_bias_ = with_tangent("key_bias", wide_.key_bias);
    for (Pair* pair : {&bias_, &key_bias_}) {
      if (pair->tangent.defined()) pair->tangent = pair->tangent.contiguous();
    }
    // c x: scores are its products with y.
    scaled_.value = x_.value * factor_.value;
    if (x_.tangent.defined()) scaled_.tangent = x_.tangent * factor_.value;
    if (factor_.tangent.defined()) {
      const at::Tensor of_factor = x_.value * factor_.tangent;
      scaled_.tangent = scaled_.tangent.defined() ? scaled_.tangent + of_factor : of_factor;
    }
    if (cotangents == nullptr) return;
    const auto wide = [](const OptionalTensor& tensor) {
      return tensor ? tensor->to(at::kFloat) : at::Tensor();
    };
    d_o_ = {wide(cotangents->d_o), wide(cotangents->d_o_tangent)};
    d_lse_ = {Contiguous(AsOptional(wide(cotangents->d_lse))),
              Contiguous(AsOptional(wide(cotangents->d_lse_tangent)))};
  }

  std::vector<at::Tensor> Run(bool is_backward) {
    auto [o, lse] = EmptyTangents(given_, Tangents());
    o_tangent_ = o;
    lse_tangent_ = lse;
    std::vector<at::Tensor> results = {o, lse};
    if (is_backward) {
      SetGradients();
    } else {
      has_gradients_ = false;
    }
    if (call_.empty()) {
      o.zero_();
      lse.zero_();
    } else {
      RunTasks(n_.batch * n_.heads,
               [&](int64_t task) { RunHead(task / n_.heads, task % n_.heads); });
    }
    if (is_backward) AddGradients(results);
    return results;
  }

 private:
  // Rows [begin, end) of a head, and a range that contains all keys they see.
  struct Tile {
    int64_t b, h, begin, end;
    KeyRange keys;
    int64_t rows() const { return end - begin; }
    int64_t columns() const { return keys.end - keys.begin; }
  };

  Pair Needed(std::string_view name, at::IntArrayRef sizes) const {
    const size_t n = IndexOf<OperatorArguments>(name);
    const auto make = [&](bool is_needed) {
      return is_needed ? at::zeros(sizes, at::kFloat) : at::Tensor();
    };
    return {make(needed_[n]), make(needed_[AttentionOperator::kGradients + n])};
  }

  // Allocates the gradients. Those of keys have an entry per query head, those of the factor and of
  // a bias one per batch; these are summed in order at the end.
  void SetGradients() {
    d_x_ = Needed("x", wide_.x.sizes());
    d_y_ = Needed("y", {n_.batch, n_.heads, n_.keys, n_.dim});
    d_v_ = Needed("v", {n_.batch, n_.heads, n_.keys, n_.value_dim});
    d_factor_ = Needed("factor", {n_.batch, n_.heads});
    d_bias_ = Needed("bias", {n_.batch, n_.heads, n_.queries + n_.keys - 1});
    d_key_bias_ = Needed("key_bias", {n_.batch, n_.heads, n_.keys});
    has_gradients_ = d_x_.any() || d_y_.any() || d_v_.any() || d_factor_.any() || d_bias_.any() ||
                     d_key_bias_.any();
  }

  void AddGradients(std::vector<at::Tensor>& results) const {
    const auto sum_of = [&](size_t n, bool is_tangent) {
      const std::string_view name = AttentionOperator::kFields[n].name;
      const auto of = [&](const Pair& pair) { return is_tangent ? pair.tangent : pair.value; };
      const auto of_keys = [&](const Pair& pair) {
        return of(pair).unflatten(1, {n_.key_heads, group_}).sum(2);
      };
      if (name == "x") return of(d_x_);
      if (name == "y") return of_keys(d_y_);
      if (name == "v") return of_keys(d_v_);
      if (name == "factor") return of(d_factor_).sum(0);
      if (name == "key_bias") return of(d_key_bias_);
      TORCH_INTERNAL_ASSERT(name == "bias", name);
      return wide_.bias->size(0) == 1 ? of(d_bias_).sum(0, /*keepdim=*/true) : of(d_bias_);
    };
    for (const bool is_tangent : {false, true}) {
      AttentionOperator::ForEachTensor(given_, [&](size_t n, const OptionalTensor& tensor) {
        constexpr size_t kGradients = AttentionOperator::kGradients;
        if (n >= kGradients) return;
        results.push_back(needed_[(is_tangent ? kGradients : 0) + n]
                              ? sum_of(n, is_tangent).to(tensor->scalar_type())
                              : at::empty({0}, given_.x.options()));
      });
    }
  }

  KeyRange KeysOf(int64_t b, int64_t i) const {
    KeyRange keys =
        VisibleKeys(in_.mask, BatchKeys(in_.mask, n_.keys, b), QueryPosition(in_, b, i));
    keys.begin = std::clamp<int64_t>(keys.begin, 0, n_.keys);
    keys.end = std::clamp<int64_t>(keys.end, keys.begin, n_.keys);
    return keys;
  }

  void RunHead(int64_t b, int64_t h) const {
    // A tile has about this many scores, which fit into the L2 cache together with their tangents.
    constexpr int64_t kScores = int64_t{1} << 17;
    const int64_t rows = std::clamp<int64_t>(kScores / n_.keys, 16, 128);
    const at::Tensor memory = at::empty({4, rows * n_.keys}, at::kFloat);
    for (int64_t begin = 0; begin < n_.queries; begin += rows) {
      Tile tile{b, h, begin, std::min(begin + rows, n_.queries), {n_.keys, 0}};
      for (int64_t i = tile.begin; i < tile.end; ++i) {
        const KeyRange seen = KeysOf(b, i);
        if (seen.empty()) continue;
        tile.keys = {std::min(tile.keys.begin, seen.begin), std::max(tile.keys.end, seen.end)};
      }
      if (tile.keys.empty()) {
        o_tangent_.select(0, b).select(0, h).narrow(0, begin, tile.rows()).zero_();
        lse_tangent_.select(0, b).select(0, h).narrow(0, begin, tile.rows()).zero_();
        continue;
      }
      RunTile(tile, memory);
    }
  }

  void RunTile(const Tile& tile, const at::Tensor& memory) const {
    const auto matrix = [&](int64_t n) {
      return memory.select(0, n)
          .narrow(0, 0, tile.rows() * tile.columns())
          .view({tile.rows(), tile.columns()});
    };
    const int64_t kv = tile.h / group_;
    const Pair scaled = scaled_.Head(tile.b, tile.h).Rows(tile.begin, tile.end);
    const Pair y = y_.Head(tile.b, kv).Rows(tile.keys.begin, tile.keys.end);
    const Pair v = v_.Head(tile.b, kv).Rows(tile.keys.begin, tile.keys.end);
    Pair weights{matrix(0), matrix(1)};
    SetProduct(weights, scaled, y.Transposed());
    FinishWeights(tile, weights);
    Pair o{{}, at::empty({tile.rows(), n_.value_dim}, at::kFloat)};
    SetProduct(o, weights, v);
    o_tangent_.select(0, tile.b)
        .select(0, tile.h)
        .narrow(0, tile.begin, tile.rows())
        .copy_(o.tangent);
    if (!has_gradients_) return;

    const Pair d_o = d_o_.Head(tile.b, tile.h).Rows(tile.begin, tile.end);
    Pair d_v = d_v_.Head(tile.b, tile.h).Rows(tile.keys.begin, tile.keys.end);
    AddProduct(d_v, weights.Transposed(), d_o);
    if (!d_x_.any() && !d_y_.any() && !d_factor_.any() && !d_bias_.any() && !d_key_bias_.any()) {
      return;
    }
    Pair d_scores{matrix(2), matrix(3)};
    SetProduct(d_scores, d_o, v.Transposed());
    FinishGradients(tile, weights, d_scores);
    Pair d_y = d_y_.Head(tile.b, tile.h).Rows(tile.keys.begin, tile.keys.end);
    AddProduct(d_y, d_scores.Transposed(), scaled);
    if (!d_x_.any() && !d_factor_.any()) return;
    // First the gradient with respect to c x, then those with respect to x and c.
    const bool has_value = d_x_.value.defined() || d_factor_.any() || factor_.tangent.defined();
    Pair product{has_value ? at::empty({tile.rows(), n_.dim}, at::kFloat) : at::Tensor(),
                 at::empty({tile.rows(), n_.dim}, at::kFloat)};
    SetProduct(product, d_scores, y);
    const auto number = [&](const at::Tensor& factor) {
      return factor.defined() ? factor.const_data_ptr<float>()[tile.h * factor.stride(0)] : 0.0f;
    };
    const float c = number(factor_.value);
    Pair d_x = d_x_.Head(tile.b, tile.h).Rows(tile.begin, tile.end);
    if (d_x.value.defined()) at::mul_out(d_x.value, product.value, at::scalar_tensor(c));
    if (d_x.tangent.defined()) {
      at::mul_out(d_x.tangent, product.tangent, at::scalar_tensor(c));
      if (factor_.tangent.defined()) {
        d_x.tangent.add_(product.value, number(factor_.tangent));
      }
    }
    if (!d_factor_.any()) return;
    const Pair x = x_.Head(tile.b, tile.h).Rows(tile.begin, tile.end);
    const int64_t head = tile.b * n_.heads + tile.h;
    if (d_factor_.value.defined()) {
      d_factor_.value.data_ptr<float>()[head] += (x.value * product.value).sum().item<float>();
    }
    if (d_factor_.tangent.defined()) {
      at::Tensor sum = (x.value * product.tangent).sum();
      if (x.tangent.defined()) sum = sum + (x.tangent * product.value).sum();
      d_factor_.tangent.data_ptr<float>()[head] += sum.item<float>();
    }
  }

  // Calls body(numbers, tangents) for each bias of a row, starting at the first key of the tile.
  template <class Body>
  void ForEachBias(const Tile& tile, int64_t i, const Body& body) const {
    const auto call = [&](const float* numbers, const at::Tensor& tangents, int64_t entry) {
      const float* own = Data<float>(tangents);
      body(numbers + entry, own == nullptr ? nullptr : own + entry);
    };
    const int64_t offset = n_.queries - 1 + tile.keys.begin - i;
    if (in_.bias.table != nullptr) {
      call(in_.bias.table, bias_.tangent,
           tile.b * in_.bias.batch_stride + tile.h * (n_.queries + n_.keys - 1) + offset);
    }
    if (in_.key_bias != nullptr) {
      call(in_.key_bias, key_bias_.tangent,
           (tile.b * n_.heads + tile.h) * n_.keys + tile.keys.begin);
    }
  }

  // Turns products into weights and their tangents, and computes the tangents of lse.
  void FinishWeights(const Tile& tile, Pair& weights) const {
    const int64_t columns = tile.columns();
    float* const scores = weights.value.data_ptr<float>();
    float* const tangents = weights.tangent.data_ptr<float>();
    std::array<bool, 128> sees = {};
    for (int64_t r = 0; r < tile.rows(); ++r) {
      float* const s = scores + r * columns;
      float* const ds = tangents + r * columns;
      ForEachBias(tile, tile.begin + r, [&](const float* bias, const float* tangent) {
        for (int64_t j = 0; j < columns; ++j) s[j] += bias[j];
        for (int64_t j = 0; tangent != nullptr && j < columns; ++j) ds[j] += tangent[j];
      });
      const KeyRange seen = KeysOf(tile.b, tile.begin + r);
      const int64_t first = std::clamp<int64_t>(seen.begin - tile.keys.begin, 0, columns);
      const int64_t last = std::clamp<int64_t>(seen.end - tile.keys.begin, first, columns);
      std::fill(s, s + first, kMasked);
      std::fill(s + last, s + columns, kMasked);
      sees[static_cast<size_t>(r)] =
          std::any_of(s + first, s + last, [](float score) { return score != kMasked; });
    }
    weights.value.copy_(at::softmax(weights.value, 1));
    float* const lse =
        lse_tangent_.data_ptr<float>() + (tile.b * n_.heads + tile.h) * n_.queries + tile.begin;
    for (int64_t r = 0; r < tile.rows(); ++r) {
      float* const p = scores + r * columns;
      float* const dp = tangents + r * columns;
      lse[r] = 0;
      if (!sees[static_cast<size_t>(r)]) {
        std::fill(p, p + columns, 0.0f);
        std::fill(dp, dp + columns, 0.0f);
        continue;
      }
      float mean = 0;
#pragma omp simd reduction(+ : mean)
      for (int64_t j = 0; j < columns; ++j) mean += p[j] * dp[j];
      for (int64_t j = 0; j < columns; ++j) dp[j] = p[j] * (dp[j] - mean);
      lse[r] = mean;
    }
  }

  // Turns the gradients of weights into those of scores, and adds those of biases.
  void FinishGradients(const Tile& tile, const Pair& weights, Pair& d_scores) const {
    const int64_t columns = tile.columns();
    const auto add = [&](const at::Tensor& to, int64_t entry, const float* numbers) {
      if (!to.defined()) return;
      float* const sums = to.data_ptr<float>() + entry;
      for (int64_t j = 0; j < columns; ++j) sums[j] += numbers[j];
    };
    for (int64_t r = 0; r < tile.rows(); ++r) {
      const int64_t i = tile.begin + r;
      const int64_t head = tile.b * n_.heads + tile.h;
      const float* const p = weights.value.const_data_ptr<float>() + r * columns;
      const float* const dp = weights.tangent.const_data_ptr<float>() + r * columns;
      float* const d = d_scores.value.data_ptr<float>() + r * columns;
      float* const dd = d_scores.tangent.data_ptr<float>() + r * columns;
      float delta = 0;
      float tangent = 0;
#pragma omp simd reduction(+ : delta, tangent)
      for (int64_t j = 0; j < columns; ++j) {
        delta += p[j] * d[j];
        tangent += dp[j] * d[j] + p[j] * dd[j];
      }
      const int64_t row = head * n_.queries + i;
      if (const float* d_lse = Data<float>(d_lse_.value)) delta -= d_lse[row];
      if (const float* d_lse = Data<float>(d_lse_.tangent)) tangent -= d_lse[row];
      for (int64_t j = 0; j < columns; ++j) {
        const float difference = d[j] - delta;
        dd[j] = dp[j] * difference + p[j] * (dd[j] - tangent);
        d[j] = p[j] * difference;
      }
      const int64_t entry =
          head * (n_.queries + n_.keys - 1) + n_.queries - 1 + tile.keys.begin - i;
      add(d_bias_.value, entry, d);
      add(d_bias_.tangent, entry, dd);
      add(d_key_bias_.value, head * n_.keys + tile.keys.begin, d);
      add(d_key_bias_.tangent, head * n_.keys + tile.keys.begin, dd);
    }
  }

  const OperatorArguments& given_;
  const AttentionOperator::BothNeeded& needed_;
  OperatorArguments wide_;
  KernelCall<float> call_;
  const AttentionInput<float>& in_;
  const AttentionShape& n_;
  int64_t group_;
  Pair x_, y_, v_, factor_, scaled_, bias_, key_bias_, d_o_, d_lse_;
  at::Tensor o_tangent_, lse_tangent_;
  bool has_gradients_ = false;
  Pair d_x_, d_y_, d_v_, d_factor_, d_bias_, d_key_bias_;
};

}  // namespace

bool HasTiledDerivatives(const Cotangents* cotangents, const OperatorArguments& a,
                         const Tangents& tangents) {
  const bool is_supported =
      a.function == "dot" && a.x.scalar_type() != at::kDouble && !a.pair_bias && !a.temperature &&
      !a.relative_keys && !a.relative_values && !a.relative_queries && !a.bias_parameters &&
      !a.key_bias_low && !a.mask && !a.query_positions && !a.key_positions && !a.query_segments &&
      !a.key_segments && !a.grid && a.dropout == 0 && a.softcap == 0;
  if (!is_supported) return false;
  // In a tile product, NaN or infinity in a hidden key would reach rows that do not see it.
  bool is_finite = IsFinite(a.x) && IsFinite(a.y) && IsFinite(a.v);
  for (size_t n = 0; n < tangents.size(); ++n) is_finite = is_finite && IsFinite(tangents.get(n));
  if (cotangents == nullptr) return is_finite;
  return is_finite && IsFinite(cotangents->d_o) && IsFinite(cotangents->d_lse) &&
         IsFinite(cotangents->d_o_tangent) && IsFinite(cotangents->d_lse_tangent);
}

std::vector<at::Tensor> TiledDerivatives(const Cotangents* cotangents, const OperatorArguments& a,
                                         const Tangents& tangents,
                                         const AttentionOperator::BothNeeded& needed) {
  return Tiles(cotangents, a, tangents, needed).Run(cotangents != nullptr);
}

}  // namespace gnomon
