#include <ATen/ATen.h>
#include <gnomon/torch/term.h>

#include "ops/catalogue/registry.h"
#include "ops/catalogue/term_builder.h"

namespace gnomon {

Position operator+(const Position& a, const Position& b) {
  Position sum = a;
  sum.spec += "+" + b.spec;
  sum.tensors.insert(sum.tensors.end(), b.tensors.begin(), b.tensors.end());
  return sum;
}

void CheckDetails(const std::string& spec, const char* key, const std::string& words) {
  const std::string name = spec.substr(0, spec.find(':'));
  const CatalogueEntry* entry = FindCatalogueEntry(name);
  bool fits = entry != nullptr && words.find('+') == std::string::npos &&
              words.find('=') >= words.find(':');
  const auto is_detail = [&](const std::string& option) {
    const CatalogueParameter* parameter = entry->Find(option);
    return parameter != nullptr && parameter->detail_of == key;
  };
  for (size_t at = words.find(':'); fits && at != std::string::npos; at = words.find(':', at + 1)) {
    const size_t end = words.find_first_of(":=", at + 1);
    fits = is_detail(words.substr(at + 1, end == std::string::npos ? end : end - at - 1));
  }
  TORCH_CHECK_VALUE(fits, "gnomon: ", name, " has ", key, " = \"", words,
                    "\"; expected a word, optionally followed by its own options");
}

namespace position {

Position Grid(const std::vector<int64_t>& shape, const std::vector<Position>& axes,
              int64_t prefix) {
  TORCH_CHECK_VALUE(!shape.empty() && axes.size() == shape.size(),
                    "gnomon.position.Grid: shape has ", shape.size(), " axes and axes has ",
                    axes.size(), " biases; expected one bias per axis");
  Position sum;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    const Component bias = Component::Parse(axes[axis].spec);
    const PositionEntry& entry = FindPosition(bias);
    TORCH_CHECK_VALUE(entry.role() == PositionEntry::Role::kBias &&
                          entry.catalogue.Find("axis") != nullptr && !bias.Find("shape"),
                      "gnomon.position.Grid: axes contains ", axes[axis].spec,
                      "; expected offset biases");
    if (axis > 0) sum.spec += "+";
    sum.spec += axes[axis].spec + ":shape=" + SizesText(shape) + ":axis=" + std::to_string(axis) +
                ":prefix=" + std::to_string(prefix);
    sum.tensors.insert(sum.tensors.end(), axes[axis].tensors.begin(), axes[axis].tensors.end());
  }
  return sum;
}

}  // namespace position
}  // namespace gnomon
