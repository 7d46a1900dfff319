#include "models/learned_similarity.h"

#include "gnomon/torch/nn.h"
#include "training/strings.h"

namespace gnomon::models {
namespace {

// "umbral:r=0.2" or "umbral:gamma=learned:r=0.2" as "umbral:r=0.2:gamma=tensor".
std::string WithTensor(const std::string& spec, const std::string& parameter) {
  std::string text;
  std::istringstream parts(spec);
  for (std::string part; std::getline(parts, part, ':');) {
    if (part == parameter + "=learned") continue;
    text += (text.empty() ? "" : ":") + part;
  }
  return StrCat(text, ":", parameter, "=tensor");
}

}  // namespace

LearnedSimilarityImpl::LearnedSimilarityImpl(const std::string& spec, int64_t heads, int64_t dim)
    : spec_(spec) {
  // A module knows the start that makes the spread of its logits 1, and the columns.
  nn::MultiheadAttention module(
      nn::MultiheadAttentionOptions(heads * dim, heads).similarity(spec).bias(false));
  columns_ = module->q_proj->options.out_features() / heads;
  for (const auto& entry : module->named_parameters(/*recurse=*/false)) {
    const std::string& name = entry.key();
    const std::string parameter = name.substr(0, name.find("_theta"));
    theta_ = register_parameter(name, entry.value().detach().clone());
    const std::string start = parameter + "_start";
    start_ = register_buffer(start, module->named_buffers(/*recurse=*/false)[start]);
    spec_ = WithTensor(spec, parameter);
  }
}

Similarity LearnedSimilarityImpl::term() const {
  Similarity term(spec_);
  // As in nn::MultiheadAttention: AdamW moves a large factor as fast as a small one.
  if (theta_.defined()) term.tensors.push_back(start_ * (5 * theta_).exp());
  return term;
}

}  // namespace gnomon::models
