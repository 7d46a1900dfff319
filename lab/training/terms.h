// The terms of attention: similarity and position.
#ifndef GNOMON_TRAINING_TERMS_H_
#define GNOMON_TRAINING_TERMS_H_

#include <string>

#include "training/options.h"

namespace gnomon::lab {

#define GNOMON_TERM_OPTIONS(OPTION)                                                             \
  OPTION(std::string, similarity, "dot", .help = "Similarity specification; see `gnomon list`") \
  OPTION(std::string, position, "none",                                                         \
         .help =                                                                                \
             "Position specification; see `gnomon list`. Several specifications separated by "  \
             "semicolons, such as \"rope;rope;none\", form a pattern that repeats over the "    \
             "layers. Except in compare, commas are also accepted as separators")

struct Terms {
  GNOMON_OPTIONS(GNOMON_TERM_OPTIONS)

  std::string label() const { return similarity + "/" + position; }
  bool operator==(const Terms&) const = default;
};

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_TERMS_H_
