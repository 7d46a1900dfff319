// The rows of a batch that a process computes.
#ifndef GNOMON_TRAINING_BATCH_ROWS_H_
#define GNOMON_TRAINING_BATCH_ROWS_H_

#include <cstdint>

namespace gnomon::lab {

// Rows `first`, `first` + 1 ... of a batch of `total` rows. Given the same generator state,
// training draws the same random numbers for these rows as it would for the whole batch.
struct BatchRows {
  int64_t first = 0;
  int64_t total = 0;
};

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_BATCH_ROWS_H_
