// Which rows of a batch a call has, where the batch is shared out over processes.
#ifndef GNOMON_TORCH_BATCH_ROWS_H_
#define GNOMON_TORCH_BATCH_ROWS_H_

#include <cstdint>

namespace gnomon {

// The sequences of a call are rows `first`, `first` + 1 ... of a batch of `total`. What training
// draws for them is what it draws for these rows of the whole batch, from a generator of the same
// state.
struct BatchRows {
  int64_t first = 0;
  int64_t total = 0;
};

}  // namespace gnomon

#endif  // GNOMON_TORCH_BATCH_ROWS_H_
