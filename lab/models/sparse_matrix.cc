#include "models/sparse_matrix.h"

#include <optional>
#include <utility>

namespace gnomon::lab {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns weighted sums of rows of x. The backward pass calls this function with the transposed
// matrix, because the backward pass of PyTorch's embedding is several times slower.
torch::Tensor SumRows(const torch::Tensor& x, const torch::Tensor& indices,
                      const torch::Tensor& indptr, const std::optional<torch::Tensor>& values) {
  return std::get<0>(at::embedding_bag(x.contiguous(), indices, indptr,
                                       /*scale_grad_by_freq=*/false, /*mode=*/0, /*sparse=*/false,
                                       values, /*include_last_offset=*/true));
}

class SparseProduct : public torch::autograd::Function<SparseProduct> {
 public:
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& indptr, const torch::Tensor& indices,
                               const std::optional<torch::Tensor>& values,
                               const torch::Tensor& transposed_indptr,
                               const torch::Tensor& transposed_indices,
                               const torch::Tensor& order) {
    variable_list saved = {transposed_indptr, transposed_indices};
    if (values) saved.push_back(values->index_select(0, order));
    context->save_for_backward(saved);
    return SumRows(x, indices, indptr, values);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    variable_list results(7);
    results[0] = SumRows(gradients[0], saved[1], saved[0],
                         saved.size() > 2 ? std::optional(saved[2]) : std::nullopt);
    return results;
  }
};

}  // namespace

torch::Tensor RowStarts(const torch::Tensor& row_of_entry, int64_t rows) {
  const torch::Tensor counts = torch::bincount(row_of_entry, {}, rows);
  return torch::cat({torch::zeros({1}, counts.options()), counts.cumsum(0)});
}

SparseMatrix::SparseMatrix(torch::Tensor indptr, torch::Tensor indices, int64_t columns,
                           std::optional<torch::Tensor> values)
    : indptr_(std::move(indptr)), indices_(std::move(indices)), values_(std::move(values)) {
  const torch::Tensor rows = torch::repeat_interleave(
      torch::arange(indptr_.size(0) - 1, indptr_.options()), indptr_.diff());
  // The sort is stable, so that sums have a fixed order.
  order_ = std::get<1>(indices_.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false));
  transposed_indices_ = rows.index_select(0, order_);
  transposed_indptr_ = RowStarts(indices_, columns);
}

SparseMatrix SparseMatrix::To(torch::Device device) const {
  SparseMatrix there = *this;
  for (torch::Tensor* tensor : {&there.indptr_, &there.indices_, &there.transposed_indptr_,
                                &there.transposed_indices_, &there.order_}) {
    if (tensor->defined()) *tensor = tensor->to(device);
  }
  if (values_) there.values_ = values_->to(device);
  return there;
}

torch::Tensor SparseMatrix::Multiply(const torch::Tensor& x,
                                     const std::optional<torch::Tensor>& values) const {
  return SparseProduct::apply(x, indptr_, indices_, values, transposed_indptr_, transposed_indices_,
                              order_);
}

torch::Tensor TakeRows(const torch::Tensor& x, const torch::Tensor& indices) {
  const torch::Tensor indptr = torch::arange(indices.size(0) + 1, indices.options());
  return SparseMatrix(indptr, indices, x.size(0)).Multiply(x);
}

}  // namespace gnomon::lab
