#include "models/grid_position.h"

#include <c10/util/Exception.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gnomon/torch/nn.h"
#include "ops/catalogue/registry.h"
#include "ops/grammar/component.h"
#include "training/strings.h"

namespace gnomon::models {
namespace {

constexpr const char* kShape = "shape";
constexpr const char* kPrefix = "prefix";

// The sum, or pattern of sums, with the text of each component replaced.
std::string Rewritten(const std::string& position,
                      const std::function<std::string(const Component&)>& rewrite) {
  std::vector<std::string> layers;
  for (const std::string& part : nn::layer_positions(position)) {
    std::vector<std::string> terms;
    for (const Component& component : ParseSum(part)) terms.push_back(rewrite(component));
    layers.push_back(Join(terms, "+"));
  }
  return Join(layers, ";");
}

// The component with a replaced or appended shape and prefix.
std::string WithGrid(const Component& component, const TokenGrid& grid, bool keeps_prefix) {
  Component made = Component::Parse(component.name());
  for (const auto& [key, value] : component.options()) {
    if (key == kShape) {
      made.SetDefault(key, SizesText(grid.shape()));
    } else if (key != kPrefix || keeps_prefix) {
      made.SetDefault(key, value);
    }
  }
  made.SetDefault(kShape, SizesText(grid.shape()));
  if (grid.prefix() > 0) made.SetDefault(kPrefix, std::to_string(grid.prefix()));
  return made.Text();
}

}  // namespace

std::string OnGrid(const std::string& position, const TokenGrid& grid) {
  return Rewritten(position, [&](const Component& component) {
    const CatalogueEntry* entry = FindCatalogueEntry(component.name());
    const std::optional<std::string> shape = component.Find(kShape);
    const bool is_open = shape ? *shape == "grid" : entry != nullptr && entry->needs_grid;
    if (is_open) return WithGrid(component, grid, /*keeps_prefix=*/true);
    const std::optional<TokenGrid> own = TokenGrid::Find(component);
    TORCH_CHECK_VALUE(!own || *own == grid, "'", component.Text(), "' has the grid ", own->Text(),
                      ", but the tokens form the grid ", grid.Text(), "; use shape=grid");
    return component.Text();
  });
}

std::string OnOtherGrid(const std::string& position, const TokenGrid& grid,
                        const TokenGrid& other) {
  return Rewritten(position, [&](const Component& component) {
    return TokenGrid::Find(component) == grid ? WithGrid(component, other, /*keeps_prefix=*/false)
                                              : component.Text();
  });
}

}  // namespace gnomon::models
