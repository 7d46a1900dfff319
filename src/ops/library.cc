// The PyTorch operators of the namespace gnomon, which Python, compiled graphs and C++ call.
#include <gnomon/torch/attention.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
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
                           const std::string& position, at::TensorList tensors, int64_t value_dim) {
  return ModuleAttentionWeights(q, k, rows, *ModuleTerms::Of(similarity, position), tensors,
                                value_dim, call);
}

bool GoesByLength(const std::string& position) {
  const std::vector<Component> components = ParseSum(position);
  return std::any_of(components.begin(), components.end(), [](const Component& component) {
    return FindPosition(component).GoesByLength(component);
  });
}

std::tuple<std::vector<std::string>, std::vector<std::string>> AxesOfOperator(
    const std::string& name) {
  TORCH_CHECK_VALUE(name == OperatorArguments::kName || name == GraphArguments::kName,
                    "gnomon: operator is \"", name, "\"; expected ", OperatorArguments::kName,
                    " or ", GraphArguments::kName);
  return name == GraphArguments::kName ? NamedAxes<GraphArguments>()
                                       : NamedAxes<OperatorArguments>();
}

std::optional<int64_t> AxisOfCall(const std::string& argument, const std::string& letter,
                                  int64_t axes) {
  const auto fields = CallArguments::Fields();
  const auto* field = std::find_if(fields.begin(), fields.end(),
                                   [&](const ArgumentField& its) { return its.name == argument; });
  TORCH_CHECK_VALUE(field != fields.end() && letter.size() == 1, "gnomon: argument is \"", argument,
                    "\" and letter \"", letter, "\"; expected a call argument and a single letter");
  return AxisOf(field->shape.text, letter[0], axes);
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

std::tuple<std::vector<std::string>, std::vector<int64_t>, std::vector<std::string>,
           std::vector<std::string>, std::vector<std::string>>
OriginsOfTensors(const std::string& similarity, const std::string& position) {
  std::vector<std::string> names;
  std::vector<int64_t> components;
  std::vector<std::string> parameters;
  std::vector<std::string> parts;
  std::vector<std::string> indices;
  for (TensorOrigin& origin : TensorOrigins(*ModuleTerms::Of(similarity, position))) {
    names.push_back(std::move(origin.name));
    components.push_back(origin.component);
    parameters.push_back(origin.parameter->name);
    parts.emplace_back(PartName(origin.part));
    indices.emplace_back(IndexName(origin.index));
  }
  return {names, components, parameters, parts, indices};
}

std::tuple<int64_t, int64_t, int64_t, int64_t> CheckedSizes(const std::string& similarity,
                                                            int64_t embed_dim, int64_t num_heads,
                                                            std::optional<int64_t> kv_heads,
                                                            std::optional<int64_t> qk_dim,
                                                            std::optional<int64_t> kdim,
                                                            std::optional<int64_t> vdim) {
  const ModuleSizes sizes =
      SizesOfModule(similarity, embed_dim, num_heads, kv_heads, qk_dim, kdim, vdim);
  return {sizes.key_heads, sizes.head_dim, sizes.key_dim, sizes.value_dim};
}

std::tuple<std::vector<at::Tensor>, std::vector<int64_t>> ProjectionsOfModule(
    const std::string& similarity, const std::string& position, int64_t num_heads,
    at::TensorList tensors, const at::Tensor& query, const at::Tensor& key) {
  ProjectedTensors call =
      ProjectTokens(*ModuleTerms::Of(similarity, position), num_heads, tensors, query, key);
  return {std::move(call.tensors), std::move(call.of_keys)};
}

std::tuple<std::vector<std::string>, std::vector<std::string>, std::optional<int64_t>>
EncodingsOfTokens(const std::string& position, int64_t max_length) {
  std::vector<std::string> names;
  std::vector<std::string> specs;
  for (const Component& component : TokenEncodings(position, max_length)) {
    names.push_back(component.name());
    specs.push_back(component.Text());
  }
  return {names, specs, LongestSequence(ParseSum(position), max_length)};
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

std::tuple<std::vector<std::string>, std::vector<std::vector<std::string>>,
           std::vector<std::string>, std::vector<std::vector<int64_t>>>
ComponentsOf(const std::string& specification) {
  std::vector<std::string> names;
  std::vector<std::vector<std::string>> options;
  std::vector<std::string> specifications;
  std::vector<std::vector<int64_t>> grids;
  for (const Component& component : ParseSum(specification)) {
    names.push_back(component.name());
    specifications.push_back(component.Text());
    std::vector<std::string>& its = options.emplace_back();
    for (const auto& [key, value] : component.options()) its.push_back(key + "=" + value);
    std::vector<int64_t>& numbers = grids.emplace_back();
    if (const std::optional<TokenGrid> grid = TokenGrid::Find(component)) {
      numbers = {grid->prefix()};
      numbers.insert(numbers.end(), grid->shape().begin(), grid->shape().end());
    }
  }
  return {names, options, specifications, grids};
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

std::optional<int64_t> HeightCoordinate(const std::string& similarity) {
  const Component component = Component::Parse(similarity);
  const SimilarityEntry& entry = FindSimilarity(component);
  if (!entry.HasHeight(component)) return std::nullopt;
  return entry.HeightIsFirst(component) ? 0 : -1;
}

std::string PointsOption(const std::string& similarity) {
  const Component component = Component::Parse(similarity);
  const Parameter* parameter = FindSimilarity(component).points_parameter(component);
  return parameter == nullptr ? "" : parameter->name + "=" + parameter->points;
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
  // and overwrite the last rows of k. Caches store rotated keys if module_turns_keys_once returns
  // true.
  add("module_attention_of_turned_keys(Tensor q, Tensor(a!) k, Tensor v, str similarity, "
      "str position, Tensor[] tensors, Tensor? new_keys, " +
          call + ") -> Tensor",
      kFlat<AttentionOfTurnedKeys>);
  add("module_turns_keys_once(str similarity, str position) -> bool",
      [](const std::string& similarity, const std::string& position) {
        return TurnsKeysOnce(*ModuleTerms::Of(similarity, position));
      });
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
      "Tensor[] tensors, int value_dim, " +
          call + ") -> Tensor",
      kFlat<WeightsOfModule>);
  add("module_tensors(str similarity, str position, int num_heads, int head_dim, "
      "int value_dim, int max_length, int query_tokens, int key_tokens, Tensor[] given) -> "
      "(str[], Tensor[], bool[])",
      TensorsOfModule);
  // For each tensor of module_tensors: its name; the index of its component in the position, or -1
  // for the similarity; its parameter; its part of the parameter, "value", "start", "theta",
  // "weight" or "bias"; and for a table, the kind of its index in the catalogue, otherwise "".
  add("module_tensor_origins(str similarity, str position) -> "
      "(str[] names, int[] components, str[] parameters, str[] parts, str[] indices)",
      OriginsOfTensors);
  add("module_has_projections(str position) -> bool", HasProjections);
  // The tensors of a module for one call, including projections of its tokens, and the indices of
  // the tensors that belong to keys.
  add("module_projections(str similarity, str position, int num_heads, Tensor[] tensors, "
      "Tensor query, Tensor key) -> (Tensor[] tensors, int[] of_keys)",
      ProjectionsOfModule);
  add("module_sizes(str similarity, int embed_dim, int num_heads, int? kv_heads, int? qk_dim, "
      "int? kdim, int? vdim) -> (int kv_heads, int qk_dim, int kdim, int vdim)",
      CheckedSizes);
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
  add("rms_norm_epsilon() -> float", [] { return kRMSNormEpsilon; });
  add("module_learned(str similarity, str position, int num_heads, int head_dim, int value_dim, "
      "Tensor[] tensors) -> (str[] names, Tensor[] values, Tensor[] starts)",
      LearnedOfModule);
  add("learned_number(Tensor start, Tensor theta) -> Tensor", LearnedNumber);
  add("attention_position(str position) -> str", AttentionPosition);
  add("layer_positions(str pattern) -> str[]", LayerPositions);
  // The catalogue (gnomon/catalogue.h) as JSON.
  add("catalogue() -> str", CatalogueJson);
  add("load_terms(str path) -> str[]", LoadTerms);
  // The components of a sum: their names, options (each "key=value") and specifications, and the
  // prefix and sizes of each component's grid, if any.
  add("components(str specification) -> "
      "(str[] names, str[][] options, str[] specifications, int[][] grids)",
      ComponentsOf);
  // The index of the token coordinate that is a height or a time: -1 (last) or 0 (first); None if
  // there is none.
  add("height_coordinate(str similarity) -> int?", HeightCoordinate);
  // The option that makes a similarity accept points as tokens, such as "map=none"; "" if there is
  // none.
  add("points_option(str similarity) -> str", PointsOption);
  // The query axis ("Q") or key axis ("K") of a call argument with the given rank, counted from the
  // end; None if it has none.
  add("axis_of_call(str argument, str letter, int axes) -> int?", AxisOfCall);
  // Whether a position depends on the call's sequence length.
  add("goes_by_length(str position) -> bool", GoesByLength);
  add("token_encodings(str position, int max_length) -> (str[], str[], int?)", EncodingsOfTokens);
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
  // The axes of the tensors that these operators take and return, for vmap's rules: one letter per
  // axis, preceded by "1|" if the axis may have length 1.
  m.def("operator_axes(str operator) -> (str[] names, str[] axes)", AxesOfOperator);
  // The instruction set that the CPU kernels use, and all instruction sets that this machine
  // supports.
  m.def("instruction_sets() -> (str, str[])",
        [] { return std::tuple(CurrentTarget(), Targets()); });
  // Cone tokens (ops/geometry/cone_map.h): x, row_scalars, y and column_scalars.
  m.def(
      "cone_map(Tensor q, Tensor k, str function, str map, float r) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "cone_map_backward(Tensor? d_x, Tensor? d_row_scalars, Tensor? d_y, "
      "Tensor? d_column_scalars, Tensor q, Tensor k, str function, str map, float r, "
      "bool[2] needed) -> (Tensor, Tensor)");
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
