// Compares the double-precision reference with a direct evaluation of the formula, and its
// gradients with finite differences.
#include <cmath>
#include <numeric>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"
#include "reference/reference.h"

namespace gnomon::testing {
namespace {

// Evaluates the formula directly, with all weights of a row and a plain exp.
Results<double> Naive(const Problem<double>& p) {
  const PairFunction& f = p.function;
  const AttentionShape& n = p.options.shape;
  Results<double> results = {{"o", {}}, {"lse", {}}};
  for (int64_t b = 0; b < n.batch; ++b) {
    for (int64_t h = 0; h < n.heads; ++h) {
      const int64_t kh = h * n.key_heads / n.heads;
      for (int64_t i = 0; i < n.queries; ++i) {
        std::vector<double> weights;
        // The entries of the relative tables that a pair reads.
        const auto entries = [&](int64_t j) {
          std::vector<TableRun> runs;
          const int64_t key = KeyAt(p.options, b, j);
          if (p.options.relative) {
            p.options.relative->AddRuns(QueryAt(p.options, b, i), key, key + 1, &runs);
          }
          std::vector<int64_t> read;
          for (const TableRun& run : runs) {
            read.push_back((p.options.relative_heads ? h * p.options.relative->size() : 0) +
                           run.entry);
          }
          return read;
        };
        for (int64_t j = 0; j < n.keys; ++j) {
          double product = 0;
          double distance2 = 0;
          for (int64_t d = 0; d < n.dim; ++d) {
            const double x = p.x.at(b, h, i, d);
            const double y = p.y.at(b, kh, j, d);
            product += x * y;
            distance2 += std::pow(x - y, 2);
          }
          const double g = f.input == PairInput::kSquaredDistance ? distance2 : product;
          std::vector<double> a, c, t;
          for (int64_t s = 0; s < f.row_scalars; ++s) {
            a.push_back(p.row.at(((s * n.batch + b) * n.heads + h) * n.queries + i));
          }
          for (int64_t s = 0; s < f.column_scalars; ++s) {
            c.push_back(p.column.at(((s * n.batch + b) * n.key_heads + kh) * n.keys + j));
          }
          for (int64_t s = 0; s < f.head_scalars; ++s) t.push_back(p.head.at(s * n.heads + h));
          double score = p.factor.at(h) * f.value(g, a.data(), c.data(), t.data());
          if (!p.bias.empty()) {
            // In tests with positions, layouts clip offsets to [-3, 4].
            const int64_t offset = KeyAt(p.options, b, j) - QueryAt(p.options, b, i);
            const int64_t entry = p.options.query_positions.empty()
                                      ? n.queries - 1 + j - i
                                      : std::clamp<int64_t>(offset, -3, 4) + 3;
            score += p.bias.at(b * p.bias_stride() + h * p.bias_size() + entry);
          }
          if (p.options.pair_bias.exists) {
            score +=
                Problem<double>::PairView(p.pair_bias.view(), p.options.pair_bias).row(b, h, i)[j];
          }
          if (!p.key_bias.empty()) score += p.key_bias.at((b * n.heads + h) * n.keys + j);
          for (const int64_t entry : entries(j)) {
            for (int64_t d = 0; d < p.options.relative_dim; ++d) {
              score += p.relative_factor * p.relative_query.at(b, h, i, d) *
                       p.relative_keys.at(entry * p.options.relative_dim + d);
            }
          }
          for (const int64_t entry : entries(j)) {
            // Rows of relative queries are indexed by p_i - p_j.
            const int64_t size = p.options.relative->size();
            const int64_t row = entry / size * size + size - 1 - entry % size;
            for (int64_t d = 0; d < p.options.relative_key_dim; ++d) {
              score += p.relative_factor * p.relative_key.at(b, kh, j, d) *
                       p.relative_queries.at(row * p.options.relative_key_dim + d);
            }
          }
          const bool sees = Sees(p.options, b, i, j) && p.SeesPair(b, h, i, j);
          weights.push_back(sees ? std::exp(score) : 0);
        }
        const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
        results["lse"].push_back(std::log(sum));
        for (int64_t d = 0; d < n.value_dim; ++d) {
          double o = 0;
          for (int64_t j = 0; j < n.keys; ++j) {
            double value = p.v.at(b, kh, j, d);
            for (const int64_t entry : entries(j)) {
              if (!p.relative_values.empty()) {
                value += p.relative_values.at(entry * n.value_dim + d);
              }
            }
            o += weights[j] * value;
          }
          results["o"].push_back(sum == 0 ? 0 : o / sum);
        }
      }
    }
  }
  return results;
}

struct ReferenceCase {
  const char* name;
  ProblemOptions options;
};

const std::vector<ReferenceCase>& ReferenceCases() {
  static const std::vector<ReferenceCase> cases = [] {
    std::vector<ReferenceCase> list;
    const auto add = [&](const char* name, const AttentionShape& shape) -> ProblemOptions& {
      return list.emplace_back(ReferenceCase{name, {}}).options = {.shape = shape, .seed = 11};
    };
    add("Plain", {2, 2, 2, 5, 6, 3, 2});
    ProblemOptions& causal = add("CausalWithBias", {2, 4, 2, 6, 6, 4, 3});
    causal.right = 0;
    causal.bias = ProblemOptions::kSharedBias;
    ProblemOptions& window = add("WindowWithBatchBias", {2, 3, 1, 5, 7, 4, 1});
    window.left = 2;
    window.right = 1;
    window.query_offset = 1;
    window.bias = ProblemOptions::kBiasForEachBatch;
    window.padded = true;
    ProblemOptions& lengths = add("LengthsAndEmptyRows", {3, 2, 1, 4, 6, 3, 2});
    lengths.key_starts = {1, 4, 0};
    lengths.key_lengths = {5, 2, 0};
    ProblemOptions& behind = add("NegativeOffset", {1, 2, 2, 6, 5, 3, 2});
    behind.right = 0;
    behind.query_offset = -2;
    ProblemOptions& documents = add("Documents", {2, 2, 1, 6, 7, 3, 2});
    documents.query_segments = {1, 1, 2, 2, 2, 9, 4, 4, 4, 3, 3, 3};
    documents.key_segments = {1, 2, 2, 2, 1, 3, 3, 4, 4, 3, 3, 3, 4, 4};
    ProblemOptions& offsets = add("OffsetsOfBatches", {3, 2, 2, 4, 6, 3, 2});
    offsets.right = 0;
    offsets.left = 3;
    offsets.query_offsets = {0, 2, -1};
    offsets.bias = ProblemOptions::kBiasForEachBatch;
    ProblemOptions& chunks = add("Chunks", {2, 2, 1, 7, 8, 3, 2});
    chunks.chunks = {3, 1, 0};
    chunks.query_offsets = {1, -2};
    static const OffsetLayout clip(2, 1, OffsetLayout::Far::kClip);
    ProblemOptions& shaw = add("RelativeKeysAndValues", {2, 4, 2, 5, 6, 3, 2});
    shaw.relative = &clip;
    shaw.right = 1;
    shaw.query_offset = 1;
    static const OffsetLayout zero(3, 0, OffsetLayout::Far::kZero);
    ProblemOptions& music = add("RelativeKeysOfHeadsAndBiases", {2, 4, 2, 6, 6, 3, 2});
    music.relative = &zero;
    music.relative_heads = true;
    music.relative_values = false;
    music.right = 0;
    music.bias = ProblemOptions::kSharedBias;
    music.key_bias = true;
    ProblemOptions& disentangled = add("RelativeQueries", {2, 4, 2, 5, 6, 3, 2});
    disentangled.relative = &clip;
    disentangled.relative_key_dim = 4;
    disentangled.relative_values = false;
    disentangled.query_offset = 1;
    ProblemOptions& position_to_content = add("RelativeQueriesOfHeads", {2, 4, 2, 6, 6, 3, 2});
    position_to_content.relative = &zero;
    position_to_content.relative_dim = 0;
    position_to_content.relative_key_dim = 3;
    position_to_content.relative_heads = true;
    position_to_content.right = 0;
    static const GridLayout grid({2, 3}, 1, GridLayout::Kind::kAxes);
    ProblemOptions& image = add("RelativeOnGrid", {1, 2, 1, 7, 7, 3, 2});
    image.relative = &grid;
    image.relative_heads = true;
    static const OffsetLayout offsets_of_positions(3, 4, OffsetLayout::Far::kClip);
    ProblemOptions& placed = add("Positions", {2, 4, 2, 4, 6, 3, 2});
    placed.right = 1;
    placed.chunks = {4, 1, 0};
    placed.query_positions = {3, 0, 0, -5, 7, 8, 2, 30};
    placed.key_positions = {0, 1, 2, 0, 1, 2, 9, 7, 5, 3, 1, 29};
    placed.bias = ProblemOptions::kBiasForEachBatch;
    placed.layout = &offsets_of_positions;
    placed.relative = &clip;
    placed.relative_key_dim = 2;
    ProblemOptions& key_bias = add("KeyBias", {2, 2, 1, 4, 5, 3, 2});
    key_bias.key_bias = true;
    for (const auto& [name, batch, heads] :
         {std::tuple{"PairBias", false, false}, std::tuple{"PairBiasOfBatches", false, true},
          std::tuple{"PairBiasOfHeads", true, false}, std::tuple{"PairBiasOfAll", true, true}}) {
      ProblemOptions& pairs = add(name, {2, 4, 2, 4, 5, 3, 2});
      pairs.pair_bias = {true, batch, heads};
      pairs.pair_mask = {true, heads, batch};
      pairs.padded = batch;
    }
    ProblemOptions& all_pairs = add("PairsAndAll", {2, 4, 2, 6, 6, 3, 2});
    all_pairs.relative = &clip;
    all_pairs.relative_heads = true;
    all_pairs.right = 1;
    all_pairs.bias = ProblemOptions::kSharedBias;
    all_pairs.key_bias = true;
    all_pairs.pair_bias = {true, false, true};
    all_pairs.pair_mask = {true, true, false};
    return list;
  }();
  return cases;
}

class ReferenceTest
    : public ::testing::TestWithParam<std::tuple<const PairFunction*, const ReferenceCase*>> {
 protected:
  Problem<double> MakeProblem() const {
    const auto& [function, test_case] = GetParam();
    ProblemOptions options = test_case->options;
    options.on_grid = false;  // on the grid, finite differences would cross kinks
    if (ReadsAngles(*function)) options.shape.dim += 8;
    return RandomProblem(*function, options).InDouble();
  }
};

// Counts the pairs for which the reference computes f.
int64_t computed_pairs = 0;

double CountedProduct(double g, const double* /*a*/, const double* /*b*/, const double* /*t*/) {
  ++computed_pairs;
  return g;
}
void SlopeOfProduct(double /*g*/, const double* /*a*/, const double* /*b*/, const double* /*t*/,
                    reference::PairDerivative<double>& d) {
  d.g = 1;
}

// The reference computes only visible pairs, so its time for packed documents is proportional to
// the number of pairs within documents.
TEST(ReferenceMaskTest, ComputesVisiblePairsAlone) {
  const AttentionShape shape = {2, 2, 1, 6, 7, 3, 2};
  ProblemOptions documents = {.shape = shape};
  documents.query_segments = {1, 1, 2, 2, 2, 9, 4, 4, 4, 3, 3, 3};
  documents.key_segments = {1, 2, 2, 2, 1, 3, 3, 4, 4, 3, 3, 3, 4, 4};
  ProblemOptions causal = documents;
  causal.right = 0;
  ProblemOptions placed = causal;
  placed.query_positions = {0, 1, 0, 1, 2, 0, 0, 1, 2, 0, 1, 2};
  placed.key_positions = {0, 0, 1, 2, 1, 0, 1, 0, 1, 0, 1, 2, 2, 3};
  ProblemOptions pairs = documents;
  pairs.pair_mask = {true, true, true};
  for (const ProblemOptions& options : {documents, causal, placed, pairs}) {
    std::ostringstream description;
    description << options;
    SCOPED_TRACE(description.str());
    const Problem<double> p = RandomProblem(FindPairFunction("dot"), options).InDouble();
    int64_t visible = 0;
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t i = 0; i < shape.queries; ++i) {
          for (int64_t j = 0; j < shape.keys; ++j) {
            visible += Sees(options, b, i, j) && p.SeesPair(b, h, i, j) ? 1 : 0;
          }
        }
      }
    }
    ASSERT_GT(visible, 0);
    const reference::Table table = {PairInput::kInnerProduct, 0,      0, 0, CountedProduct,
                                    SlopeOfProduct,           nullptr};
    const AttentionInput<double> in = p.Input();
    Array<double> o(p.d_o.size(), false, 0);
    std::vector<double> lse(p.d_lse.size());
    std::vector<double> statistics(3 * lse.size());
    computed_pairs = 0;
    reference::Forward(table, in, {o.view(), lse.data(), statistics.data()}, SerialExecutor());
    EXPECT_EQ(computed_pairs, visible);
    AttentionBackwardInput<double> saved;
    saved.o = static_cast<const Array<double>&>(o).view();
    saved.lse = lse.data();
    saved.statistics = statistics.data();
    saved.d_o = p.d_o.view();
    computed_pairs = 0;
    reference::Backward(table, in, saved, {}, SerialExecutor());
    EXPECT_EQ(computed_pairs, visible);
  }
}

void ExpectNear(const std::vector<double>& actual, const std::vector<double>& expected,
                double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::isinf(expected[i])) {
      EXPECT_EQ(actual[i], expected[i]) << i;
    } else {
      EXPECT_NEAR(actual[i], expected[i], tolerance * std::max(1.0, std::fabs(expected[i]))) << i;
    }
  }
}

TEST_P(ReferenceTest, ForwardIsTheFormula) {
  const Problem<double> p = MakeProblem();
  const Results<double> actual = p.Forward();
  for (const auto& [name, expected] : Naive(p)) {
    SCOPED_TRACE(name);
    ExpectNear(actual.at(name), expected, 1e-12);
  }
}

// sum(d_o * o) + sum(d_lse * lse), whose gradient the backward pass computes. The second sum
// excludes rows without keys.
double Loss(const Problem<double>& p, const std::vector<double>& d_o) {
  Results<double> r = p.Forward();
  double loss = std::inner_product(d_o.begin(), d_o.end(), r["o"].begin(), 0.0);
  for (size_t row = 0; row < p.d_lse.size(); ++row) {
    if (std::isfinite(r["lse"][row])) loss += p.d_lse[row] * r["lse"][row];
  }
  return loss;
}

TEST_P(ReferenceTest, GradientsAreDifferences) {
  Problem<double> p = MakeProblem();
  const std::vector<double> d_o = p.d_o.Elements();
  const Results<double> actual = p.Run();
  // Fourth-order finite differences.
  constexpr double kStep = 1e-5;
  const auto slope = [&](double& argument) {
    const double at = argument;
    const auto loss = [&](double step) {
      argument = at + step;
      return Loss(p, d_o);
    };
    const double difference =
        (8 * (loss(kStep) - loss(-kStep)) - (loss(2 * kStep) - loss(-2 * kStep))) / (12 * kStep);
    argument = at;
    return difference;
  };
  const auto check_array = [&](const char* name, Array<double>& array) {
    SCOPED_TRACE(name);
    std::vector<double> slopes;
    array.ForEach([&](double& element) { slopes.push_back(slope(element)); });
    ExpectNear(actual.at(name), slopes, 1e-7);
  };
  const auto check = [&](const char* name, std::vector<double>& array) {
    SCOPED_TRACE(name);
    std::vector<double> slopes;
    for (double& element : array) slopes.push_back(slope(element));
    ExpectNear(actual.at(name), slopes, 1e-7);
  };
  check_array("d_x", p.x);
  check_array("d_y", p.y);
  check_array("d_v", p.v);
  check("d_row", p.row);
  check("d_column", p.column);
  check("d_head", p.head);
  check("d_factor", p.factor);
  if (!p.bias.empty()) check("d_bias", p.bias);
  if (!p.key_bias.empty()) check("d_key_bias", p.key_bias);
  if (p.options.pair_bias.exists) check_array("d_pair_bias", p.pair_bias);
  if (!p.relative_keys.empty()) {
    check_array("d_relative_query", p.relative_query);
    check("d_relative_keys", p.relative_keys);
  }
  if (!p.relative_queries.empty()) {
    check_array("d_relative_key", p.relative_key);
    check("d_relative_queries", p.relative_queries);
  }
  if (!p.relative_values.empty()) check("d_relative_values", p.relative_values);
}

std::vector<const ReferenceCase*> CasePointers() {
  std::vector<const ReferenceCase*> pointers;
  for (const ReferenceCase& c : ReferenceCases()) pointers.push_back(&c);
  return pointers;
}

INSTANTIATE_TEST_SUITE_P(All, ReferenceTest,
                         ::testing::ValuesIn(WithFunctions(AllPairFunctions(), CasePointers())),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)->name) +
                                  std::get<1>(test.param)->name;
                         });

}  // namespace
}  // namespace gnomon::testing
