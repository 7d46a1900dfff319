// The parts of data that a model is evaluated on.
#ifndef GNOMON_MODELS_SPLITS_H_
#define GNOMON_MODELS_SPLITS_H_

#include <string>
#include <vector>

namespace gnomon::models {

// Throws Error naming --splits where there is none, or one is given twice.
void CheckSplits(const std::vector<std::string>& splits);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_SPLITS_H_
