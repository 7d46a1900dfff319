// The attention operator on plain views, without PyTorch; the caller allocates no scratch memory.
//
//   g_ij = x_i . y_j, or |x_i - y_j|^2
//   s_ij = tau_hi (c_h f(g_ij; a_i, b_j, t_h) + beta_h(i, j) + r q_i . E_h(i, j)
//                  + r k_j . F_h(i, j) + kappa_hj + pi_hij)
//   with a soft cap z, s_ij is replaced by z tanh(s_ij / z)
//   p_ij = softmax_j(s_ij | mask)
//   o_i  = sum_j m_ij p_ij (v_j + W_h(i, j)),   lse_i = log sum_j exp(s_ij)
//
// Here f is the pair function of a similarity (src/definitions), with row, column and head scalars
// a, b and t, and c is a per-head factor. beta is a bias read from a table (indexed by offset
// unless it has a layout). E, F and W are relative keys, queries and values read from tables, and r
// scales the products with E and F. kappa is a per-key bias, pi is a per-pair bias (the caller's
// array), tau is a per-row temperature, and m is the dropout mask. Neither pass allocates an
// Lq x Lk array. Results are bitwise identical from run to run and for any number of workers.
#ifndef GNOMON_ATTENTION_H_
#define GNOMON_ATTENTION_H_

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace gnomon {

// Thrown for an invalid argument, which the message names.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs the operator's tasks. Run() calls body(0) ... body(workers - 1), concurrently if it can, and
// returns when all calls have returned. body must not throw.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int max_workers() const = 0;
  virtual void Run(int workers, const std::function<void(int)>& body) const = 0;
};

// Runs everything on the calling thread.
const Executor& SerialExecutor();

// Starts std::thread workers for each call.
class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int workers) : workers_(workers < 1 ? 1 : workers) {}
  int max_workers() const override { return workers_; }
  void Run(int workers, const std::function<void(int)>& body) const override;

 private:
  int workers_;
};

// The input g of a pair function: nothing, x_i . y_j, or |x_i - y_j|^2.
enum class PairInput { kNone, kInnerProduct, kSquaredDistance };

// B is the batch size; H / Hkv query heads share each key head; D is the head_dim of x and y (0 if
// the pair function reads neither); Dv is the head_dim of v.
struct AttentionShape {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t key_heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t dim = 0;
  int64_t value_dim = 0;
};

// A (batch, head, row, column) array. `stride` contains the first three strides, in elements; the
// column stride is 1.
template <class T>
struct View {
  T* data = nullptr;
  std::array<int64_t, 3> stride = {0, 0, 0};
  T* row(int64_t b, int64_t h, int64_t i) const {
    return data + b * stride[0] + h * stride[1] + i * stride[2];
  }
};

enum class TokenType { kFloat32, kBFloat16, kFloat16 };

// Tokens of the fused kernels, laid out as in a View: float32, or 16-bit values that the kernels
// widen as they read them. Rows may be followed by arbitrary data.
struct Tokens {
  const void* data = nullptr;
  std::array<int64_t, 3> stride = {0, 0, 0};  // in elements
  TokenType type = TokenType::kFloat32;

  Tokens() = default;
  Tokens(View<const float> view) : data(view.data), stride(view.stride) {}  // NOLINT: implicit
  Tokens(const void* numbers, std::array<int64_t, 3> strides,
         TokenType number_type = TokenType::kFloat32)
      : data(numbers), stride(strides), type(number_type) {}

  // Returns a pointer to a row, whose elements have the type `type`.
  const void* row(int64_t b, int64_t h, int64_t i) const {
    const int64_t offset = b * stride[0] + h * stride[1] + i * stride[2];
    return static_cast<const char*>(data) + offset * (type == TokenType::kFloat32 ? 4 : 2);
  }
};
template <class T>
using TokensOf = std::conditional_t<std::is_same_v<T, float>, Tokens, View<const T>>;

inline constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

// Chunks of `size` positions. A query attends to its own chunk, `before` chunks before it and
// `after` chunks after it.
struct Chunks {
  int64_t size = 0;  // 0 means no chunks
  int64_t before = 0;
  int64_t after = 0;
};

// Query i is at position p_i = query_offset + i and key j is at p_j = j, unless the input gives
// positions. Query i attends to key j iff p_i - left <= p_j <= p_i + right, key_starts[b] <= j <
// key_lengths[b], both are in the same segment, the chunk of i attends to the chunk of j, and pairs
// is nonzero at (i, j). right = 0 makes attention causal.
struct Mask {
  int64_t left = kUnbounded;
  int64_t right = kUnbounded;
  Chunks chunks = {};
  const int64_t* key_starts = nullptr;   // (B); null means 0
  const int64_t* key_lengths = nullptr;  // (B); null means Lk
  // (B, Lq) and (B, Lk), contiguous: arbitrary integers that identify the documents of packed
  // tokens. Set both or neither.
  const int32_t* query_segments = nullptr;
  const int32_t* key_segments = nullptr;
  // (B, H, Lq, Lk), the caller's array, with stride 0 along broadcast axes. Fully masked tiles are
  // skipped. Null data means no mask.
  View<const uint8_t> pairs = {};
};

// Consecutive pairs of one query that read a table in order: for n = 0 ... count - 1, the pair with
// the key at `column + n` reads the table entry at `entry + n * step`, where step is 0 or 1.
struct TableRun {
  int64_t column;
  int64_t count;
  int64_t entry;
  int64_t step;
};

// The table entries [begin, end).
struct TableRange {
  int64_t begin;
  int64_t end;
};

// Describes one entry of each pair: its index is the KeyCode() of the key's position minus the
// QueryCode() of the query's position. If the index is outside [begin, end), the pair reads the
// nearest entry if `clip` is true, and none otherwise.
struct EntryDifference {
  int64_t begin;
  int64_t end;
  bool clip;
};

// Determines which table entries a pair reads; the pair's value is their sum, or 0 if it reads
// none. table_layout.h contains the library's layouts. Keys are identified by their positions.
class TableLayout {
 public:
  virtual ~TableLayout() = default;
  virtual int64_t size() const = 0;
  // Appends the runs that the query at position p reads for the keys at positions [begin, end). The
  // columns of these runs are key positions.
  virtual void AddRuns(int64_t p, int64_t begin, int64_t end,
                       std::vector<TableRun>* runs) const = 0;
  // Returns a range that contains all entries that queries at positions [first, last) read for keys
  // [begin, end).
  virtual TableRange Window(int64_t /*first*/, int64_t /*last*/, int64_t /*begin*/,
                            int64_t /*end*/) const {
    return {0, size()};
  }
  // Returns the maximum size of Window() for this many queries and keys.
  virtual int64_t LargestWindow(int64_t /*queries*/, int64_t /*keys*/) const { return size(); }
  // Returns the maximum number of entries that one pair reads, or 0 if it is unknown.
  virtual int64_t MostEntries() const { return 0; }
  // Returns the entries of AddRuns as differences, for tokens at arbitrary positions. If the result
  // is empty, this form is not available, and AddRuns is called for each run of consecutive
  // positions.
  virtual std::vector<EntryDifference> Differences() const { return {}; }
  // Return the code of a key's or a query's position for the n-th difference, or nullopt if a token
  // at this position reads no entry.
  virtual std::optional<int64_t> KeyCode(size_t /*n*/, int64_t /*p*/) const { return {}; }
  virtual std::optional<int64_t> QueryCode(size_t /*n*/, int64_t /*p*/) const { return {}; }
};

// A table of biases for each head. By default, entry n belongs to column - row = n - (Lq - 1), and
// the table has Lq + Lk - 1 entries; if the input gives positions, the bias must have a layout.
// -inf masks the pair.
template <class T>
struct Bias {
  T* table = nullptr;                   // (1 or B, H, size), contiguous; null means no bias
  int64_t batch_stride = 0;             // 0 if shared across the batch
  const TableLayout* layout = nullptr;  // null if indexed by offset
};

// Relative keys E and values W (Shaw et al. 2018), and relative queries F, which are multiplied by
// keys (position to content, He et al. 2021). All three share one layout.
template <class T>
struct Relative {
  const TableLayout* layout = nullptr;  // null if there are no tables
  View<const T> query;                  // q: (B, H, Lq, dim)
  int64_t dim = 0;
  T factor = 1;               // r
  const T* keys = nullptr;    // (1 or H, size, dim), contiguous; may be null
  bool key_heads = false;     // whether each head has its own table
  const T* values = nullptr;  // (1 or H, size, Dv), contiguous; may be null
  bool value_heads = false;
  View<const T> key;  // k: (B, Hkv, Lk, key_dim)
  int64_t key_dim = 0;
  // F: (1 or H, size, key_dim), contiguous; may be null. Otherwise, the layout must be an
  // OffsetLayout (table_layout.h), and rows are ordered by p_i - p_j: row n belongs to entry
  // size - 1 - n.
  const T* queries = nullptr;
  bool query_heads = false;
};

// Weights are multiplied by 0 with probability `rate`, and by 1 / (1 - rate) otherwise. The choice
// depends only on `seed` and on the pair's batch, head, row and column.
struct Dropout {
  double rate = 0;
  uint64_t seed = 0;
};

// The default tolerance: the rounding error of float32, relative to a row's total weight.
inline constexpr double kDefaultTolerance = 0x1p-24;

template <class T>
struct AttentionInput {
  AttentionShape shape;
  // x and y have the same type; v may have a different one. If all three are bfloat16 and the
  // processor has bfloat16 multiplication instructions, the kernels use them and round the weights
  // to bfloat16. Sums are accumulated in fp32.
  TokensOf<T> x;                      // (B, H, Lq, D)
  TokensOf<T> y;                      // (B, Hkv, Lk, D)
  TokensOf<T> v;                      // (B, Hkv, Lk, Dv)
  const T* row_scalars = nullptr;     // a: (R, B, H, Lq), contiguous
  const T* column_scalars = nullptr;  // b: (C, B, Hkv, Lk), contiguous
  const T* head_scalars = nullptr;    // t: (S, H), contiguous
  const T* factor = nullptr;          // c: (H)
  Bias<const T> bias;
  const T* key_bias = nullptr;  // kappa: (B, H, Lk), contiguous; may be null
  // (B, H, Lk) and (B, H, Lq), contiguous; set both or neither. kappa_j is then key_bias[j] -
  // key_bias_base[i] + key_bias_low[j], evaluated in this order. This preserves the precision of
  // sums over a long past, which T cannot represent exactly, if base is close to the biases of the
  // keys with large weights. lse is computed from these scores. The gradients of low and base are
  // not returned. That of low equals the gradient of key_bias. Without a soft cap, that of base is
  // -tau d_lse, or 0 if all keys are masked; with one, it cannot be computed from d_lse alone.
  const T* key_bias_low = nullptr;
  const T* key_bias_base = nullptr;
  // pi: (B, H, Lq, Lk), the caller's array, with stride 0 along broadcast axes. -inf masks the
  // pair. Null data means no pair bias.
  View<const T> pair_bias;
  Relative<T> relative;
  const T* temperature = nullptr;  // tau: (B, H, Lq), contiguous; null means 1
  // z > 0 is a soft cap on the scores, including biases and the temperature; 0 means no cap.
  double softcap = 0;
  Dropout dropout;
  Mask mask;
  int64_t query_offset = 0;
  const int64_t* query_offsets = nullptr;  // (B): instead of query_offset
  // Fraction of a row's total weight that may be skipped: tiles are not computed if the sum of all
  // their weights is provably smaller. If tolerance is 0 or the type is fp64, no tiles are skipped.
  // The proofs require biases that decrease with distance and pair functions with bounds.
  // Non-finite values are never skipped.
  double tolerance = kDefaultTolerance;
  // (B, Lq) and (B, Lk), contiguous; set both or neither: the positions of queries and keys, in any
  // order, instead of query_offset + i and j. Positions in a batch element must lie less than 2^30
  // apart, except for keys outside key_starts and key_lengths.
  const int64_t* query_positions = nullptr;
  const int64_t* key_positions = nullptr;
};

template <class T>
struct AttentionOutput {
  View<T> o;         // (B, H, Lq, Dv); 0 if all keys of a query are masked
  T* lse = nullptr;  // (B, H, Lq), contiguous; natural logarithm, -inf if all keys are masked
  // (3, B, H, Lq), contiguous; not stored if null. The backward pass uses them, as does code that
  // merges results for subsets of the keys. For each row: the maximum m of s_ij / ln 2, the sum of
  // 2^(s_ij / ln 2 - m), and the index of the key with the maximum (-1 if there is none or it is
  // unknown). On GPUs, m and its key may be those of a score that is at most 8 below the maximum.
  // lse alone is not accurate enough: its rounding error, 6e-8 |lse|, would affect every weight.
  T* statistics = nullptr;
};

// Additional inputs of the backward pass.
template <class T>
struct AttentionBackwardInput {
  View<const T> o;
  const T* lse = nullptr;    // (B, H, Lq), from the forward pass
  View<const T> d_o;         // (B, H, Lq, Dv)
  const T* d_lse = nullptr;  // (B, H, Lq), contiguous; null means 0
  // (3, B, H, Lq), from the forward pass; recomputed if null.
  const T* statistics = nullptr;
};

// Gradients; those with a null pointer are not computed. All except the views are contiguous and
// have the shape of the corresponding input.
template <class T>
struct AttentionGradient {
  View<T> x;
  View<T> y;
  View<T> v;
  T* row_scalars = nullptr;
  T* column_scalars = nullptr;
  T* head_scalars = nullptr;
  T* factor = nullptr;
  Bias<T> bias;  // batch_stride and layout as in the input
  T* key_bias = nullptr;
  // (B, H, Lq, Lk). Every element is written; masked pairs get 0. The stride along batch or heads
  // may be 0: the gradient is then summed over them in a fixed order.
  View<T> pair_bias;
  View<T> relative_query;
  T* relative_keys = nullptr;
  T* relative_values = nullptr;
  View<T> relative_key;
  T* relative_queries = nullptr;
  T* temperature = nullptr;
};

// Declared in gnomon/graph.h.
template <class T>
struct GraphInput;
template <class T>
struct GraphOutput;
template <class T>
struct GraphBackwardInput;
template <class T>
struct GraphGradient;

// Operations per pair in the forward pass, in addition to the inner product, the scale and the
// exponential: simple ones (arithmetic, comparisons, selections) and special ones (roots,
// logarithms, angles, divisions).
struct OperationCount {
  int simple = 0;
  int special = 0;
};

// A pair function with its kernels. FindPairFunction returns the built-in pair functions; the CMake
// function gnomon_add_similarity() compiles other definitions.
struct PairFunction {
  const char* name;
  int row_scalars;
  int column_scalars;
  int head_scalars;
  PairInput input;
  // fp32: fused kernels for the processor's instruction set.
  void (*forward)(const AttentionInput<float>&, const AttentionOutput<float>&, const Executor&);
  void (*backward)(const AttentionInput<float>&, const AttentionBackwardInput<float>&,
                   const AttentionGradient<float>&, const Executor&);
  // fp64: plain loops, which are the reference in the tests. AttentionForward and AttentionBackward
  // use fused kernels instead, if the definition was compiled for fp64 as well, as those above are.
  void (*reference_forward)(const AttentionInput<double>&, const AttentionOutput<double>&,
                            const Executor&);
  void (*reference_backward)(const AttentionInput<double>&, const AttentionBackwardInput<double>&,
                             const AttentionGradient<double>&, const Executor&);
  // f for one pair in fp64, without the factor c; a, b and t are its row, column and head scalars.
  double (*value)(double g, const double* a, const double* b, const double* t);
  // The functions for attention over the edges of a graph.
  void (*graph_forward)(const GraphInput<float>&, const GraphOutput<float>&, const Executor&);
  void (*graph_backward)(const GraphInput<float>&, const GraphBackwardInput<float>&,
                         const GraphGradient<float>&, const Executor&);
  void (*reference_graph_forward)(const GraphInput<double>&, const GraphOutput<double>&,
                                  const Executor&);
  void (*reference_graph_backward)(const GraphInput<double>&, const GraphBackwardInput<double>&,
                                   const GraphGradient<double>&, const Executor&);
  OperationCount operations;
  // Computes bounds f[0] <= f <= f[1] for all g in [g[0], g[1]] and all b with b[2 s] <= b_s <= b[2
  // s + 1], in fp64. Null if the definition has no bounds: tiles are then never skipped.
  void (*bounds)(const double* g, const double* a, const double* b, const double* t, double* f);
};

// The built-in pair functions.
const std::vector<const PairFunction*>& PairFunctions();

// Registers an external pair function for FindPairFunction. The object must stay at the same
// address.
void AddPairFunction(const PairFunction& function);

// Throws Error, listing the known names, if there is no function with that name.
const PairFunction& FindPairFunction(std::string_view name);

// Checks the arguments, throwing Error if one is invalid, and runs the kernels.
void AttentionForward(const PairFunction& function, const AttentionInput<float>& input,
                      const AttentionOutput<float>& output,
                      const Executor& executor = SerialExecutor());
void AttentionForward(const PairFunction& function, const AttentionInput<double>& input,
                      const AttentionOutput<double>& output,
                      const Executor& executor = SerialExecutor());
void AttentionBackward(const PairFunction& function, const AttentionInput<float>& input,
                       const AttentionBackwardInput<float>& saved,
                       const AttentionGradient<float>& gradient,
                       const Executor& executor = SerialExecutor());
void AttentionBackward(const PairFunction& function, const AttentionInput<double>& input,
                       const AttentionBackwardInput<double>& saved,
                       const AttentionGradient<double>& gradient,
                       const Executor& executor = SerialExecutor());

// Targets() returns the instruction sets that both this build and this processor support, best
// first (for example "AVX3", "AVX2", "SSE4", "SCALAR"). SetTarget() selects one for all later
// calls. The default is the one named by the environment variable GNOMON_TARGET if it is set,
// otherwise the best one.
std::vector<std::string> Targets();
void SetTarget(std::string_view name);
std::string CurrentTarget();

}  // namespace gnomon

#endif  // GNOMON_ATTENTION_H_
