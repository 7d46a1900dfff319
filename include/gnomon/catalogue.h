// The similarities and positions of the library, by name: what `gnomon list` prints and what the
// specifications of modules and of the command line may say. No Torch.
//
//   similarity = component
//   position   = component ("+" component)*          their sum
//   component  = name (":" key "=" value | ":" flag)*     a flag is key=true
//
// for example "rope:layout=half+hype:mu=0.001:tau=learned".
#ifndef GNOMON_CATALOGUE_H_
#define GNOMON_CATALOGUE_H_

#include <string>
#include <vector>

namespace gnomon {

struct CatalogueParameter {
  std::string name;
  // The values a specification may give, as text: "number", "abs | odd | cosh".
  std::string values;
  std::string default_value;
};

struct CatalogueEntry {
  std::string name;
  std::string title;  // as a person says it, "RoPE"
  std::string formula;
  std::string citation;
  std::vector<CatalogueParameter> parameters;
  // Operations for each pair of a query and a key in the forward pass, besides the inner product,
  // the scale and the exponential: "5 + 1", simple ones (arithmetic, comparisons, choices) and
  // special ones (roots, logarithms, angles, divisions).
  std::string cost;
  // What takes it: "attention(), modules".
  std::string use;
  // Of a position: what its tokens lie on, "sequence, grid".
  std::string tokens;
  // For pages: the formula in LaTeX, and what it leaves unsaid. Where both are empty, `formula` is
  // words.
  std::string latex;
  std::string note;
};

// Both in the order in which they are listed. Positions include "none".
const std::vector<CatalogueEntry>& SimilarityCatalogue();
const std::vector<CatalogueEntry>& PositionCatalogue();

// A specification as a person says it: "RoPE + learned HyPE" of "rope+hype:tau=learned". Mistakes
// throw c10::ValueError.
std::string SimilarityTitle(const std::string& specification);
std::string PositionTitle(const std::string& specification);

}  // namespace gnomon

#endif  // GNOMON_CATALOGUE_H_
