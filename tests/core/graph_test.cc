// Compares the graph attention reference with the dense reference, and the fused kernels of every
// instruction set with the graph attention reference.
#include "gnomon/graph.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/edge_chunks.h"
#include "core/derivatives.h"
#include "core/dual_tables.h"
#include "core/random_problem.h"
#include "gmock/gmock.h"
#include "gnomon/derivatives.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

struct Graph {
  std::vector<int64_t> indptr = {0};
  std::vector<int64_t> indices = {};
  std::vector<float> bias = {};  // (E, H), or empty
  Dropout dropout = {};

  int64_t queries() const { return static_cast<int64_t>(indptr.size()) - 1; }
  int64_t edges() const { return static_cast<int64_t>(indices.size()); }
  void AddRow(const std::vector<int64_t>& keys) {
    indices.insert(indices.end(), keys.begin(), keys.end());
    indptr.push_back(edges());
  }
};

// A random graph with rows of different degrees: some are empty, some have duplicate edges, and one
// has `most` edges.
Graph RandomGraph(int64_t queries, int64_t keys, int64_t most, unsigned seed = 1) {
  std::mt19937 engine(seed);
  std::uniform_int_distribution<int64_t> key(0, std::max<int64_t>(0, keys - 1));
  // Half of the edges connect to the first few keys.
  std::uniform_int_distribution<int64_t> hub(0,
                                             std::min<int64_t>(2, std::max<int64_t>(0, keys - 1)));
  Graph graph;
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t degree = i == queries / 2 ? most : std::min<int64_t>(most, i % 7);
    std::vector<int64_t> row;
    for (int64_t e = 0; keys > 0 && e < degree; ++e) {
      row.push_back(e % 2 == 0 ? key(engine) : hub(engine));
    }
    if (i < keys && degree > 0) row[0] = i;
    graph.AddRow(row);
  }
  return graph;
}

// The input of graph attention, with the data of a problem that has a single batch element.
template <class T>
GraphInput<T> AsGraph(const Problem<T>& p, const Graph& graph) {
  const AttentionInput<T> dense = p.Input();
  GraphInput<T> in;
  in.shape = {.heads = dense.shape.heads,
              .key_heads = dense.shape.key_heads,
              .queries = dense.shape.queries,
              .keys = dense.shape.keys,
              .edges = graph.edges(),
              .dim = dense.shape.dim,
              .value_dim = dense.shape.value_dim};
  in.indptr = graph.indptr.data();
  in.indices = graph.indices.data();
  in.x = p.x.view();
  in.y = p.y.view();
  in.v = p.v.view();
  in.row_scalars = dense.row_scalars;
  in.column_scalars = dense.column_scalars;
  in.head_scalars = dense.head_scalars;
  in.factor = dense.factor;
  return in;
}

// Transposes (rows, columns) to (columns, rows).
template <class T>
std::vector<T> Transpose(const std::vector<T>& from, int64_t rows, int64_t columns) {
  std::vector<T> to(from.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      to[static_cast<size_t>(c * rows + r)] = from[static_cast<size_t>(r * columns + c)];
    }
  }
  return to;
}

// Like Problem::Run, for graph attention: returns the outputs, and the gradient named `only` or (if
// it is empty) all gradients.
template <class T>
Results<T> RunGraph(const Problem<T>& p, const Graph& graph,
                    const Executor& executor = SerialExecutor(), const std::string& only = "") {
  const std::vector<T> edge_bias(graph.bias.begin(), graph.bias.end());
  GraphInput<T> in = AsGraph(p, graph);
  in.edge_bias = edge_bias.empty() ? nullptr : edge_bias.data();
  in.dropout = graph.dropout;
  const GraphShape& n = in.shape;
  Array<T> o(p.d_o.size(), p.options.padded, kNan);
  std::vector<T> lse(p.d_lse.size(), kNan);
  std::vector<T> statistics(p.options.keeps_statistics ? 3 * lse.size() : 0, kNan);
  GraphForward(p.function, in, {o.view(), lse.data(), statistics.data()}, executor);

  const std::vector<T> d_lse = Transpose(p.d_lse, n.heads, n.queries);
  GraphBackwardInput<T> saved;
  saved.o = static_cast<const Array<T>&>(o).view();
  saved.lse = lse.data();
  saved.statistics = statistics.data();
  saved.d_o = p.d_o.view();
  saved.d_lse = p.pass_d_lse ? d_lse.data() : nullptr;
  const auto wanted = [&](const char* name) { return only.empty() || only == name; };
  std::map<std::string, Array<T>> arrays;
  Results<T> results;
  const auto view = [&](const char* name, const Array<T>& like) {
    if (!wanted(name)) return View<T>{};
    return (arrays[name] = Array<T>(like.size(), p.options.padded, kNan)).view();
  };
  const auto pointer = [&](const char* name, const std::vector<T>& like) -> T* {
    if (!wanted(name)) return nullptr;
    return (results[name] = std::vector<T>(like.size(), kNan)).data();
  };
  GraphGradient<T> gradient;
  gradient.x = view("d_x", p.x);
  gradient.y = view("d_y", p.y);
  gradient.v = view("d_v", p.v);
  gradient.row_scalars = pointer("d_row", p.row);
  gradient.column_scalars = pointer("d_column", p.column);
  gradient.head_scalars = pointer("d_head", p.head);
  gradient.factor = pointer("d_factor", p.factor);
  if (!edge_bias.empty()) gradient.edge_bias = pointer("d_edge_bias", edge_bias);
  GraphBackward(p.function, in, saved, gradient, executor);
  for (auto& [name, array] : arrays) results[name] = array.TakeOutput();
  results["o"] = o.TakeOutput();
  results["lse"] = Transpose(lse, n.queries, n.heads);
  return results;
}

// A problem and the direction of its derivative. The bias of a graph has a bias as its tangent.
template <class T>
struct DirectedGraph {
  Problem<T> at;
  Problem<T> along;
  Graph graph;
  std::vector<float> bias_along = {};

  DirectedGraph<double> InDouble() const {
    return {at.InDouble(), along.InDouble(), graph, bias_along};
  }
};

DirectedGraph<float> Directed(const Problem<float>& at, const Graph& graph) {
  ProblemOptions options = at.options;
  options.seed += 1;
  DirectedGraph<float> p{at, RandomProblem(at.function, options), graph};
  std::mt19937 engine(7);
  std::normal_distribution<float> normal;
  for (size_t n = 0; n < graph.bias.size(); ++n) p.bias_along.push_back(normal(engine));
  return p;
}

// Runs the derivatives kernel and returns all results, without gaps between rows. The names of
// tangents end with an apostrophe.
template <class T>
Results<T> RunDerivatives(const DirectedGraph<T>& p, const Executor& executor = SerialExecutor()) {
  const std::vector<T> bias(p.graph.bias.begin(), p.graph.bias.end());
  const std::vector<T> bias_along(p.bias_along.begin(), p.bias_along.end());
  GraphDerivatives<T> of;
  if (p.at.function.name != std::string("dot")) of.function = FindDualTable<T>(p.at.function);
  of.input = AsGraph(p.at, p.graph);
  of.tangent = AsGraph(p.along, p.graph);
  if (!bias.empty()) {
    of.input.edge_bias = bias.data();
    of.tangent.edge_bias = bias_along.data();
  }
  of.input.dropout = p.graph.dropout;
  const GraphShape& n = of.input.shape;
  of.d_o = p.at.d_o.view();
  of.d_o_tangent = p.along.d_o.view();
  const std::vector<T> d_lse = Transpose(p.at.d_lse, n.heads, n.queries);
  const std::vector<T> d_lse_tangent = Transpose(p.along.d_lse, n.heads, n.queries);
  of.d_lse = d_lse.data();
  of.d_lse_tangent = d_lse_tangent.data();
  std::map<std::string, Array<T>> arrays;
  Results<T> results;
  const auto view = [&](const std::string& name, const Array<T>& like) {
    return (arrays[name] = Array<T>(like.size(), p.at.options.padded, kNan)).view();
  };
  const auto pointer = [&](const std::string& name, size_t size) {
    return (results[name] = std::vector<T>(size, kNan)).data();
  };
  of.output = {view("o", p.at.d_o), pointer("lse", d_lse.size()),
               pointer("statistics", 3 * d_lse.size())};
  of.o_tangent = view("o'", p.at.d_o);
  of.lse_tangent = pointer("lse'", d_lse.size());
  const auto set = [&](GraphGradient<T>& gradient, const std::string& mark) {
    gradient.x = view("d_x" + mark, p.at.x);
    gradient.y = view("d_y" + mark, p.at.y);
    gradient.v = view("d_v" + mark, p.at.v);
    gradient.row_scalars = pointer("d_row" + mark, p.at.row.size());
    gradient.column_scalars = pointer("d_column" + mark, p.at.column.size());
    gradient.head_scalars = pointer("d_head" + mark, p.at.head.size());
    gradient.factor = pointer("d_factor" + mark, p.at.factor.size());
    if (!bias.empty()) gradient.edge_bias = pointer("d_edge_bias" + mark, bias.size());
  };
  set(of.gradient, "");
  set(of.gradient_tangent, "'");
  DifferentiateGraph(p.at.function, of, executor);
  for (auto& [name, array] : arrays) results[name] = array.TakeOutput();
  return results;
}

// Computes the same results with the reference in dual numbers.
template <class T>
Results<double> RunDuals(const DirectedGraph<T>& p) {
  std::deque<std::vector<Dual>> kept;
  const auto numbers = [&](const auto& values, const auto& tangents) {
    std::vector<Dual>& duals = kept.emplace_back();
    for (size_t n = 0; n < values.size(); ++n) duals.emplace_back(values[n], tangents[n]);
    return duals.data();
  };
  const auto strides = [](const Array<T>& array) {
    const auto [batch, heads, rows, columns] = array.size();
    return std::array<int64_t, 3>{heads * rows * columns, rows * columns, columns};
  };
  const auto rows = [&](const Array<T>& values, const Array<T>& tangents) {
    return View<const Dual>{numbers(values.Elements(), tangents.Elements()), strides(values)};
  };
  const GraphInput<T> at = AsGraph(p.at, p.graph);
  GraphInput<Dual> in;
  in.shape = at.shape;
  in.indptr = at.indptr;
  in.indices = at.indices;
  in.x = rows(p.at.x, p.along.x);
  in.y = rows(p.at.y, p.along.y);
  in.v = rows(p.at.v, p.along.v);
  in.row_scalars = numbers(p.at.row, p.along.row);
  in.column_scalars = numbers(p.at.column, p.along.column);
  in.head_scalars = numbers(p.at.head, p.along.head);
  in.factor = numbers(p.at.factor, p.along.factor);
  if (!p.graph.bias.empty()) in.edge_bias = numbers(p.graph.bias, p.bias_along);
  in.dropout = p.graph.dropout;
  const GraphShape& n = in.shape;

  std::map<std::string, std::vector<Dual>> results;
  const auto result = [&](const std::string& name, size_t size) {
    return (results[name] = std::vector<Dual>(size)).data();
  };
  const auto view = [&](const std::string& name, const Array<T>& like) {
    return View<Dual>{result(name, like.Elements().size()), strides(like)};
  };
  const size_t lines = p.at.d_lse.size();
  const GraphOutput<Dual> out{view("o", p.at.d_o), result("lse", lines),
                              result("statistics", 3 * lines)};
  GraphForward(p.at.function, in, out);
  const GraphBackwardInput<Dual> saved{{out.o.data, out.o.stride},
                                       out.lse,
                                       rows(p.at.d_o, p.along.d_o),
                                       numbers(Transpose(p.at.d_lse, n.heads, n.queries),
                                               Transpose(p.along.d_lse, n.heads, n.queries)),
                                       out.statistics};
  GraphGradient<Dual> gradient;
  gradient.x = view("d_x", p.at.x);
  gradient.y = view("d_y", p.at.y);
  gradient.v = view("d_v", p.at.v);
  gradient.row_scalars = result("d_row", p.at.row.size());
  gradient.column_scalars = result("d_column", p.at.column.size());
  gradient.head_scalars = result("d_head", p.at.head.size());
  gradient.factor = result("d_factor", p.at.factor.size());
  if (in.edge_bias != nullptr) gradient.edge_bias = result("d_edge_bias", p.graph.bias.size());
  GraphBackward(p.at.function, in, saved, gradient);

  Results<double> all;
  for (const auto& [name, duals] : results) {
    std::vector<double>& values = all[name];
    std::vector<double>& tangents = all[name + "'"];
    for (const Dual& dual : duals) {
      values.push_back(dual.value);
      tangents.push_back(dual.tangent);
    }
  }
  all.erase("statistics'");
  return all;
}

template <class T>
void ExpectDerivatives(const Results<T>& actual, const Results<double>& expected,
                       double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, values] : expected) {
    EXPECT_LE(Difference(actual.at(name), values, 1.0), tolerance) << name;
  }
}
void ExpectDerivativesOfReference(const DirectedGraph<float>& p) {
  const Results<double> expected = RunDuals(p);
  OnEveryTarget([&] {
    ExpectDerivatives(RunDerivatives(p), expected, 1e-4);
    if (HasDoubles()) ExpectDerivatives(RunDerivatives(p.InDouble()), expected, 1e-12);
  });
}

// The graph as the layout of a dense bias, whose entries are indexed by the number of edges of a
// pair.
class EdgeCounts final : public TableLayout {
 public:
  EdgeCounts(const Graph& graph, int64_t keys) : keys_(keys) {
    counts_.assign(static_cast<size_t>(graph.queries() * keys), 0);
    for (int64_t i = 0; i < graph.queries(); ++i) {
      for (int64_t e = graph.indptr[static_cast<size_t>(i)];
           e < graph.indptr[static_cast<size_t>(i) + 1]; ++e) {
        int64_t& count =
            counts_[static_cast<size_t>(i * keys + graph.indices[static_cast<size_t>(e)])];
        most_ = std::max(most_, ++count);
      }
    }
  }
  int64_t size() const override { return most_ + 1; }
  void AddRuns(int64_t p, int64_t begin, int64_t end, std::vector<TableRun>* runs) const override {
    for (int64_t j = begin; j < end; ++j) {
      runs->push_back({j, 1, counts_[static_cast<size_t>(p * keys_ + j)], 0});
    }
  }

 private:
  int64_t keys_;
  int64_t most_ = 0;
  std::vector<int64_t> counts_;
};

Results<double> DenseResults(const Problem<float>& problem, const Graph& graph) {
  const EdgeCounts counts(graph, problem.options.shape.keys);
  Problem<double> dense = problem.InDouble();
  dense.options.bias = ProblemOptions::kSharedBias;
  dense.options.layout = &counts;
  for (int64_t h = 0; h < dense.options.shape.heads; ++h) {
    for (int64_t n = 0; n < counts.size(); ++n) {
      dense.bias.push_back(std::log(static_cast<double>(n)));
    }
  }
  Results<double> results = dense.Run();
  results.erase("d_bias");
  return results;
}

struct Case {
  const char* name;
  int64_t queries;
  int64_t keys;
  int64_t heads;
  int64_t key_heads;
  int64_t dim;
  int64_t value_dim;
  int64_t most;
  bool padded = false;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> Cases() {
  return {
      {"OneEdge", 1, 1, 1, 1, 1, 1, 1},
      {"EightHeadsOfEight", 60, 60, 8, 8, 8, 8, 9, true},
      {"OneHead", 50, 40, 1, 1, 17, 3, 20},
      {"Bipartite", 33, 90, 3, 3, 5, 19, 12, true},
      {"Grouped", 40, 40, 6, 2, 7, 33, 10, true},
      {"OneKeyHead", 40, 30, 4, 1, 64, 64, 15},
      {"ManyHeads", 9, 9, 70, 70, 3, 2, 8},
      // One row has so many edges that it spans several chunks.
      {"Star", 20, 300, 8, 8, 8, 8, 3000},
      {"StarOfOneHead", 5, 300, 1, 1, 3, 1, 9000},
      {"Wide", 6, 11, 2, 1, 130, 257, 1000, true},
      {"NoEdges", 300, 4, 2, 2, 3, 5, 0},
      {"NoKeys", 4, 0, 2, 2, 3, 5, 3},
      {"NoQueries", 0, 4, 2, 2, 3, 5, 3},
      {"NoNodes", 0, 0, 2, 2, 3, 5, 3},
      {"NoHeads", 4, 4, 0, 0, 3, 5, 3},
      {"NoValueColumns", 12, 12, 2, 2, 3, 0, 5},
  };
}

std::pair<Problem<float>, Graph> MakeProblem(const PairFunction& function, const Case& c) {
  // With few columns, tokens are often nearly parallel, so that their angles lose precision.
  const int64_t dim = function.name == std::string("cosine_entailment") ? c.dim + 8 : c.dim;
  return {RandomProblem(function,
                        {.shape = {1, c.heads, c.key_heads, c.queries, c.keys, dim, c.value_dim},
                         .padded = c.padded}),
          RandomGraph(c.queries, c.keys, c.most)};
}

class GraphTest : public ::testing::TestWithParam<std::tuple<const PairFunction*, Case>> {};

TEST_P(GraphTest, ReferenceMatchesTheDenseOne) {
  const auto& [function, c] = GetParam();
  const auto [problem, graph] = MakeProblem(*function, c);
  const Results<double> expected = DenseResults(problem, graph);
  const Results<double> ours = RunGraph(problem.InDouble(), graph);
  ASSERT_EQ(ours.size(), expected.size());
  for (const auto& [name, values] : expected) {
    ASSERT_EQ(ours.at(name).size(), values.size()) << name;
    for (size_t n = 0; n < values.size(); ++n) {
      if (values[n] == -kInfinity) {
        EXPECT_EQ(ours.at(name)[n], values[n]) << name << " " << n;
      } else {
        EXPECT_NEAR(ours.at(name)[n], values[n], 1e-11 * (1 + std::fabs(values[n])))
            << name << " " << n;
      }
    }
  }
}

TEST_P(GraphTest, KernelsMatchReference) {
  const auto& [function, c] = GetParam();
  const auto [problem, graph] = MakeProblem(*function, c);
  const Results<double> expected = RunGraph(problem.InDouble(), graph);
  OnEveryTarget([&, &p = problem, &g = graph] { ExpectClose(RunGraph(p, g), expected, 2e-5); });
}

TEST_P(GraphTest, DerivativesMatchReference) {
  const auto& [function, c] = GetParam();
  const auto [problem, graph] = MakeProblem(*function, c);
  ExpectDerivativesOfReference(Directed(problem, graph));
}

INSTANTIATE_TEST_SUITE_P(All, GraphTest,
                         ::testing::Combine(::testing::ValuesIn(AllPairFunctions()),
                                            ::testing::ValuesIn(Cases())),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)->name) +
                                  std::get<1>(test.param).name;
                         });

class GraphFunctionTest : public ::testing::TestWithParam<const PairFunction*> {
 protected:
  const PairFunction& function() const { return *GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(All, GraphFunctionTest, ::testing::ValuesIn(AllPairFunctions()),
                         [](const auto& test) { return std::string(test.param->name); });

TEST_P(GraphFunctionTest, WorkersDoNotChangeAnything) {
  for (const Case& c : {Case{"", 700, 500, 8, 4, 8, 8, 900}, Case{"", 90, 90, 1, 1, 3, 5, 9000}}) {
    const auto [problem, graph] = MakeProblem(function(), c);
    const Results<float> expected = RunGraph(problem, graph);
    for (const int workers : {1, 2, 3}) {
      ExpectSame(RunGraph(problem, graph, ThreadExecutor(workers)), expected);
    }
    const Results<double> expected_double = RunGraph(problem.InDouble(), graph);
    for (const int workers : {2, 3}) {
      EXPECT_EQ(RunGraph(problem.InDouble(), graph, ThreadExecutor(workers)), expected_double);
    }
    const DirectedGraph<float> directed = Directed(problem, graph);
    const Results<float> derivatives = RunDerivatives(directed);
    for (const int workers : {2, 3}) {
      ExpectSame(RunDerivatives(directed, ThreadExecutor(workers)), derivatives);
    }
  }
}

TEST_P(GraphFunctionTest, EachGradientAloneIsTheSame) {
  const auto [problem, graph] = MakeProblem(function(), {"", 40, 30, 6, 2, 9, 11, 500});
  const Results<float> all = RunGraph(problem, graph);
  for (const auto& [name, values] : all)
    ExpectSame(RunGraph(problem, graph, SerialExecutor(), name), all);
}

TEST_P(GraphFunctionTest, WithoutTheGradientOfLse) {
  auto [problem, graph] = MakeProblem(function(), {"", 40, 30, 6, 2, 9, 11, 500});
  problem.pass_d_lse = false;
  const Results<float> without = RunGraph(problem, graph);
  std::fill(problem.d_lse.begin(), problem.d_lse.end(), 0.0f);
  problem.pass_d_lse = true;
  ExpectSame(RunGraph(problem, graph), without);
}

// Some rows are in one chunk, some are empty, and some are split. Biases of -inf remove one edge in
// seven per head, and all edges of one row.
TEST_P(GraphFunctionTest, BiasesAndDropoutMatchReference) {
  auto [problem, graph] = MakeProblem(function(), {"", 40, 30, 6, 2, 9, 11, 1500});
  std::mt19937 engine(3);
  std::normal_distribution<float> normal;
  for (int64_t n = 0; n < graph.edges() * 6; ++n) {
    graph.bias.push_back(n % 7 == 0 || (n >= graph.indptr[5] * 6 && n < graph.indptr[6] * 6)
                             ? -kInfinity
                             : 2 * normal(engine));
  }
  for (const double rate : {0.0, 0.3, 1.0}) {
    graph.dropout = {rate, 12345};
    const Results<double> expected = RunGraph(problem.InDouble(), graph);
    const Results<float> ours = RunGraph(problem, graph);
    OnEveryTarget([&, &p = problem, &g = graph] { ExpectClose(RunGraph(p, g), expected, 2e-5); });
    ExpectSame(RunGraph(problem, graph, ThreadExecutor(3)), ours);
    ExpectSame(RunGraph(problem, graph, SerialExecutor(), "d_edge_bias"), ours);
    ExpectDerivativesOfReference(Directed(problem, graph));
  }
}

// Scores are too large for exp, so each row's largest score must be subtracted, even in rows that
// span chunks.
TEST_P(GraphFunctionTest, LargeScores) {
  auto [problem, graph] = MakeProblem(function(), {"", 20, 300, 2, 2, 8, 8, 5000});
  for (float& factor : problem.factor) factor *= 300;
  const Results<double> expected = RunGraph(problem.InDouble(), graph);
  OnEveryTarget([&, &p = problem, &g = graph] {
    const Results<float> ours = RunGraph(p, g);
    for (const char* name : {"o", "lse"}) {
      EXPECT_LE(Difference(ours.at(name), expected.at(name)), 1e-3) << name;
    }
  });
}

// Like FactorTest for the dense operator: the part of f that all pairs of a row have in common must
// cancel in the gradient of the factor, even in rows that span chunks.
TEST(Graph, GradientOfFactorHangsOnTheSpreadOfScoresAlone) {
  for (const bool pass_d_lse : {false, true}) {
    auto [problem, graph] =
        MakeProblem(FindPairFunction("dot"), {"", 60, 300, 2, 1, 8, 16, 3000, false});
    problem.pass_d_lse = pass_d_lse;
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 60; ++i) problem.x.at(0, h, i, 0) = 16;
    }
    for (int64_t j = 0; j < 300; ++j) problem.y.at(0, 0, j, 0) = 16;
    problem.v.ForEach([](float& element) { element += 100; });
    const std::vector<double> expected = RunGraph(problem.InDouble(), graph).at("d_factor");
    OnEveryTarget([&, &p = problem, &g = graph] {
      const std::vector<float> actual = RunGraph(p, g).at("d_factor");
      for (size_t h = 0; h < 2; ++h) {
        EXPECT_NEAR(actual[h], expected[h], 3e-3 + 3e-6 * std::fabs(expected[h]))
            << "d_lse " << pass_d_lse << " head " << h;
      }
    });
  }
}

// Like EqualSlopesTest for the dense operator: if all slopes of a row are equal, they cancel and
// leave exactly the gradient of lse, even in rows that span chunks.
TEST(Graph, EqualSlopesLeaveTheGradientOfLse) {
  constexpr float kFar = 1000;
  for (const char* name : {"additive", "umbral"}) {
    for (const bool pass_d_lse : {false, true}) {
      SCOPED_TRACE(std::string(name) + (pass_d_lse ? " with d_lse" : ""));
      auto [problem, graph] =
          MakeProblem(FindPairFunction(name), {"", 60, 300, 2, 1, 8, 16, 3000, false});
      problem.pass_d_lse = pass_d_lse;
      const bool is_cone = problem.function.input == PairInput::kSquaredDistance;
      for (float& scalar : problem.row) scalar += is_cone ? -kFar : kFar;
      const std::vector<double> expected = RunGraph(problem.InDouble(), graph).at("d_row");
      OnEveryTarget([&, &p = problem, &g = graph, with_d_lse = pass_d_lse] {
        const std::vector<float> actual = RunGraph(p, g).at("d_row");
        for (size_t n = 0; n < actual.size(); ++n) {
          const double limit = with_d_lse ? 3e-7 * std::fabs(expected[n]) : 0;
          ASSERT_NEAR(actual[n], with_d_lse ? expected[n] : 0, limit) << n;
        }
      });
    }
  }
}

// An edge with score -inf acts like a missing edge, whether a row has some or only such edges.
// Tests rows in one chunk, and split rows in which the first part, the last part or all parts have
// only such edges.
class MinusInfinityTest : public ::testing::Test {
 protected:
  static constexpr int64_t kHidden = 8;  // the first keys, whose scores are -inf
  static constexpr int64_t kKeys = 20;
  static constexpr int64_t kMany = 1500;  // enough edges to span several chunks

  // Adds a row to both graphs. In graph_, it has edges to hidden keys, visible keys and hidden keys
  // again; in without_, it has only the edges to visible keys.
  void AddRow(int64_t hidden_first, int64_t seen, int64_t hidden_last) {
    std::vector<int64_t> all;
    std::vector<int64_t> rest;
    for (int64_t e = 0; e < hidden_first; ++e) all.push_back(e % kHidden);
    for (int64_t e = 0; e < seen; ++e) {
      all.push_back(kHidden + e % (kKeys - kHidden));
      rest.push_back(all.back());
    }
    for (int64_t e = 0; e < hidden_last; ++e) all.push_back(e % kHidden);
    graph_.AddRow(all);
    without_.AddRow(rest);
  }

  MinusInfinityTest() {
    AddRow(0, 3, 0);
    AddRow(4, 0, 0);
    AddRow(2, 3, 1);
    AddRow(kMany, 0, 0);
    AddRow(kMany, 5, 0);
    AddRow(0, 5, kMany);
    AddRow(kMany, kMany, kMany);
    AddRow(1, 0, 0);
    AddRow(0, 0, 0);
  }

  // Compares all results except the gradients of the factor and of head scalars, which contain
  // products of 0 and -inf.
  static void Compare(const Results<float>& ours, const Results<double>& expected) {
    for (const auto& [name, values] : expected) {
      if (name == "d_factor" || name == "d_head") continue;
      EXPECT_LE(Difference(ours.at(name), values), 2e-5) << name;
    }
  }

  Graph graph_;
  Graph without_;
};

TEST_F(MinusInfinityTest, IsAnEdgeThatIsNotThere) {
  Problem<float> p = RandomProblem(FindPairFunction("additive"),
                                   {.shape = {1, 4, 2, graph_.queries(), kKeys, 3, 5}});
  // (1, Hkv, Lk).
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t j = 0; j < kHidden; ++j) p.column[static_cast<size_t>(h * kKeys + j)] = -kInfinity;
  }
  std::fill(p.factor.begin(), p.factor.end(), 1.0f);
  std::fill(p.head.begin(), p.head.end(), 0.2f);
  // Scores are about -180, so their exponentials are negligible relative to e^0.
  for (float& scalar : p.row) scalar -= 900.0f;
  const Results<double> expected = RunGraph(p.InDouble(), without_);
  for (const double d : expected.at("d_row")) ASSERT_TRUE(std::isfinite(d));
  Compare(RunGraph(p, graph_, ThreadExecutor(2)), expected);
  OnEveryTarget([&] { Compare(RunGraph(p, graph_), expected); });
}

// A bias of -inf removes an edge regardless of its score.
TEST_F(MinusInfinityTest, OfABiasHidesNaN) {
  const PairFunction& dot = FindPairFunction("dot");
  Problem<float> p = RandomProblem(dot, {.shape = {1, 4, 2, graph_.queries(), kKeys, 3, 5}});
  const Results<double> expected = RunGraph(p.InDouble(), without_);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t j = 0; j < kHidden; ++j) p.y.at(0, h, j, 0) = std::nanf("");
  }
  for (const int64_t key : graph_.indices) {
    for (int64_t h = 0; h < 4; ++h) graph_.bias.push_back(key < kHidden ? -kInfinity : 0.0f);
  }
  OnEveryTarget([&] {
    const Results<float> ours = RunGraph(p, graph_);
    for (const char* name : {"o", "lse"}) {
      EXPECT_LE(Difference(ours.at(name), expected.at(name)), 2e-5) << name;
    }
  });
}

// Inner products of finite tokens may overflow to -inf. Rows with only such products have no
// weights, and their tokens have no gradients.
TEST_F(MinusInfinityTest, OfProductsThatOverflow) {
  Problem<float> p =
      RandomProblem(FindPairFunction("dot"), {.shape = {1, 4, 2, graph_.queries(), kKeys, 3, 5}});
  for (int64_t h = 0; h < 4; ++h) {
    p.factor[static_cast<size_t>(h)] = 1;
    for (int64_t i = 0; i < graph_.queries(); ++i) p.x.at(0, h, i, 0) = 1e20f;
    for (int64_t j = 0; h < 2 && j < kKeys; ++j) {
      p.y.at(0, h, j, 0) = j < kHidden ? -1e20f : 0.0f;
    }
  }
  Problem<double> seen = p.InDouble();
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t j = 0; j < kHidden; ++j) seen.y.at(0, h, j, 0) = 0;
  }
  const Results<double> expected = RunGraph(seen, without_);
  OnEveryTarget([&] {
    const Results<float> ours = RunGraph(p, graph_);
    Compare(ours, expected);
    for (const int64_t row : {1, 3, 7, 8}) {
      for (int64_t h = 0; h < 4; ++h) {
        EXPECT_EQ(ours.at("lse")[static_cast<size_t>(h * graph_.queries() + row)], -kInfinity);
        for (int64_t e = 0; e < 5; ++e) {
          EXPECT_EQ(ours.at("o")[static_cast<size_t>((h * graph_.queries() + row) * 5 + e)], 0);
        }
        for (int64_t e = 0; e < 3; ++e) {
          EXPECT_EQ(ours.at("d_x")[static_cast<size_t>((h * graph_.queries() + row) * 3 + e)], 0);
        }
      }
    }
  });
}

// Each row spans several chunks, and one of its edges outweighs all others so much that the row's
// sum of weights equals that edge's weight in fp32. Only that edge's value has a gradient.
TEST(Graph, OneEdgeOutweighsARowThatChunksShare) {
  constexpr int64_t kKeys = 300;
  Graph graph;
  for (const int64_t at : {0, 1500, 2999}) {
    std::vector<int64_t> row;
    for (int64_t e = 0; e < 3000; ++e) row.push_back(e == at ? kKeys - 1 : e % (kKeys - 1));
    graph.AddRow(row);
  }
  Problem<float> p = RandomProblem(FindPairFunction("dot"), {.shape = {1, 6, 3, 3, kKeys, 8, 8}});
  for (int64_t h = 0; h < 6; ++h) {
    for (int64_t i = 0; i < 3; ++i) p.x.at(0, h, i, 0) = 8;
    p.y.at(0, h / 2, kKeys - 1, 0) = 60;
  }
  for (const double rate : {0.0, 0.3}) {
    graph.dropout = {rate, 7};
    const Results<double> expected = RunGraph(p.InDouble(), graph);
    OnEveryTarget([&] { ExpectClose(RunGraph(p, graph), expected, 2e-5); });
  }
}

// Distances of near pairs are computed from differences, so large norms do not reduce their
// precision.
TEST(Graph, DistancesOfNearPairsAreExact) {
  const PairFunction& laplacian = FindPairFunction("laplacian");
  constexpr int64_t kDim = 24;
  Graph graph;
  graph.AddRow({0, 1, 2, 3});
  Problem<float> p = RandomProblem(laplacian, {.shape = {1, 1, 1, 1, 4, kDim, 3}});
  for (int64_t k = 0; k < kDim; ++k) p.x.at(0, 0, 0, k) = 100.0f + static_cast<float>(k);
  for (int64_t j = 0; j < 4; ++j) {
    for (int64_t k = 0; k < kDim; ++k) {
      p.y.at(0, 0, j, k) = p.x.at(0, 0, 0, k) + 1e-3f * static_cast<float>(j * (k % 3));
    }
  }
  p.factor[0] = -50.0f;
  const Results<double> expected = RunGraph(p.InDouble(), graph);
  OnEveryTarget([&] { ExpectClose(RunGraph(p, graph), expected, 2e-5); });
}

TEST(Graph, ChunksCoverEachEdgeOnceAndAreBalanced) {
  for (const int64_t size : {1, 2, 7, 32}) {
    const Graph graph = RandomGraph(40, 30, 100);
    const EdgeChunks chunks(graph.indptr.data(), graph.queries(), size);
    std::vector<int> edges(static_cast<size_t>(graph.edges()), 0);
    std::map<int64_t, std::vector<int64_t>> slots;
    std::vector<int> whole(static_cast<size_t>(graph.queries()), 0);
    int64_t next = 0;
    for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
      EXPECT_EQ(chunks.FirstEdge(chunk), next);
      int64_t steps = 0;
      chunks.ForRows(chunk, [&](const EdgeChunks::Part& part) {
        EXPECT_EQ(part.begin, next);
        next = part.end;
        for (int64_t e = part.begin; e < part.end; ++e) ++edges[static_cast<size_t>(e)];
        steps += part.end - part.begin;
        if (part.slot < 0) {
          ++whole[static_cast<size_t>(part.row)];
        } else {
          EXPECT_LT(part.slot, chunks.slots());
          slots[part.row].push_back(part.slot);
        }
      });
      EXPECT_LE(steps, size);
    }
    EXPECT_EQ(chunks.FirstEdge(chunks.count()), graph.edges());
    EXPECT_THAT(edges, ::testing::Each(1));
    std::map<int64_t, std::vector<int64_t>> cut;
    for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
      chunks.ForCutRow(chunk, [&](int64_t row, const std::vector<int64_t>& of) { cut[row] = of; });
    }
    EXPECT_EQ(cut, slots);
    for (int64_t i = 0; i < graph.queries(); ++i) {
      EXPECT_EQ(whole[static_cast<size_t>(i)], slots.count(i) == 0 ? 1 : 0) << i;
    }
  }
}

TEST(Graph, TransposedGraphKeepsTheOrderOfEdges) {
  const Graph graph = RandomGraph(40, 30, 100);
  const TransposedGraph transposed(graph.indptr.data(), graph.indices.data(), 40, 30);
  ASSERT_EQ(transposed.indptr.back(), graph.edges());
  std::vector<int> seen(static_cast<size_t>(graph.edges()), 0);
  for (size_t j = 0; j < 30; ++j) {
    for (auto t = static_cast<size_t>(transposed.indptr[j]);
         t < static_cast<size_t>(transposed.indptr[j + 1]); ++t) {
      const auto e = static_cast<size_t>(transposed.edges[t]);
      ++seen[e];
      EXPECT_EQ(graph.indices[e], static_cast<int64_t>(j));
      const auto row = static_cast<size_t>(transposed.rows[t]);
      EXPECT_TRUE(graph.indptr[row] <= transposed.edges[t] &&
                  transposed.edges[t] < graph.indptr[row + 1]);
      if (t > static_cast<size_t>(transposed.indptr[j])) {
        EXPECT_LT(transposed.edges[t - 1], transposed.edges[t]);
      }
    }
  }
  EXPECT_THAT(seen, ::testing::Each(1));
}

TEST(Graph, SaysWhatIsWrongWithIt) {
  const PairFunction& dot = FindPairFunction("dot");
  const Problem<float> p = RandomProblem(dot, {.shape = {1, 2, 1, 3, 4, 5, 6}});
  const auto message = [&](const Graph& graph, auto change) {
    GraphInput<float> in = AsGraph(p, graph);
    change(in);
    Array<float> o(p.d_o.size(), false, 0.0f);
    std::vector<float> lse(6);
    try {
      GraphForward(dot, in, {o.view(), lse.data()});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  const auto same = [](GraphInput<float>&) {};
  EXPECT_EQ(message({{0, 1, 3, 3}, {3, 0, 2}}, same), "nothing");
  EXPECT_THAT(message({{1, 1, 3, 3}, {3, 0, 2}}, same),
              ::testing::HasSubstr("indptr[0] is 1; expected 0"));
  EXPECT_THAT(message({{0, 3, 1, 3}, {3, 0, 2}}, same),
              ::testing::HasSubstr("indptr[2] is 1, but indptr[1] is 3"));
  EXPECT_THAT(message({{0, 1, 2, 2}, {3, 0, 2}}, same),
              ::testing::HasSubstr("indptr[3] is 2; expected the number of indices, 3"));
  EXPECT_THAT(message({{0, 1, 3, 3}, {3, 4, 2}}, same),
              ::testing::HasSubstr("indices[1] is 4; expected a key index from 0 to 3"));
  EXPECT_THAT(message({{0, 1, 3, 3}, {3, 0, -1}}, same), ::testing::HasSubstr("indices[2] is -1"));
  const Graph graph{{0, 1, 3, 3}, {3, 0, 2}};
  const std::vector<std::pair<const char*, void (*)(GraphInput<float>&)>> nulls = {
      {"indptr", [](GraphInput<float>& in) { in.indptr = nullptr; }},
      {"indices", [](GraphInput<float>& in) { in.indices = nullptr; }},
      {"x", [](GraphInput<float>& in) { in.x.data = nullptr; }},
      {"y", [](GraphInput<float>& in) { in.y.data = nullptr; }},
      {"v", [](GraphInput<float>& in) { in.v.data = nullptr; }},
      {"factor", [](GraphInput<float>& in) { in.factor = nullptr; }}};
  for (const auto& [name, change] : nulls) {
    EXPECT_EQ(message(graph, change), std::string("graph_attention: ") + name + " is null");
  }
  EXPECT_THAT(message(graph, [](GraphInput<float>& in) { in.shape.key_heads = 3; }),
              ::testing::HasSubstr("heads is 2; expected a multiple of key_heads, 3"));
  EXPECT_THAT(message(graph, [](GraphInput<float>& in) { in.shape.edges = -1; }),
              ::testing::HasSubstr("edges is -1"));
}

}  // namespace
}  // namespace gnomon::testing
