// gnomon::attention: resolves specifications and their tensors, and calls Compose.
#include <gnomon/torch/attention.h>

#include <ATen/ATen.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/kept.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_weights.h"
#include "ops/attention/call_checks.h"
#include "ops/attention/compose.h"
#include "ops/attention/options.h"
#include "ops/attention/pages.h"
#include "ops/attention/resolve.h"
#include "ops/attention/starts.h"
#include "ops/operators/kept_tensor.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

// The values of parameters in a call: numbers, initial values, and the tensors of a list, which are
// read in order and checked against q.
class CallValues {
 public:
  CallValues(const char* operation, at::TensorList tensors, const at::Tensor& q)
      : operation_(operation), tensors_(tensors), q_(q) {}

  at::Tensor HeadParameter(const SimilarityEntry& entry, const Component& component,
                           const Setting& setting) {
    if (setting.kind != Setting::Kind::kNone && setting.kind != Setting::Kind::kFixed) {
      return Heads(component, setting);
    }
    const int64_t head_dim = SizeOf(q_, -1);
    entry.CheckColumns(component, head_dim, operation_, ": head_dim of q is ");
    return HeadNumber(q_, HeadParameterStart(entry, component, head_dim));
  }

  at::Tensor Heads(const Component& component, const Setting& setting) {
    const std::string& name = setting.parameter->name;
    TORCH_CHECK_VALUE(setting.kind != Setting::Kind::kLearned, operation_, ": ", component.name(),
                      ":", name,
                      "=learned works only in modules; here pass a tensor with requires_grad=True");
    if (setting.kind != Setting::Kind::kTensor) {
      return HeadValueIn(q_, component, setting, /*held=*/std::nullopt);
    }
    at::Tensor tensor = Next(component.name(), name);
    if (tensor.dim() == 0) return tensor.expand_symint({q_.sym_size(1)});
    TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.sym_size(0) == q_.sym_size(1), operation_, ": ",
                      name, " of ", component.name(), " has shape ", tensor.sym_sizes(),
                      "; expected (H,) = (", q_.sym_size(1), ",), or () if shared by all heads");
    return tensor;
  }

  at::Tensor Table(const Component& component, const Setting& setting) {
    const std::string& name = setting.parameter->name;
    TORCH_CHECK_VALUE(setting.kind == Setting::Kind::kTensor, operation_, ": ", name, " of ",
                      component.name(),
                      " is missing; pass a term that contains the tensor, since only modules "
                      "create their own tables");
    return Next(component.name(), name);
  }

  void CheckDone(const char* what) const {
    TORCH_CHECK_VALUE(next_ == tensors_.size(), operation_, ": ", what, " has ", tensors_.size(),
                      " tensors; expected ", next_);
  }

 private:
  at::Tensor Next(const std::string& component, const std::string& name) {
    TORCH_CHECK_VALUE(next_ < tensors_.size(), operation_, ": ", name, " of ", component,
                      " is missing");
    const at::Tensor& tensor = tensors_[next_++];
    TORCH_CHECK_TYPE(tensor.device() == q_.device(), operation_, ": ", name, " of ", component,
                     " is on ", tensor.device(), ", but q is on ", q_.device(),
                     "; expected the same device");
    return AsParameter(tensor, q_, operation_, ": ", name, " of ", component);
  }

  const char* operation_;
  at::TensorList tensors_;
  const at::Tensor& q_;
  size_t next_ = 0;
};

// Parsed specifications are cached: parsing one would take a significant part of a short attention
// call.
std::shared_ptr<const ParsedSimilarity<Setting>> Parsed(const std::string& spec) {
  static Kept<std::string, std::shared_ptr<const ParsedSimilarity<Setting>>> known;
  return known.Get(spec, [&] {
    return std::make_shared<const ParsedSimilarity<Setting>>(
        ParseSimilarity<Setting>(spec, SettingOf));
  });
}

using PositionTerms = std::vector<ParsedPosition<Setting>>;

std::shared_ptr<const PositionTerms> ParsedSum(const std::string& spec) {
  static Kept<std::string, std::shared_ptr<const PositionTerms>> known;
  return known.Get(spec, [&] {
    return std::make_shared<const PositionTerms>(
        ParsePositions<Setting>("gnomon.attention", spec, /*holds_tables=*/false, SettingOf));
  });
}

}  // namespace

ResolvedSimilarity ResolveSimilarity(const char* operation, const std::string& spec,
                                     at::TensorList tensors, const at::Tensor& q) {
  CallValues values(operation, tensors, q);
  ResolvedSimilarity similarity = Resolve(*Parsed(spec), values);
  values.CheckDone("similarity");
  return similarity;
}

std::vector<ResolvedPosition> ResolvePositions(const std::vector<std::string>& positions,
                                               at::TensorList tensors, const at::Tensor& q) {
  // All sums are parsed first, so that an invalid one is reported before a missing tensor.
  std::vector<std::shared_ptr<const PositionTerms>> sums;
  for (const std::string& spec : positions) sums.push_back(ParsedSum(spec));
  CallValues values("gnomon.attention", tensors, q);
  std::vector<ResolvedPosition> resolved;
  for (const auto& sum : sums) {
    for (const ParsedPosition<Setting>& term : *sum) resolved.push_back(Resolve(term, values));
  }
  values.CheckDone("position");
  return resolved;
}

Outputs AttentionOfSpecs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::string& similarity, at::TensorList similarity_tensors,
                         const std::vector<std::string>& positions, at::TensorList position_tensors,
                         const CallArguments& arguments, bool returns_lse) {
  const WithoutAutocast guard;
  std::optional<Pages> pages;
  if (arguments.page_table) {
    CheckTokenType("gnomon.attention", "q", q, q);
    pages = Pages::Of("gnomon.attention", q, k, v, arguments);
  } else {
    CheckTokens("gnomon.attention", q, k, v);
  }
  const ResolvedSimilarity resolved_similarity =
      ResolveSimilarity("gnomon.attention", similarity, similarity_tensors, q);
  const std::vector<ResolvedPosition> resolved = ResolvePositions(positions, position_tensors, q);
  if (pages) {
    return ComposePages(q, *pages, resolved_similarity, resolved, arguments, returns_lse);
  }
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
