// Which rows of a batch a process has, where processes share one out.
#ifndef GNOMON_TRAINING_BATCH_ROWS_H_
#define GNOMON_TRAINING_BATCH_ROWS_H_

#include <cstdint>

namespace gnomon::models {

// Rows `first`, `first` + 1 ... of a batch of `total`. Training draws the same random numbers for
// them as it does for these rows of the whole batch, from a generator in the same state.
struct BatchRows {
  int64_t first = 0;
  int64_t total = 0;
};

}  // namespace gnomon::models

#endif  // GNOMON_TRAINING_BATCH_ROWS_H_
