// Compares the kernels with the reference on random problems; intended to run under sanitizers.
#include <cmath>
#include <memory>
#include <random>
#include <string>

#include "core/random_problem.h"
#include "gnomon/attention.h"
#include "gnomon/table_layout.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

// `layout` owns the table layout that the options point to.
ProblemOptions RandomOptions(std::mt19937& engine, std::unique_ptr<TableLayout>* layout) {
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine);
  };
  const auto chance = [&](int percent) { return draw(0, 99) < percent; };
  ProblemOptions o;
  AttentionShape& n = o.shape;
  n.batch = draw(1, 3);
  n.key_heads = draw(1, 3);
  n.heads = n.key_heads * draw(1, 3);
  n.queries = chance(10) ? draw(0, 2) : draw(1, 110);
  n.keys = chance(10) ? draw(0, 2) : chance(20) ? draw(281, 700) : draw(1, 280);
  n.dim = draw(1, 40);
  n.value_dim = chance(5) ? 0 : draw(1, 40);
  o.query_offset = chance(50) ? n.keys - n.queries : draw(-150, 300);
  if (chance(40)) o.left = draw(-10, 150);
  if (chance(40)) o.right = chance(60) ? 0 : draw(-10, 150);
  for (int64_t b = 0; b < n.batch; ++b) {
    // Values may be out of range, and starts may exceed lengths; they then hide no keys or all
    // keys.
    o.key_starts.push_back(draw(-5, n.keys / 2 + 5));
    o.key_lengths.push_back(draw(n.keys / 2 - 5, n.keys + 5));
  }
  if (chance(60)) o.key_starts.clear();
  if (chance(60)) o.key_lengths.clear();
  if (n.queries + n.keys > 0 && chance(50)) {
    o.bias = chance(50) ? ProblemOptions::kSharedBias : ProblemOptions::kBiasForEachBatch;
  }
  o.padded = chance(50);
  if (chance(20)) o.chunks = {draw(1, 100), draw(0, 2), draw(0, 2)};
  o.key_bias = chance(25);
  o.key_bias_base = o.key_bias && chance(50);
  o.temperature = chance(25);
  o.softcap = chance(15) ? 1.5 : 0;
  for (PairOptions* pairs : {&o.pair_bias, &o.pair_mask}) {
    *pairs = {.exists = chance(25), .shares_batch = chance(50), .shares_heads = chance(50)};
  }
  if (chance(50)) {
    const auto far = chance(50) ? OffsetLayout::Far::kClip : OffsetLayout::Far::kZero;
    *layout = std::make_unique<OffsetLayout>(chance(30) ? 400 : draw(0, 40),
                                             chance(30) ? 400 : draw(0, 40), far);
    if (chance(50)) o.relative_key_dim = draw(1, 40);
    if (o.relative_key_dim == 0 && chance(40)) *layout = std::make_unique<KeyLayout>(n.keys);
    o.relative = layout->get();
    o.relative_dim = chance(25) ? 0 : draw(1, 40);
    o.relative_values = chance(50);
    o.relative_heads = chance(50);
  }
  if (chance(25)) o.dropout = static_cast<double>(draw(1, 100)) / 100;
  if (chance(25)) {
    for (int64_t b = 0; b < n.batch; ++b) o.query_offsets.push_back(draw(-150, 300));
  }
  if (chance(25)) {
    const auto segments = [&](int64_t tokens) {
      std::vector<int32_t> drawn;
      int32_t segment = 0;
      for (int64_t t = 0; t < n.batch * tokens; ++t) {
        if (chance(3)) segment = static_cast<int32_t>(draw(-2, 2));
        drawn.push_back(segment);
      }
      return drawn;
    };
    o.query_segments = segments(n.queries);
    o.key_segments = segments(n.keys);
  }
  o.seed = static_cast<unsigned>(draw(1, 1 << 20));
  return o;
}

// Makes biases decrease with distance, so that tiles are skipped.
void MakeSteep(Problem<float>& p, float slope) {
  const int64_t size = p.bias_size();
  for (size_t e = 0; e < p.bias.size(); ++e) {
    const int64_t offset =
        static_cast<int64_t>(e) % size - (p.options.shape.queries - 1) - p.options.query_offset;
    p.bias[e] -= slope * std::fabs(static_cast<float>(offset));
  }
  for (size_t e = 0; e < p.key_bias.size(); ++e) {
    p.key_bias[e] += slope * static_cast<float>(static_cast<int64_t>(e) % p.options.shape.keys);
  }
}

class FuzzTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(FuzzTest, KernelsMatchReference) {
  std::mt19937 engine(GetParam());
  const auto functions = AllPairFunctions();
  const auto targets = Targets();
  for (int repeat = 0; repeat < 50; ++repeat) {
    const PairFunction& function = *functions[engine() % functions.size()];
    const std::string& target = targets[engine() % targets.size()];
    std::unique_ptr<TableLayout> layout;
    ProblemOptions options = RandomOptions(engine, &layout);
    if (ReadsAngles(function)) options.shape.dim += 8;
    Problem<float> p = RandomProblem(function, options);
    if (engine() % 3 == 0) MakeSteep(p, static_cast<float>(1 + engine() % 8) / 8);
    for (std::vector<float>* biases : {&p.bias, &p.key_bias}) {
      for (float& bias : *biases) {
        if (engine() % 16 == 0) bias = -kInfinity;
      }
    }
    p.pair_bias.ForEach([&](float& bias) { bias = engine() % 16 == 0 ? -kInfinity : bias; });
    SCOPED_TRACE(function.name);
    SCOPED_TRACE(target);
    SCOPED_TRACE(::testing::PrintToString(options));
    const ScopedTarget scope(target);
    const ThreadExecutor executor(static_cast<int>(engine() % 4));
    ExpectClose(p.Run(executor), p.InDouble().Run(), 5e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, FuzzTest, ::testing::Range(1u, 7u));

}  // namespace
}  // namespace gnomon::testing
