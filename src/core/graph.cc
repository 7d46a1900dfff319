// Public entry points of graph attention, which check the arguments and call the kernels.
#include "gnomon/graph.h"

#include <string>
#include <type_traits>
#include <utility>

#include "base/call_log.h"
#include "core/derivatives.h"
#include "core/targets.h"
#include "core/with_statistics.h"
#include "gnomon/derivatives.h"
#include "reference/reference.h"

namespace gnomon {
namespace {

[[noreturn]] void Fail(const char* name, const std::string& problem) {
  throw Error("graph_attention: " + std::string(name) + " " + problem);
}

void Require(bool condition, const char* name, const char* problem) {
  if (!condition) Fail(name, problem);
}

void RequireGiven(bool is_given, const char* name) { Require(is_given, name, "is null"); }

// Checks all entries, because an invalid one would make the kernels access memory outside their
// arrays.
void CheckGraph(const GraphShape& n, const int64_t* indptr, const int64_t* indices) {
  RequireGiven(indptr != nullptr, "indptr");
  RequireGiven(indices != nullptr || n.edges == 0, "indices");
  const auto entry = [](int64_t i, int64_t value) {
    return "[" + std::to_string(i) + "] is " + std::to_string(value);
  };
  if (indptr[0] != 0) throw Error("graph_attention: indptr" + entry(0, indptr[0]) + "; expected 0");
  for (int64_t i = 0; i < n.queries; ++i) {
    if (indptr[i + 1] >= indptr[i]) continue;
    throw Error("graph_attention: indptr" + entry(i + 1, indptr[i + 1]) + ", but indptr" +
                entry(i, indptr[i]) + "; expected non-decreasing values");
  }
  if (indptr[n.queries] != n.edges) {
    throw Error("graph_attention: indptr" + entry(n.queries, indptr[n.queries]) +
                "; expected the number of indices, " + std::to_string(n.edges));
  }
  for (int64_t e = 0; e < n.edges; ++e) {
    if (indices[e] >= 0 && indices[e] < n.keys) continue;
    throw Error("graph_attention: indices" + entry(e, indices[e]) +
                "; expected a key index from 0 to " + std::to_string(n.keys - 1));
  }
}

template <class T>
void Check(const PairFunction& f, const GraphInput<T>& in) {
  const GraphShape& n = in.shape;
  const std::pair<const char*, int64_t> sizes[] = {
      {"heads", n.heads},        {"key_heads", n.key_heads}, {"queries", n.queries},
      {"keys", n.keys},          {"edges", n.edges},         {"dim", n.dim},
      {"value_dim", n.value_dim}};
  for (const auto& [name, size] : sizes) {
    if (size < 0) Fail(name, "is " + std::to_string(size) + "; expected at least 0");
  }
  if (n.key_heads > 0 ? n.heads % n.key_heads != 0 : n.heads != 0) {
    Fail("heads", "is " + std::to_string(n.heads) + "; expected a multiple of key_heads, " +
                      std::to_string(n.key_heads));
  }
  CheckGraph(n, in.indptr, in.indices);
  const int64_t rows = n.heads * n.queries;
  const int64_t columns = n.key_heads * n.keys;
  if (f.input != PairInput::kNone) {
    Require(n.dim > 0 || rows * columns == 0, "dim", "is 0; expected at least 1");
    RequireGiven(in.x.data != nullptr || rows * n.dim == 0, "x");
    RequireGiven(in.y.data != nullptr || columns * n.dim == 0, "y");
  }
  RequireGiven(in.v.data != nullptr || columns * n.value_dim == 0, "v");
  RequireGiven(in.factor != nullptr || n.heads == 0, "factor");
  RequireGiven(f.row_scalars == 0 || in.row_scalars != nullptr || rows == 0, "row_scalars");
  RequireGiven(f.column_scalars == 0 || in.column_scalars != nullptr || columns == 0,
               "column_scalars");
  RequireGiven(f.head_scalars == 0 || in.head_scalars != nullptr || n.heads == 0, "head_scalars");
  Require(in.dropout.rate >= 0 && in.dropout.rate <= 1, "dropout.rate",
          "is invalid; expected a probability from 0 to 1");
}

template <class T>
void CheckForward(const PairFunction& f, const GraphInput<T>& in, const GraphOutput<T>& out) {
  Check(f, in);
  const int64_t rows = in.shape.heads * in.shape.queries;
  RequireGiven(out.o.data != nullptr || rows * in.shape.value_dim == 0, "o");
  RequireGiven(out.lse != nullptr || rows == 0, "lse");
}

template <class T>
void CheckBackward(const PairFunction& f, const GraphInput<T>& in,
                   const GraphBackwardInput<T>& saved) {
  Check(f, in);
  const int64_t rows = in.shape.heads * in.shape.queries;
  RequireGiven(saved.o.data != nullptr || rows * in.shape.value_dim == 0, "o");
  RequireGiven(saved.d_o.data != nullptr || rows * in.shape.value_dim == 0, "d_o");
  RequireGiven(saved.lse != nullptr || rows == 0, "lse");
}

template <class T, class Forward>
WithStatistics<GraphBackwardInput<T>> Complete(const Forward& forward, const GraphInput<T>& in,
                                               const GraphBackwardInput<T>& saved,
                                               const Executor& executor) {
  const GraphShape& n = in.shape;
  return {saved, n.queries * n.heads, n.value_dim, [&](T* o, T* lse, T* statistics) {
            forward(in, {{o, {0, n.value_dim, n.heads * n.value_dim}}, lse, statistics}, executor);
          }};
}

template <class T>
void Log(const char* operation, const PairFunction& function, const GraphInput<T>& in,
         bool is_reference = false) {
  if (!LogsCalls()) return;
  const GraphShape& n = in.shape;
  LogCall(std::string(operation) + ": " + function.name +
              (std::is_same_v<T, float> ? ", float32" : ", float64") + ", head_dim " +
              std::to_string(n.dim) + ", CPU " + (is_reference ? "reference" : CurrentTarget()),
          "heads " + std::to_string(n.heads) + ", nodes " + std::to_string(n.queries) + ", edges " +
              std::to_string(n.edges));
}

}  // namespace

void GraphForward(const PairFunction& function, const GraphInput<float>& input,
                  const GraphOutput<float>& output, const Executor& executor) {
  CheckForward(function, input, output);
  ChooseTargetOnce();
  function.graph_forward(input, output, executor);
  Log("graph forward", function, input);
}

void GraphForward(const PairFunction& function, const GraphInput<double>& input,
                  const GraphOutput<double>& output, const Executor& executor) {
  CheckForward(function, input, output);
  function.reference_graph_forward(input, output, executor);
  Log("graph forward", function, input, /*is_reference=*/true);
}

void GraphBackward(const PairFunction& function, const GraphInput<float>& input,
                   const GraphBackwardInput<float>& saved, const GraphGradient<float>& gradient,
                   const Executor& executor) {
  CheckBackward(function, input, saved);
  ChooseTargetOnce();
  const auto complete = Complete(function.graph_forward, input, saved, executor);
  function.graph_backward(input, complete.saved(), gradient, executor);
  Log("graph backward", function, input);
}

void GraphBackward(const PairFunction& function, const GraphInput<double>& input,
                   const GraphBackwardInput<double>& saved, const GraphGradient<double>& gradient,
                   const Executor& executor) {
  CheckBackward(function, input, saved);
  const auto complete = Complete(function.reference_graph_forward, input, saved, executor);
  function.reference_graph_backward(input, complete.saved(), gradient, executor);
  Log("graph backward", function, input, /*is_reference=*/true);
}

template <class T>
void DifferentiateGraph(const PairFunction& function, const GraphDerivatives<T>& of,
                        const Executor& executor) {
  Check(function, of.input);
  ChooseTargetOnce();
  GraphDerivativesKernel(of, executor);
  const bool is_jvp = of.output.lse != nullptr;
  Log(is_jvp ? "graph forward-mode derivative" : "graph second derivative", function, of.input);
}

template void DifferentiateGraph(const PairFunction&, const GraphDerivatives<float>&,
                                 const Executor&);
template void DifferentiateGraph(const PairFunction&, const GraphDerivatives<double>&,
                                 const Executor&);

void GraphForward(const PairFunction& function, const GraphInput<Dual>& input,
                  const GraphOutput<Dual>& output, const Executor& executor) {
  CheckForward(function, input, output);
  reference::GraphForward(reference::FindTable(function), input, output, executor);
  Log("graph forward-mode derivative", function, input, /*is_reference=*/true);
}

void GraphBackward(const PairFunction& function, const GraphInput<Dual>& input,
                   const GraphBackwardInput<Dual>& saved, const GraphGradient<Dual>& gradient,
                   const Executor& executor) {
  CheckBackward(function, input, saved);
  const reference::Table& table = reference::FindTable(function);
  const auto forward = [&](const GraphInput<Dual>& in, const GraphOutput<Dual>& out,
                           const Executor& workers) {
    reference::GraphForward(table, in, out, workers);
  };
  const auto complete = Complete(forward, input, saved, executor);
  reference::GraphBackward(table, input, complete.saved(), gradient, executor);
  Log("graph second derivative", function, input, /*is_reference=*/true);
}

}  // namespace gnomon
