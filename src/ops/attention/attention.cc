// gnomon::attention: from specifications and their tensors to the composition.
#include <gnomon/torch/attention.h>

#include <ATen/ATen.h>

#include <cstddef>
#include <utility>

#include "ops/attention/attention.h"
#include "ops/attention/attention_weights.h"
#include "ops/attention/compose.h"
#include "ops/nn/module_terms.h"

namespace gnomon {
namespace {

// Hands out the tensors of a list, each checked to go with q.
class TensorReader {
 public:
  TensorReader(const char* operation, at::TensorList tensors, const at::Tensor& q)
      : operation_(operation), tensors_(tensors), q_(q) {}

  at::Tensor Next(const std::string& component, const std::string& name) {
    const std::string what = name + " of " + component;
    TORCH_CHECK_VALUE(next_ < tensors_.size(), operation_, ": ", what, " is missing");
    const at::Tensor& tensor = tensors_[next_++];
    TORCH_CHECK_TYPE(tensor.device() == q_.device(), operation_, ": ", what, " is on ",
                     tensor.device(), " and q on ", q_.device(), "; expected the same");
    return AsParameter(tensor, q_, operation_ + (": " + what));
  }

  at::Tensor NextHeads(const std::string& component, const std::string& name) {
    const at::Tensor tensor = Next(component, name);
    if (tensor.dim() == 0) return tensor.expand_symint({q_.sym_size(1)});
    TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.sym_size(0) == q_.sym_size(1), operation_, ": ",
                      name, " of ", component, " has shape ", tensor.sym_sizes(),
                      "; expected (H,) = (", q_.sym_size(1), ",), or () for all heads");
    return tensor;
  }

  void CheckDone(const char* argument) const {
    TORCH_CHECK_VALUE(next_ == tensors_.size(), operation_, ": ", argument, " has ",
                      tensors_.size(), " tensors; expected ", next_);
  }

 private:
  std::string operation_;
  at::TensorList tensors_;
  const at::Tensor& q_;
  size_t next_ = 0;
};

// A component of name, with an option and perhaps a tensor for each (key, value).
class TermBuilder {
 public:
  explicit TermBuilder(const char* name) { term_.spec = name; }

  TermBuilder& Option(const char* key, const std::string& value) {
    TORCH_CHECK_VALUE(value.find_first_of(":+=") == std::string::npos, "gnomon: ", term_.spec,
                      " has ", key, " = \"", value, "\"");
    term_.spec += std::string(":") + key + "=" + value;
    return *this;
  }
  TermBuilder& Option(const char* key, const HeadValue& value) {
    if (value.is_number()) {
      term_.spec += std::string(":") + key + "=" + NumberText(value.number());
    } else {
      term_.spec += std::string(":") + key + "=tensor";
      term_.tensors.push_back(value.tensor());
    }
    return *this;
  }

  template <class Kind>
  Kind Build() {
    return Kind{std::move(term_)};
  }

 private:
  Term term_;
};

}  // namespace

Position operator+(const Position& a, const Position& b) {
  Position sum = a;
  sum.spec += "+" + b.spec;
  sum.tensors.insert(sum.tensors.end(), b.tensors.begin(), b.tensors.end());
  return sum;
}

namespace similarity {

Similarity Dot(std::optional<double> softcap) {
  TermBuilder builder("dot");
  if (softcap) builder.Option("softcap", HeadValue(*softcap));
  return builder.Build<Similarity>();
}

Similarity Laplacian(HeadValue gamma) {
  return TermBuilder("laplacian").Option("gamma", gamma).Build<Similarity>();
}

Similarity Gaussian(HeadValue gamma) {
  return TermBuilder("gaussian").Option("gamma", gamma).Build<Similarity>();
}

Similarity Umbral(HeadValue gamma, double r, const std::string& map, const std::string& score) {
  return TermBuilder("umbral")
      .Option("gamma", gamma)
      .Option("r", HeadValue(r))
      .Option("map", map)
      .Option("score", score)
      .Build<Similarity>();
}

Similarity Penumbral(HeadValue gamma, double r, const std::string& map, const std::string& score) {
  return TermBuilder("penumbral")
      .Option("gamma", gamma)
      .Option("r", HeadValue(r))
      .Option("map", map)
      .Option("score", score)
      .Build<Similarity>();
}

Similarity Hyperbolic(HeadValue beta, const std::string& model,
                      const std::optional<std::string>& map) {
  TermBuilder builder("hyperbolic");
  builder.Option("beta", beta).Option("model", model);
  if (map) builder.Option("map", *map);
  return builder.Build<Similarity>();
}

Similarity Entailment(HeadValue gamma, double K, const std::string& map) {
  return TermBuilder("entailment")
      .Option("gamma", gamma)
      .Option("K", HeadValue(K))
      .Option("map", map)
      .Build<Similarity>();
}

Similarity Additive(double slope) {
  return TermBuilder("additive").Option("slope", HeadValue(slope)).Build<Similarity>();
}

}  // namespace similarity

namespace position {

Position ALiBi(HeadValue slopes) {
  return TermBuilder("alibi").Option("slopes", slopes).Build<Position>();
}

Position HyPE(HeadValue tau, HeadValue mu, const std::string& mode) {
  return TermBuilder("hype")
      .Option("tau", tau)
      .Option("mu", mu)
      .Option("mode", mode)
      .Build<Position>();
}

Position T5(torch::Tensor table, bool bidirectional, int64_t max_distance) {
  return TermBuilder("t5")
      .Option("table", HeadValue(std::move(table)))
      .Option("bidirectional", std::string(bidirectional ? "true" : "false"))
      .Option("max_distance", std::to_string(max_distance))
      .Build<Position>();
}

Position Kerple(HeadValue r1, HeadValue r2, const std::string& kind) {
  return TermBuilder("kerple")
      .Option("r1", r1)
      .Option("r2", r2)
      .Option("kind", kind)
      .Build<Position>();
}

Position OffsetBias(torch::Tensor table) {
  return TermBuilder("offset_bias").Option("table", HeadValue(std::move(table))).Build<Position>();
}

Position RoPE(double base, const std::string& layout, std::optional<int64_t> dims,
              const std::vector<int64_t>& shape, int64_t prefix,
              const std::optional<std::string>& scaling, bool xpos) {
  TermBuilder builder("rope");
  builder.Option("base", HeadValue(base)).Option("layout", layout);
  if (dims) builder.Option("dims", std::to_string(*dims));
  if (!shape.empty()) builder.Option("shape", SizesText(shape));
  builder.Option("prefix", std::to_string(prefix));
  if (xpos) builder.Option("xpos", std::string("true"));
  Position rope = builder.Build<Position>();
  // Its own numbers come with it.
  if (scaling) rope.spec += ":scaling=" + *scaling;
  return rope;
}

Position Grid(const std::vector<int64_t>& shape, const std::vector<Position>& axes,
              int64_t prefix) {
  TORCH_CHECK_VALUE(!shape.empty() && axes.size() == shape.size(), "gnomon.position.Grid: shape ",
                    "has ", shape.size(), " axes and axes ", axes.size(),
                    " biases; expected one bias for each axis");
  Position sum;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    const Component bias = Component::Parse(axes[axis].spec);
    TORCH_CHECK_VALUE(
        FindPosition(bias).role() == PositionEntry::Role::kBias && !bias.Find("shape"),
        "gnomon.position.Grid: axes have ", axes[axis].spec, "; expected biases of one offset");
    if (axis > 0) sum.spec += "+";
    sum.spec += axes[axis].spec + ":shape=" + SizesText(shape) + ":axis=" + std::to_string(axis) +
                ":prefix=" + std::to_string(prefix);
    sum.tensors.insert(sum.tensors.end(), axes[axis].tensors.begin(), axes[axis].tensors.end());
  }
  return sum;
}

Position GridBias(torch::Tensor table, int64_t prefix) {
  return TermBuilder("grid_bias")
      .Option("table", HeadValue(std::move(table)))
      .Option("prefix", std::to_string(prefix))
      .Build<Position>();
}

Position Relative(torch::Tensor table, int64_t max_offset, const std::string& far,
                  std::optional<torch::Tensor> values) {
  TermBuilder builder("relative");
  builder.Option("max_offset", std::to_string(max_offset)).Option("far", far);
  builder.Option("table", HeadValue(std::move(table)));
  if (values) {
    builder.Option("values", HeadValue(std::move(*values)));
  }
  return builder.Build<Position>();
}

Position TransformerXL(torch::Tensor u, torch::Tensor v, torch::Tensor r) {
  return TermBuilder("transformer_xl")
      .Option("u", HeadValue(std::move(u)))
      .Option("v", HeadValue(std::move(v)))
      .Option("r", HeadValue(std::move(r)))
      .Build<Position>();
}

Position Relative2D(torch::Tensor rows, torch::Tensor columns, int64_t height, int64_t width,
                    int64_t prefix) {
  return TermBuilder("relative2d")
      .Option("shape", SizesText({height, width}))
      .Option("prefix", std::to_string(prefix))
      .Option("rows", HeadValue(std::move(rows)))
      .Option("columns", HeadValue(std::move(columns)))
      .Build<Position>();
}

Position AbsoluteKeys(torch::Tensor table) {
  return TermBuilder("absolute_keys")
      .Option("table", HeadValue(std::move(table)))
      .Build<Position>();
}

}  // namespace position

namespace {

// What a specification says of a parameter that has no tensor: a number, or nullopt for its start.
std::optional<double> FixedNumber(const char* operation, const Component& component,
                                  const std::string& name) {
  const std::optional<std::string> value = component.Find(name);
  if (!value || *value == "fixed") return std::nullopt;
  TORCH_CHECK_VALUE(*value != "learned", operation, ": ", component.name(), ":", name,
                    "=learned; expected a tensor, for it is modules that hold parameters");
  return component.FindNumber(name);
}

}  // namespace

ResolvedSimilarity ResolveSimilarity(const char* operation, const std::string& spec,
                                     at::TensorList tensors, const at::Tensor& q) {
  ResolvedSimilarity similarity{nullptr, Component::Parse(spec), {}};
  const Component& component = similarity.component;
  similarity.entry = &FindSimilarity(component);
  TensorReader reader(operation, tensors, q);
  if (const Parameter* parameter = similarity.entry->head_parameter()) {
    const std::string& name = parameter->name;
    if (component.IsTensor(name)) {
      similarity.head_parameter = reader.NextHeads(component.name(), name);
    } else if (const auto number = FixedNumber(operation, component, name)) {
      similarity.head_parameter = HeadNumber(q, *number);
    } else {
      const int64_t head_dim = SizeOf(q, -1);
      similarity.entry->CheckColumns(component, head_dim, std::string(operation) + ": q has D = ");
      similarity.head_parameter =
          HeadNumber(q, HeadParameterStart(*similarity.entry, component, head_dim));
    }
  }
  reader.CheckDone("similarity_tensors");
  return similarity;
}

std::vector<ResolvedPosition> ResolvePositions(const std::vector<std::string>& positions,
                                               at::TensorList tensors, const at::Tensor& q) {
  std::vector<ResolvedPosition> resolved;
  TensorReader reader("gnomon.attention", tensors, q);
  std::vector<Component> components;
  for (const std::string& spec : positions) {
    for (Component& term : ParseSum(spec)) components.push_back(std::move(term));
  }
  for (Component& term : components) {
    const PositionEntry& entry =
        FindPositionInAttention("gnomon.attention", term, /*holds_tables=*/false);
    ResolvedPosition position{&entry, std::move(term), {}};
    const std::string& name = position.component.name();
    for (const Parameter* parameter : position.entry->Tensors(position.component)) {
      const bool is_tensor = position.component.IsTensor(parameter->name);
      if (!parameter->is_per_head()) {
        TORCH_CHECK_VALUE(is_tensor, "gnomon.attention: ", parameter->name, " of ", name,
                          " is missing; expected a term with a tensor, for it is modules that ",
                          "hold tables");
        position.tensors.push_back(reader.Next(name, parameter->name));
      } else if (is_tensor) {
        position.tensors.push_back(reader.NextHeads(name, parameter->name));
      } else if (const auto number =
                     FixedNumber("gnomon.attention", position.component, parameter->name)) {
        position.tensors.push_back(HeadNumber(q, *number));
      } else {
        // What has one number a head depends on nothing else.
        const ModuleShape shape{SizeOf(q, 1), SizeOf(q, 3), /*value_dim=*/0, /*max_length=*/0};
        position.tensors.push_back(PositionStart(*parameter, position.component, shape, q));
      }
    }
    resolved.push_back(std::move(position));
  }
  reader.CheckDone("position_tensors");
  return resolved;
}

Outputs AttentionOfSpecs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::string& similarity, at::TensorList similarity_tensors,
                         const std::vector<std::string>& positions, at::TensorList position_tensors,
                         const CallArguments& arguments, bool returns_lse) {
  const WithoutAutocast guard;
  CheckTokens("gnomon.attention", q, k, v);
  const ResolvedSimilarity resolved_similarity =
      ResolveSimilarity("gnomon.attention", similarity, similarity_tensors, q);
  const std::vector<ResolvedPosition> resolved = ResolvePositions(positions, position_tensors, q);
  return Compose(q, k, v, resolved_similarity, resolved, arguments, returns_lse);
}

namespace {

std::pair<std::vector<std::string>, std::vector<at::Tensor>> Lowered(
    const AttentionOptions::Positions& positions) {
  std::vector<std::string> specs;
  std::vector<at::Tensor> tensors;
  for (const Position& position : positions) {
    specs.push_back(position.spec);
    tensors.insert(tensors.end(), position.tensors.begin(), position.tensors.end());
  }
  return {specs, tensors};
}

CallArguments ArgumentsOf(const AttentionOptions& options) {
  const AttentionOptions::Window window = options.window().value_or(AttentionOptions::Window());
  CallArguments arguments;
  arguments.causal = options.causal();
  arguments.left = window.first;
  arguments.right = window.second;
  arguments.key_starts = options.key_starts();
  arguments.key_lengths = options.key_lengths();
  arguments.query_segments = options.query_segments();
  arguments.key_segments = options.key_segments();
  arguments.query_offset = options.query_offset();
  arguments.query_offsets = options.query_offsets();
  arguments.scale = options.scale();
  arguments.chunks = options.chunks();
  arguments.sink = options.sink();
  arguments.dropout = options.dropout();
  if (options.seed()) arguments.seed = torch::tensor({*options.seed()}, torch::kLong);
  arguments.aggregation = options.aggregation();
  return arguments;
}

Outputs AttentionOfOptions(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const AttentionOptions& options, bool returns_lse) {
  const auto [specs, tensors] = Lowered(options.position());
  return AttentionOfSpecs(q, k, v, options.similarity().spec, options.similarity().tensors, specs,
                          tensors, ArgumentsOf(options), returns_lse);
}

}  // namespace

std::tuple<torch::Tensor, torch::Tensor> attention_with_lse(const torch::Tensor& q,
                                                            const torch::Tensor& k,
                                                            const torch::Tensor& v,
                                                            const AttentionOptions& options) {
  const auto [o, lse, statistics] = AttentionOfOptions(q, k, v, options, /*returns_lse=*/true);
  return {o, lse};
}

torch::Tensor attention_weights(const torch::Tensor& q, const torch::Tensor& k,
                                const std::vector<int64_t>& rows, const AttentionOptions& options) {
  const auto [specs, tensors] = Lowered(options.position());
  return AttentionWeights(q, k, rows, options.similarity().spec, options.similarity().tensors,
                          specs, tensors, ArgumentsOf(options));
}

torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                        const AttentionOptions& options) {
  return std::get<0>(AttentionOfOptions(q, k, v, options, /*returns_lse=*/false));
}

}  // namespace gnomon
