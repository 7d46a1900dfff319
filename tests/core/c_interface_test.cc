// Compares results of the C interface with those of the C++ interface, and checks the C interface's
// errors.
#include <string>
#include <vector>

#include "core/random_problem.h"
#include "gmock/gmock.h"
#include "gnomon/attention.h"
#include "gnomon/gnomon.h"
#include "gtest/gtest.h"

namespace gnomon::testing {
namespace {

using ::testing::HasSubstr;

gnomon_attention CallOf(const Problem<float>& p) {
  const AttentionShape& n = p.options.shape;
  return {.function = p.function.name,
          .batch = n.batch,
          .heads = n.heads,
          .key_heads = n.key_heads,
          .queries = n.queries,
          .keys = n.keys,
          .dim = n.dim,
          .value_dim = n.value_dim,
          .x = p.x.data().data(),
          .y = p.y.data().data(),
          .v = p.v.data().data(),
          .row_scalars = p.row.data(),
          .column_scalars = p.column.data(),
          .head_scalars = p.head.data(),
          .factor = p.factor.data(),
          .bias = p.bias.empty() ? nullptr : p.bias.data(),
          .causal = p.options.right == 0 ? 1 : 0,
          .query_offset = p.options.query_offset,
          .threads = 2,
          .statistics = nullptr,
          .tolerance = 0};
}

// Returns a causal problem with enough work for two threads.
Problem<float> CausalProblem(const PairFunction& function) {
  Problem<float> p = RandomProblem(function, {.shape = {2, 4, 2, 60, 90, 8, 12},
                                              .right = 0,
                                              .query_offset = 20,
                                              .bias = ProblemOptions::kSharedBias});
  p.pass_d_lse = false;
  return p;
}

TEST(CInterfaceTest, GivesWhatTheCppInterfaceGives) {
  for (const PairFunction* function : PairFunctions()) {
    SCOPED_TRACE(function->name);
    const Problem<float> p = CausalProblem(*function);
    const Results<float> expected = p.Run();
    const gnomon_attention call = CallOf(p);

    Results<float> results = expected;
    for (auto& [name, values] : results) values.assign(values.size(), kNan);
    const auto out = [&](const char* name) { return results.at(name).data(); };
    ASSERT_EQ(gnomon_attention_forward(&call, out("o"), out("lse")), GNOMON_OK);
    const gnomon_attention_gradient gradient = {.x = out("d_x"),
                                                .y = out("d_y"),
                                                .v = out("d_v"),
                                                .row_scalars = out("d_row"),
                                                .column_scalars = out("d_column"),
                                                .head_scalars = out("d_head"),
                                                .factor = out("d_factor"),
                                                .bias = out("d_bias")};
    ASSERT_EQ(
        gnomon_attention_backward(&call, out("o"), out("lse"), p.d_o.data().data(), &gradient),
        GNOMON_OK);
    EXPECT_STREQ(gnomon_last_error(), "");
    ExpectSame(results, expected);
  }
}

TEST(CInterfaceTest, ComputesTheGradientsThatAreAskedFor) {
  const Problem<float> p = CausalProblem(FindPairFunction("dot"));
  const Results<float> all = p.Run();
  gnomon_attention call = CallOf(p);
  call.threads = 0;
  Results<float> only = {{"d_y", std::vector<float>(all.at("d_y").size())}};
  gnomon_attention_gradient gradient = {};
  gradient.y = only.at("d_y").data();
  ASSERT_EQ(gnomon_attention_backward(&call, all.at("o").data(), all.at("lse").data(),
                                      p.d_o.data().data(), &gradient),
            GNOMON_OK);
  EXPECT_EQ(only.at("d_y"), all.at("d_y"));
}

TEST(CInterfaceTest, SaysWhatIsWrong) {
  const Problem<float> p = CausalProblem(FindPairFunction("penumbral"));
  const gnomon_attention call = CallOf(p);
  std::vector<float> o(p.d_o.data().size()), lse(p.d_lse.size());
  const auto message = [&](const gnomon_attention* spoiled) -> std::string {
    EXPECT_EQ(gnomon_attention_forward(spoiled, o.data(), lse.data()), GNOMON_INVALID_ARGUMENT);
    return gnomon_last_error();
  };
  const auto spoiled = [&](auto change) {
    gnomon_attention bad = call;
    change(bad);
    return message(&bad);
  };
  EXPECT_THAT(message(nullptr), HasSubstr("input is null"));
  EXPECT_THAT(spoiled([](auto& c) { c.function = nullptr; }), HasSubstr("function is null"));
  EXPECT_THAT(spoiled([](auto& c) { c.function = "dott"; }),
              HasSubstr("unknown pair function 'dott'"));
  EXPECT_THAT(spoiled([](auto& c) { c.key_heads = 3; }), HasSubstr("expected a multiple"));
  EXPECT_THAT(spoiled([](auto& c) { c.queries = -1; }), HasSubstr("queries is -1"));
  EXPECT_THAT(spoiled([](auto& c) { c.row_scalars = nullptr; }), HasSubstr("row_scalars is null"));
  EXPECT_EQ(gnomon_attention_backward(&call, o.data(), lse.data(), o.data(), nullptr),
            GNOMON_INVALID_ARGUMENT);
  EXPECT_THAT(gnomon_last_error(), HasSubstr("gradient is null"));
  ASSERT_EQ(gnomon_attention_forward(&call, o.data(), lse.data()), GNOMON_OK);
  EXPECT_STREQ(gnomon_last_error(), "");
}

}  // namespace
}  // namespace gnomon::testing
