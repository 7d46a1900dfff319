// Attention on Torch tensors: any similarity, any position, exact gradients, memory linear in the
// lengths. Works under autograd; not under torch.func transforms.
//
//   o = gnomon::attention(q, k, v, AttentionOptions()
//                                      .similarity(similarity::Umbral(gamma))
//                                      .position(position::RoPE() + position::ALiBi(slopes))
//                                      .causal(true));
//
// Query row i stands at p_i = query_offset + i, key column j at p_j = j, in every formula below.
// Mistakes throw c10::ValueError (a shape or a value), c10::TypeError (a dtype or a device) or
// c10::NotImplementedError (what this version does not offer), naming the argument.
#ifndef GNOMON_TORCH_ATTENTION_H_
#define GNOMON_TORCH_ATTENTION_H_

#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace gnomon {

// One number for all heads, or a tensor, which may require grad: (H,) with one for each query head,
// or () with one for all. Its dtype is that of q, or float32 where q is float16 or bfloat16.
class HeadValue {
 public:
  HeadValue(double number) : number_(number) {}                                // NOLINT: implicit
  HeadValue(torch::Tensor tensor) : number_(0), tensor_(std::move(tensor)) {}  // NOLINT: implicit
  bool is_number() const { return !tensor_.defined(); }
  double number() const { return number_; }
  const torch::Tensor& tensor() const { return tensor_; }

 private:
  double number_;
  torch::Tensor tensor_;
};

// A similarity or a position, as the operator reads it: a specification in the grammar of
// include/gnomon/catalogue.h, and the tensors of those of its parameters that are "name=tensor"
// there, in the order of the catalogue. Made by the functions below, or of a specification alone,
// "penumbral:gamma=0.5", of which parameters that it does not mention are as a module has them at
// its start.
struct Term {
  std::string spec;
  std::vector<torch::Tensor> tensors;
};
struct Similarity : Term {
  Similarity(std::string text) : Term{std::move(text), {}} {}  // NOLINT: implicit
  Similarity(const char* text) : Term{text, {}} {}             // NOLINT: implicit
  explicit Similarity(Term term) : Term(std::move(term)) {}
};
// Also the sum of several.
struct Position : Term {
  Position() = default;
  Position(std::string text) : Term{std::move(text), {}} {}  // NOLINT: implicit
  Position(const char* text) : Term{text, {}} {}             // NOLINT: implicit
  explicit Position(Term term) : Term(std::move(term)) {}
};
// "rope" + ALiBi(slopes) and ALiBi(slopes) + "rope", too.
Position operator+(const Position& a, const Position& b);

namespace similarity {

// scale * q.k; scale is AttentionOptions::scale, by default 1/sqrt(D) (Vaswani et al. 2017, eq. 1).
// Under a soft cap c it is c tanh(scale * q.k / c), between -c and c (Riviere et al. 2024, Gemma
// 2); masks and biases come after it.
Similarity Dot(std::optional<double> softcap = std::nullopt);

// -gamma |q - k|.
Similarity Laplacian(HeadValue gamma);

// -gamma |q - k|^2.
Similarity Gaussian(HeadValue gamma);

// -gamma h (score "height") or -gamma log h ("log"), h the height of the lowest common ancestor
// under umbral cones of balls of radius r (Tseng et al. 2023). Needs D >= 2: the last coordinate z
// is the height's. map "psi": height e^z, X = x e^z, z clamped to +-30; "exp": the exponential map
// of the half-space at (0, ..., 0, 1), tangents no longer than 30; "none": (X, height) = (x, z).
Similarity Umbral(HeadValue gamma, double r = 0.1, const std::string& map = "psi",
                  const std::string& score = "height");

// -gamma h (score "height"), -gamma h^2 ("height2") or gamma log(r / h) ("log"), h the height of
// the lowest common ancestor under penumbral cones below the horosphere of height r (Tseng et al.
// 2023). Needs D >= 2. map "xi": height r sigmoid(z), X = x r sigmoid(z); "exp": the exponential
// map, heights clamped to r; "none": (X, height) = (x, z), z clamped to [0, r].
Similarity Penumbral(HeadValue gamma, double r = 1.0, const std::string& map = "xi",
                     const std::string& score = "height");

// -beta d, d the distance in hyperbolic space (Gulcehre et al. 2019). `model` says what the map
// "none" takes, and which maps there are, the first by default:
//   "hyperboloid": "pseudopolar", the point at distance z from the origin in the direction of the
//     other coordinates x; "exp", the exponential map at the origin, of D-dimensional tangents;
//     "none", points (x, t), whose time t is taken to be sqrt(1 + |x|^2);
//   "half_space": "psi", "exp" as for cones; "xi", height sigmoid(z), X = x sigmoid(z); "none",
//     (X, height), heights clamped to e^-30 .. e^30;
//   "ball" (Poincare's) and "klein": "exp"; "none", points of the unit ball, where those outside
//     are pulled to its edge.
// Needs D >= 2 but for "exp" and "none" of the two balls and "exp" of the hyperboloid. Maps reach
// no farther than 30 from the origin.
Similarity Hyperbolic(HeadValue beta, const std::string& model = "hyperboloid",
                      const std::optional<std::string>& map = std::nullopt);

// -gamma max(0, Xi - psi): how far the key is outside the entailment cone of the query in the
// Poincare ball (Ganea et al. 2018, eqs. 26, 28). Xi is the angle at the query between the cone's
// axis and the key, psi = arcsin(K (1 - |q|^2) / |q|) the aperture, pi/2 where that has none. map
// "ball": tanh(|x| / 2) x / |x|; "none": points of the unit ball.
Similarity Entailment(HeadValue gamma, double K = 0.1, const std::string& map = "ball");

// LeakyReLU(q + k), with that slope below 0: q and k (B, H, L, 1) are the two scores of graph
// attention (Velickovic et al. 2018, eq. 3).
Similarity Additive(double slope = 0.2);

}  // namespace similarity

namespace position {

// -slopes_h |p_i - p_j| (Press et al. 2022).
Position ALiBi(HeadValue slopes);

// mode "abs": -tau_h sinh(mu_h |p_i - p_j|); "odd": -tau_h sinh(mu_h (p_i - p_j)), the form of the
// paper; "cosh": tau_h (1 - cosh(mu_h (p_i - p_j))) (Angelotti 2023). With causal "abs" and "odd"
// are the same; without it "odd" favours the last key. The argument of sinh and cosh is clamped to
// +-80; beyond it mu has gradient zero.
Position HyPE(HeadValue tau, HeadValue mu, const std::string& mode = "abs");

// table[bucket(p_j - p_i), h]; table (buckets, H) (Raffel et al. 2020).
Position T5(torch::Tensor table, bool bidirectional, int64_t max_distance = 128);

// kind "log": -r1_h log(1 + r2_h |p_i - p_j|); "power": -r1_h |p_i - p_j|^r2_h (Chi et al. 2022).
Position Kerple(HeadValue r1, HeadValue r2, const std::string& kind = "log");

// table (H, Lq + Lk - 1): entry n is added where column - row = n - (Lq - 1), whatever query_offset
// is; -inf masks.
Position OffsetBias(torch::Tensor table);

// Rotates the first `dims` coordinates of q and k by their positions times base^(-2 i / dims),
// before the map of the similarity (Su et al. 2021). layout "interleaved": pairs (2 i, 2 i + 1);
// "half": pairs (i, i + dims / 2). By default dims is D, or the largest even number <= D - 1 where
// the last coordinate is a height.
//
// With a shape, tokens lie on a grid in row-major order, after `prefix` tokens that are not
// rotated. The rotated coordinates are split evenly over its axes, each of which rotates its part
// by its own coordinate, with dims / axes for dims; dims is by default the largest multiple of 2 *
// axes.
//
// scaling changes the frequencies for sequences longer than those of the training: "linear", "ntk",
// "dynamic", "yarn", "longrope", "llama3" or "proportional" with numbers of its own, as in
// "yarn:factor=4:original_max_position_embeddings=2048" (docs/catalogue.md). With xpos, products of
// pairs decay with the distance, for dot alone and lengths up to 65536 (Sun et al. 2023).
Position RoPE(double base = 10000.0, const std::string& layout = "interleaved",
              std::optional<int64_t> dims = std::nullopt, const std::vector<int64_t>& shape = {},
              int64_t prefix = 0, const std::optional<std::string>& scaling = std::nullopt,
              bool xpos = false);

// One bias for each axis of a grid, summed: it reads the coordinates along its axis instead of p_i
// and p_j. Tokens are in row-major order, after `prefix` tokens (a class token) that have no bias,
// neither as queries nor as keys. Self-attention of all tokens only: Lq = Lk = prefix + the product
// of the shape, query_offset nullopt or 0.
Position Grid(const std::vector<int64_t>& shape, const std::vector<Position>& axes,
              int64_t prefix = 0);

// table[h, dy + height - 1, dx + width - 1], dy = y_j - y_i and dx = x_j - x_i, of a table (H, 2
// height - 1, 2 width - 1) that may have any number of axes; tokens as in Grid (Liu et al. 2021,
// whose tables are indexed by the opposite differences).
Position GridBias(torch::Tensor table, int64_t prefix = 0);

// Content terms: scale times the product of q, as it was passed, and a row of a table (n, D), or
// (H, n, D) with one for each head; at most one of them.

// scale q_i.table[p_j - p_i + max_offset], past first; the nearest row (far "clip", Shaw et al.
// 2018) or none ("zero", Huang et al. 2019) beyond max_offset. 2 max_offset + 1 rows, or
// max_offset + 1 for the past alone, which needs causal. With values, (n, Dv) or (H, n, Dv), their
// row is added to v_j. A table that has the future first is this one with its rows reversed,
// table.flip(-2).
Position Relative(torch::Tensor table, int64_t max_offset, const std::string& far = "clip",
                  std::optional<torch::Tensor> values = std::nullopt);

// scale (u_h.k_j + (q_i + v_h).r_h[p_i - p_j]), with dot and causal alone; u and v (H, D), r
// (H, n, D), n at least Lq + query_offset (Dai et al. 2019).
Position TransformerXL(torch::Tensor u, torch::Tensor v, torch::Tensor r);

// scale q_i.(rows[y_j - y_i + height - 1] + columns[x_j - x_i + width - 1]), rows (2 height - 1, D)
// and columns (2 width - 1, D); tokens as in Grid (Ramachandran et al. 2019; Srinivas et al. 2021).
Position Relative2D(torch::Tensor rows, torch::Tensor columns, int64_t height, int64_t width,
                    int64_t prefix = 0);

// scale q_i.table[j], Lk rows.
Position AbsoluteKeys(torch::Tensor table);

}  // namespace position

struct AttentionOptions {
  // (left, right), or one number for both.
  struct Window : std::pair<std::optional<int64_t>, std::optional<int64_t>> {
    using Sides = std::pair<std::optional<int64_t>, std::optional<int64_t>>;
    using pair::pair;
    Window(Sides sides) : pair(sides) {}        // NOLINT: implicit
    Window(int64_t both) : pair(both, both) {}  // NOLINT: implicit
  };

  // One position, or several for their sum.
  struct Positions : std::vector<Position> {
    using vector::vector;
    Positions(std::vector<Position> several) : vector(std::move(several)) {}  // NOLINT: implicit
    Positions(Position one) { push_back(std::move(one)); }                    // NOLINT: implicit
    Positions(const char* spec) { emplace_back(spec); }                       // NOLINT: implicit
    Positions(const std::string& spec) { emplace_back(spec); }                // NOLINT: implicit
  };

  TORCH_ARG(Similarity, similarity) = gnomon::similarity::Dot();
  // At most one RoPE and one content term.
  TORCH_ARG(Positions, position);
  // p_j <= p_i only.
  TORCH_ARG(bool, causal) = false;
  // (left, right), both inclusive: p_i - left <= p_j <= p_i + right; nullopt is unbounded, and one
  // number is both.
  TORCH_ARG(std::optional<Window>, window);
  // (B,) integers, or () for all batches: row b sees the columns [key_starts[b], key_lengths[b])
  // only. The columns outside may hold NaN. They shift no position.
  TORCH_ARG(std::optional<torch::Tensor>, key_starts);
  TORCH_ARG(std::optional<torch::Tensor>, key_lengths);
  // (B, Lq) and (B, Lk) integers within int32, or (Lq,) and (Lk,) for all batches: a query sees the
  // keys of its own segment only (packed documents). Both or neither.
  TORCH_ARG(std::optional<torch::Tensor>, query_segments);
  TORCH_ARG(std::optional<torch::Tensor>, key_segments);
  // Any sign. nullopt is 0 where Lq = Lk; elsewhere, with causal, a window or a position, it is an
  // error.
  TORCH_ARG(std::optional<int64_t>, query_offset);
  // (B,) integers, or () for all batches: an offset for each batch, instead of query_offset.
  TORCH_ARG(std::optional<torch::Tensor>, query_offsets);
  // Of the dot product and of content terms, by default 1/sqrt(D); with neither it is an error.
  TORCH_ARG(std::optional<double>, scale);
  // {size, before, after}: positions lie in chunks of that size, of which a query sees its own and
  // so many before and after it. With Relative, the relative local attention of Huang et al. 2019.
  TORCH_ARG(std::optional<std::vector<int64_t>>, chunks);
  // (H,) or (B, H, Lq), or () for all: one more score in each row's softmax, whose key has no value
  // (Agarwal et al. 2025, gpt-oss). o is multiplied by sigmoid(lse - sink), and lse is that of all
  // scores with the sink. -inf is none.
  TORCH_ARG(std::optional<torch::Tensor>, sink);
  // The chance with which a weight is dropped; the others are multiplied by 1 / (1 - dropout). lse
  // is that of all. What is dropped depends on the seed and on the batch, head, row and column of a
  // pair alone; without a seed, Torch's generator draws one.
  TORCH_ARG(double, dropout) = 0;
  TORCH_ARG(std::optional<int64_t>, seed);
  // "mean", sum_j p_ij v_j, or "einstein_midpoint", sum_j p_ij g_j v_j / sum_j p_ij g_j with
  // g_j = 1 / sqrt(1 - |v_j|^2), of values in the Klein ball, where those outside are pulled to its
  // edge (Gulcehre et al. 2019): log g_j is added to s_ij.
  TORCH_ARG(std::string, aggregation) = "mean";
};

// q (B, H, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), H a multiple of Hkv, bfloat16,
// float16, float32 or float64 on the CPU; returns o (B, H, Lq, Dv) in the dtype of q. bfloat16 and
// float16 are computed in float32 and rounded at the end; where the processor multiplies bfloat16
// itself, the forward pass lets it, with the weights rounded to it. A row that sees no key gives 0.
torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                        const AttentionOptions& options = {});

// Adds lse (B, H, Lq), in float32 or float64: the natural logarithm of sum_j exp(s_ij), s as
// documented, constants included; differentiable. A row that sees no key gives -inf.
std::tuple<torch::Tensor, torch::Tensor> attention_with_lse(const torch::Tensor& q,
                                                            const torch::Tensor& k,
                                                            const torch::Tensor& v,
                                                            const AttentionOptions& options = {});

// The weights p_ij (B, H, rows, Lk), in the dtype of q, of the rows of q that are asked for: what
// attention with those options multiplies the values by, without dropout and aggregation.
// Differentiable. Rows are from 0 to Lq - 1, or from -Lq on, -1 the last; memory is linear in their
// number times Lk. A row that sees no key gives 0.
torch::Tensor attention_weights(const torch::Tensor& q, const torch::Tensor& k,
                                const std::vector<int64_t>& rows = {-1},
                                const AttentionOptions& options = {});

// The slopes (H,) of ALiBi, float64: 2^(-8 (h + 1) / H) for a power of two; else those of the power
// of two below H, then every second one of the next (Press et al. 2022).
torch::Tensor alibi_slopes(int64_t num_heads);

// The buckets of T5 for integers p_j - p_i of any shape, int64 (Raffel et al. 2020).
torch::Tensor t5_bucket(const torch::Tensor& relative_position, bool bidirectional,
                        int64_t num_buckets = 32, int64_t max_distance = 128);

// Sinusoids of positions (...): (..., dim), dim even; float64 for float64 positions, else float32.
// layout "interleaved": (sin, cos) pairs of p 10000^(-2 i / dim) (Vaswani et al. 2017); "split":
// all sines, then all cosines, exponent -i / (dim / 2 - 1) (tensor2tensor); "split_xl": the same
// with exponent -2 i / dim (Dai et al. 2019).
torch::Tensor sinusoid(const torch::Tensor& positions, int64_t dim,
                       const std::string& layout = "interleaved");

// The sinusoids (prefix + the product of shape, dim) of tokens on a grid in row-major order: dim is
// split evenly over the axes, each part the sinusoids of one coordinate. Zero for the prefix.
torch::Tensor grid_sinusoid(const std::vector<int64_t>& shape, int64_t dim,
                            const std::string& layout = "interleaved", int64_t prefix = 0);

// q and k with 2 * copies columns more, whose inner product is sqrt(D) times the odd HyPE bias, for
// kernels that know no bias: keep their scale at 1/sqrt(D), D the head size before. tau and mu
// (H,); k gets the H heads of q (Angelotti 2023). axes is the shape of a grid that the tokens lie
// on in row-major order; the bias is then the sum over its axes, with 2 * copies columns for each.
std::tuple<torch::Tensor, torch::Tensor> hype_augment(const torch::Tensor& q,
                                                      const torch::Tensor& k, const HeadValue& tau,
                                                      const HeadValue& mu, int64_t copies = 1,
                                                      const std::vector<int64_t>& axes = {},
                                                      int64_t query_offset = 0);

// The order that cones make of points (..., D), D >= 2, of the upper half-space, whose last
// coordinate is the height (Tseng et al. 2023). cone "penumbral": below the horosphere of height r,
// by default 1, heights clamped to [0, r]; "umbral": of balls of radius r, by default 0.1.
namespace cones {

// Whether u is an ancestor of v, that is v in the cone of u: booleans in the shape that u and v
// without their last axis broadcast to.
torch::Tensor ancestor(const torch::Tensor& u, const torch::Tensor& v,
                       const std::string& cone = "penumbral",
                       std::optional<double> r = std::nullopt);

// The lowest point whose cone holds u and v, (..., D). Penumbral cones of points too far apart have
// none below r; the top of the geodesic through both then stands for it, higher than r.
torch::Tensor lowest_common_ancestor(const torch::Tensor& u, const torch::Tensor& v,
                                     const std::string& cone = "penumbral",
                                     std::optional<double> r = std::nullopt);

}  // namespace cones

}  // namespace gnomon

#endif  // GNOMON_TORCH_ATTENTION_H_
