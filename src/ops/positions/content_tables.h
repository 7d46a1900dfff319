// What positions share that multiply the query by rows of tables.
#ifndef GNOMON_OPS_POSITIONS_CONTENT_TABLES_H_
#define GNOMON_OPS_POSITIONS_CONTENT_TABLES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/catalogue/registry.h"

namespace gnomon {

// A table (n, columns) or (H, n, columns) as (1 or H, n, columns); throws c10::ValueError, which
// names it, where it is neither.
at::Tensor AsRows(const Component& component, const char* name, const at::Tensor& table,
                  int64_t columns, int64_t heads);

// Numbers of their own for each table of a module.
enum class Stream : uint64_t {
  kTable = 1,
  kValues,
  kDistances,
  kRows,
  kColumns,
  kProjection,
  kQueries
};

// Rows of N(0, 1 / columns), so that their product with a query of unit variance has variance 1.
// The seed comes from the state of Torch's generator, which stays as it is: the other weights of a
// model start alike with and without them.
at::Tensor RandomRows(Stream stream, std::vector<int64_t> sizes, int64_t columns);

// (n,), or (H, n) of "per_head".
std::vector<int64_t> TableRows(const Component& component, int64_t rows, const ModuleShape& n);

}  // namespace gnomon

#endif  // GNOMON_OPS_POSITIONS_CONTENT_TABLES_H_
