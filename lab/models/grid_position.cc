#include "models/grid_position.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "gnomon/specification.h"
#include "gnomon/torch/nn.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

constexpr const char* kShape = "shape";
constexpr const char* kPrefix = "prefix";

// Replaces the text of each component in a position specification, which may be a per-layer
// pattern.
std::string Rewritten(const std::string& position,
                      const std::function<std::string(const SpecifiedTerm&)>& rewrite) {
  std::vector<std::string> layers;
  for (const std::string& part : nn::layer_positions(position)) {
    std::vector<std::string> terms;
    for (const SpecifiedTerm& term : ParseSpecification(part)) terms.push_back(rewrite(term));
    layers.push_back(Join(terms, "+"));
  }
  return Join(layers, ";");
}

// Describes a grid in a message: "3x4", or "3x4 after 1" if one token precedes it.
std::string GridText(const std::string& shape, const std::string& prefix) {
  return shape + (prefix == "0" ? "" : " after " + prefix);
}

std::string GridText(const TokenGrid& grid) {
  return GridText(SizesText(grid.shape), std::to_string(grid.prefix));
}

// Describes the grid of a component; nullopt if it has none.
std::optional<std::string> GridText(const SpecifiedTerm& term) {
  const std::optional<std::string> shape = term.Find(kShape);
  if (!shape) return std::nullopt;
  return GridText(*shape, term.Find(kPrefix).value_or("0"));
}

// Sets the shape and the prefix of a component; keeps_prefix keeps a prefix that it already has.
std::string WithGrid(SpecifiedTerm term, const TokenGrid& grid, bool keeps_prefix) {
  auto& options = term.options;
  if (!keeps_prefix) {
    std::erase_if(options, [](const auto& option) { return option.first == kPrefix; });
  }
  const auto shape = std::find_if(options.begin(), options.end(),
                                  [](const auto& option) { return option.first == kShape; });
  if (shape == options.end()) {
    options.emplace_back(kShape, SizesText(grid.shape));
  } else {
    shape->second = SizesText(grid.shape);
  }
  if (grid.prefix > 0 && !term.Find(kPrefix)) {
    options.emplace_back(kPrefix, std::to_string(grid.prefix));
  }
  return term.Text();
}

}  // namespace

int64_t TokenGrid::tokens() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()) + prefix;
}

std::string OnGrid(const std::string& position, const TokenGrid& grid) {
  return Rewritten(position, [&](const SpecifiedTerm& term) {
    const CatalogueEntry* entry = FindCatalogueEntry(term.name);
    const std::optional<std::string> shape = term.Find(kShape);
    const bool is_open = shape ? *shape == "grid" : entry != nullptr && entry->needs_grid;
    if (is_open) return WithGrid(term, grid, /*keeps_prefix=*/true);
    const std::optional<std::string> own = GridText(term);
    TORCH_CHECK_VALUE(!own || *own == GridText(grid), "'", term.Text(), "' has the grid ", *own,
                      ", but the tokens form the grid ", GridText(grid), "; use shape=grid");
    return term.Text();
  });
}

std::string OnOtherGrid(const std::string& position, const TokenGrid& grid,
                        const TokenGrid& other) {
  return Rewritten(position, [&](const SpecifiedTerm& term) {
    return GridText(term) == GridText(grid) ? WithGrid(term, other, /*keeps_prefix=*/false)
                                            : term.Text();
  });
}

}  // namespace gnomon::lab
