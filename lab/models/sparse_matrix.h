// Products of constant sparse matrices and dense matrices.
#ifndef GNOMON_MODELS_SPARSE_MATRIX_H_
#define GNOMON_MODELS_SPARSE_MATRIX_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>

namespace gnomon::lab {

// A constant sparse matrix on the device of its indices. Row i has non-zeros in the columns
// indices[indptr[i] .. indptr[i + 1]).
class SparseMatrix {
 public:
  SparseMatrix() = default;
  // `values` has one number per non-zero; without it, all are 1.
  SparseMatrix(torch::Tensor indptr, torch::Tensor indices, int64_t columns,
               std::optional<torch::Tensor> values = std::nullopt);

  bool defined() const { return indptr_.defined(); }
  SparseMatrix To(torch::Device device) const;
  const std::optional<torch::Tensor>& values() const { return values_; }
  // Returns the product with x (columns, D), differentiable in x. If given, `values` replace the
  // matrix's own values.
  torch::Tensor Multiply(const torch::Tensor& x, const std::optional<torch::Tensor>& values) const;
  torch::Tensor Multiply(const torch::Tensor& x) const { return Multiply(x, values_); }

 private:
  torch::Tensor indptr_;
  torch::Tensor indices_;
  std::optional<torch::Tensor> values_;
  // The transposed matrix: its n-th non-zero is the order_[n]-th non-zero of this matrix.
  torch::Tensor transposed_indptr_;
  torch::Tensor transposed_indices_;
  torch::Tensor order_;
};

// Returns the rows `indices` (n,) of x (rows, D), differentiable in x.
torch::Tensor TakeRows(const torch::Tensor& x, const torch::Tensor& indices);

// Returns the CSR row pointers (rows + 1,), given the row of each non-zero.
torch::Tensor RowStarts(const torch::Tensor& row_of_entry, int64_t rows);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_SPARSE_MATRIX_H_
