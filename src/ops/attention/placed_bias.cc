#include "ops/attention/placed_bias.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>

#include "ops/catalogue/registry.h"
#include "ops/operators/autograd.h"

namespace gnomon {

void PackedBiases::Add(const PositionEntry& entry, const Component& component,
                       const std::vector<at::Tensor>& tensors) {
  if (!terms_.empty()) terms_ += "+";
  terms_ += entry.Complete(component, {.has_tables_of_positions = true}).Text();
  for (const at::Tensor& tensor : tensors) {
    shapes_.emplace_back(tensor.dim());
    for (const c10::SymInt& size : tensor.sym_sizes()) shapes_.push_back(size);
    flat_.push_back(tensor.reshape({-1}));
  }
}

at::Tensor PackedBiases::Parameters(const at::TensorOptions& options) const {
  return flat_.empty() ? at::empty({0}, options) : at::cat(flat_);
}

at::Tensor PlacedBiasTable(std::string_view terms, at::IntArrayRef shapes,
                           const at::Tensor& parameters, int64_t heads, OffsetSpan span) {
  // One query at -first, and one key per offset.
  const OffsetRange range{.queries = 1,
                          .keys = span.last - span.first + 1,
                          .query_offset = -span.first,
                          .heads = heads,
                          .query_offsets = std::nullopt,
                          .options = parameters.options()};
  size_t next = 0;
  int64_t at = 0;
  const auto take = [&] {
    TORCH_CHECK_VALUE(
        next < shapes.size() && next + 1 + static_cast<size_t>(shapes[next]) <= shapes.size(),
        "gnomon.attention: bias_shapes has ", shapes.size(),
        " elements; expected more for the terms ", terms);
    const at::IntArrayRef sizes = shapes.slice(next + 1, static_cast<size_t>(shapes[next]));
    next += 1 + sizes.size();
    const int64_t count = c10::multiply_integers(sizes);
    TORCH_CHECK_VALUE(at + count <= parameters.size(0), "gnomon.attention: bias_parameters has ",
                      parameters.size(0), " elements; expected at least ", at + count,
                      " for the terms ", terms);
    at += count;
    return parameters.narrow(0, at - count, count).view(sizes);
  };
  at::Tensor sum;
  for (const Component& component : ParseSum(terms)) {
    const PositionEntry* entry = FindPositionEntry(component.name());
    TORCH_CHECK_VALUE(entry != nullptr && entry->role() == PositionEntry::Role::kBias,
                      "gnomon.attention: bias_terms contains ", component.name(),
                      "; expected offset biases");
    std::vector<at::Tensor> tensors;
    for (size_t n = 0; n < entry->Tensors(component).size(); ++n) tensors.push_back(take());
    const at::Tensor term = entry->BiasByOffset(component, tensors, range);
    sum = sum.defined() ? sum + term : term;
  }
  TORCH_CHECK_VALUE(sum.defined(),
                    "gnomon.attention: bias_terms is empty; expected at least one offset bias");
  return sum.unsqueeze(0).contiguous();
}

namespace {

// The gradient of <y, d_y> with respect to x; 0 if y does not depend on x.
at::Tensor GradientOf(const at::Tensor& y, const at::Tensor& x, const at::Tensor& d_y,
                      bool create_graph) {
  if (!y.requires_grad()) return at::zeros_like(x);
  const auto gradients = torch::autograd::grad({y}, {x}, {d_y}, /*retain_graph=*/std::nullopt,
                                               create_graph, /*allow_unused=*/true);
  return gradients[0].defined() ? gradients[0] : at::zeros_like(x);
}

}  // namespace

at::Tensor PlacedBiasGradient(std::string_view terms, at::IntArrayRef shapes,
                              const at::Tensor& parameters, OffsetSpan span,
                              const at::Tensor& d_table) {
  const AboveAutograd guard;
  const at::Tensor leaf = parameters.detach().requires_grad_();
  const at::Tensor table = PlacedBiasTable(terms, shapes, leaf, d_table.size(1), span);
  return GradientOf(table, leaf, d_table, /*create_graph=*/false).detach();
}

at::Tensor PlacedBiasTangent(std::string_view terms, at::IntArrayRef shapes,
                             const at::Tensor& parameters, int64_t heads, OffsetSpan span,
                             const at::Tensor& tangent) {
  const AboveAutograd guard;
  const at::Tensor leaf = parameters.detach().requires_grad_();
  const at::Tensor table = PlacedBiasTable(terms, shapes, leaf, heads, span);
  // The gradient is linear in d_table, and the transpose of this map gives the tangent.
  const at::Tensor d_table = at::zeros_like(table).requires_grad_();
  const at::Tensor gradient = GradientOf(table, leaf, d_table, /*create_graph=*/true);
  return GradientOf(gradient, d_table, tangent.detach(), /*create_graph=*/false).detach();
}

at::Tensor PlacedBiasGradientTangent(std::string_view terms, at::IntArrayRef shapes,
                                     const at::Tensor& parameters, OffsetSpan span,
                                     const at::Tensor& d_table, const at::Tensor& tangent) {
  const AboveAutograd guard;
  const at::Tensor leaf = parameters.detach().requires_grad_();
  const at::Tensor table = PlacedBiasTable(terms, shapes, leaf, d_table.size(1), span);
  const at::Tensor gradient = GradientOf(table, leaf, d_table, /*create_graph=*/true);
  return GradientOf(gradient, leaf, tangent.detach(), /*create_graph=*/false).detach();
}

}  // namespace gnomon
