// Products of constant sparse matrices and dense ones.
#ifndef GNOMON_MODELS_SPARSE_MATRIX_H_
#define GNOMON_MODELS_SPARSE_MATRIX_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>

namespace gnomon::lab {

// A constant sparse matrix, on the device of its indices: row i has the columns indices[indptr[i]
// .. indptr[i + 1]).
class SparseMatrix {
 public:
  SparseMatrix() = default;
  // With one number of `values` per entry, or ones without values.
  SparseMatrix(torch::Tensor indptr, torch::Tensor indices, int64_t columns,
               std::optional<torch::Tensor> values = std::nullopt);

  bool defined() const { return indptr_.defined(); }
  SparseMatrix To(torch::Device device) const;
  const std::optional<torch::Tensor>& values() const { return values_; }
  // Its product with x (columns, D), differentiable in x; `values` replace its own.
  torch::Tensor Multiply(const torch::Tensor& x, const std::optional<torch::Tensor>& values) const;
  torch::Tensor Multiply(const torch::Tensor& x) const { return Multiply(x, values_); }

 private:
  torch::Tensor indptr_;
  torch::Tensor indices_;
  std::optional<torch::Tensor> values_;
  // The transposed matrix, whose entry n is entry order_[n] of this one.
  torch::Tensor transposed_indptr_;
  torch::Tensor transposed_indices_;
  torch::Tensor order_;
};

// Rows `indices` (n,) of x (rows, D), differentiable in x.
torch::Tensor TakeRows(const torch::Tensor& x, const torch::Tensor& indices);

// Row boundaries (rows + 1,) of a list of entries, from the row of each entry.
torch::Tensor RowStarts(const torch::Tensor& row_of_entry, int64_t rows);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_SPARSE_MATRIX_H_
