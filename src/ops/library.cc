// The PyTorch operators of the namespace gnomon, which Python, compiled graphs and C++ call.
#include <gnomon/torch/attention.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/attention/attention.h"
#include "ops/attention/attention_weights.h"
#include "ops/attention/hype_augment.h"
#include "ops/attention/outputs.h"
#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"
#include "ops/graph/graph_attention.h"
#include "ops/linear/linear_attention.h"
#include "ops/nn/module_attention.h"
#include "ops/nn/module_tensors.h"
#include "ops/nn/token_encoding.h"
#include "ops/operators/attention_operators.h"
#include "ops/operators/graph_operators.h"

namespace gnomon {
namespace {

// Implementations of the attention operators, whose call arguments are passed separately
// (Flattened).

at::Tensor Attention(const CallArguments& call, const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& v, const std::string& similarity,
                     at::TensorList similarity_tensors, std::vector<std::string> position,
                     at::TensorList position_tensors) {
  return std::get<0>(AttentionOfSpecs(q, k, v, similarity, similarity_tensors, position,
                                      position_tensors, call, /*returns_lse=*/false));
}

Outputs AttentionWithLse(const CallArguments& call, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const std::string& similarity,
                         at::TensorList similarity_tensors, std::vector<std::string> position,
                         at::TensorList position_tensors) {
  return AttentionOfSpecs(q, k, v, similarity, similarity_tensors, position, position_tensors, call,
                          /*returns_lse=*/true);
}

at::Tensor AttentionOfModule(const CallArguments& call, const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v, const std::string& similarity,
                             const std::string& position, at::TensorList tensors) {
  return ModuleAttention(q, k, v, *ModuleTerms::Of(similarity, position), tensors, call);
}

at::Tensor AttentionOfTurnedKeys(const CallArguments& call, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v,
                                 const std::string& similarity, const std::string& position,
                                 at::TensorList tensors, const OptionalTensor& new_keys) {
  return ModuleAttentionOfTurnedKeys(q, k, v, *ModuleTerms::Of(similarity, position), tensors,
                                     new_keys, call);
}

at::Tensor WeightsOfSpecs(const CallArguments& call, const at::Tensor& q, const at::Tensor& k,
                          std::vector<int64_t> rows, const std::string& similarity,
                          at::TensorList similarity_tensors, std::vector<std::string> position,
                          at::TensorList position_tensors) {
  return AttentionWeights(q, k, rows, similarity, similarity_tensors, position, position_tensors,
                          call);
}

at::Tensor WeightsOfModule(const CallArguments& call, const at::Tensor& q, const at::Tensor& k,
                           std::vector<int64_t> rows, const std::string& similarity,
                           const std::string& position, at::TensorList tensors) {
  return ModuleAttentionWeights(q, k, rows, *ModuleTerms::Of(similarity, position), tensors, call);
}

// A member's initial value, as written in a schema.
template <class Member>
std::string DefaultText(const Member& value) {
  if constexpr (std::is_same_v<Member, bool>) {
    return value ? "True" : "False";
  } else if constexpr (std::is_same_v<Member, double>) {
    return NumberText(value);
  } else if constexpr (std::is_same_v<Member, std::string>) {
    return std::string("\"").append(value).append("\"");
  } else {
    return "None";
  }
}

// The schema of the members with their initial values as defaults, such as "bool causal=False".
// Calls omit arguments with default values, because passing an argument takes time.
template <class Arguments>
std::string SchemaWithDefaults() {
  Arguments unset;
  std::string text = SchemaOf<Arguments>::Text() + ", ";
  size_t comma = 0;
  const auto add = [&](const auto& value) {
    comma = text.find(", ", comma);
    std::string initial("=");
    initial += DefaultText(value);
    text.insert(comma, initial);
    comma += initial.size() + 2;
  };
  std::apply([&](const auto&... members) { (add(members), ...); }, Arguments::Tie(unset));
  return text.substr(0, text.size() - 2);
}

template <auto run>
constexpr auto kFlat = &Flattened<CallArguments>::Kernel<run>::Run;

std::tuple<std::vector<std::string>, std::vector<at::Tensor>, c10::List<bool>> TensorsOfModule(
    const std::string& similarity, const std::string& position, int64_t num_heads, int64_t head_dim,
    int64_t value_dim, int64_t max_length, int64_t query_tokens, int64_t key_tokens,
    at::TensorList given) {
  const ModuleShape shape{num_heads, head_dim, value_dim, max_length, query_tokens, key_tokens};
  std::vector<std::string> names;
  std::vector<at::Tensor> starts;
  c10::List<bool> learned;
  for (ModuleTensor& tensor : ModuleTensors(*ModuleTerms::Of(similarity, position), shape, given)) {
    names.push_back(std::move(tensor.name));
    starts.push_back(std::move(tensor.start));
    learned.push_back(tensor.learned);
  }
  return {names, starts, learned};
}

std::tuple<std::vector<at::Tensor>, std::vector<int64_t>> ProjectionsOfModule(
    const std::string& similarity, const std::string& position, int64_t num_heads,
    at::TensorList tensors, const at::Tensor& query, const at::Tensor& key) {
  ProjectedTensors call =
      ProjectTokens(*ModuleTerms::Of(similarity, position), num_heads, tensors, query, key);
  return {std::move(call.tensors), std::move(call.of_keys)};
}

std::tuple<std::vector<std::string>, std::vector<at::Tensor>, std::optional<int64_t>, int64_t>
TensorsOfEncoding(const std::string& spec, int64_t dim, bool causal) {
  const std::unique_ptr<TokenEncoder> encoder =
      MakeTokenEncoder(Component::Parse(spec), dim, causal);
  std::vector<std::string> names;
  std::vector<at::Tensor> starts;
  for (ModuleTensor& tensor : encoder->Tensors()) {
    names.push_back(std::move(tensor.name));
    starts.push_back(std::move(tensor.start));
  }
  return {names, starts, encoder->max_length(), encoder->history()};
}

std::tuple<std::vector<std::string>, std::vector<at::Tensor>, std::vector<at::Tensor>>
LearnedOfModule(const std::string& similarity, const std::string& position, int64_t num_heads,
                int64_t head_dim, int64_t value_dim, at::TensorList tensors) {
  std::vector<std::string> names;
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> starts;
  for (LearnedTensor& learned :
       LearnedTensors(*ModuleTerms::Of(similarity, position),
                      {num_heads, head_dim, value_dim, /*max_length=*/1}, tensors)) {
    names.push_back(std::move(learned.name));
    starts.push_back(learned.start ? *learned.start : at::empty({0}, learned.value.options()));
    values.push_back(std::move(learned.value));
  }
  return {names, values, starts};
}

// Answers to questions about specifications and argument lists, as JSON.
using Json = nlohmann::json;

Json OrNull(const std::optional<int64_t>& number) { return number ? Json(*number) : Json(); }

Json AxisOfCall(const std::string& argument, const std::string& letter, int64_t axes) {
  const auto fields = CallArguments::Fields();
  const auto* field = std::find_if(fields.begin(), fields.end(),
                                   [&](const ArgumentField& its) { return its.name == argument; });
  TORCH_CHECK_VALUE(field != fields.end() && letter.size() == 1, "gnomon: argument is \"", argument,
                    "\" and letter \"", letter, "\"; expected a call argument and a single letter");
  return OrNull(AxisOf(field->shape.text, letter[0], axes));
}

Json Components(const std::string& specification) {
  Json components = Json::array();
  for (const Component& component : ParseSum(specification)) {
    Json& numbers =
        components.emplace_back(Json{component.name(), component.options(), component.Text()})
            .emplace_back(Json::array());
    if (const std::optional<TokenGrid> grid = TokenGrid::Find(component)) {
      numbers = grid->shape();
      numbers.insert(numbers.begin(), grid->prefix());
    }
  }
  return components;
}

Json GoesByLength(const std::string& position) {
  const std::vector<Component> components = ParseSum(position);
  return std::any_of(components.begin(), components.end(), [](const Component& component) {
    return FindPosition(component).GoesByLength(component);
  });
}

Json HeightCoordinate(const std::string& similarity) {
  const Component component = Component::Parse(similarity);
  const SimilarityEntry& entry = FindSimilarity(component);
  if (!entry.HasHeight(component)) return nullptr;
  return entry.HeightIsFirst(component) ? 0 : -1;
}

Json OriginsOfTensors(const std::string& similarity, const std::string& position) {
  Json origins = Json::array();
  for (const TensorOrigin& its : TensorOrigins(*ModuleTerms::Of(similarity, position))) {
    origins.push_back(
        {its.name, its.component, its.parameter->name, PartName(its.part), IndexName(its.index)});
  }
  return origins;
}

Json PointsOption(const std::string& similarity) {
  const Component component = Component::Parse(similarity);
  const Parameter* parameter = FindSimilarity(component).points_parameter(component);
  return parameter == nullptr ? "" : parameter->name + "=" + parameter->points;
}

Json EncodingsOfTokens(const std::string& position, int64_t max_length) {
  Json encodings = Json::array();
  for (const Component& component : TokenEncodings(position, max_length)) {
    encodings.push_back(Json::array({component.name(), component.Text()}));
  }
  return Json::array({encodings, OrNull(LongestSequence(ParseSum(position), max_length))});
}

Json CheckedSizes(const Json& of) {
  const auto size = [&](size_t n) {
    return of[n].is_null() ? std::nullopt : std::optional<int64_t>(of[n]);
  };
  const ModuleSizes sizes = SizesOfModule(of[0], of[1], of[2], size(3), size(4), size(5), size(6));
  return {sizes.key_heads, sizes.head_dim, sizes.key_dim, sizes.value_dim};
}

// The answer to a question, given a JSON array of arguments. Answers change only with LoadTerms.
std::string Query(const std::string& question, const std::string& arguments) {
  // The catalogue (gnomon/catalogue.h).
  if (question == "catalogue") return CatalogueJson();
  static const std::map<std::string, Json (*)(const Json&)> answers = {
      {"attention_position", [](const Json& of) -> Json { return AttentionPosition(of[0]); }},
      // The query axis ("Q") or key axis ("K") of a call argument with the given rank, counted from
      // the end; null if it has none.
      {"axis_of_call", [](const Json& of) { return AxisOfCall(of[0], of[1], of[2]); }},
      // For each component of a sum: its name, options, specification, and the prefix and sizes of
      // its grid, if any.
      {"components", [](const Json& of) { return Components(of[0]); }},
      // Whether a position depends on the call's sequence length.
      {"goes_by_length", [](const Json& of) { return GoesByLength(of[0]); }},
      // The index of the token coordinate that is a height or a time: -1 (last) or 0 (first); null
      // if there is none.
      {"height_coordinate", [](const Json& of) { return HeightCoordinate(of[0]); }},
      // The CPU kernels' instruction set, and all that this machine supports.
      {"instruction_sets", [](const Json&) { return Json::array({CurrentTarget(), Targets()}); }},
      {"layer_positions", [](const Json& of) -> Json { return LayerPositions(of[0]); }},
      {"module_has_projections", [](const Json& of) -> Json { return HasProjections(of[0]); }},
      // kv_heads, qk_dim, kdim and vdim of a module.
      {"module_sizes", CheckedSizes},
      // For each tensor of module_tensors: its name; the index of its component in the position, or
      // -1 for the similarity; its parameter; its part of the parameter, "value", "start", "theta",
      // "weight" or "bias"; and for a table, the kind of its index in the catalogue, otherwise "".
      {"module_tensor_origins", [](const Json& of) { return OriginsOfTensors(of[0], of[1]); }},
      {"module_turns_keys_once",
       [](const Json& of) -> Json { return TurnsKeysOnce(*ModuleTerms::Of(of[0], of[1])); }},
      // The axes of the tensors that a fused operator takes and returns, for vmap's rules: one
      // letter per axis, preceded by "1|" if the axis may have length 1.
      {"operator_axes",
       [](const Json& of) -> Json {
         return of[0] == GraphArguments::kName ? NamedAxes<GraphArguments>()
                                               : NamedAxes<OperatorArguments>();
       }},
      // The option that makes a similarity accept points as tokens, such as "map=none"; "" if there
      // is none.
      {"points_option", [](const Json& of) { return PointsOption(of[0]); }},
      {"rms_norm_epsilon", [](const Json&) -> Json { return kRMSNormEpsilon; }},
      // The name and specification of each component that is added to embeddings, and the longest
      // sequence, or null.
      {"token_encodings", [](const Json& of) { return EncodingsOfTokens(of[0], of[1]); }},
  };
  const auto answer = answers.find(question);
  TORCH_CHECK_VALUE(answer != answers.end(), "gnomon: unknown question \"", question, "\"");
  return answer->second(Json::parse(arguments)).dump();
}

at::Tensor AggregateCentroid(const at::Tensor& o, const at::Tensor& q,
                             const std::string& similarity, at::TensorList tensors) {
  return LorentzCentroid(o, ResolveSimilarity("gnomon.attention", similarity, tensors, q));
}

at::Tensor LorentzLift(const at::Tensor& x, const OptionalTensor& c, double number) {
  return lorentz::lift(x, c ? HeadValue(*c) : HeadValue(number));
}

at::Tensor LorentzCentroidOf(const at::Tensor& points, const OptionalTensor& c, double number) {
  return lorentz::centroid(points, c ? HeadValue(*c) : HeadValue(number));
}

std::vector<at::Tensor> TensorsOfSimilarity(const at::Tensor& q, const std::string& similarity,
                                            at::TensorList tensors) {
  return SimilarityTensors(q, *ModuleTerms::Of(similarity, "none"), tensors);
}

at::Tensor EncodeTokensOp(const at::Tensor& embeddings, const std::string& spec, int64_t dim,
                          bool causal, at::TensorList tensors, c10::SymInt offset, bool training,
                          const OptionalTensor& lengths, const OptionalTensor& before,
                          std::optional<at::Generator> generator, const OptionalTensor& positions) {
  return EncodeTokens(*ModuleComponent(spec), dim, causal, tensors.vec(),
                      {.embeddings = embeddings,
                       .offset = std::move(offset),
                       .training = training,
                       .lengths = lengths,
                       .before = before,
                       .generator = std::move(generator),
                       .positions = positions});
}

std::tuple<at::Tensor, at::Tensor> HypeAugmentOp(const at::Tensor& q, const at::Tensor& k,
                                                 const at::Tensor& tau, const at::Tensor& mu,
                                                 int64_t copies, std::vector<int64_t> axes,
                                                 c10::SymInt query_offset) {
  return HypeAugment(q, k, tau, mu, copies, axes, query_offset);
}

at::Tensor GridSinusoid(std::vector<int64_t> shape, int64_t dim, const std::string& layout,
                        int64_t prefix) {
  return grid_sinusoid(shape, dim, layout, prefix);
}

at::Tensor LinearAttentionOp(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const std::string& feature, std::optional<std::string> rope,
                             bool causal, const OptionalTensor& key_lengths,
                             OptionalSymInt query_offset, std::optional<int64_t> num_features,
                             std::optional<int64_t> seed, const OptionalTensor& projection) {
  return LinearAttention(q, k, v,
                         {feature, std::move(rope), causal, key_lengths, std::move(query_offset),
                          num_features, seed, projection});
}

// Calls add(schema, function) for each operator that is composed of kernel operators and PyTorch
// operators.
template <typename Add>
void ForCompositions(const Add& add) {
  const std::string call = SchemaWithDefaults<CallArguments>();
  const std::string attention =
      "(Tensor q, Tensor k, Tensor v, str similarity, Tensor[] similarity_tensors, "
      "str[] position, Tensor[] position_tensors, " +
      call + ") -> ";
  add("attention" + attention + "Tensor", kFlat<Attention>);
  add("attention_with_lse" + attention + "(Tensor o, Tensor lse, Tensor statistics)",
      kFlat<AttentionWithLse>);
  // Adds a sink to o and lse.
  add("add_sink(Tensor o, Tensor lse, Tensor sink) -> (Tensor, Tensor)", AddSink);
  // Applies the aggregation lorentz_centroid to o.
  add("aggregate_centroid(Tensor o, Tensor q, str similarity, Tensor[] similarity_tensors) -> "
      "Tensor",
      AggregateCentroid);
  add("module_attention(Tensor q, Tensor k, Tensor v, str similarity, str position, "
      "Tensor[] tensors, " +
          call + ") -> Tensor",
      kFlat<AttentionOfModule>);
  // Like module_attention, for keys that module_turned_keys has rotated; new_keys are rotated here
  // and overwrite the last rows of k. Caches store rotated keys if the query module_turns_keys_once
  // returns true.
  add("module_attention_of_turned_keys(Tensor q, Tensor(a!) k, Tensor v, str similarity, "
      "str position, Tensor[] tensors, Tensor? new_keys, " +
          call + ") -> Tensor",
      kFlat<AttentionOfTurnedKeys>);
  add("module_turned_keys(Tensor k, str similarity, str position, int num_heads, SymInt first, "
      "Tensor? positions=None) -> Tensor",
      [](const at::Tensor& k, const std::string& similarity, const std::string& position,
         int64_t num_heads, c10::SymInt first, const OptionalTensor& positions) {
        return TurnedKeys(k, *ModuleTerms::Of(similarity, position), num_heads, first, positions);
      });
  add("attention_weights(Tensor q, Tensor k, int[] rows, str similarity, "
      "Tensor[] similarity_tensors, str[] position, Tensor[] position_tensors, " +
          call + ") -> Tensor",
      kFlat<WeightsOfSpecs>);
  add("module_attention_weights(Tensor q, Tensor k, int[] rows, str similarity, str position, "
      "Tensor[] tensors, " +
          call + ") -> Tensor",
      kFlat<WeightsOfModule>);
  add("module_tensors(str similarity, str position, int num_heads, int head_dim, "
      "int value_dim, int max_length, int query_tokens, int key_tokens, Tensor[] given) -> "
      "(str[], Tensor[], bool[])",
      TensorsOfModule);
  // The tensors of a module for one call, including projections of its tokens, and the indices of
  // the tensors that belong to keys.
  add("module_projections(str similarity, str position, int num_heads, Tensor[] tensors, "
      "Tensor query, Tensor key) -> (Tensor[] tensors, int[] of_keys)",
      ProjectionsOfModule);
  add("check_module(str module, float dropout, float tolerance=0, bool sink=False, "
      "bool gate=False, bool qk_norm=False, str position='none') -> ()",
      [](const std::string& module, double dropout, double tolerance, bool sink, bool gate,
         bool qk_norm, const std::string& position) {
        CheckModule(module.c_str(), dropout, tolerance, {sink, gate, qk_norm}, position);
      });
  // The values (H,) of the similarity's parameters in a call with q, computed from the tensors of
  // module_tensors(similarity, "none", ...).
  add("module_similarity(Tensor q, str similarity, Tensor[] tensors) -> Tensor[]",
      TensorsOfSimilarity);
  add("module_learned(str similarity, str position, int num_heads, int head_dim, int value_dim, "
      "Tensor[] tensors) -> (str[] names, Tensor[] values, Tensor[] starts)",
      LearnedOfModule);
  // Answers a question about specifications (Query).
  add("query(str question, str arguments) -> str", Query);
  add("load_terms(str path) -> str[]", LoadTerms);
  add("token_encoding_tensors(str spec, int dim, bool causal) -> "
      "(str[] names, Tensor[] starts, int? max_length, int history)",
      TensorsOfEncoding);
  add("encode_tokens(Tensor embeddings, str spec, int dim, bool causal, Tensor[] tensors, "
      "SymInt offset, bool training, Tensor? lengths, Tensor? before, Generator? generator, "
      "Tensor? positions=None) -> Tensor",
      EncodeTokensOp);
  add("graph_attention(Tensor q, Tensor k, Tensor v, Tensor indptr, Tensor indices, "
      "str similarity, Tensor[] similarity_tensors, float? scale, Tensor? edge_bias=None, "
      "float dropout=0, Tensor? seed=None) -> (Tensor, Tensor)",
      GraphAttentionOfSpecs);
  add("linear_attention(Tensor q, Tensor k, Tensor v, str feature, str? rope, bool causal, "
      "Tensor? key_lengths, SymInt? query_offset, int? num_features, int? seed, "
      "Tensor? projection) -> Tensor",
      LinearAttentionOp);
  add("alibi_slopes(int num_heads) -> Tensor", alibi_slopes);
  add("t5_bucket(Tensor relative_position, bool bidirectional, int num_buckets, "
      "int max_distance) -> Tensor",
      t5_bucket);
  add("sinusoid(Tensor positions, int dim, str layout) -> Tensor", sinusoid);
  add("grid_sinusoid(int[] shape, int dim, str layout, int prefix) -> Tensor", GridSinusoid);
  add("hype_augment(Tensor q, Tensor k, Tensor tau, Tensor mu, int copies, int[] axes, "
      "SymInt query_offset) -> (Tensor, Tensor)",
      HypeAugmentOp);
  // Points on hyperboloids.
  add("lorentz_lift(Tensor x, Tensor? c, float number) -> Tensor", LorentzLift);
  add("lorentz_centroid(Tensor points, Tensor? c, float number) -> Tensor", LorentzCentroidOf);
  add("cone_ancestor(Tensor u, Tensor v, str cone, float? r) -> Tensor", cones::ancestor);
  add("cone_lowest_common_ancestor(Tensor u, Tensor v, str cone, float? r) -> Tensor",
      cones::lowest_common_ancestor);
}

}  // namespace

TORCH_LIBRARY(gnomon, m) {
  // The fused attention operators (gnomon/attention.h), with first and second derivatives.
  m.def(AttentionOperator::ForwardSchema().c_str());
  m.def(AttentionOperator::BackwardSchema().c_str());
  m.def(AttentionOperator::JvpSchema().c_str());
  m.def(AttentionOperator::BackwardJvpSchema().c_str());
  // Attention over the edges of a graph (gnomon/graph.h).
  m.def(GraphOperator::ForwardSchema().c_str());
  m.def(GraphOperator::BackwardSchema().c_str());
  m.def(GraphOperator::JvpSchema().c_str());
  m.def(GraphOperator::BackwardJvpSchema().c_str());
  // Cone tokens (ops/geometry/cone_map.h): x, row_scalars, y and column_scalars. Tokens are rotated
  // first, as in rotate_tokens; x and y have the dtype.
  m.def(
      "cone_map(Tensor q, Tensor k, str function, str map, float r, Tensor? q_cosine=None, "
      "Tensor? q_sine=None, Tensor? k_cosine=None, Tensor? k_sine=None, int block=0, "
      "ScalarType? dtype=None) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "cone_map_backward(Tensor? d_x, Tensor? d_row_scalars, Tensor? d_y, "
      "Tensor? d_column_scalars, Tensor q, Tensor k, str function, str map, float r, "
      "bool[2] needed, Tensor? q_cosine=None, Tensor? q_sine=None, Tensor? k_cosine=None, "
      "Tensor? k_sine=None, int block=0) -> (Tensor, Tensor)");
  // Rotates the leading column pairs of q and k, or of one of them (ops/operators/pair_rotation.h).
  m.def(
      "rotate_tokens(Tensor? q, Tensor? k, Tensor? q_cosine, Tensor? q_sine, Tensor? k_cosine, "
      "Tensor? k_sine, int block, bool back, ScalarType dtype) -> (Tensor, Tensor)");
  m.def(
      "rotate_tokens_backward(Tensor? d_x, Tensor? d_y, Tensor? q, Tensor? k, Tensor? q_cosine, "
      "Tensor? q_sine, Tensor? k_cosine, Tensor? k_sine, int block, bool back) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // Causal linear attention, and the sums used in its gradients (ops/linear/causal_sums.h).
  m.def("causal_sums(Tensor x, Tensor y, Tensor z, bool reverse) -> Tensor");
  m.def("causal_linear(Tensor q, Tensor k, Tensor v, str feature) -> (Tensor, Tensor)");
  // Causal sums of random features, traced as one operator (ops/linear/feature_sums.h).
  m.def(
      "causal_exponent_sums(Tensor query, Tensor key, Tensor value, Tensor largest_met, "
      "str? rope) -> Tensor");
  m.def(
      "causal_exponent_sums_backward(Tensor d, Tensor query, Tensor key, Tensor value, "
      "Tensor largest_met, str? rope) -> (Tensor, Tensor, Tensor)");
  // Returns (num_features, D) in float64, with D and the device of `like`.
  m.def("favor_projection(Tensor like, int num_features, int seed) -> Tensor");
  ForCompositions([&](const std::string& schema, auto run) { m.def(schema.c_str(), run); });
}

// With this registration, vmap decomposes the compositions instead of calling them once per sample
// or rejecting them. Its rules for the other operators are in python/gnomon/_vmap.py.
TORCH_LIBRARY_IMPL(gnomon, FuncTorchBatchedDecomposition, m) {
  ForCompositions([&](const std::string& schema, auto run) {
    m.impl(schema.substr(0, schema.find('(')).c_str(), run);
  });
}

}  // namespace gnomon
