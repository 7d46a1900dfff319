#include "models/learned_similarity.h"

#include "gnomon/torch/nn.h"
#include "ops/grammar/component.h"
#include "ops/nn/module_terms.h"

namespace gnomon::models {
namespace {

// "umbral:r=0.2" or "umbral:gamma=learned:r=0.2" as "umbral:r=0.2:gamma=tensor".
std::string WithTensor(const std::string& spec, const std::string& parameter) {
  const Component component = Component::Parse(spec);
  Component made = Component::Parse(component.name());
  for (const auto& [key, value] : component.options()) {
    if (key != parameter) made.SetDefault(key, value);
  }
  made.SetDefault(parameter, "tensor");
  return made.Text();
}

}  // namespace

LearnedSimilarityImpl::LearnedSimilarityImpl(const std::string& spec, int64_t heads, int64_t dim)
    : spec_(spec) {
  // A module computes the start for which its logits have standard deviation 1, and the number of
  // columns.
  nn::MultiheadAttention module(
      nn::MultiheadAttentionOptions(heads * dim, heads).similarity(spec).bias(false));
  columns_ = module->q_proj->options.out_features() / heads;
  const auto parameters = module->named_parameters(/*recurse=*/false);
  const auto buffers = module->named_buffers(/*recurse=*/false);
  for (const nn::LearnedValue& learned : module->learned_values()) {
    const std::string start = TensorName(learned.name, TensorPart::kStart);
    const std::string theta = TensorName(learned.name, TensorPart::kTheta);
    thetas_.push_back(register_parameter(theta, parameters[theta].detach().clone()));
    starts_.push_back(
        register_buffer(start, buffers.contains(start) ? buffers[start] : *learned.start));
    spec_ = WithTensor(spec_, learned.name);
  }
}

Similarity LearnedSimilarityImpl::term() const {
  Similarity term(spec_);
  for (size_t n = 0; n < thetas_.size(); ++n) {
    term.tensors.push_back(nn::learned_number(starts_[n], thetas_[n]));
  }
  return term;
}

}  // namespace gnomon::models
