#include "ops/catalogue/entries.h"

#include <ATen/ATen.h>

namespace gnomon {

const Parameter* SimilarityEntry::head_parameter() const {
  if (catalogue.takes_scale) return nullptr;
  for (const Parameter& parameter : parameters) {
    if (parameter.is_per_head()) return &parameter;
  }
  return nullptr;
}

std::vector<const Parameter*> SimilarityEntry::other_head_parameters() const {
  std::vector<const Parameter*> others;
  for (const Parameter& parameter : parameters) {
    if (parameter.is_per_head() && &parameter != head_parameter()) others.push_back(&parameter);
  }
  return others;
}

at::Tensor SimilarityEntry::WithHeightLast(const Component& component,
                                           const at::Tensor& tokens) const {
  return HeightIsFirst(component) ? tokens.roll(-1, -1) : tokens;
}

std::vector<const Parameter*> PositionEntry::Tensors(const Component& component) const {
  std::vector<const Parameter*> tensors;
  for (const Parameter& parameter : parameters) {
    if (parameter.takes_tensor && parameter.tensor.IsPresent(component)) {
      tensors.push_back(&parameter);
    }
  }
  return tensors;
}

at::Tensor PositionEntry::BiasByOffset(const Component& component,
                                       const std::vector<at::Tensor>& tensors,
                                       const OffsetRange& range) const {
  at::Tensor by_offset = bias(component, tensors, range);
  TORCH_CHECK_VALUE(
      (by_offset.dim() == 2 || (range.query_offsets && by_offset.dim() == 3)) &&
          by_offset.sym_size(-2) == range.heads && by_offset.sym_size(-1) == range.size(),
      "gnomon.attention: the bias of ", component.name(), " has shape ", by_offset.sym_sizes(),
      "; expected (H, entries) = (", range.heads, ", ", range.size(), ")");
  return by_offset;
}

const Parameter* SimilarityEntry::points_parameter(const Component& component) const {
  for (const Parameter& parameter : parameters) {
    const std::string value = component.Find(parameter.name).value_or(parameter.default_value);
    if (!parameter.points.empty() && value == parameter.points) return &parameter;
  }
  return nullptr;
}

void SimilarityEntry::CheckColumns(const Component& component, int64_t head_dim,
                                   const char* operation, const char* what) const {
  TORCH_CHECK_VALUE(
      !HasHeight(component) || head_dim >= 2, operation, what, head_dim, "; ", catalogue.name,
      " needs two columns, ",
      HeightIsFirst(component) ? "the first of them the time" : "the last of them the height");
  TORCH_CHECK_VALUE(columns == 0 || head_dim == columns, operation, what, head_dim, "; ",
                    catalogue.name, " has ", columns);
}

}  // namespace gnomon
