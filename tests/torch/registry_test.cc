#include "ops/catalogue/registry.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gnomon/torch/attention.h>
#include <gnomon/torch/nn.h>
#include <gnomon/torch/term.h>
#include <gnomon/torch/token_encoding.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/attention/attention.h"
#include "ops/attention/attention_weights.h"
#include "ops/attention/compose.h"
#include "ops/attention/starts.h"
#include "ops/coordinates/token_grid.h"

namespace gnomon {
namespace {

using ::testing::HasSubstr;
using Role = CatalogueEntry::Role;

CatalogueEntry Mine(Role role) {
  CatalogueEntry entry;
  entry.name = "mine";
  entry.role = role;
  return entry;
}

const OffsetBiasFunction kBias = [](const Component& /*component*/,
                                    const std::vector<at::Tensor>& tensors,
                                    const OffsetRange& /*range*/) { return tensors[0]; };

std::string Refusal(Role role, std::vector<Parameter> parameters = {},
                    OffsetBiasFunction bias = nullptr) {
  try {
    RegisterAllOrNone("libmine.so", [&] {
      RegisterPosition(
          {.catalogue = Mine(role), .parameters = std::move(parameters), .bias = bias});
    });
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(RegisterTest, RefusesAnEntryWithoutWhatItsRoleAsksFor) {
  EXPECT_THAT(Refusal(Role::kBias), HasSubstr("bias mine, without a function `bias`"));
  EXPECT_THAT(Refusal(Role::kRotation), HasSubstr("rotation mine, without a function `rotate`"));
  EXPECT_THAT(Refusal(Role::kEmbedding), HasSubstr("a function `encoder`"));
  EXPECT_THAT(Refusal(Role::kContent), HasSubstr("a function `content`"));
  EXPECT_THAT(Refusal(Role::kNorm), HasSubstr("a function `norm`"));
  EXPECT_THAT(Refusal(Role::kTemperature), HasSubstr("a function `temperature`"));
  const char* const table = "without a table that is always present as its first tensor";
  const auto start = [](const Component&, const ModuleShape& n) { return at::ones({n.heads}); };
  EXPECT_THAT(Refusal(Role::kGridBias, OnGrid({})), HasSubstr(table));
  for (const Role role : {Role::kSink, Role::kGate, Role::kKeyBias, Role::kPairBias}) {
    EXPECT_THAT(Refusal(role), HasSubstr(table));
    EXPECT_THAT(Refusal(role, {PerHead("slope", "1", {.start = start})}), HasSubstr(table));
    EXPECT_THAT(Refusal(role, {Table("bias", Index::kKeyEntries, {})}, kBias),
                HasSubstr("with a function `bias`, which its role does not use"));
  }
  EXPECT_THAT(Refusal(Role::kBias, {PerHead("slope", "1")}, kBias),
              HasSubstr("without an initial value for its parameter slope"));
  const TokenProjection nothing;
  EXPECT_THAT(Refusal(Role::kGate, {Table("gates", Index::kQueries, {.projection = nothing})}),
              HasSubstr("without a function `columns` in the projection for its parameter gates"));
  const Parameter first = Table("table", Index::kGrid, {});
  EXPECT_THAT(Refusal(Role::kGridBias, {first, Shape()}),
              HasSubstr("without the parameters shape and prefix"));
  for (const Role role : {Role::kSink, Role::kGate, Role::kKeyBias, Role::kPairBias}) {
    EXPECT_THAT(Refusal(role, {first, Table("other", Index::kNone, {})}),
                HasSubstr("with a second tensor, other, which its role does not use"));
  }
  EXPECT_EQ(FindCatalogueEntry("mine"), nullptr);
  try {
    RegisterAllOrNone("libmine.so", [] {
      RegisterSimilarity({.catalogue = Mine(Role::kSimilarity), .map = nullptr});
    });
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("similarity mine, without a function `map`"));
  }
}

template <class Body>
std::string FaultOf(const Body& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(PositionEntryTest, TheBiasOfATermHasEachHeadAndOffset) {
  const PositionEntry entry{.catalogue = Mine(Role::kBias), .bias = kBias};
  const Component component = Component::Parse("alibi");
  const OffsetRange range{
      .queries = 3, .keys = 5, .query_offset = 0, .heads = 2, .query_offsets = std::nullopt};
  const auto fault = [&](at::IntArrayRef sizes) {
    return FaultOf([&] { entry.BiasByOffset(component, {at::zeros(sizes)}, range); });
  };
  EXPECT_EQ(fault({2, 7}), "");
  EXPECT_THAT(
      FaultOf([&] { entry.BiasByOffset(component, {at::zeros({2, 7}, at::kDouble)}, range); }),
      HasSubstr("the bias of alibi has dtype Double; expected Float"));
  EXPECT_THAT(FaultOf([&] { entry.BiasByOffset(component, {at::Tensor()}, range); }),
              HasSubstr("the bias of alibi has shape []"));
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{4, 7}, {2, 8}, {7}, {1, 2, 7}}) {
    EXPECT_THAT(fault(sizes), HasSubstr("the bias of alibi has shape"));
    EXPECT_THAT(fault(sizes), HasSubstr("expected (H, entries) = (2, 7)"));
  }
}

// Returns the error for a map's result with q (1, 2, 3, 4) and k (1, 1, 5, 4).
std::string FaultOfMap(const MappedTokens& tokens) {
  const SimilarityEntry entry{.catalogue = Mine(Role::kSimilarity),
                              .map = [&](const Component&, const at::Tensor&, const at::Tensor&,
                                         const HeadParameters&) { return tokens; }};
  return FaultOf([&] {
    entry.Mapped(Component::Parse("dot"), at::zeros({1, 2, 3, 4}), at::zeros({1, 1, 5, 4}),
                 {at::ones({2})});
  });
}

TEST(SimilarityEntryTest, AMapGivesWhatThePairFunctionReads) {
  const at::Tensor x = at::zeros({1, 2, 3, 6});
  const at::Tensor y = at::zeros({1, 1, 5, 6});
  const at::Tensor factor = at::ones({2});
  EXPECT_EQ(FaultOfMap({"dot", x, y, factor}), "");
  EXPECT_EQ(FaultOfMap({"dot", x, at::zeros({1, 2, 5, 6}), factor}), "");
  EXPECT_THAT(FaultOfMap({nullptr, x, y, factor}),
              HasSubstr("the map of mine returns the pair function \"\", which does not exist"));
  EXPECT_THAT(FaultOfMap({"nope", x, y, factor}), HasSubstr("the pair function \"nope\""));
  EXPECT_THAT(FaultOfMap({"dot", {}, y, factor}),
              HasSubstr("the map of mine returns x or y without four axes"));
  EXPECT_THAT(FaultOfMap({"dot", x, at::zeros({1, 1, 5, 7}), factor}),
              HasSubstr("returns y of shape [1, 1, 5, 7]; expected [1, 1, 5, 6]"));
  EXPECT_THAT(FaultOfMap({"dot", x.narrow(2, 0, 2), y, factor}), HasSubstr("returns x of shape"));
  EXPECT_THAT(FaultOfMap({"dot", x, y, {}}), HasSubstr("returns a factor of shape []"));
  EXPECT_THAT(FaultOfMap({"dot", x, y, factor.to(at::kDouble)}),
              HasSubstr("returns a factor of dtype Double; expected Float"));
  EXPECT_THAT(FaultOfMap({"dot", x.to(at::kDouble), y, factor}),
              HasSubstr("returns x of dtype Double; expected Float"));
  const at::Tensor rows = at::zeros({1, 1, 2, 3});
  const at::Tensor columns = at::zeros({1, 1, 1, 5});
  EXPECT_EQ(FaultOfMap({"laplacian", x, y, factor}), "");
  EXPECT_THAT(FaultOfMap({"umbral", x, y, factor}),
              HasSubstr("returns row_scalars of shape []; expected [1, 1, 2, 3]"));
  EXPECT_THAT(FaultOfMap({"umbral", x, y, factor, rows, columns.narrow(3, 0, 4)}),
              HasSubstr("returns column_scalars of shape [1, 1, 1, 4]; expected [1, 1, 1, 5]"));
  EXPECT_THAT(FaultOfMap({"dot", x, y, factor, {}, {}, at::ones({1, 2})}),
              HasSubstr("returns head_scalars of shape [1, 2]; expected [0, 2]"));
}

TEST(PositionEntryTest, NormsAndRotationsLeaveTheFormOfTokens) {
  const Component component = Component::Parse("rope");
  const at::Tensor x = at::zeros({1, 2, 3, 4});
  const auto of_norm = [&](NormFunction norm) {
    const PositionEntry entry{.catalogue = Mine(Role::kNorm), .norm = norm};
    return FaultOf([&] { entry.Normed(component, {}, x, /*of_keys=*/true); });
  };
  const auto same = [](const Component&, const std::vector<at::Tensor>&, const at::Tensor& tokens,
                       bool) { return tokens; };
  EXPECT_EQ(of_norm(same), "");
  EXPECT_THAT(of_norm([](const Component&, const std::vector<at::Tensor>&, const at::Tensor& tokens,
                         bool) { return tokens.narrow(3, 0, 2); }),
              HasSubstr("rope returns keys of shape [1, 2, 3, 2]; expected [1, 2, 3, 4]"));
  EXPECT_THAT(of_norm([](const Component&, const std::vector<at::Tensor>&, const at::Tensor& tokens,
                         bool) { return tokens.to(at::kDouble); }),
              HasSubstr("rope returns keys of dtype Double; expected Float"));
  const PositionEntry rotation{
      .catalogue = Mine(Role::kRotation),
      .rotate = [](const Component&, const std::vector<at::Tensor>&, const RotationCall& call) {
        return call.x.narrow(2, 0, 1);
      }};
  EXPECT_THAT(FaultOf([&] {
                rotation.Rotated(component, {},
                                 {.x = x,
                                  .position = 0,
                                  .firsts = std::nullopt,
                                  .length = 3,
                                  .of_keys = false,
                                  .is_product = true,
                                  .last_is_height = false,
                                  .heads = 2});
              }),
              HasSubstr("rope returns queries of shape [1, 2, 1, 4]; expected [1, 2, 3, 4]"));
}

// Returns the error of a call with a position that is not in the catalogue.
std::string FaultInAttention(const PositionEntry& entry, const CallArguments& arguments = {}) {
  const auto component = std::make_shared<const Component>(Component::Parse("mine"));
  const at::Tensor x = at::zeros({1, 2, 3, 4});
  const ResolvedSimilarity dot = ResolveSimilarity("gnomon.attention", "dot", {}, x);
  return FaultOf([&] { Compose(x, x, x, dot, {{&entry, component, /*tensors=*/{}}}, arguments); });
}

TEST(PositionEntryTest, ABiasThatGoesByTheLengthTakesNoPositions) {
  const PositionEntry entry{
      .catalogue = Mine(Role::kBias),
      .bias =
          [](const Component&, const std::vector<at::Tensor>&, const OffsetRange& range) {
            return at::zeros_symint({range.heads, range.size()}, range.options);
          },
      .goes_by_length = [](const Component&) { return true; }};
  EXPECT_EQ(FaultInAttention(entry), "");
  CallArguments placed;
  placed.positions = at::arange(3).unsqueeze(0);
  EXPECT_THAT(FaultInAttention(entry, placed),
              HasSubstr("mine depends on the call's sequence length and does not support "
                        "positions"));
}

// A content term whose function reads all tensors of its entry.
ContentTerm KeysAndValues(const Component& /*component*/, const std::vector<at::Tensor>& tensors,
                          const ContentCall& call) {
  TORCH_CHECK(tensors.size() == 2 && call.value_dim == tensors[0].size(2));
  return {.query = call.q, .keys = tensors[1], .values = tensors[0], .layout = "clip"};
}

// Tests with q (1, 2, 3, 4), values with 5 columns, and tables for the offsets -2 to 2.
struct TablesTest : ::testing::Test {
  at::Tensor q = at::randn({1, 2, 3, 4}, at::kDouble);
  at::Tensor v = at::randn({1, 2, 3, 5}, at::kDouble);
  at::Tensor values = at::randn({1, 5, 5}, at::kDouble);
  at::Tensor keys = at::randn({1, 5, 4}, at::kDouble);
  at::Tensor offsets = at::arange(3).unsqueeze(0) - at::arange(3).unsqueeze(1) + 2;
  ResolvedSimilarity dot = ResolveSimilarity("gnomon.attention", "dot", {}, q);
  std::shared_ptr<const Component> component =
      std::make_shared<const Component>(Component::Parse("mine"));

  // Returns the table rows of all pairs, (3, 3, columns).
  at::Tensor Rows(const at::Tensor& table) const { return table[0].index({offsets}); }
  at::Tensor Scores() const { return at::matmul(q, q.transpose(2, 3)) / 2; }
};

TEST_F(TablesTest, WeightsAreThoseOfATermWithValues) {
  const PositionEntry entry{
      .catalogue = Mine(Role::kContent),
      .parameters = {Table("values", Index::kNearOffsets, {.of_values = true}),
                     Table("keys", Index::kNearOffsets, {})},
      .content = KeysAndValues};
  const at::Tensor scores = Scores() + at::einsum("bhid,ijd->bhij", {q, Rows(keys)}) / 2;
  const at::Tensor expected = scores.softmax(-1);
  const std::vector<ResolvedPosition> positions = {{&entry, component, {values, keys}}};
  const at::Tensor weights = AttentionWeights(q, q, {0, 2}, dot, positions, CallArguments());
  EXPECT_TRUE(at::allclose(weights, expected.index_select(2, at::tensor({0, 2}))));
  const at::Tensor o = std::get<0>(Compose(q, q, v, dot, positions, CallArguments()));
  const at::Tensor added = at::einsum("bhij,ijd->bhid", {expected, Rows(values)});
  EXPECT_TRUE(at::allclose(o, expected.matmul(v) + added));
}

TEST_F(TablesTest, ATermMayHaveValuesAlone) {
  const PositionEntry entry{
      .catalogue = Mine(Role::kContent),
      .parameters = {Table("values", Index::kNearOffsets, {.of_values = true})},
      .content = [](const Component&, const std::vector<at::Tensor>& tensors, const ContentCall&) {
        ContentTerm term = {};
        term.values = tensors[0];
        term.layout = "clip";
        return term;
      }};
  const std::vector<ResolvedPosition> positions = {{&entry, component, {values}}};
  const at::Tensor expected = Scores().softmax(-1);
  const at::Tensor o = std::get<0>(Compose(q, q, v, dot, positions, CallArguments()));
  const at::Tensor added = at::einsum("bhij,ijd->bhid", {expected, Rows(values)});
  EXPECT_TRUE(at::allclose(o, expected.matmul(v) + added));
  EXPECT_TRUE(at::allclose(AttentionWeights(q, q, {0, 1, 2}, dot, positions, {}), expected));
}

TEST_F(TablesTest, ATermMayMultiplyKeysAlone) {
  const PositionEntry entry{.catalogue = Mine(Role::kContent),
                            .parameters = {Table("queries", Index::kNearOffsets, {})},
                            .content = [](const Component&, const std::vector<at::Tensor>& tensors,
                                          const ContentCall& call) {
                              ContentTerm term = {};
                              term.key = call.k;
                              term.queries = tensors[0];
                              term.layout = "clip";
                              return term;
                            }};
  // These rows are indexed by p_i - p_j.
  const at::Tensor rows = Rows(keys.flip(1));
  const at::Tensor scores = Scores() + at::einsum("bhjd,ijd->bhij", {q, rows}) / 2;
  const at::Tensor o =
      std::get<0>(Compose(q, q, v, dot, {{&entry, component, {keys}}}, CallArguments()));
  EXPECT_TRUE(at::allclose(o, scores.softmax(-1).matmul(v)));
}

TEST_F(TablesTest, ABiasOfKeysIsMadeOfAllItsTensors) {
  const KeyBiasFunction scaled = [](const Component&, const std::vector<at::Tensor>& tensors,
                                    const KeyBiasCall&) {
    return tensors[0] * tensors[1].reshape({1, -1, 1});
  };
  const at::Tensor bias = at::randn({1, 1, 3}, at::kDouble);
  const at::Tensor slopes = at::randn({2}, at::kDouble);
  const auto run = [&](KeyBiasFunction function) {
    const PositionEntry entry{.catalogue = Mine(Role::kKeyBias), .key_bias = function};
    return std::get<0>(
        Compose(q, q, v, dot, {{&entry, component, {bias, slopes}}}, CallArguments()));
  };
  const at::Tensor scores = Scores() + (bias * slopes.reshape({1, -1, 1})).unsqueeze(2);
  EXPECT_TRUE(at::allclose(run(scaled), scores.softmax(-1).matmul(v)));
  const auto fault = [&](KeyBiasFunction function) { return FaultOf([&] { run(function); }); };
  EXPECT_THAT(
      fault([](const Component&, const std::vector<at::Tensor>&, const KeyBiasCall&) {
        return at::Tensor();
      }),
      HasSubstr("the bias of mine has shape []; expected (1 or B, 1 or H, Lk) = (1, 2, 3)"));
  EXPECT_THAT(fault([](const Component&, const std::vector<at::Tensor>& tensors,
                       const KeyBiasCall&) { return tensors[0].to(at::kFloat); }),
              HasSubstr("the bias of mine has dtype Float; expected Double"));
}

TEST(SimilarityEntryTest, ScoresWithoutASpreadHaveNoStart) {
  const SimilarityEntry entry{.catalogue = Mine(Role::kSimilarity),
                              .parameters = {PerHead("gamma", "learned")},
                              .map = [](const Component&, const at::Tensor& q, const at::Tensor& k,
                                        const HeadParameters& heads) {
                                return MappedTokens{
                                    .function = "dot", .x = q * 0, .y = k, .factor = heads.factor};
                              }};
  EXPECT_THAT(FaultOf([&] { HeadParameterStart(entry, Component::Parse("mine"), 4); }),
              HasSubstr("the scores of mine for N(0, 1) tokens have a standard deviation of 0"));
}

// Tests the errors of `body`, which registers terms. Runs it in a separate process, because terms
// cannot be removed from the catalogue.
template <class Body>
void ExpectApart(const Body& body, const char* said) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        std::cerr << "said: " << FaultOf(body) << ".";
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), said);
}

TEST(PositionEntryTest, ABiasNeedsNoTensor) {
  ExpectApart(
      [] {
        RegisterAllOrNone("libmine.so", [] {
          RegisterPosition({.catalogue = Mine(Role::kBias),
                            .parameters = {Number("rate", "0.5")},
                            .bias = [](const Component& component, const std::vector<at::Tensor>&,
                                       const OffsetRange& range) {
                              const at::Tensor far = range.Distances(range.options).abs();
                              return (-component.Number("rate") * far.to(range.options))
                                  .expand_symint({range.heads, range.size()});
                            }});
        });
        for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
          const at::Tensor q = at::randn({1, 2, 5, 4}, type);
          const at::Tensor offsets = at::arange(5, type).unsqueeze(0) - at::arange(5).unsqueeze(1);
          const at::Tensor scores = at::matmul(q, q.transpose(2, 3)) / 2 - 0.25 * offsets.abs();
          const at::Tensor expected = at::softmax(scores, -1).matmul(q);
          const auto check = [&](const char* what, const AttentionOptions& how) {
            TORCH_CHECK(at::allclose(attention(q, q, q, how), expected, 1e-4, 1e-5), what, type);
          };
          const Position position{"mine:rate=0.25"};
          check("of rows, ", AttentionOptions().position(position));
          check("placed, ", AttentionOptions().position(position).positions(7 + at::arange(5)));
        }
      },
      "said: \\.");
}

TEST(PositionEntryTest, AStartIsOneNumberPerHead) {
  ExpectApart(
      [] {
        RegisterAllOrNone("libmine.so", [] {
          const auto start = [](const Component&, const ModuleShape&) { return at::ones({3}); };
          RegisterPosition({.catalogue = Mine(Role::kBias),
                            .parameters = {PerHead("slopes", "learned", {.start = start})},
                            .bias = kBias});
        });
        nn::MultiheadAttention(nn::MultiheadAttentionOptions(8, 2).position("mine"));
      },
      "the initial value of slopes of mine has shape \\[3\\]; expected \\(H,\\) = \\(2,\\)");
}

TEST(PositionEntryTest, AGridIsAskedForBeforeAStart) {
  ExpectApart(
      [] {
        RegisterAllOrNone("libmine.so", [] {
          CatalogueEntry entry = Mine(Role::kGridBias);
          entry.needs_grid = true;
          const auto start = [](const Component& component, const ModuleShape& n) {
            return at::zeros({n.heads, 2 * TokenGrid::Find(component)->shape()[0] - 1});
          };
          RegisterPosition(
              {.catalogue = entry,
               .parameters = OnGrid({Table("table", Index::kGrid, {.start = start})})});
        });
        nn::MultiheadAttention(nn::MultiheadAttentionOptions(8, 2).position("mine"));
      },
      "mine in a module needs a shape, as in mine:shape=14x14");
}

TEST(PositionEntryTest, ATemperatureIsOfRows) {
  const auto fault = [](TemperatureFunction temperature) {
    return FaultInAttention({.catalogue = Mine(Role::kTemperature), .temperature = temperature});
  };
  const auto of_rows = [](const Component&, const std::vector<at::Tensor>&,
                          const TemperatureCall& call) { return call.seen.log(); };
  EXPECT_EQ(fault(of_rows), "");
  EXPECT_THAT(fault([](const Component&, const std::vector<at::Tensor>&, const TemperatureCall&) {
                return at::ones({4});
              }),
              HasSubstr("the temperature of mine has shape [4]; expected (B, H, Lq) = [1, 2, 3]"));
  EXPECT_THAT(fault([](const Component&, const std::vector<at::Tensor>&, const TemperatureCall&) {
                return at::Tensor();
              }),
              HasSubstr("the temperature of mine has shape []"));
}

TEST(PositionEntryTest, AContentTermHasWhatItsTablesAreMultipliedBy) {
  const auto fault = [](ContentFunction content) {
    return FaultInAttention({.catalogue = Mine(Role::kContent), .content = content});
  };
  const auto without_keys = [](const Component&, const std::vector<at::Tensor>&,
                               const ContentCall& call) {
    ContentTerm term = {};
    term.query = call.q;
    return term;
  };
  const auto without_key = [](const Component&, const std::vector<at::Tensor>&,
                              const ContentCall& /*call*/) {
    ContentTerm term = {};
    term.queries = at::zeros({1, 3, 4});
    return term;
  };
  for (const ContentFunction content :
       {ContentFunction(without_keys), ContentFunction(without_key)}) {
    EXPECT_THAT(fault(content),
                HasSubstr("mine returns an incomplete content term; expected both query and "));
  }
  const auto even = [](const Component&, const std::vector<at::Tensor>&, const ContentCall& call) {
    return ContentTerm{.query = call.q, .keys = at::zeros({1, 4, 4}), .layout = "clip"};
  };
  EXPECT_THAT(fault(even), HasSubstr("mine returns a table of keys with 4 rows; expected an odd"));
  const auto flat = [](const Component&, const std::vector<at::Tensor>&, const ContentCall& call) {
    return ContentTerm{.query = call.q, .keys = at::zeros({3, 4}), .layout = "clip"};
  };
  EXPECT_THAT(fault(flat),
              HasSubstr("mine returns a table of keys of shape [3, 4]; expected (1 or"));
}

TEST(PositionEntryTest, AnEncodingHasAnEncoder) {
  ExpectApart(
      [] {
        RegisterAllOrNone("libmine.so", [] {
          const TokenEncoderFactory none = [](const Component&, int64_t, bool) {
            return std::unique_ptr<TokenEncoder>();
          };
          RegisterPosition({.catalogue = Mine(Role::kEmbedding), .encoder = none});
        });
        nn::TokenEncoding("mine", 4);
      },
      "gnomon.nn: mine returned no encoder; return one from its factory");
}

TEST(RegisterTest, RefusesAPositionWithoutARole) {
  EXPECT_THAT(Refusal(CatalogueEntry().role, {}, kBias), HasSubstr("without a role"));
}

TEST(RegisterTest, RefusesWhatNoSpecificationCouldName) {
  for (const char* const name : {"", "my term", "a+b", "a:b", "2d"}) {
    try {
      RegisterAllOrNone("libmine.so", [&] {
        CatalogueEntry entry = Mine(Role::kBias);
        entry.name = name;
        RegisterPosition({.catalogue = entry, .bias = kBias});
      });
      ADD_FAILURE() << name;
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  HasSubstr("with an invalid name; expected letters"));
    }
  }
  EXPECT_THAT(Refusal(Role::kBias, {Number("a=b", "1")}, kBias),
              HasSubstr("with a parameter \"a=b\", which is not a valid name"));
}

TEST(RegisterTest, RefusesParametersThatContradict) {
  const auto refusal = [](std::vector<Parameter> parameters) {
    return Refusal(Role::kBias, std::move(parameters), kBias);
  };
  EXPECT_THAT(refusal({Number("w", "1"), Number("w", "2")}), HasSubstr("with two parameters w"));
  EXPECT_THAT(refusal({PositiveNumber("w", "-1")}),
              HasSubstr("with a parameter w, which has an invalid default value: -1"));
  EXPECT_THAT(refusal({Integer("n", "9").AtMost(8)}),
              HasSubstr("which has an invalid default value: 9"));
  EXPECT_THAT(refusal({Flag("f", "yes")}), HasSubstr("which has an invalid default value: yes"));
  EXPECT_THAT(refusal({Number("shape", "1")}),
              HasSubstr("with a parameter shape of the wrong kind; this name is reserved"));
  EXPECT_THAT(refusal({Number("axis", "1")}), HasSubstr("with a parameter axis"));
  EXPECT_EQ(refusal({Integer("n", "9").AtMost(8), Shape()}),
            refusal({Integer("n", "9").AtMost(8)}));
}

TEST(RegisterTest, RefusesAChoiceOfNothing) {
  EXPECT_THAT(Refusal(Role::kBias, {Choice("mode", {})}, kBias),
              HasSubstr("with a parameter mode, a choice without values"));
}

TEST(RegisterTest, RefusesASimilarityThatNoCallCouldCompute) {
  const TokenMap map = [](const Component& /*component*/, const at::Tensor& q, const at::Tensor& k,
                          const HeadParameters& heads) {
    return MappedTokens{.function = "dot", .x = q, .y = k, .factor = heads.factor};
  };
  const auto refusal = [&](SimilarityEntry entry) -> std::string {
    try {
      RegisterAllOrNone("libmine.so", [&] { RegisterSimilarity(std::move(entry)); });
    } catch (const c10::ValueError& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_THAT(refusal({.catalogue = Mine(Role::kSimilarity),
                       .parameters = {PerHead("gamma", "learned"), PerHead("tau", "learned")},
                       .map = map}),
              HasSubstr("similarity mine, without an initial value for its parameter tau"));
  EXPECT_THAT(refusal({.catalogue = Mine(Role::kSimilarity),
                       .parameters = {PerHead("gamma", "learned")},
                       .map = map}),
              HasSubstr("which uses the unknown pair function mine"));
  EXPECT_THAT(refusal({.catalogue = Mine(Role::kSimilarity),
                       .parameters = {PerHead("gamma", "learned")},
                       .map = map,
                       .functions = {{"", "dot"}, {"other", "theirs"}}}),
              HasSubstr("which uses the unknown pair function theirs"));
  EXPECT_EQ(FindCatalogueEntry("mine"), nullptr);
}

}  // namespace
}  // namespace gnomon
