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

  // The value (H,) of a per-head parameter; `start` replaces its initial value.
  at::Tensor Heads(const Component& component, const Setting& setting,
                   const OptionalTensor& start = std::nullopt) {
    const std::string& name = setting.parameter->name;
    TORCH_CHECK_VALUE(setting.kind != Setting::Kind::kLearned, operation_, ": ", component.name(),
                      ":", name,
                      "=learned works only in modules; here pass a tensor with requires_grad=True");
    if (setting.kind != Setting::Kind::kTensor) return HeadValueIn(q_, component, setting, start);
    at::Tensor tensor = Next(component.name(), name);
    if (tensor.dim() == 0) return tensor.expand_symint({q_.sym_size(1)});
    TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.sym_size(0) == q_.sym_size(1), operation_, ": ",
                      name, " of ", component.name(), " has shape ", tensor.sym_sizes(),
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

// Parsed and checked specifications, which are cached: parsing one would take a significant part of
// a short attention call.
struct SimilaritySpec {
  std::shared_ptr<const Component> component;
  const SimilarityEntry* entry;
  std::optional<Setting> head;
  std::vector<Setting> others;
};

struct PositionSpec {
  std::shared_ptr<const Component> component;
  const PositionEntry* entry;
  std::vector<Setting> settings;
};

std::vector<Setting> SettingsOf(const Component& component,
                                const std::vector<const Parameter*>& parameters) {
  std::vector<Setting> settings;
  for (const Parameter* parameter : parameters) {
    settings.push_back(SettingOf(component, *parameter));
  }
  return settings;
}

std::shared_ptr<const SimilaritySpec> ReadSimilarity(const std::string& spec) {
  static Kept<std::string, std::shared_ptr<const SimilaritySpec>> known;
  return known.Get(spec, [&] {
    auto component = std::make_shared<const Component>(Component::Parse(spec));
    const SimilarityEntry& entry = FindSimilarity(*component);
    SimilaritySpec read{component, &entry, std::nullopt,
                        SettingsOf(*component, entry.other_head_parameters())};
    if (const Parameter* head = entry.head_parameter()) read.head = SettingOf(*component, *head);
    return std::make_shared<const SimilaritySpec>(std::move(read));
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
      terms.push_back({component, &entry, SettingsOf(*component, entry.Tensors(*component))});
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
  if (const std::optional<Setting>& head = read->head) {
    OptionalTensor start;
    if (head->kind == Setting::Kind::kNone || head->kind == Setting::Kind::kFixed) {
      const int64_t head_dim = SizeOf(q, -1);
      read->entry->CheckColumns(component, head_dim, operation, ": head_dim of q is ");
      start = HeadNumber(q, HeadParameterStart(*read->entry, component, head_dim));
    }
    similarity.head_parameter = reader.Heads(component, *head, start);
  }
  for (const Setting& setting : read->others) {
    similarity.others.push_back(reader.Heads(component, setting));
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
    for (const Setting& setting : term.settings) {
      const Parameter& parameter = *setting.parameter;
      if (parameter.is_per_head()) {
        position.tensors.push_back(reader.Heads(component, setting));
        continue;
      }
      TORCH_CHECK_VALUE(setting.kind == Setting::Kind::kTensor,
                        "gnomon.attention: ", parameter.name, " of ", component.name(),
                        " is missing; pass a term that contains the tensor, since only modules "
                        "create their own tables");
      position.tensors.push_back(reader.Next(component.name(), parameter.name));
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
