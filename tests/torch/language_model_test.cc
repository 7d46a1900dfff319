#include "models/language_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "gnomon/catalogue.h"
#include "torch/seeded_model.h"

namespace gnomon::models {
namespace {

LanguageModelOptions Small(const std::string& similarity, const std::string& position) {
  LanguageModelOptions options;
  options.dim = 32;
  options.depth = 2;
  options.heads = 2;
  options.mlp = 48;
  options.max_length = 80;
  options.similarity = similarity;
  options.position = position;
  return options;
}

struct Spec {
  std::string similarity;
  std::string position;
};

// Every similarity and every position of the catalogue, and some compositions.
std::vector<Spec> Specs() {
  std::vector<Spec> specs;
  for (const CatalogueEntry& similarity : SimilarityCatalogue()) {
    specs.push_back({similarity.name, "none"});
  }
  for (const CatalogueEntry& position : PositionCatalogue()) {
    // The table of the first is as long as the text; a grid has a number of tokens of its own; the
    // others' tensors are those of a call.
    const bool fits = position.name != "offset_bias" && position.name != "grid_bias" &&
                      position.name != "relative2d" && position.use() != "attention()";
    if (fits && position.name != "none") {
      specs.push_back({"dot", position.name});
    }
  }
  for (const char* position :
       {"rope+hype:tau=learned", "rope:layout=half+alibi:slopes=learned",
        "hype:mode=abs:tau=learned:mu=learned", "kerple:kind=power", "sinusoidal:layout=split+t5",
        "learned+rope:dims=8", "conv:kernel=5+cape+conv:kernel=9:groups=4",
        "sinusoidal:shape=7x10+rope:shape=7x10", "relative:max_offset=9:values=true+rope",
        "relative:far=zero:past=true:per_head=true+alibi"}) {
    specs.push_back({"dot", position});
    specs.push_back({"penumbral", position});
  }
  specs.push_back({"penumbral:score=height2", "rope"});
  return specs;
}

// Of a model of bytes, as text.
std::string Continue(LanguageModel& model, std::string_view prompt,
                     const GenerationOptions& options) {
  const std::vector<int64_t> tokens = Generate(model, prompt, options);
  return {tokens.begin(), tokens.end()};
}

class EverySpec : public testing::TestWithParam<Spec> {};

TEST_P(EverySpec, LogitsDoNotSeeLaterBytes) {
  const torch::NoGradGuard no_grad;
  LanguageModel model = NewModel(Small(GetParam().similarity, GetParam().position), 1);
  model->eval();
  const torch::Tensor tokens = torch::randint(256, {2, 70}, torch::kLong);
  const torch::Tensor logits = model->forward(tokens);
  EXPECT_TRUE(logits.isfinite().all().item<bool>());
  for (const int64_t t : {1, 33, 69}) {
    torch::Tensor changed = tokens.clone();
    changed.select(1, t).add_(1).remainder_(256);
    const torch::Tensor after = model->forward(changed);
    EXPECT_TRUE(torch::equal(after.narrow(1, 0, t), logits.narrow(1, 0, t))) << t;
    EXPECT_FALSE(torch::equal(after.select(1, t), logits.select(1, t))) << t;
  }
}

TEST_P(EverySpec, CachedLogitsAreThoseOfTheWholeText) {
  const torch::NoGradGuard no_grad;
  LanguageModel model = NewModel(Small(GetParam().similarity, GetParam().position), 1);
  model->eval();
  const torch::Tensor tokens = torch::randint(256, {2, 40}, torch::kLong);
  const torch::Tensor whole = model->forward(tokens);
  LanguageModelCache cache(2);
  std::vector<torch::Tensor> parts;
  for (const auto& [begin, length] : {std::pair(0, 17), {17, 1}, {18, 20}, {38, 1}, {39, 1}}) {
    parts.push_back(model->forward(tokens.narrow(1, begin, length), &cache));
  }
  EXPECT_LT((torch::cat(parts, 1) - whole).abs().max().item<double>(), 2e-4);
}

INSTANTIATE_TEST_SUITE_P(Catalogue, EverySpec, testing::ValuesIn(Specs()),
                         [](const testing::TestParamInfo<Spec>& spec) {
                           std::string name = spec.param.similarity + "_" + spec.param.position;
                           for (char& c : name) {
                             if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
                           }
                           return name;
                         });

TEST(LanguageModelTest, PositionsAreSeen) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor tokens = torch::arange(20, torch::kLong).unsqueeze(0);
  const torch::Tensor swapped = tokens.index_select(1, torch::tensor({1, 0, 2, 3, 4, 5, 6, 7}));
  const auto last = [&](const std::string& position, const torch::Tensor& input) {
    LanguageModelOptions options = Small("dot", position);
    options.depth = 1;  // one layer without positions sees a set
    LanguageModel model = NewModel(options, 1);
    model->eval();
    return model->forward(input.narrow(1, 0, 8)).select(1, 7);
  };
  EXPECT_LT((last("none", tokens) - last("none", swapped)).abs().max().item<double>(), 1e-5);
  for (const char* position : {"sinusoidal", "rope", "alibi", "hype", "kerple", "conv", "cape"}) {
    EXPECT_GT((last(position, tokens) - last(position, swapped)).abs().max().item<double>(), 1e-3)
        << position;
  }
}

TEST(LanguageModelTest, EncodingsAreReadAtPositions) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor tokens = torch::randint(256, {2, 8}, torch::kLong);
  const torch::Tensor in_order = torch::arange(8).expand({2, 8});
  for (const char* position : {"sinusoidal:layout=split", "learned", "learned+sinusoidal"}) {
    LanguageModel model = NewModel(Small("penumbral", position), 1);
    model->eval();
    const torch::Tensor logits = model->forward(tokens);
    EXPECT_LT((model->forward_at(tokens, in_order) - logits).abs().max().item<double>(), 1e-6);
    // Those of the tokens from 30 on of a longer text, and each row has its own.
    torch::Tensor later = in_order.clone();
    later.select(0, 1).add_(30);
    const torch::Tensor at = model->forward_at(tokens, later);
    EXPECT_LT((at[0] - logits[0]).abs().max().item<double>(), 1e-6);
    EXPECT_GT((at[1] - logits[1]).abs().max().item<double>(), 1e-3);
    LanguageModelCache cache(2);
    cache.tokens.tokens = 30;
    EXPECT_LT((model->forward(tokens, &cache)[1] - at[1]).abs().max().item<double>(), 1e-5);
  }
  LanguageModel model = NewModel(Small("dot", "conv+rope"), 1);
  EXPECT_THROW(model->forward_at(tokens, in_order), Error);
}

TEST(LanguageModelTest, EverythingSharedBeginsEqual) {
  const auto plain = NewModel(Small("dot", "none"), 5)->named_parameters();
  for (const char* position : {"learned", "rope+hype:tau=learned", "t5"}) {
    const auto other = NewModel(Small("dot", position), 5)->named_parameters();
    for (const auto& entry : plain) {
      EXPECT_TRUE(torch::equal(entry.value(), other[entry.key()])) << position << entry.key();
    }
  }
  EXPECT_FALSE(torch::equal(NewModel(Small("dot", "none"), 6)->parameters()[0],
                            NewModel(Small("dot", "none"), 5)->parameters()[0]));
}

TEST(LanguageModelTest, LogitsBeginWithUnitSpread) {
  const torch::NoGradGuard no_grad;
  LanguageModelOptions options = Small("dot", "rope");
  options.dim = 128;
  LanguageModel model = NewModel(options, 3);
  model->eval();
  const torch::Tensor logits = model->forward(torch::randint(256, {2, 64}, torch::kLong));
  EXPECT_GT(logits.std().item<double>(), 0.5);
  EXPECT_LT(logits.std().item<double>(), 2.0);
}

TEST(LanguageModelTest, LearnedPositionsEndWithTheirTable) {
  EXPECT_EQ(NewModel(Small("dot", "learned"), 1)->max_length(), 80);
  EXPECT_EQ(NewModel(Small("dot", "rope"), 1)->max_length(), std::nullopt);
  EXPECT_EQ(NewModel(Small("dot", "learned+sinusoidal:shape=4x4:prefix=1"), 1)->max_length(), 17);
  EXPECT_EQ(NewModel(Small("dot", "alibi:shape=4x4+rope:shape=4x4"), 1)->max_length(), 16);
}

TEST(LanguageModelTest, WrongOptionsAreErrors) {
  LanguageModelOptions options = Small("dot", "none");
  options.heads = 3;
  EXPECT_THROW(LanguageModel{options}, Error);
  options = Small("dot", "none");
  options.dropout = 1;
  EXPECT_THROW(LanguageModel{options}, Error);
  EXPECT_THROW(LanguageModel{Small("dot", "ropee")}, c10::ValueError);
  EXPECT_THROW(LanguageModel{Small("dots", "none")}, c10::ValueError);
  EXPECT_THROW(LanguageModel{Small("dot", "alibi:shape=4x4+rope:shape=5x5")}, c10::ValueError);
}

TEST(LanguageModelTest, RowsDrawWhatTheyDrawInTheirBatch) {
  LanguageModelOptions options = Small("dot", "rope+cape");
  options.dropout = 0.3;
  LanguageModel model = NewModel(options, 1);
  const torch::Tensor tokens = torch::randint(options.vocabulary, {5, 11}, torch::kLong);
  const auto logits = [&](int64_t first, int64_t count, const std::optional<BatchRows>& rows) {
    torch::manual_seed(7);
    return model->forward(tokens.narrow(0, first, count), nullptr, nullptr, rows);
  };
  const torch::Tensor whole = logits(0, 5, std::nullopt);
  EXPECT_TRUE(torch::equal(logits(0, 5, BatchRows{0, 5}), whole));
  for (const auto& [first, count] : {std::pair(0, 2), std::pair(2, 3), std::pair(4, 1)}) {
    const torch::Tensor rows = whole.narrow(0, first, count);
    EXPECT_TRUE(torch::allclose(logits(first, count, BatchRows{first, 5}), rows, 1e-4, 1e-5));
    if (first > 0) {
      EXPECT_FALSE(torch::allclose(logits(first, count, std::nullopt), rows, 1e-2, 1e-2));
    }
  }
  EXPECT_THROW(logits(3, 2, BatchRows{4, 5}), c10::ValueError);
  EXPECT_THROW(logits(0, 2, BatchRows{-1, 5}), c10::ValueError);
}

TEST(LanguageModelTest, DropoutActsInTrainingOnly) {
  LanguageModelOptions options = Small("dot", "none");
  options.dropout = 0.5;
  LanguageModel model = NewModel(options, 1);
  const torch::Tensor tokens = torch::randint(256, {1, 8}, torch::kLong);
  model->train();
  EXPECT_FALSE(torch::equal(model->forward(tokens), model->forward(tokens)));
  model->eval();
  EXPECT_TRUE(torch::equal(model->forward(tokens), model->forward(tokens)));
}

// A model whose tables, which begin at 0, hold something.
LanguageModel WithTables(const LanguageModelOptions& options) {
  const torch::NoGradGuard no_grad;
  LanguageModel model = NewModel(options, 1);
  for (const auto& entry : model->named_parameters()) {
    const std::string& name = entry.key();
    if (name.ends_with("_table") || name.ends_with("_xl_u") || name.ends_with("_xl_v")) {
      torch::Tensor(entry.value()).normal_();
    }
  }
  model->eval();
  return model;
}

// Logits of each part of the tokens, read as segments with a memory.
std::vector<torch::Tensor> BySegments(LanguageModel& model, const torch::Tensor& tokens,
                                      const std::vector<int64_t>& lengths, int64_t memory) {
  LanguageModelMemory remembered;
  remembered.max_length = memory;
  std::vector<torch::Tensor> logits;
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    logits.push_back(model->forward(tokens.narrow(1, begin, length), nullptr, &remembered));
    begin += length;
    EXPECT_EQ(remembered.length(), std::min(begin, memory));
  }
  return logits;
}

double Distance(const torch::Tensor& a, const torch::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST(MemoryTest, OfEverythingIsTheWholeText) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor tokens = torch::randint(256, {2, 40}, torch::kLong);
  for (const char* position :
       {"none", "rope", "alibi", "t5", "hype", "kerple", "rope+hype:tau=learned", "sinusoidal",
        "cape", "conv:kernel=5:groups=4", "relative:max_offset=9:values=true", "transformer_xl"}) {
    for (const char* similarity : {"dot", "umbral"}) {
      if (std::string(position) == "transformer_xl" && std::string(similarity) != "dot") continue;
      LanguageModel model = WithTables(Small(similarity, position));
      const torch::Tensor parts = torch::cat(BySegments(model, tokens, {17, 1, 3, 19}, 100), 1);
      EXPECT_LT(Distance(parts, model->forward(tokens)), 2e-4) << similarity << " " << position;
    }
  }
}

// Keys and values that are kept are those that are made anew of the memory.
TEST(MemoryTest, ACacheOfItsLengthIsTheSame) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor tokens = torch::randint(256, {2, 60}, torch::kLong);
  const std::vector<int64_t> lengths = {7, 1, 12, 3, 12, 25};
  for (const char* position :
       {"none", "rope", "alibi", "t5", "kerple", "rope+hype:tau=learned", "sinusoidal", "cape",
        "conv:kernel=5:groups=4", "relative:max_offset=9:values=true", "transformer_xl", "forget",
        "scalable_softmax", "content_bias:extent=4"}) {
    for (const char* similarity : {"dot", "umbral", "penumbral"}) {
      if (std::string(position) == "transformer_xl" && std::string(similarity) != "dot") continue;
      LanguageModel model = WithTables(Small(similarity, position));
      for (const int64_t memory : {0, 5, 11, 100}) {
        const std::vector<torch::Tensor> anew = BySegments(model, tokens, lengths, memory);
        LanguageModelCache cache(2, memory);
        int64_t begin = 0;
        for (size_t n = 0; n < lengths.size(); ++n) {
          const torch::Tensor kept = model->forward(tokens.narrow(1, begin, lengths[n]), &cache);
          begin += lengths[n];
          EXPECT_LT(Distance(kept, anew[n]), 5e-5)
              << similarity << " " << position << " " << memory << " " << n;
          EXPECT_EQ(cache.layers[1].length(), std::min(begin, memory));
        }
      }
    }
  }
}

TEST(LanguageModelTest, LossesOfTheLastTokens) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor tokens = torch::randint(256, {2, 25}, torch::kLong);
  for (const char* position :
       {"rope+hype:tau=learned", "sinusoidal", "conv:kernel=5:groups=4", "t5", "transformer_xl",
        "forget", "relative:max_offset=9:values=true", "content_bias:extent=4"}) {
    LanguageModel model = WithTables(Small("dot", position));
    const torch::Tensor logits = model->forward(tokens.narrow(1, 0, 24));
    const torch::Tensor all =
        -torch::log_softmax(logits, 2).gather(2, tokens.narrow(1, 1, 24).unsqueeze(2)).squeeze(2);
    for (const int64_t count : {24, 3, 1, 0}) {
      LanguageModelCache some(2);
      LanguageModelCache whole(2);
      for (const int64_t begin : {0, 8}) {
        const int64_t length = begin == 0 ? 8 : 16;
        const int64_t last = std::min(count, length);
        const int64_t end = begin + length;
        const torch::Tensor segment = tokens.narrow(1, begin, length);
        const torch::Tensor losses =
            model->losses(segment, tokens.narrow(1, end + 1 - last, last), &some);
        ASSERT_EQ(losses.sizes(), (std::vector<int64_t>{2, last}));
        if (last > 0) {
          EXPECT_LT(Distance(losses, all.narrow(1, end - last, last)), 5e-5);
        }
        model->forward(segment, &whole);
        for (size_t layer = 0; layer < 2; ++layer) {
          EXPECT_TRUE(torch::equal(some.layers[layer].k, whole.layers[layer].k)) << position;
          EXPECT_TRUE(torch::equal(some.layers[layer].v, whole.layers[layer].v)) << position;
        }
      }
    }
    // Without a cache, too.
    EXPECT_LT(Distance(model->losses(tokens.narrow(1, 0, 24), tokens.narrow(1, 20, 5)),
                       all.narrow(1, 19, 5)),
              5e-5);
  }
}

TEST(MemoryTest, OneLayerSeesTheSegmentAndTheTokensBefore) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor tokens = torch::randint(256, {2, 40}, torch::kLong);
  constexpr int64_t kMemory = 5;
  for (const char* position :
       {"rope", "alibi", "t5", "hype", "kerple", "relative:max_offset=9", "transformer_xl"}) {
    LanguageModelOptions options = Small("dot", position);
    options.depth = 1;
    LanguageModel model = WithTables(options);
    const std::vector<int64_t> lengths = {8, 8, 3, 12, 1, 8};
    const std::vector<torch::Tensor> parts = BySegments(model, tokens, lengths, kMemory);
    int64_t begin = 0;
    for (size_t n = 0; n < lengths.size(); ++n) {
      const int64_t from = std::max<int64_t>(begin - kMemory, 0);
      const torch::Tensor seen = tokens.slice(1, from, begin + lengths[n]);
      const torch::Tensor expected = model->forward(seen).slice(1, begin - from);
      EXPECT_LT(Distance(parts[n], expected), 1e-4) << position << " " << n;
      // The memory is what makes them differ from the segment on its own.
      if (n > 0) {
        const torch::Tensor alone = model->forward(tokens.narrow(1, begin, lengths[n]));
        EXPECT_GT(Distance(parts[n], alone), 1e-3) << position << " " << n;
      }
      begin += lengths[n];
    }
  }
}

TEST(MemoryTest, SegmentsOfOneTokenAreAWindowInEveryLayer) {
  const torch::NoGradGuard no_grad;
  constexpr int64_t kMemory = 4, kTokens = 14;
  const torch::Tensor tokens = torch::randint(256, {1, kTokens}, torch::kLong);
  LanguageModel model = WithTables(Small("dot", "rope+t5"));
  const torch::Tensor got =
      torch::cat(BySegments(model, tokens, std::vector<int64_t>(kTokens, 1), kMemory), 1);
  // Layer by layer and token by token: each sees the window before it in the layer below.
  const torch::Tensor table = model->named_parameters()["embedding.weight"];
  torch::Tensor x = torch::embedding(table, tokens) * std::sqrt(32.0);
  const auto modules = model->named_modules("", /*include_self=*/false);
  for (const char* block : {"blocks.0", "blocks.1"}) {
    std::vector<torch::Tensor> next;
    for (int64_t t = 0; t < kTokens; ++t) {
      const torch::Tensor window = x.slice(1, std::max<int64_t>(t - kMemory, 0), t + 1);
      next.push_back(
          modules[block]->as<TransformerBlock>()->forward(window, {.causal = true}).slice(1, -1));
    }
    x = torch::cat(next, 1);
  }
  const torch::Tensor expected = torch::matmul(modules["norm"]->as<Norm>()->forward(x), table.t());
  EXPECT_LT(Distance(got, expected), 1e-4);
}

TEST(MemoryTest, TakesNoGradient) {
  for (const char* position : {"rope", "conv:kernel=5:groups=4"}) {
    LanguageModel writer = NewModel(Small("dot", position), 1);
    LanguageModel reader = NewModel(Small("dot", position), 1);
    const torch::Tensor tokens = torch::randint(256, {2, 20}, torch::kLong);
    LanguageModelMemory memory;
    memory.max_length = 8;
    writer->forward(tokens.narrow(1, 0, 10), nullptr, &memory);
    ASSERT_EQ(memory.layers.size(), 2u);
    EXPECT_EQ(memory.layers[1].sizes(), (std::vector<int64_t>{2, 8, 32}));
    for (const torch::Tensor& layer : memory.layers) EXPECT_FALSE(layer.requires_grad());
    reader->forward(tokens.narrow(1, 10, 10), nullptr, &memory).square().sum().backward();
    // Nothing that the memory was made by has a gradient; what reads it has one.
    for (const auto& entry : writer->named_parameters()) {
      EXPECT_FALSE(entry.value().grad().defined()) << entry.key();
    }
    for (const auto& entry : reader->named_parameters()) {
      ASSERT_TRUE(entry.value().grad().defined()) << entry.key();
    }
    // Keys and values of the memory are made by weights that learn from them.
    LanguageModel alone = NewModel(Small("dot", position), 1);
    alone->forward(tokens.narrow(1, 10, 10)).square().sum().backward();
    const std::string name = "blocks.0.attention.v_proj.weight";
    EXPECT_GT(
        Distance(reader->named_parameters()[name].grad(), alone->named_parameters()[name].grad()),
        1e-3);
  }
}

TEST(MemoryTest, WrongMemoriesAreErrors) {
  LanguageModel model = NewModel(Small("dot", "rope"), 1);
  const torch::Tensor tokens = torch::randint(256, {2, 8}, torch::kLong);
  LanguageModelMemory memory;
  memory.max_length = 8;
  LanguageModelCache cache(2);
  EXPECT_THROW(model->forward(tokens, &cache, &memory), Error);
  model->forward(tokens, nullptr, &memory);
  EXPECT_THROW(model->forward(tokens.narrow(0, 0, 1), nullptr, &memory), Error);
  memory.reset();
  EXPECT_EQ(memory.length(), 0);
  model->forward(tokens.narrow(0, 0, 1), nullptr, &memory);
  EXPECT_EQ(memory.tokens.length(), 8);
}

TEST(GenerateTest, GreedyWithTheCacheIsGreedyWithoutIt) {
  for (const char* position :
       {"none", "sinusoidal", "learned", "rope+hype:tau=learned", "t5", "conv", "cape"}) {
    for (const char* similarity : {"dot", "penumbral"}) {
      LanguageModel model = NewModel(Small(similarity, position), 2);
      GenerationOptions options;
      options.tokens = 40;
      options.temperature = 0;
      const std::string cached = Continue(model, "prompt", options);
      options.use_cache = false;
      EXPECT_EQ(Continue(model, "prompt", options), cached) << position;
      EXPECT_EQ(cached.size(), 40u);
    }
  }
}

TEST(GenerateTest, SamplesBySeed) {
  LanguageModel model = NewModel(Small("dot", "rope"), 2);
  GenerationOptions options;
  options.tokens = 30;
  options.seed = 7;
  const std::string first = Continue(model, "a", options);
  EXPECT_EQ(Continue(model, "a", options), first);
  options.seed = 8;
  EXPECT_NE(Continue(model, "a", options), first);
  options.top_k = 1;
  const std::string only = Continue(model, "a", options);
  options.temperature = 0;
  options.top_k = 0;
  EXPECT_EQ(Continue(model, "a", options), only);
}

TEST(GenerateTest, TokensNeedNotBeBytes) {
  LanguageModelOptions options = Small("dot", "rope");
  options.vocabulary = 1000;
  LanguageModel model = NewModel(options, 2);
  GenerationOptions generation;
  generation.tokens = 50;
  generation.temperature = 100;  // nearly uniform
  const std::vector<int64_t> tokens = Generate(model, TokenText({999, 0}, {1, 2}), generation);
  EXPECT_EQ(tokens.size(), 50u);
  EXPECT_GT(*std::max_element(tokens.begin(), tokens.end()), 256);
  EXPECT_LT(*std::max_element(tokens.begin(), tokens.end()), 1000);
  EXPECT_EQ(model->forward(torch::tensor({{999}})).size(2), 1000);
}

TEST(GenerateTest, StopsWhenToldTo) {
  LanguageModel model = NewModel(Small("dot", "rope"), 2);
  int seen = 0;
  EXPECT_EQ(Generate(model, "a", {}, [&](int64_t) { return ++seen < 3; }).size(), 3u);
  EXPECT_THROW(Generate(model, "", {}), Error);
}

}  // namespace
}  // namespace gnomon::models
