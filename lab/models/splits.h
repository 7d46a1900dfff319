// The parts of the data on which a model is evaluated.
#ifndef GNOMON_MODELS_SPLITS_H_
#define GNOMON_MODELS_SPLITS_H_

#include <string>
#include <vector>

namespace gnomon::lab {

// Throws an Error that names --splits if there is none, or one is given twice.
void CheckSplits(const std::vector<std::string>& splits);

// Removes the part "valid", by which a comparison decides, from the default splits "test" and
// "valid"; throws an Error that names --splits if others contain it.
void HoldOutValid(std::vector<std::string>* splits);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_SPLITS_H_
