// Randomly initialised tables of modules.
#ifndef GNOMON_OPS_CATALOGUE_RANDOM_ROWS_H_
#define GNOMON_OPS_CATALOGUE_RANDOM_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gnomon {

// Rows from N(0, 1 / columns), float64, so that their product with a query of unit variance has
// variance 1. Tables of a term with equal sizes are equal unless their streams differ. The seed is
// derived from the state of PyTorch's generator without advancing it, so the other weights of a
// model are initialised identically with and without these tables.
at::Tensor RandomRows(uint64_t stream, std::vector<int64_t> sizes, int64_t columns);

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_RANDOM_ROWS_H_
