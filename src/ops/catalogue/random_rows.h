// Tables of modules that start at random.
#ifndef GNOMON_OPS_CATALOGUE_RANDOM_ROWS_H_
#define GNOMON_OPS_CATALOGUE_RANDOM_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gnomon {

// Rows of N(0, 1 / columns), float64, so that their product with a query of unit variance has
// variance 1. The tables of one term that have the same sizes are the same numbers unless their
// streams differ. The seed comes from the state of Torch's generator, which stays as it is: the
// other weights of a model start alike with and without these.
at::Tensor RandomRows(uint64_t stream, std::vector<int64_t> sizes, int64_t columns);

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_RANDOM_ROWS_H_
