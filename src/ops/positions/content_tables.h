// Helpers for positions that multiply the query by table rows.
#ifndef GNOMON_OPS_POSITIONS_CONTENT_TABLES_H_
#define GNOMON_OPS_POSITIONS_CONTENT_TABLES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/catalogue/registry.h"

namespace gnomon {

// Expands a table (n, columns) or (H, n, columns) to (1 or H, n, columns). Throws c10::ValueError,
// which names the table, for other shapes.
at::Tensor AsRows(const Component& component, const char* name, const at::Tensor& table,
                  int64_t columns, int64_t heads);

// The parameter "scale", which replaces the scale of the call for this term.
Parameter OwnScale();
// Applies this scale to the term, if the component sets it.
ContentTerm WithOwnScale(const Component& component, ContentTerm term);

// The table shape: (n,), or (H, n) with "per_head".
std::vector<int64_t> TableRows(const Component& component, int64_t rows, const ModuleShape& n);

}  // namespace gnomon

#endif  // GNOMON_OPS_POSITIONS_CONTENT_TABLES_H_
