// Which rows of a batch a call has, where the batch is shared out over processes.
#ifndef GNOMON_TORCH_BATCH_ROWS_H_
#define GNOMON_TORCH_BATCH_ROWS_H_

#include <cstdint>

namespace gnomon {

// The sequences of a call are rows `first`, `first` + 1 ... of a batch of `total`. Training draws
// the same random numbers for them as it does for these rows of the whole batch, from a generator
// in the same state.
struct BatchRows {
  int64_t first = 0;
  int64_t total = 0;
};

}  // namespace gnomon

#endif  // GNOMON_TORCH_BATCH_ROWS_H_
