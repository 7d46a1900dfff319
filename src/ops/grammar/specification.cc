#include "gnomon/specification.h"

#include "ops/grammar/component.h"

namespace gnomon {

std::optional<std::string> SpecifiedTerm::Find(std::string_view key) const {
  for (const auto& [known, value] : options) {
    if (known == key) return value;
  }
  return std::nullopt;
}

std::string SpecifiedTerm::Text() const {
  std::string text = name;
  for (const auto& [key, value] : options) text.append(":").append(key).append("=").append(value);
  return text;
}

std::vector<SpecifiedTerm> ParseSpecification(std::string_view text) {
  std::vector<SpecifiedTerm> terms;
  for (const Component& component : ParseSum(text)) {
    terms.push_back({component.name(), component.options()});
  }
  return terms;
}

}  // namespace gnomon
