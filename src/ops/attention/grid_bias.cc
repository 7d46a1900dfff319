#include "ops/attention/grid_bias.h"

#include <ATen/ATen.h>

#include <string>

#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

// The sizes of a table, (H, 2 n_1 - 1, 2 n_2 - 1, ...).
std::vector<int64_t> TableSizes(const TokenGrid& grid, int64_t heads) {
  std::vector<int64_t> sizes = {heads};
  for (const int64_t length : grid.shape()) sizes.push_back(2 * length - 1);
  return sizes;
}

// The grid of a bias; nullopt if it depends on positions in the sequence.
std::optional<TokenGrid> GridOfBias(const PositionEntry& entry, const Component& component,
                                    const std::vector<at::Tensor>& tensors) {
  if (entry.role() == PositionEntry::Role::kBias || component.Find("shape")) {
    return TokenGrid::Find(component);
  }
  const at::Tensor& table = tensors[0];
  std::vector<int64_t> shape;
  bool odd = table.dim() >= 2;
  for (int64_t axis = 1; axis < table.dim(); ++axis) {
    odd = odd && SizeOf(table, axis) % 2 == 1;
    shape.push_back((SizeOf(table, axis) + 1) / 2);
  }
  TORCH_CHECK_VALUE(
      odd, "gnomon.attention: the table of ", entry.shown_name(), " has shape ", table.sym_sizes(),
      "; expected (H, 2 height - 1, 2 width - 1), or the equivalent for another number of axes");
  return TokenGrid(shape, component.Integer("prefix"));
}

bool IsContent(const ResolvedPosition& position) {
  return position.entry->role() == PositionEntry::Role::kContent;
}

}  // namespace

bool IsBias(const ResolvedPosition& position) {
  return position.entry->role() == PositionEntry::Role::kBias ||
         position.entry->role() == PositionEntry::Role::kGridBias;
}

std::optional<TokenGrid> FindGrid(const at::Tensor& q, const at::Tensor& k,
                                  const std::vector<ResolvedPosition>& positions,
                                  const CallArguments& arguments) {
  const ResolvedPosition* first = nullptr;
  std::optional<TokenGrid> grid;
  const auto describe = [](const ResolvedPosition& position, const std::optional<TokenGrid>& on) {
    return position.component->name() + (on ? " on the grid " + on->Text() : " in the sequence");
  };
  for (const ResolvedPosition& position : positions) {
    if (!IsBias(position) && !(IsContent(position) && position.component->Find("shape"))) continue;
    const std::optional<TokenGrid> on =
        GridOfBias(*position.entry, *position.component, position.tensors);
    if (first == nullptr) {
      first = &position;
      grid = on;
    }
    TORCH_CHECK_VALUE(on == grid, "gnomon.attention: position contains ", describe(*first, grid),
                      " and ", describe(position, on),
                      "; expected all biases in the sequence, or all on one grid");
  }
  if (!grid) return std::nullopt;
  // A rotation may use this grid or positions in the sequence, but no other grid.
  for (const ResolvedPosition& position : positions) {
    if (position.entry->role() != PositionEntry::Role::kRotation) continue;
    const std::optional<TokenGrid> on = TokenGrid::Find(*position.component);
    TORCH_CHECK_VALUE(!on || on == grid, "gnomon.attention: position contains ",
                      position.component->name(), " on the grid ", on ? on->Text() : "",
                      " and other terms on the grid ", grid->Text(),
                      "; expected one grid for all terms");
  }
  // The caller's positions are token indices on the grid.
  if (arguments.positions) return grid;
  TORCH_CHECK_VALUE(!arguments.query_offsets,
                    "gnomon.attention: query_offset is a tensor, which is not supported with ",
                    describe(*first, grid), "; pass an integer or None");
  if (!arguments.query_offset) {
    TORCH_CHECK_VALUE(q.sym_size(2) == grid->tokens() && k.sym_size(2) == grid->tokens(),
                      "gnomon.attention: position contains ", describe(*first, grid),
                      ", but Lq is ", q.sym_size(2), " and Lk is ", k.sym_size(2), "; expected ",
                      grid->tokens(),
                      " tokens in q and in k, or query_offset set to the index of the first query");
    return grid;
  }
  // The keys are the first tokens of the grid. Keys beyond it (memory keys) have no bias.
  const c10::SymInt& offset = *arguments.query_offset;
  TORCH_CHECK_VALUE(offset >= 0 && offset + q.sym_size(2) <= grid->tokens(),
                    "gnomon.attention: query_offset is ", offset, " and Lq is ", q.sym_size(2),
                    ", but position contains ", describe(*first, grid),
                    "; expected query_offset >= 0 and query_offset + Lq <= ", grid->tokens(),
                    ", the size of the grid");
  return grid;
}

at::Tensor GridTable(const PositionEntry& entry, const Component& component,
                     const std::vector<at::Tensor>& tensors, const TokenGrid& grid, int64_t heads,
                     const at::TensorOptions& options) {
  if (entry.role() == PositionEntry::Role::kGridBias) {
    const at::Tensor& table = tensors[0];
    const std::vector<int64_t> expected = TableSizes(grid, heads);
    TORCH_CHECK_VALUE(table.sym_sizes() == c10::fromIntArrayRefSlow(expected),
                      "gnomon.attention: the table of ", entry.shown_name(), " has shape ",
                      table.sym_sizes(), "; expected ", at::IntArrayRef(expected),
                      " = (H, 2 height - 1, 2 width - 1)");
    return table;
  }
  const bool has_axis = component.Find("axis").has_value();
  const int64_t first = component.FindInteger("axis").value_or(0);
  const int64_t last = has_axis ? first : grid.axes() - 1;
  at::Tensor sum;
  for (int64_t axis = first; axis <= last; ++axis) {
    const int64_t length = grid.shape()[axis];
    std::vector<int64_t> sizes(grid.axes() + 1, 1);
    sizes[0] = heads;
    sizes[axis + 1] = 2 * length - 1;
    const at::Tensor term = entry
                                .BiasByOffset(component, tensors,
                                              {.queries = length,
                                               .keys = length,
                                               .query_offset = 0,
                                               .heads = heads,
                                               .query_offsets = std::nullopt,
                                               .options = options})
                                .reshape(sizes);
    sum = sum.defined() ? sum + term : term;
  }
  return sum;
}

at::Tensor FlatGridTable(const at::Tensor& table, const TokenGrid& grid) {
  return table.expand(TableSizes(grid, SizeOf(table, 0))).flatten(1);
}

}  // namespace gnomon
