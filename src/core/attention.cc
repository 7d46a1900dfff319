// Public entry points of attention, which check the arguments and call the kernels.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "base/call_log.h"
#include "base/pair_count.h"
#include "base/visible_keys.h"
#include "core/derivatives.h"
#include "core/engine.h"
#include "core/targets.h"
#include "core/with_statistics.h"
#include "gnomon/attention.h"
#include "gnomon/derivatives.h"
#include "gnomon/table_layout.h"
#include "reference/reference.h"

namespace gnomon {
namespace {

[[noreturn]] void Fail(const char* name, const std::string& problem) {
  throw Error("attention: " + std::string(name) + " " + problem);
}

void Require(bool condition, const char* name, const char* problem) {
  if (!condition) Fail(name, problem);
}

template <class View>
void RequireView(const View& view, const char* name, int64_t size) {
  Require(view.data != nullptr || size == 0, name, "is null");
}

template <class T>
void CheckPositions(const AttentionInput<T>& in) {
  const AttentionShape& n = in.shape;
  if (n.batch * n.queries * n.keys == 0) return;
  Require((in.query_positions == nullptr) == (in.key_positions == nullptr),
          "one of query_positions and key_positions", "is null; expected both or neither");
  if (!HasPositions(in)) return;
  Require(in.bias.table == nullptr || in.bias.layout != nullptr, "bias",
          "has no layout; expected one, because the call has positions");
  // Beyond 2^53, float64 positions would be inexact.
  constexpr int64_t kLargest = int64_t{1} << 53;
  for (int64_t b = 0; b < n.batch; ++b) {
    const int64_t* queries = in.query_positions + b * n.queries;
    auto [least, greatest] = std::minmax_element(queries, queries + n.queries);
    int64_t low = *least;
    int64_t high = *greatest;
    const KeyRange seen = BatchKeys(in.mask, n.keys, b);
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      low = std::min(low, KeyPosition(in, b, j));
      high = std::max(high, KeyPosition(in, b, j));
    }
    if (low < -kLargest || high > kLargest || high - low >= kMostApart) {
      Fail("positions", "of batch element " + std::to_string(b) + " range from " +
                            std::to_string(low) + " to " + std::to_string(high) +
                            "; expected values within +-2^53 and less than 2^30 apart");
    }
  }
}

template <class T>
void Check(const PairFunction& f, const AttentionInput<T>& in) {
  const AttentionShape& n = in.shape;
  const std::pair<const char*, int64_t> sizes[] = {
      {"batch", n.batch}, {"heads", n.heads}, {"key_heads", n.key_heads}, {"queries", n.queries},
      {"keys", n.keys},   {"dim", n.dim},     {"value_dim", n.value_dim}};
  for (const auto& [name, size] : sizes) {
    if (size < 0) Fail(name, "is " + std::to_string(size) + "; expected at least 0");
  }
  if (n.key_heads > 0 ? n.heads % n.key_heads != 0 : n.heads != 0) {
    Fail("heads", "is " + std::to_string(n.heads) + "; expected a multiple of key_heads, " +
                      std::to_string(n.key_heads));
  }
  constexpr int64_t kMost = int64_t{1} << 30;
  Require(n.queries < kMost && n.keys < kMost, "the number of queries or keys",
          "is too large; expected a number below 2^30");
  const int64_t rows = n.batch * n.heads * n.queries;
  const int64_t columns = n.batch * n.key_heads * n.keys;
  if (f.input != PairInput::kNone) {
    Require(n.dim > 0 || rows * columns == 0, "dim", "is 0; expected at least 1");
    RequireView(in.x, "x", rows * n.dim);
    RequireView(in.y, "y", columns * n.dim);
    if constexpr (std::is_same_v<T, float>) {
      Require(in.x.type == in.y.type || rows * columns == 0, "y",
              "has a different type than x; expected the same type");
    }
  }
  RequireView(in.v, "v", columns * n.value_dim);
  const Chunks& chunks = in.mask.chunks;
  for (const int64_t number : {chunks.size, chunks.before, chunks.after}) {
    if (number < 0 || number >= kMost) {
      Fail("chunks", "contains " + std::to_string(number) + "; expected 0 to 2^30 - 1");
    }
  }
  Require(rows * columns == 0 ||
              (in.mask.query_segments == nullptr) == (in.mask.key_segments == nullptr),
          "one of query_segments and key_segments", "is null; expected both or neither");
  CheckPositions(in);
  Require(in.factor != nullptr || n.heads == 0, "factor", "is null");
  const Relative<T>& relative = in.relative;
  Require(relative.layout != nullptr || (relative.keys == nullptr && relative.values == nullptr &&
                                         relative.queries == nullptr),
          "relative", "has a table without a layout; expected both");
  if (relative.keys != nullptr) {
    Require(relative.dim > 0, "relative dim", "is 0; expected at least 1");
    RequireView(relative.query, "relative query", rows * relative.dim);
  }
  if (relative.queries != nullptr) {
    Require(relative.key_dim > 0, "relative key_dim", "is 0; expected at least 1");
    RequireView(relative.key, "relative key", columns * relative.key_dim);
    Require(dynamic_cast<const OffsetLayout*>(relative.layout) != nullptr, "relative",
            "has queries and a layout that is not indexed by offset; expected an OffsetLayout");
  }
  Require(rows * columns == 0 || (in.key_bias_low == nullptr) == (in.key_bias_base == nullptr),
          "one of key_bias_low and key_bias_base", "is null; expected both or neither");
  Require(rows * columns == 0 || in.key_bias_low == nullptr || in.key_bias != nullptr,
          "key_bias_low", "is given without key_bias; expected both");
  if (!(in.softcap >= 0 && std::isfinite(in.softcap))) {
    Fail("softcap",
         "is " + std::to_string(in.softcap) + "; expected a positive number, or 0 for no cap");
  }
  if (!(in.tolerance >= 0 && in.tolerance < 1)) {
    Fail("tolerance", "is " + std::to_string(in.tolerance) + "; expected at least 0 and below 1");
  }
  if (!(in.dropout.rate >= 0 && in.dropout.rate <= 1)) {
    Fail("dropout",
         "is " + std::to_string(in.dropout.rate) + "; expected a probability from 0 to 1");
  }
  const auto require_scalars = [&](const char* name, const T* scalars, int count, int64_t size) {
    if (count == 0 || scalars != nullptr || size == 0) return;
    Fail(name, std::string("is null; the pair function ") + f.name + " requires it");
  };
  require_scalars("row_scalars", in.row_scalars, f.row_scalars, rows);
  require_scalars("column_scalars", in.column_scalars, f.column_scalars, columns);
  require_scalars("head_scalars", in.head_scalars, f.head_scalars, n.heads);
}

template <class T>
void CheckForward(const PairFunction& f, const AttentionInput<T>& in,
                  const AttentionOutput<T>& out) {
  Check(f, in);
  const int64_t rows = in.shape.batch * in.shape.heads * in.shape.queries;
  RequireView(out.o, "o", rows * in.shape.value_dim);
  Require(out.lse != nullptr || rows == 0, "lse", "is null");
}

template <class T>
void CheckBackward(const PairFunction& f, const AttentionInput<T>& in,
                   const AttentionBackwardInput<T>& saved, const AttentionGradient<T>& grad) {
  Check(f, in);
  const int64_t rows = in.shape.batch * in.shape.heads * in.shape.queries;
  RequireView(saved.o, "o", rows * in.shape.value_dim);
  RequireView(saved.d_o, "d_o", rows * in.shape.value_dim);
  Require(saved.lse != nullptr || rows == 0, "lse", "is null");
  Require(grad.bias.table == nullptr || in.bias.table != nullptr, "d_bias",
          "is given without bias; expected both");
  Require(grad.bias.table == nullptr || grad.bias.batch_stride == in.bias.batch_stride, "d_bias",
          "has a different batch_stride than bias; expected the same");
  Require(grad.key_bias == nullptr || in.key_bias != nullptr, "d_key_bias",
          "is given without key_bias; expected both");
  Require((grad.relative_query.data == nullptr && grad.relative_keys == nullptr) ||
              in.relative.keys != nullptr,
          "d_relative_keys", "is given without relative keys; expected both");
  Require((grad.relative_key.data == nullptr && grad.relative_queries == nullptr) ||
              in.relative.queries != nullptr,
          "d_relative_queries", "is given without relative queries; expected both");
  Require(grad.pair_bias.data == nullptr || in.pair_bias.data != nullptr, "d_pair_bias",
          "is given without pair_bias; expected both");
  Require(grad.pair_bias.data == nullptr || in.shape.queries < 2 || grad.pair_bias.stride[2] != 0,
          "d_pair_bias", "has rows that share memory; expected separate rows");
  Require(grad.temperature == nullptr || in.temperature != nullptr, "d_temperature",
          "is given without temperature; expected both");
  Require(grad.relative_values == nullptr || in.relative.values != nullptr, "d_relative_values",
          "is given without relative values; expected both");
}

template <class T, class Forward>
WithStatistics<AttentionBackwardInput<T>> Complete(const Forward& forward,
                                                   const AttentionInput<T>& in,
                                                   const AttentionBackwardInput<T>& saved,
                                                   const Executor& executor) {
  const AttentionShape& n = in.shape;
  return {saved, n.batch * n.heads * n.queries, n.value_dim, [&](T* o, T* lse, T* statistics) {
            const int64_t of_head = n.queries * n.value_dim;
            forward(in, {{o, {n.heads * of_head, of_head, n.value_dim}}, lse, statistics},
                    executor);
          }};
}

// Returns the caller's executor, or a serial one if waking other threads would take longer than the
// work itself.
const Executor& ExecutorFor(const AttentionShape& n, const Executor& executor) {
  constexpr int64_t kLeastProducts = int64_t{1} << 17;
  const int64_t products = n.batch * n.heads * n.queries * n.keys * (n.dim + n.value_dim);
  // The caller's executor exists during the call.
  // NOLINTNEXTLINE(bugprone-return-const-ref-from-parameter)
  return products < kLeastProducts ? SerialExecutor() : executor;
}

// Runs a pass of the CPU engine or of the reference, and logs it if GNOMON_LOG is "calls".
template <class T, class Pass>
void RunLogged(const char* operation, const PairFunction& function, const AttentionInput<T>& in,
               const Pass& pass, bool is_reference = false) {
  if (!LogsCalls()) return pass();
  CallPlan plan;
  CallPlan* const outer = std::exchange(call_plan, &plan);
  try {
    pass();
  } catch (...) {
    call_plan = outer;
    throw;
  }
  call_plan = outer;
  std::string kind = std::string(operation) + ": " + DescribeCall(function, in);
  if (is_reference) {
    kind += ", CPU reference";
  } else {
    kind += ", CPU " + CurrentTarget();
    if (plan.multiplies_pairs) kind += " with bfloat16 products";
    if (*plan.keys != '\0') kind += std::string(", ") + plan.keys;
    if (plan.may_skip) kind += ", skips negligible tiles";
  }
  LogCall(kind, DescribeSizes(in.shape));
}

}  // namespace

void CountPairs(PairCount* count) { pair_count = count; }

void AttentionForward(const PairFunction& function, const AttentionInput<float>& input,
                      const AttentionOutput<float>& output, const Executor& executor) {
  CheckForward(function, input, output);
  ChooseTargetOnce();
  RunLogged("forward", function, input,
            [&] { function.forward(input, output, ExecutorFor(input.shape, executor)); });
}

void AttentionForward(const PairFunction& function, const AttentionInput<double>& input,
                      const AttentionOutput<double>& output, const Executor& executor) {
  CheckForward(function, input, output);
  if (const PairTableOf<double>* const table = FindDoubleTable(function)) {
    return RunLogged("forward", function, input, [&] {
      EngineForward(*table, input, output, ExecutorFor(input.shape, executor));
    });
  }
  RunLogged(
      "forward", function, input, [&] { function.reference_forward(input, output, executor); },
      /*is_reference=*/true);
}

void AttentionBackward(const PairFunction& function, const AttentionInput<float>& input,
                       const AttentionBackwardInput<float>& saved,
                       const AttentionGradient<float>& gradient, const Executor& executor) {
  CheckBackward(function, input, saved, gradient);
  ChooseTargetOnce();
  const Executor& workers = ExecutorFor(input.shape, executor);
  const auto complete = Complete(function.forward, input, saved, workers);
  RunLogged("backward", function, input,
            [&] { function.backward(input, complete.saved(), gradient, workers); });
}

void AttentionBackward(const PairFunction& function, const AttentionInput<double>& input,
                       const AttentionBackwardInput<double>& saved,
                       const AttentionGradient<double>& gradient, const Executor& executor) {
  CheckBackward(function, input, saved, gradient);
  if (const PairTableOf<double>* const table = FindDoubleTable(function)) {
    const Executor& workers = ExecutorFor(input.shape, executor);
    const auto forward = [table](const AttentionInput<double>& in,
                                 const AttentionOutput<double>& out,
                                 const Executor& with) { EngineForward(*table, in, out, with); };
    const auto complete = Complete(forward, input, saved, workers);
    return RunLogged("backward", function, input,
                     [&] { EngineBackward(*table, input, complete.saved(), gradient, workers); });
  }
  const auto complete = Complete(function.reference_forward, input, saved, executor);
  RunLogged(
      "backward", function, input,
      [&] { function.reference_backward(input, complete.saved(), gradient, executor); },
      /*is_reference=*/true);
}

void AttentionForward(const PairFunction& function, const AttentionInput<Dual>& input,
                      const AttentionOutput<Dual>& output, const Executor& executor) {
  CheckForward(function, input, output);
  RunLogged(
      "forward-mode derivative", function, input,
      [&] { reference::Forward(reference::FindTable(function), input, output, executor); },
      /*is_reference=*/true);
}

void AttentionBackward(const PairFunction& function, const AttentionInput<Dual>& input,
                       const AttentionBackwardInput<Dual>& saved,
                       const AttentionGradient<Dual>& gradient, const Executor& executor) {
  CheckBackward(function, input, saved, gradient);
  const reference::Table& table = reference::FindTable(function);
  const auto forward = [&](const AttentionInput<Dual>& in, const AttentionOutput<Dual>& out,
                           const Executor& workers) {
    reference::Forward(table, in, out, workers);
  };
  const auto complete = Complete(forward, input, saved, executor);
  RunLogged(
      "second derivative", function, input,
      [&] { reference::Backward(table, input, complete.saved(), gradient, executor); },
      /*is_reference=*/true);
}

template <class T>
void DifferentiateAttention(const PairFunction& function, const AttentionDerivatives<T>& of,
                            const Executor& executor) {
  Check(function, of.input);
  ChooseTargetOnce();
  const bool is_jvp = of.output.lse != nullptr;
  RunLogged(is_jvp ? "forward-mode derivative" : "second derivative", function, of.input,
            [&] { DerivativesKernel(of, executor); });
}

template void DifferentiateAttention(const PairFunction&, const AttentionDerivatives<float>&,
                                     const Executor&);
template void DifferentiateAttention(const PairFunction&, const AttentionDerivatives<double>&,
                                     const Executor&);

}  // namespace gnomon
