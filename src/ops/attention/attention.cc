// gnomon::attention: resolves specifications and their tensors, and calls Compose.
#include <gnomon/torch/attention.h>

#include <ATen/ATen.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/kept.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_weights.h"
#include "ops/attention/call_checks.h"
#include "ops/attention/compose.h"
#include "ops/attention/options.h"
#include "ops/attention/starts.h"
#include "ops/operators/kept_tensor.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

// Reads the tensors of a list in order and checks each against q.
class TensorReader {
 public:
  TensorReader(const char* operation, at::TensorList tensors, const at::Tensor& q)
      : operation_(operation), tensors_(tensors), q_(q) {}

  at::Tensor Next(const std::string& component, const std::string& name) {
    TORCH_CHECK_VALUE(next_ < tensors_.size(), operation_, ": ", name, " of ", component,
                      " is missing");
    const at::Tensor& tensor = tensors_[next_++];
    TORCH_CHECK_TYPE(tensor.device() == q_.device(), operation_, ": ", name, " of ", component,
                     " is on ", tensor.device(), ", but q is on ", q_.device(),
                     "; expected the same device");
    return AsParameter(tensor, q_, operation_, ": ", name, " of ", component);
  }

  at::Tensor NextHeads(const std::string& component, const std::string& name) {
    at::Tensor tensor = Next(component, name);
    if (tensor.dim() == 0) return tensor.expand_symint({q_.sym_size(1)});
    TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.sym_size(0) == q_.sym_size(1), operation_, ": ",
                      name, " of ", component, " has shape ", tensor.sym_sizes(),
                      "; expected (H,) = (", q_.sym_size(1), ",), or () if shared by all heads");
    return tensor;
  }

  void CheckDone(const char* what) const {
    TORCH_CHECK_VALUE(next_ == tensors_.size(), operation_, ": ", what, " has ", tensors_.size(),
                      " tensors; expected ", next_);
  }

 private:
  const char* operation_;
  at::TensorList tensors_;
  const at::Tensor& q_;
  size_t next_ = 0;
};

// The value that a specification sets for a parameter that is not a tensor: a number, or nullopt
// for the initial value.
std::optional<double> FixedNumber(const char* operation, const Component& component,
                                  const std::string& name) {
  const std::optional<std::string> value = component.Find(name);
  if (!value || *value == "fixed") return std::nullopt;
  TORCH_CHECK_VALUE(*value != "learned", operation, ": ", component.name(), ":", name,
                    "=learned works only in modules; here pass a tensor with requires_grad=True");
  return component.FindNumber(name);
}

// Parsed and checked specifications, which are cached: parsing one would take a significant part of
// a short attention call.
struct SimilaritySpec {
  std::shared_ptr<const Component> component;
  const SimilarityEntry* entry;
  std::vector<const Parameter*> other_head_parameters;
};

struct PositionSpec {
  std::shared_ptr<const Component> component;
  const PositionEntry* entry;
  std::vector<const Parameter*> tensors;
};

std::shared_ptr<const SimilaritySpec> ReadSimilarity(const std::string& spec) {
  static Kept<std::string, std::shared_ptr<const SimilaritySpec>> known;
  return known.Get(spec, [&] {
    auto component = std::make_shared<const Component>(Component::Parse(spec));
    const SimilarityEntry& entry = FindSimilarity(*component);
    return std::make_shared<const SimilaritySpec>(
        SimilaritySpec{std::move(component), &entry, entry.other_head_parameters()});
  });
}

// Parses the terms of a sum.
std::shared_ptr<const std::vector<PositionSpec>> ReadPositions(const std::string& spec) {
  static Kept<std::string, std::shared_ptr<const std::vector<PositionSpec>>> known;
  return known.Get(spec, [&] {
    std::vector<PositionSpec> terms;
    for (Component& term : ParseSum(spec)) {
      auto component = std::make_shared<const Component>(std::move(term));
      const PositionEntry& entry =
          FindPositionInAttention("gnomon.attention", *component, /*holds_tables=*/false);
      std::vector<const Parameter*> tensors = entry.Tensors(*component);
      terms.push_back({std::move(component), &entry, std::move(tensors)});
    }
    return std::make_shared<const std::vector<PositionSpec>>(std::move(terms));
  });
}

}  // namespace

ResolvedSimilarity ResolveSimilarity(const char* operation, const std::string& spec,
                                     at::TensorList tensors, const at::Tensor& q) {
  const std::shared_ptr<const SimilaritySpec> read = ReadSimilarity(spec);
  ResolvedSimilarity similarity{read->entry, read->component, {}, {}};
  const Component& component = *read->component;
  TensorReader reader(operation, tensors, q);
  if (const Parameter* parameter = similarity.entry->head_parameter()) {
    const std::string& name = parameter->name;
    if (component.IsTensor(name)) {
      similarity.head_parameter = reader.NextHeads(component.name(), name);
    } else if (const auto number = FixedNumber(operation, component, name)) {
      similarity.head_parameter = HeadNumber(q, *number);
    } else {
      const int64_t head_dim = SizeOf(q, -1);
      similarity.entry->CheckColumns(component, head_dim, operation, ": head_dim of q is ");
      similarity.head_parameter =
          HeadNumber(q, HeadParameterStart(*similarity.entry, component, head_dim));
    }
  }
  for (const Parameter* parameter : read->other_head_parameters) {
    const std::string& name = parameter->name;
    if (component.IsTensor(name)) {
      similarity.others.push_back(reader.NextHeads(component.name(), name));
    } else if (const auto number = FixedNumber(operation, component, name)) {
      similarity.others.push_back(HeadNumber(q, *number));
    } else {
      const ModuleShape shape{SizeOf(q, 1), SizeOf(q, -1), /*value_dim=*/0, /*max_length=*/0};
      similarity.others.push_back(PositionStart(*parameter, component, shape, q));
    }
  }
  reader.CheckDone("similarity");
  return similarity;
}

std::vector<ResolvedPosition> ResolvePositions(const std::vector<std::string>& positions,
                                               at::TensorList tensors, const at::Tensor& q) {
  std::vector<ResolvedPosition> resolved;
  TensorReader reader("gnomon.attention", tensors, q);
  std::vector<std::shared_ptr<const std::vector<PositionSpec>>> sums;
  for (const std::string& spec : positions) sums.push_back(ReadPositions(spec));
  const auto resolve = [&](const PositionSpec& term) {
    ResolvedPosition position{term.entry, term.component, {}};
    const Component& component = *term.component;
    const std::string& name = component.name();
    for (const Parameter* parameter : term.tensors) {
      const bool is_tensor = component.IsTensor(parameter->name);
      if (!parameter->is_per_head()) {
        TORCH_CHECK_VALUE(is_tensor, "gnomon.attention: ", parameter->name, " of ", name,
                          " is missing; pass a term that contains the tensor, since only modules "
                          "create their own tables");
        position.tensors.push_back(reader.Next(name, parameter->name));
      } else if (is_tensor) {
        position.tensors.push_back(reader.NextHeads(name, parameter->name));
      } else if (const auto number = FixedNumber("gnomon.attention", component, parameter->name)) {
        position.tensors.push_back(HeadNumber(q, *number));
      } else {
        // The initial values of per-head parameters do not depend on value_dim and max_length.
        const ModuleShape shape{SizeOf(q, 1), SizeOf(q, 3), /*value_dim=*/0, /*max_length=*/0};
        position.tensors.push_back(PositionStart(*parameter, component, shape, q));
      }
    }
    resolved.push_back(std::move(position));
  };
  for (const auto& sum : sums) {
    for (const PositionSpec& term : *sum) resolve(term);
  }
  reader.CheckDone("position");
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

}  // namespace

Outputs AttentionOfTerms(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const Similarity& similarity, const AttentionOptions::Positions& positions,
                         const CallArguments& arguments, bool returns_lse) {
  const auto [specs, tensors] = Lowered(positions);
  return AttentionOfSpecs(q, k, v, similarity.spec, similarity.tensors, specs, tensors, arguments,
                          returns_lse);
}

std::tuple<torch::Tensor, torch::Tensor> attention_with_lse(const torch::Tensor& q,
                                                            const torch::Tensor& k,
                                                            const torch::Tensor& v,
                                                            const AttentionOptions& options) {
  const auto [o, lse, statistics] =
      AttentionOfTerms(q, k, v, options.similarity(), options.position(), ArgumentsOf(options),
                       /*returns_lse=*/true);
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
  return std::get<0>(AttentionOfTerms(q, k, v, options.similarity(), options.position(),
                                      ArgumentsOf(options), /*returns_lse=*/false));
}

}  // namespace gnomon
