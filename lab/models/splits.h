// The splits of the data on which a model is evaluated.
#ifndef GNOMON_MODELS_SPLITS_H_
#define GNOMON_MODELS_SPLITS_H_

#include <string>
#include <vector>

namespace gnomon::lab {

// Throws an Error that names --splits if the list is empty or contains a split twice.
void CheckSplits(const std::vector<std::string>& splits);

// A comparison that holds out the split "valid" cannot report results on it. If the splits are the
// default, "test" and "valid", removes "valid". Throws an Error that names --splits if the user
// chose "valid".
void HoldOutValid(std::vector<std::string>* splits);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_SPLITS_H_
