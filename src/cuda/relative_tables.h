// Relative keys, values and queries: the tables of a call's queries and keys, their products with
// the rows of relative keys, values and queries, and the gradients of these rows. Each query has
// one table of each kind, with one entry per row, and each key has one or several (parameters.h).
#ifndef GNOMON_SRC_CUDA_RELATIVE_TABLES_H_
#define GNOMON_SRC_CUDA_RELATIVE_TABLES_H_

#include <algorithm>
#include <cstdint>

#include "cuda/attention.h"
#include "cuda/launch_context.h"
#include "cuda/parameters.h"
#include "gnomon/attention.h"

namespace gnomon::cuda {

class RelativeTables {
 public:
  explicit RelativeTables(LaunchContext& context)
      : context_(context), in_(context.in()), n_(in_.shape), p_(context.parameters()) {}

  // Whether any of the gradients is computed from the sums in the tables of queries, or of keys.
  static bool WantsSums(const Gradient& gradient) {
    return gradient.relative_query.data != nullptr || gradient.relative_keys != nullptr ||
           gradient.relative_values != nullptr;
  }
  static bool WantsKeySums(const Gradient& gradient) {
    return gradient.relative_key.data != nullptr || gradient.relative_queries != nullptr;
  }

  // Calls body(first, count) for slices of the query heads. A slice consists of whole groups: all
  // heads, or as many as the memory limit for their tables allows. Allocates the tables that the
  // pass needs.
  template <class Body>
  void ForEachSlice(bool is_backward, const Body& body) {
    const int64_t heads = context_.heads();
    const Constants& c = context_.features();
    int64_t step = heads;
    if (c.kRelativeKeys + c.kRelativeValues + c.kRelativeQueries != 0) {
      // The numbers of the heads of a group.
      const int64_t of_queries =
          c.kRelativeKeys + c.kRelativeValues != 0 ? p_.group * n_.queries * p_.relative_size : 0;
      const int64_t of_keys = c.kRelativeQueries != 0 ? n_.keys * KeyTableColumns() : 0;
      const int64_t most = std::max<int64_t>(1, std::max(of_queries, of_keys));
      const int64_t groups =
          std::min(heads / p_.group, std::max<int64_t>(1, in_.most_table_numbers / most));
      step = std::max<int64_t>(1, groups) * p_.group;
      AllocateTables(is_backward, groups * of_queries, groups * of_keys);
    }
    for (int64_t first = 0; first < heads; first += step) {
      p_.first_head = Int(first);
      p_.relative_row = first * n_.queries;
      p_.relative_key_row = first / p_.group * n_.keys;
      body(first, std::min(step, heads - first));
    }
    p_.first_head = 0;
  }

  // The following functions process `count` query heads, starting at `first` if it is given.

  // Computes the scores of relative keys and relative queries.
  void ComputeScores(int64_t first, int64_t count);
  // Adds the relative values, weighted by the tables, to the unrounded results, and stores the
  // rounded sums.
  void AddValues(int64_t first, int64_t count);
  // Computes the products of the gradients of the results with relative values.
  void MultiplyByValues(const Tokens& d_o, int64_t count);
  // Computes the gradients of a slice's queries, and the partial gradients of the tables for its
  // heads, from the slice's sums.
  void MultiplySums(const Gradient& gradient, int64_t first, int64_t count);
  // The same for the slice's keys and relative queries.
  void MultiplyKeySums(const Gradient& gradient, int64_t first, int64_t count);

  // Allocates the partial gradients of all heads. Call this before the products of sums.
  void PrepareSums(const Gradient& gradient);
  // Sums the heads' partial gradients over the batch and over heads that share a table.
  void Sum(const Gradient& gradient);

  // The tangents of the above (derivatives.cuh). Null members of `tangent` and null cotangents are
  // 0. The tables of a slice's tangents must have been allocated, for `count` query heads.
  void AllocateTangents(const Input& tangent, bool is_backward, int64_t count);
  void ComputeScoreTangents(const Input& tangent, int64_t first, int64_t count);
  void AddValueTangents(const Input& tangent, int64_t first, int64_t count);
  void MultiplyTangentsByValues(const Input& tangent, const Tokens& d_o, const Tokens& d_o_tangent,
                                int64_t count);
  void MultiplySumTangents(const Gradient& gradient, const Input& tangent,
                           const Tokens& d_o_tangent, int64_t first, int64_t count);
  void MultiplyKeySumTangents(const Gradient& gradient, const Input& tangent, int64_t first,
                              int64_t count);

 private:
  // The numbers in the tables of a key.
  int64_t KeyTableColumns() const {
    return static_cast<int64_t>(p_.relative_key_tables) * p_.relative_size;
  }
  // `of_queries`, `of_keys`: the size of the largest slice's tables of each kind.
  void AllocateTables(bool is_backward, int64_t of_queries, int64_t of_keys);
  Product& NewProduct();
  // The tables of a slice's queries, (rows, entries) per head.
  Matrix Tables(const float* tables) const;
  // A table of rows, (entries, columns).
  Matrix RowsOf(const float* table, int64_t columns, bool of_each_head) const;
  // Stores left * right, times `factor`, in `to`, or adds it.
  void SetProduct(const Matrix& left, const Matrix& right, float factor, float* to, bool adds);
  // Computes the product that has been set.
  void Multiply(int64_t rows, int64_t columns, int64_t depth, int64_t count);
  // The tables of a slice's keys, (rows, KeyTableColumns()) per key head, and the relative queries
  // of a key head, (KeyTableColumns(), columns).
  Matrix KeyTables(const float* tables) const;
  Matrix QueryRows(const float* table) const;
  // Computes the product that has been set for the key heads of `count` query heads.
  void MultiplyKeys(int64_t rows, int64_t columns, int64_t depth, int64_t first, int64_t count);

  LaunchContext& context_;
  const Input& in_;
  const AttentionShape& n_;
  Parameters& p_;
  // The partial gradients of each head: (B, H, entries, columns).
  float* d_relative_keys_ = nullptr;
  float* d_relative_values_ = nullptr;
  // The same for relative queries: (B, Hkv, KeyTableColumns(), columns).
  float* d_relative_queries_ = nullptr;
  // The unrounded tangents of the gradients of a slice's queries, and of its keys.
  float* query_tangents_ = nullptr;
  float* key_tangents_ = nullptr;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_RELATIVE_TABLES_H_
