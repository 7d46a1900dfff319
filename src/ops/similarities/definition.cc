#include "ops/similarities/definition.h"

#include <ATen/ATen.h>

#include <string>
#include <string_view>
#include <utility>

#include "ops/catalogue/registry.h"
#include "ops/geometry/geometry.h"

namespace gnomon {
namespace {

at::Tensor Ones(const Component& /*component*/, const ModuleShape& shape) {
  return at::ones({shape.heads}, at::kDouble);
}

SimilarityEntry SimilarityOf(const DefinitionText& text) {
  std::string_view factor = text.factor;
  const bool is_negative = !factor.empty() && factor.front() == '-';
  if (is_negative) factor.remove_prefix(1);
  SimilarityEntry entry;
  entry.catalogue.name = text.name;
  entry.catalogue.title = text.title;
  entry.catalogue.formula = text.formula;
  entry.catalogue.latex = text.latex;
  entry.catalogue.details = text.details;
  entry.catalogue.source = text.source;
  entry.catalogue.class_name = text.class_name;
  if (factor == "scale") {
    entry.catalogue.takes_scale = true;
  } else {
    entry.parameters = {PerHead(std::string(factor).c_str(), "learned").Means("per-head factor")};
  }
  for (const char* head : text.heads) {
    entry.parameters.push_back(
        PerHead(head, "learned", {.start = Ones}).Means("per-head scalar, initialised to 1"));
  }
  entry.map = [function = text.name, is_negative](const Component&, const at::Tensor& q,
                                                  const at::Tensor& k,
                                                  const HeadParameters& heads) {
    MappedTokens tokens{.function = function,
                        .x = q,
                        .y = k,
                        .factor = is_negative ? TimesNumber(heads.factor, -1) : heads.factor};
    if (!heads.others.empty()) tokens.head_scalars = at::stack(heads.others);
    return tokens;
  };
  entry.keeps_tokens = true;
  return entry;
}

}  // namespace

void RegisterDefinitionText(const DefinitionText& text) {
  const RegisterSimilarity registered(SimilarityOf(text));
}

}  // namespace gnomon
