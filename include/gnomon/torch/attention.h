// Attention on PyTorch tensors, with any similarity and any position, exact gradients through
// autograd, and memory linear in the lengths.
//
//   o = gnomon::attention(q, k, v, AttentionOptions()
//                                      .similarity(similarity::Umbral(gamma))
//                                      .position(position::RoPE() + position::ALiBi(slopes))
//                                      .causal(true));
//
// In every formula below, query row i is at position p_i = query_offset + i and key column j is at
// p_j = j, unless positions are given. Invalid arguments throw c10::ValueError (shape or value),
// c10::TypeError (dtype or device) or c10::NotImplementedError (unsupported), naming the argument.
#ifndef GNOMON_TORCH_ATTENTION_H_
#define GNOMON_TORCH_ATTENTION_H_

#include <gnomon/attention.h>
#include <gnomon/torch/terms.h>
#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace gnomon {

struct AttentionOptions {
  // (left, right), or one number for both.
  struct Window : std::pair<std::optional<int64_t>, std::optional<int64_t>> {
    using Sides = std::pair<std::optional<int64_t>, std::optional<int64_t>>;
    using pair::pair;
    Window(Sides sides) : pair(sides) {}        // NOLINT: implicit
    Window(int64_t both) : pair(both, both) {}  // NOLINT: implicit
  };

  // One position, or several positions, which are summed.
  struct Positions : std::vector<Position> {
    using vector::vector;
    Positions(std::vector<Position> several) : vector(std::move(several)) {}  // NOLINT: implicit
    Positions(Position one) { push_back(std::move(one)); }                    // NOLINT: implicit
    Positions(const char* spec) { emplace_back(spec); }                       // NOLINT: implicit
    Positions(const std::string& spec) { emplace_back(spec); }                // NOLINT: implicit
  };

  TORCH_ARG(Similarity, similarity) = gnomon::similarity::Dot();
  // At most one rotation, one content term, one QK-norm, one sink and one gate.
  TORCH_ARG(Positions, position);
  // Whether queries attend only to keys with p_j <= p_i.
  TORCH_ARG(bool, causal) = false;
  // (left, right), both inclusive: p_i - left <= p_j <= p_i + right; nullopt is unbounded, and one
  // number sets both.
  TORCH_ARG(std::optional<Window>, window);
  // (B,) integers, or () if shared across the batch: the queries of batch element b attend only to
  // keys key_starts[b] <= j < key_lengths[b]. Other keys may contain NaN. The position of key j is
  // still j.
  TORCH_ARG(std::optional<torch::Tensor>, key_starts);
  TORCH_ARG(std::optional<torch::Tensor>, key_lengths);
  // (B, Lq) and (B, Lk) integers in the int32 range, or (Lq,) and (Lk,) if shared across the batch:
  // a query attends only to keys of its own segment (packed documents). Set both or neither.
  TORCH_ARG(std::optional<torch::Tensor>, query_segments);
  TORCH_ARG(std::optional<torch::Tensor>, key_segments);
  // The position of the first query, which may be negative. nullopt means 0 if Lq = Lk. If the
  // lengths differ, calls with causal, a window, chunks or a position must set it.
  TORCH_ARG(std::optional<int64_t>, query_offset);
  // (B,) integers, or () if shared across the batch: one offset per batch element, instead of
  // query_offset.
  TORCH_ARG(std::optional<torch::Tensor>, query_offsets);
  // (B, Lq) integers, or (Lq,) if shared across the batch: the positions p_i of the queries, in any
  // order; they may be negative. key_positions, (B, Lk) or (Lk,), are the positions p_j of the
  // keys. They replace query_offset and the key indices in masks and in all terms that depend on
  // positions. If Lq = Lk, the keys have the positions of the queries by default. On a grid, a
  // position is an index in row-major order. The table of OffsetBias, (H, 2 n - 1), is then
  // indexed by p_j - p_i, with offset 0 in the middle. The positions in a batch element must lie
  // less than 2^30 apart. With offset biases, the offsets must span a range of at most 2^22. A
  // tensor (1 or B, Lq, axes) contains coordinates, which only RoPE accepts; masks then still use
  // query_offset and the key indices.
  TORCH_ARG(std::optional<torch::Tensor>, positions);
  TORCH_ARG(std::optional<torch::Tensor>, key_positions);
  // Factor of the dot product and of relative keys, by default 1/sqrt(D). It must not be set in
  // a call that has neither.
  TORCH_ARG(std::optional<double>, scale);
  // {size, before, after}: positions form chunks of this size, and a query attends to its own chunk
  // and the given numbers of chunks before and after it. Together with Relative, this is the
  // relative local attention of Huang et al. 2019.
  TORCH_ARG(std::optional<std::vector<int64_t>>, chunks);
  // (H,) or (B, H, Lq), or () if shared by all heads: the score of an additional key without a
  // value in each query's softmax (Agarwal et al. 2025, gpt-oss). The returned lse includes the
  // sink. -inf means no sink.
  TORCH_ARG(std::optional<torch::Tensor>, sink);
  // Booleans that broadcast to (B, H, Lq, Lk): true where query i may attend to key j (other masks
  // still apply). Fully masked blocks are skipped.
  TORCH_ARG(std::optional<torch::Tensor>, mask);
  // A tensor that broadcasts to (B, H, Lq): multiplies s_ij, including biases but not the sink
  // (scalable softmax, Nakanishi 2025; Llama 4).
  TORCH_ARG(std::optional<torch::Tensor>, temperature);
  // z > 0: scores become z tanh(s_ij / z), where s_ij includes biases and the temperature; masks
  // and the sink are applied afterwards. The soft cap of similarity::Dot applies only to the dot
  // product (Gemma 2).
  TORCH_ARG(std::optional<double>, score_softcap);
  // The probability of dropping a weight; the others are multiplied by 1 / (1 - dropout), and lse
  // is computed before dropout. The dropped weights depend only on the seed and on the batch, head,
  // row and column of a pair; without a seed, PyTorch's generator draws one.
  TORCH_ARG(double, dropout) = 0;
  TORCH_ARG(std::optional<int64_t>, seed);
  // The aggregation of values:
  //   "mean": sum_j p_ij v_j.
  //   "einstein_midpoint": sum_j p_ij g_j v_j / sum_j p_ij g_j with g_j = 1 / sqrt(1 - |v_j|^2),
  //     for values in the Klein ball (Gulcehre et al. 2019). Values outside are projected onto its
  //     boundary. lse is then log sum_j g_j exp(s_ij).
  //   "lorentz_centroid": m sqrt(c / |(m.m)_L|) with m = sum_j p_ij v_j, for values on the
  //     hyperboloid (v.v)_L = -v_0^2 + v_1^2 + ... = -c, time first (Law et al. 2019). c is that
  //     of similarity::Lorentz, or 1 with any other similarity.
  TORCH_ARG(std::string, aggregation) = "mean";
  // At least 0 and below 1: the fraction of each query's total weight that may be skipped. Blocks
  // of keys are not computed, neither in the forward nor in the backward pass, if the sum of all
  // their weights is provably smaller. Such proofs require biases that decrease with distance. The
  // default, 2^-24, is the rounding error of float32. If tolerance is 0 or the inputs are float64,
  // no blocks are skipped. Non-finite values are never skipped.
  TORCH_ARG(double, tolerance) = kDefaultTolerance;
  // (B, T) integers, or (T,) if shared across the batch: k is then (N, Hkv, page size, D), v is
  // (N, Hkv, page size, Dv), and key j of batch element b is row j % (page size) of page
  // page_table[b, j / (page size)], so Lk = T (page size). Only attention() and
  // attention_with_lse() accept pages. GPU kernels read them in place if the page size is a power
  // of 2, the similarity has no token map, no term transforms the keys, and no derivatives are
  // recorded; otherwise, the sequences are first copied out of their pages.
  TORCH_ARG(std::optional<torch::Tensor>, page_table);
};

// q (B, H, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), H a multiple of Hkv; bfloat16, float16,
// float32 or float64, which is computed on the CPU. Returns o (B, H, Lq, Dv) in the dtype of q. On
// the CPU, bfloat16 and float16 are widened as the kernels read them, and accumulated in float32;
// processors with native bfloat16 multiplication use it, with weights rounded to bfloat16. If all
// keys are masked for a query, its output is 0.
torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                        const AttentionOptions& options = {});

// Computes attention, and also returns lse (B, H, Lq), in float32 or float64: the natural logarithm
// of sum_j exp(s_ij), which is differentiable. It is -inf if all keys are masked for a query.
std::tuple<torch::Tensor, torch::Tensor> attention_with_lse(const torch::Tensor& q,
                                                            const torch::Tensor& k,
                                                            const torch::Tensor& v,
                                                            const AttentionOptions& options = {});

// Returns the attention weights p_ij (B, H, rows, Lk) for the given rows of q, in the dtype of q,
// without dropout or aggregation. They are differentiable. Row indices start at 0; negative
// indices count from the end, so -1 is the last row. Memory is proportional to the number of rows
// times Lk. If all keys are masked for a query, its weights are 0.
torch::Tensor attention_weights(const torch::Tensor& q, const torch::Tensor& k,
                                const std::vector<int64_t>& rows = {-1},
                                const AttentionOptions& options = {});

// Returns the slopes (H,) of ALiBi, in float64: 2^(-8 (h + 1) / H) if H is a power of two;
// otherwise the slopes for the power of two below H, followed by every second slope for the next
// power (Press et al. 2022).
torch::Tensor alibi_slopes(int64_t num_heads);

// Returns the T5 buckets (int64) of relative positions p_j - p_i, integers of any shape (Raffel et
// al. 2020).
torch::Tensor t5_bucket(const torch::Tensor& relative_position, bool bidirectional,
                        int64_t num_buckets = 32, int64_t max_distance = 128);

// Returns the sinusoids (..., dim) of positions (...), in float64 for float64 positions, otherwise
// in float32. dim must be even. Layouts: "interleaved" has (sin, cos) pairs of p 10000^(-2 i / dim)
// (Vaswani et al. 2017); "split" has all sines, then all cosines, with the exponent
// -i / (dim / 2 - 1) (tensor2tensor); "split_xl" is the same with -2 i / dim (Dai et al. 2019).
torch::Tensor sinusoid(const torch::Tensor& positions, int64_t dim,
                       const std::string& layout = "interleaved");

// Returns the sinusoids (prefix + the product of shape, dim) of tokens on a grid in row-major
// order: dim is divided evenly among the axes; each part contains the sinusoids of one coordinate.
// The rows of the prefix are zero.
torch::Tensor grid_sinusoid(const std::vector<int64_t>& shape, int64_t dim,
                            const std::string& layout = "interleaved", int64_t prefix = 0);

// Appends 2 * copies coordinates to q and k whose inner product is sqrt(D) times the odd HyPE bias,
// for kernels without bias support: keep their scale at 1/sqrt(D), where D is the original head
// dimension. tau and mu are (H,); k is expanded to the H heads of q (Angelotti 2023). axes is the
// shape of a grid that the tokens lie on in row-major order; the bias is then the sum over its
// axes, with 2 * copies coordinates per axis.
std::tuple<torch::Tensor, torch::Tensor> hype_augment(const torch::Tensor& q,
                                                      const torch::Tensor& k, const HeadValue& tau,
                                                      const HeadValue& mu, int64_t copies = 1,
                                                      const std::vector<int64_t>& axes = {},
                                                      int64_t query_offset = 0);

// The order that cones define on points (..., D), D >= 2, of the upper half-space, whose last
// coordinate is the height (Tseng et al. 2023). Cones of type "penumbral" lie below the horosphere
// of height r (default 1), and heights are clamped to [0, r]. Cones of type "umbral" are cast by
// balls of radius r (default 0.1).
namespace cones {

// Returns whether u is an ancestor of v, that is, whether v lies in the cone of u. The result
// is boolean and has the broadcast shape of u and v without the last axis.
torch::Tensor ancestor(const torch::Tensor& u, const torch::Tensor& v,
                       const std::string& cone = "penumbral",
                       std::optional<double> r = std::nullopt);

// Returns the lowest point (..., D) whose cone contains both u and v. Points that are too far apart
// have no common ancestor below r in penumbral cones; the result is then the top of the geodesic
// through both, which is higher than r.
torch::Tensor lowest_common_ancestor(const torch::Tensor& u, const torch::Tensor& v,
                                     const std::string& cone = "penumbral",
                                     std::optional<double> r = std::nullopt);

}  // namespace cones

// Points of the hyperboloid (x.x)_L = -x_0^2 + x_1^2 + ... = -c, the model of a space of curvature
// -1 / c that similarity::Lorentz and the aggregation lorentz_centroid use. c is a number, or a
// tensor that broadcasts with the points without their last axis, such as (H, 1) for (B, H, L, D).
namespace lorentz {

// Lifts x (..., D) to points (..., D + 1), whose first coordinate is the time sqrt(c + |x|^2).
torch::Tensor lift(const torch::Tensor& x, const HeadValue& c = 1.0);

// Returns the point (..., D) with the smallest sum of squared Lorentzian distances from points
// (..., n, D) (Law et al. 2019).
torch::Tensor centroid(const torch::Tensor& points, const HeadValue& c = 1.0);

}  // namespace lorentz

}  // namespace gnomon

#endif  // GNOMON_TORCH_ATTENTION_H_
