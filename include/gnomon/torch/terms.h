// The similarities and positions of attention, as functions.
//
// Written by `make facades` from the catalogue, that is the files of the terms.
#ifndef GNOMON_TORCH_TERMS_H_
#define GNOMON_TORCH_TERMS_H_

#include <gnomon/torch/term.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gnomon {

namespace similarity {

// q.k / sqrt(D), or c tanh(q.k / (c sqrt(D))) under a soft cap c.
//
// The argument scale of attention() takes the place of 1/sqrt(D).
//
// Vaswani et al. 2017, Attention Is All You Need; the soft cap: Riviere et al. 2024, Gemma 2.
//
// softcap: c: scores lie between -c and c; masks and biases come after it.
Similarity Dot(std::optional<double> softcap = std::nullopt);

// LeakyReLU(q + k), of one column.
//
// q and k (B, H, L, 1) are the two scores of graph attention (eq. 3).
//
// Velickovic et al. 2018, Graph Attention Networks.
//
// slope: slope of the LeakyReLU below 0.
Similarity Additive(double slope = 0.2);

// scale q.k / (|q| |k|).
//
// Scores lie between -scale and scale, however large tokens grow. Tokens nearer to 0 than 1e-6 have
// no direction: they are divided by 1e-6 instead of their norms.
//
// Liu et al. 2022, Swin Transformer V2: Scaling Up Capacity and Resolution, section 3.3.
//
// scale: factor of each head, 1 / tau of the paper.
Similarity Cosine(HeadValue scale);

// -gamma max(0, Xi - psi), Xi the angle of k off the axis of the cone of q in the Poincare ball,
// psi = arcsin(K (1 - |q|^2) / |q|) the cone's aperture.
//
// How far k is outside the entailment cone of q (eqs. 26 and 28). The aperture is pi / 2 where it
// is not defined.
//
// Ganea et al. 2018, Hyperbolic Entailment Cones.
//
// gamma: factor of each head.
// K: the constant of the aperture.
// map: "ball": tokens x become tanh(|x| / 2) x / |x|; "none": they are points of the unit ball,
//   points outside being pulled to its edge.
Similarity Entailment(HeadValue gamma, double K = 0.1, const std::string& map = "ball");

// -gamma |q - k|^2.
//
// Chen et al. 2021, Skyformer.
//
// gamma: factor of each head.
Similarity Gaussian(HeadValue gamma);

// -beta d, d the distance in hyperbolic space.
//
// The model decides which maps there are, the first being the default, and what the map "none"
// expects:
//
// - "hyperboloid": "pseudopolar", the point at distance z, the last coordinate, from the origin in
//   the direction of x, the others; "exp", the exponential map at the origin, applied to
//   D-dimensional tangents; "none", points (x, t), whose time t is taken to be sqrt(1 + |x|^2)
// - "half_space": "psi" and "exp" as for umbral cones; "xi", height sigmoid(z), X = x sigmoid(z);
//   "none", (X, height), heights clamped to e^-30 .. e^30
// - "ball" (Poincare's) and "klein": "exp"; "none", points of the unit ball, points outside being
//   pulled to its edge
//
// Needs D >= 2, except for the two balls and for "exp" on the hyperboloid. Maps reach no farther
// than 30 from the origin.
//
// Gulcehre et al. 2019, Hyperbolic Attention Networks.
//
// beta: factor of each head.
// model: the model of hyperbolic space.
// map: how a token becomes a point of the model.
Similarity Hyperbolic(HeadValue beta, const std::string& model = "hyperboloid",
                      const std::optional<std::string>& map = std::nullopt);

// -gamma |q - k|.
//
// Tseng et al. 2023, Coneheads: Hierarchy Aware Attention.
//
// gamma: factor of each head.
Similarity Laplacian(HeadValue gamma);

// scale (2 c + 2 (q.k)_L) + bias, (x.y)_L = -x_0 y_0 + x_1 y_1 + ..., of points of the hyperboloid
// (x.x)_L = -c.
//
// Minus the squared Lorentzian distance: the scores of hyperbolic language models (HELM,
// Hypformer). RoPE turns only the spatial coordinates. Points lie no farther than sqrt(c) sinh(30)
// from the axis. Values on the hyperboloid are summed up by aggregation = "lorentz_centroid", which
// takes c from here. Where c is a tensor and several heads of q share a key head, the keys are
// repeated.
//
// Law et al. 2019, Lorentzian Distance Learning for Hyperbolic Representations; Chen et al. 2022,
// Fully Hyperbolic Neural Networks.
//
// scale: factor of each head.
// c: the curvature of each head's space is -1 / c; positive.
// bias: added to all scores of a head, which only lse and sinks see: without them it has no
//   gradient, and modules take a number, which they do not learn.
// map: "space": the point (sqrt(c + |x|^2), x) above a token x; "exp": the exponential map at
//   (sqrt(c), 0), tangents no longer than 30 sqrt(c), whose scores grow as e^(|q| + |k|); "none":
//   tokens are points (t, x), the time first, which is taken to be sqrt(c + |x|^2).
Similarity Lorentz(HeadValue scale, HeadValue c = 1.0, HeadValue bias = 0.0,
                   const std::string& map = "space");

// -gamma h, -gamma h^2 or gamma log(r / h), h the height of the lowest common ancestor of penumbral
// cones below the horosphere of height r.
//
// Needs D >= 2: the last coordinate z of a token gives its height, the others are x.
//
// Tseng et al. 2023, Coneheads: Hierarchy Aware Attention.
//
// gamma: factor of each head.
// r: height of the horosphere.
// map: "xi": height r sigmoid(z), X = x r sigmoid(z); "exp": the exponential map of the half-space
//   at (0, ..., 0, 1), heights clamped to r; "none": (X, height) = (x, z), z clamped to [0, r].
// score: "height": -gamma h; "height2": -gamma h^2; "log": gamma log(r / h).
Similarity Penumbral(HeadValue gamma, double r = 1.0, const std::string& map = "xi",
                     const std::string& score = "height");

// -gamma h or -gamma log h, h the height of the lowest common ancestor of umbral cones of radius r.
//
// Needs D >= 2: the last coordinate z of a token gives its height, the others are x. The cones are
// cast by balls of radius r.
//
// Tseng et al. 2023, Coneheads: Hierarchy Aware Attention.
//
// gamma: factor of each head.
// r: radius of the balls.
// map: "psi": height e^z, X = x e^z, z clamped to +-30; "exp": the exponential map of the
//   half-space at (0, ..., 0, 1), tangents no longer than 30; "none": (X, height) = (x, z).
// score: "height": -gamma h; "log": -gamma log h.
Similarity Umbral(HeadValue gamma, double r = 0.1, const std::string& map = "psi",
                  const std::string& score = "height");

}  // namespace similarity

namespace position {

// q and k rotated by p base^(-2 i / dims); on a grid, dims / axes by each coordinate.
//
// Pair i of the first dims coordinates is rotated, before the map of the similarity. With a shape,
// tokens lie on a grid, after `prefix` tokens that are not rotated. The rotated coordinates are
// split evenly over its axes: each axis rotates its part by its own coordinate, with dims / axes in
// place of dims. Fewer tokens than the grid has are its first ones, as those that are generated so
// far.
//
// Su et al. 2021, RoFormer.
//
// base: the base of the frequencies.
// layout: "interleaved": pairs (2 i, 2 i + 1); "half": pairs (i, i + dims / 2).
// dims: how many coordinates are rotated; by default D, or the largest even number <= D - 1 where
//   the last coordinate is a height; on a grid the largest multiple of 2 * axes.
// shape: lengths of the axes of the grid that tokens lie on, in row-major order.
// prefix: tokens before the grid, such as a class token.
// scaling: how frequencies are scaled for sequences longer than those in training, with the names
//   and numbers of transformers: "yarn:factor=4:original_max_position_embeddings=2048"; dynamic and
//   longrope depend on the length of the call, one past its last position.
// xpos: whether products of pairs decay with the distance; for dot only, and lengths up to 65536
//   (Sun et al. 2023).
// sections: for positions with several axes: how many pairs each axis turns, dims / 2 in all, with
//   the frequencies of a sequence (Qwen2-VL's temporal, height and width).
// section_order: "contiguous": one section after the other; "interleaved": pairs are dealt out to
//   the axes in turn while their sections have room, and the first axis gets the rest (Qwen3-VL).
// angles: (1 or B, 1 or H, L, dims / 2), radians, learned if it requires grad: pair n of the token
//   at position p is rotated by angles[..., p, n], instead of p times a frequency; heads may be
//   those of k, too.
// key_angles: those of the keys, (1 or B, 1 or H, Lk, dims / 2), where q and k are other tokens:
//   the rows of angles are then the queries, whatever their positions.
Position RoPE(double base = 10000.0, const std::string& layout = "interleaved",
              std::optional<int64_t> dims = std::nullopt, const std::vector<int64_t>& shape = {},
              int64_t prefix = 0, const std::optional<std::string>& scaling = std::nullopt,
              bool xpos = false, const std::vector<int64_t>& sections = {},
              const std::string& section_order = "contiguous",
              std::optional<torch::Tensor> angles = std::nullopt,
              std::optional<torch::Tensor> key_angles = std::nullopt);

// q and k rotated by t_h x + u_h y, frequencies of each head for each axis.
//
// Pair n of the first coordinates is rotated, before the map of the similarity, by its position
// along all axes at once: diagonals are directions just as the axes are. With a shape, tokens lie
// on a grid, after `prefix` tokens that are not rotated; without one the axes are those of the
// positions that the caller gives, or the sequence. In a module the frequencies are learned: they
// start as two directions at right angles (as many as there are axes), turned at random in each
// head, with frequencies base^(-n / n_max) along both.
//
// Heo et al. 2024, Rotary Position Embedding for Vision Transformer.
//
// frequencies: (H, axes, dims / 2), radians per step along each axis; one head may stand for all,
//   and those of k for groups of q's.
// layout: "interleaved": pairs (2 i, 2 i + 1); "half": pairs (i, i + dims / 2).
// shape: lengths of the axes of the grid that tokens lie on, in row-major order.
// prefix: tokens before the grid, such as a class token.
Position RoPEMixed(torch::Tensor frequencies, const std::string& layout = "interleaved",
                   const std::vector<int64_t>& shape = {}, int64_t prefix = 0);

// -slopes_h |p_i - p_j|.
//
// Press et al. 2022, Train Short, Test Long.
//
// slopes: slope of each head; alibi_slopes gives the paper's.
Position ALiBi(HeadValue slopes);

// -tau_h sinh(mu_h |p_i - p_j|); odd: of p_i - p_j; cosh: tau_h (1 - cosh(...)).
//
// With a causal mask "abs" and "odd" are the same; without one "odd" favours later keys, and the
// last one most of all. The argument of sinh and cosh is clamped to +-80; beyond it mu has gradient
// zero.
//
// Angelotti 2023, HyPE: Attention with Hyperbolic Biases for Relative Positional Encoding.
//
// tau: amplitude of each head.
// mu: rate of each head, per token.
// mode: "abs": -tau_h sinh(mu_h |p_i - p_j|); "odd": -tau_h sinh(mu_h (p_i - p_j)), the form of the
//   paper; "cosh": tau_h (1 - cosh(mu_h (p_i - p_j))).
Position HyPE(HeadValue tau, HeadValue mu, const std::string& mode = "abs");

// log: -r1_h log(1 + r2_h |p_i - p_j|); power: -r1_h |p_i - p_j|^r2_h.
//
// Chi et al. 2022, KERPLE: Kernelized Relative Positional Embedding.
//
// r1: factor of each head.
// r2: rate of each head, per token, or its exponent.
// kind: "log": -r1_h log(1 + r2_h |p_i - p_j|); "power": -r1_h |p_i - p_j|^r2_h.
Position Kerple(HeadValue r1, HeadValue r2, const std::string& kind = "log");

// attention(): table[h, j - i + Lq - 1]; modules: table[h, p_j - p_i + length - 1].
//
// Entry n belongs to column - row = n - (Lq - 1), whatever query_offset is; -inf masks. In a module
// the table is (H, 2 n - 1), over positions: entry m belongs to p_j - p_i = m - (n - 1), and calls
// of up to n tokens, cached ones included, read the part that they need.
//
// Shaw et al. 2018, Self-Attention with Relative Position Representations.
//
// table: (H, Lq + Lk - 1).
Position OffsetBias(torch::Tensor table);

// factor_h sum over i = 1 .. dims / 2 of (cos(base^(-2 i / dims) (p_i - p_j)) - 1).
//
// Chi et al. 2023, Dissecting Transformer Length Extrapolation via the Lens of Receptive Field
// Analysis.
//
// factor: factor of each head.
// dims: columns of the sinusoids, an even number.
// base: base of their wavelengths.
Position Sandwich(HeadValue factor, int64_t dims = 128, double base = 10000.0);

// table[bucket(p_j - p_i), h].
//
// t5_bucket gives the bucket of a relative position.
//
// Raffel et al. 2020, Exploring the Limits of Transfer Learning.
//
// table: (buckets, H).
// bidirectional: whether keys ahead of the query have buckets of their own.
// max_distance: the distance from which all share one bucket.
Position T5(torch::Tensor table, bool bidirectional, int64_t max_distance = 128);

// table[h, dy + height - 1, dx + width - 1], dy = y_j - y_i and dx = x_j - x_i; any number of axes.
//
// Tokens lie on a grid in row-major order, after `prefix` tokens without a bias, as in Grid. Swin's
// tables are indexed by the opposite differences: flip them along both axes.
//
// Liu et al. 2021, Swin Transformer.
//
// table: (H, 2 height - 1, 2 width - 1), or of any number of axes.
// prefix: tokens before the grid, such as a class token.
Position GridBias(torch::Tensor table, int64_t prefix = 0);

// -(log f[h, 0] + ... + log f[h, j]): with causal, a weight is multiplied by the gates f of the
// keys after it, up to the query's.
//
// The sum is exact over long sequences: it is kept in float64, and each row subtracts the sum at
// its own position. lse and sinks see it without that subtraction. Gates of keys outside key_starts
// and key_lengths count as 1. The sum is that of a key's own segment, in the order of positions. A
// module computes the gates from its tokens, f = sigmoid(w_h x + b_h); they start out as ALiBi,
// with w at 0 and b such that log f is minus ALiBi's slope.
//
// Lin et al. 2025, Forgetting Transformer: Softmax Attention with a Forget Gate.
//
// log_forget: (1 or B, 1 or H, Lk), the logarithm of each key's gate, at most 0: logsigmoid of a
//   projection of its token; less than -1e6, such as -inf, counts as that: keys before it weigh
//   nothing beside one after it.
Position Forget(torch::Tensor log_forget);

// bias[h, j], the same for all queries.
//
// The bias comes with each call, one number for each of its keys. -inf masks a key.
//
// Dai et al. 2019, Transformer-XL: Attentive Language Models beyond a Fixed-Length Context, whose
// u.k_j is one.
//
// bias: (1 or B, 1 or H, Lk).
Position KeyBias(torch::Tensor bias);

// bias[b, h, i, j].
//
// -inf masks a pair: this is what other libraries call a float mask, added to the scores. Where
// batches or heads share it, its gradient is summed over them in order. One that all queries share,
// or all keys, costs no memory for pairs. In float32 finite numbers count as at most 1e37 in size,
// so that a row of nothing but the least number there is weighs all its keys alike; one number for
// all keys of a row, (Lq, 1), changes no weight.
//
// Jumper et al. 2021, AlphaFold; Ying et al. 2021, Graphormer.
//
// bias: (1 or B, 1 or H, Lq, Lk), or what broadcasts to it.
Position PairBias(torch::Tensor bias);

// q_i.R[j] scale: learned absolute positions inside attention.
//
// Ke et al. 2021, Rethinking Positional Encoding in Language Pre-training.
//
// table: (Lk, D), or (H, Lk, D).
Position AbsoluteKeys(torch::Tensor table);

// r_i.E[p_j - p_i + extent - 1], past first; 0 where |p_i - p_j| >= extent.
//
// A module projects r_i, a few columns for each head, from its tokens, and has one table for all
// heads. It is "relative" with far "zero" and its own query.
//
// Shaw et al. 2018, Self-Attention with Relative Position Representations, whose query is q; models
// of 2026 project one.
//
// query: (B, H, Lq, Dr), what multiplies the rows.
// table: (2 extent - 1, Dr), or extent rows for the past alone, which needs causal; or (H, n, Dr),
//   a table of each head.
// extent: one more than the offset of the table's last row.
Position ContentBias(torch::Tensor query, torch::Tensor table, int64_t extent = 1024);

// (q_i.K[r] + k_j.Q[r]) scale, r = clamp(bucket(p_i - p_j) + n, 0, 2 n - 1) of 2 n rows.
//
// Content to position, and position to content. Tables are DeBERTa's: the embeddings of relative
// positions, n as position_buckets and max_distance as max_relative_positions (without buckets n is
// that, and max_distance 0), projected as keys and as queries. With scale = 1 / sqrt(3 D),
// attention is DeBERTa's. On the CPU alone.
//
// He et al. 2021, DeBERTa: Decoding-enhanced BERT with Disentangled Attention; DeBERTaV3, whose
// buckets are logarithmic.
//
// keys: (2 n, D), or (H, 2 n, D), a table of each head: what queries are multiplied by.
// queries: the same of what keys are multiplied by.
// max_distance: the distance from which all share the last bucket, more than n / 2 + 1 with n even;
//   0: a row for each offset, the nearest one beyond.
Position Disentangled(torch::Tensor keys, torch::Tensor queries, int64_t max_distance = 0);

// q_i.E[p_j - p_i + max_offset] scale, past first; with values, v_j + W[p_j - p_i + max_offset] for
// v_j; far: the nearest row, or none; with a query of its own, r_i.E[...].
//
// A table that starts with the future is this one with its rows reversed, table.flip(-2). With its
// own query, projected from the tokens to a few columns, and a table that heads share, this is the
// content-conditioned bias of models of 2026.
//
// Shaw et al. 2018, Self-Attention with Relative Position Representations; Huang et al. 2019, Music
// Transformer.
//
// table: (2 max_offset + 1, D), or max_offset + 1 rows for the past alone, which needs causal; or
//   (H, n, D), a table of each head.
// max_offset: the offset of the table's last row.
// far: the row beyond max_offset: "clip" is the nearest one (Shaw et al.), "zero" none (Huang et
//   al.).
// values: (n, Dv) with as many rows as the table, or (H, n, Dv): the row of the offset is added to
//   v_j.
// query: (B, H, Lq, Dr), what multiplies the rows instead of q: the table then has Dr columns, and
//   the products are not scaled.
Position Relative(torch::Tensor table, int64_t max_offset, const std::string& far = "clip",
                  std::optional<torch::Tensor> values = std::nullopt,
                  std::optional<torch::Tensor> query = std::nullopt);

// q_i.(R[dy + height - 1] + C[dx + width - 1]) scale, dy = y_j - y_i and dx = x_j - x_i.
//
// R are the rows and C the columns; tokens lie on a grid in row-major order, after `prefix` tokens
// without this term, as in Grid.
//
// Ramachandran et al. 2019, Stand-Alone Self-Attention; Srinivas et al. 2021, Bottleneck
// Transformers.
//
// rows: (2 height - 1, D), or (H, n, D).
// columns: (2 width - 1, D), or (H, n, D).
// height: height of the grid.
// width: width of the grid.
// prefix: tokens before the grid, such as a class token.
Position Relative2D(torch::Tensor rows, torch::Tensor columns, int64_t height, int64_t width,
                    int64_t prefix = 0);

// (u_h.k_j + (q_i + v_h).r_h[p_i - p_j]) scale, r = W_R sinusoid, or learned.
//
// Only with dot, and with causal unless bidirectional (Conformers, Gulati et al. 2020).
//
// Dai et al. 2019, Transformer-XL.
//
// u: (H, D), the part of the query that asks for keys.
// v: (H, D), the part of the query that asks for distances.
// r: (H, n, D): row n is the distance p_i - p_j = n, at least Lq + query_offset rows;
//   bidirectional: (H, 2 n - 1, D), the distances from 1 - n to n - 1.
// bidirectional: whether r has rows for keys ahead of the query as well.
Position TransformerXL(torch::Tensor u, torch::Tensor v, torch::Tensor r,
                       bool bidirectional = false);

// q / rms(q) * w_q and k / rms(k) * w_k, before anything else acts on them.
//
// Henry et al. 2020, Query-Key Normalization for Transformers; Dehghani et al. 2023, Scaling Vision
// Transformers to 22 Billion Parameters.
//
// q_weight: (D,), the weight of the queries' norm.
// k_weight: (D,), the weight of the keys' norm.
// epsilon: added to the mean of the squares.
Position QKNorm(torch::Tensor q_weight, torch::Tensor k_weight, double epsilon = 1e-06);

// multiplies the scores of row i by 1 + scale log(1 + floor((p_i + 1) / length)) (steps) or 1 +
// scale log(max(1, n_i / length)) (smooth), n_i the number of keys up to its own.
//
// Of the number of keys, those outside key_starts and key_lengths and those of other segments do
// not count; other masks make no difference, but that a window with no keys ahead is a causal mask.
// Positions (steps) are those of the call: padding before a row moves them.
//
// Meta 2025, Llama 4 (steps); Inkling 2026 (smooth).
//
// scale: how fast it grows.
// length: the length up to which it is 1.
// kind: whether it grows by whole lengths or with each key.
Position LogTemperature(double scale = 0.1, double length = 8192.0,
                        const std::string& kind = "steps");

// multiplies the scores of row i by s[h] log n_i, n_i the number of keys up to its own.
//
// Keys outside key_starts and key_lengths do not count, nor do those of other segments; other masks
// make no difference, but that a window with no keys ahead is a causal mask.
//
// Nakanishi 2025, Scalable-Softmax Is Superior for Attention.
//
// s: factor of each head.
Position ScalableSoftmax(HeadValue s);

// adds one more score s[h] to the softmax of each row, whose key has no value.
//
// The same as the argument `sink` of a call, available by name in modules.
//
// Agarwal et al. 2025, gpt-oss-120b and gpt-oss-20b Model Card; Xiao et al. 2023, Efficient
// Streaming Language Models with Attention Sinks.
//
// score: (H,), () or (B, H, Lq), learned in modules, from 0.
Position Sink(torch::Tensor score);

// o_i * g_i, the output of each head times the gate of its query.
//
// A module computes the gates from the tokens of its queries, g = sigmoid(W x).
//
// Qiu et al. 2025, Gated Attention for Large Language Models: Non-linearity, Sparsity, and
// Attention-Sink-Free.
//
// values: (B, H, Lq, Dv), what multiplies the output.
Position Gate(torch::Tensor values);

}  // namespace position

}  // namespace gnomon

#endif  // GNOMON_TORCH_TERMS_H_
