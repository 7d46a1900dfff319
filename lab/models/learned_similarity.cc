#include "models/learned_similarity.h"

#include "gnomon/specification.h"
#include "gnomon/torch/nn.h"

namespace gnomon::lab {
namespace {

// Replaces a learned parameter with a tensor: for gamma, "umbral:r=0.2" and
// "umbral:gamma=learned:r=0.2" both become "umbral:r=0.2:gamma=tensor".
std::string WithTensor(const std::string& spec, const std::string& parameter) {
  SpecifiedTerm term = ParseSpecification(spec).front();
  std::erase_if(term.options, [&](const auto& option) { return option.first == parameter; });
  term.options.emplace_back(parameter, "tensor");
  return term.Text();
}

}  // namespace

LearnedSimilarityImpl::LearnedSimilarityImpl(const std::string& spec, int64_t heads, int64_t dim)
    : spec_(spec) {
  // The module provides the number of columns, and the initial values for which the logits have
  // standard deviation 1.
  nn::MultiheadAttention module(
      nn::MultiheadAttentionOptions(heads * dim, heads).similarity(spec).bias(false));
  columns_ = module->q_proj->options.out_features() / heads;
  const auto parameters = module->named_parameters(/*recurse=*/false);
  const auto buffers = module->named_buffers(/*recurse=*/false);
  for (const nn::LearnedValue& learned : module->learned_values()) {
    const std::string start = learned.name + "_start";
    const std::string theta = learned.name + "_theta";
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

}  // namespace gnomon::lab
