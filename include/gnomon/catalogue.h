// The similarities and positions of the library, as data: what `gnomon list` prints, what the
// specifications of calls, modules and the command line may say, and what a program may ask about
// a term that it does not know. No Torch.
//
//   similarity = component
//   position   = component ("+" component)*          their sum
//   component  = name (":" key "=" value | ":" flag)*     a flag is key=true
//
// for example "rope:layout=half+hype:mu=0.001:tau=learned".
#ifndef GNOMON_CATALOGUE_H_
#define GNOMON_CATALOGUE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gnomon {

struct CatalogueParameter {
  // What a specification may give: a number, an integer, "true" or "false", one of the choices, the
  // lengths of a grid's axes ("14x14"), numbers likewise ("1x1.5x2"), a number for all heads or
  // "learned" or "fixed", or nothing, since there are only tensors for it.
  enum class Kind { kNumber, kInteger, kFlag, kChoice, kShape, kNumbers, kHeads, kTable };
  // What the entries or rows of a table are for: nothing that a place has to do with, buckets of
  // offsets, the offsets from a row of the call to a column, offsets that end somewhere, distances
  // to the past, the columns (a row of the table each, or an entry), the offsets on a grid, those
  // along the first or the second of its axes, the rows, pairs of a row and a column, or tokens, be
  // they rows or columns. Of entries the last axis is meant, of rows the last but one.
  enum class Index {
    kNone,
    kBuckets,
    kOffsets,
    kNearOffsets,
    kDistances,
    kKeys,
    kKeyEntries,
    kGrid,
    kFirstAxis,
    kSecondAxis,
    kQueries,
    kPairs,
    kTokens
  };
  // As an argument of the term's class in Python and of its function in C++: none, since something
  // else says it, a module, a grid or a table; one that a caller must give; or one that has a
  // default, the parameter's.
  enum class Argument { kNone, kRequired, kOptional };

  std::string name;
  Kind kind = Kind::kNumber;
  // What a specification that does not mention it stands for, in the same words; where that depends
  // on something else it is empty, and `otherwise` says what it is.
  std::string default_value = "";
  std::string otherwise = "";
  // What it is, with the shape of a table: a phrase, or several.
  std::string meaning = "";
  // The parameter that it belongs to, one of choices of which some need more words: facades take
  // them with it, scaling="yarn:factor=4".
  std::string detail_of = "";
  std::vector<std::string> choices = {};
  // Of a number or an integer; without the lowest itself where it is `above`.
  std::optional<double> lowest = std::nullopt;
  std::optional<double> highest = std::nullopt;
  bool above = false;
  // Whether it may be a tensor, "name=tensor" with the tensor beside the specification.
  bool takes_tensor = false;
  Index index = Index::kNone;  // of a table
  Argument argument = Argument::kNone;
  // Of a table: whether it is a call's alone, since no module has one to begin with.
  bool of_call = false;
  // Of a shape that always has the same axes: what their lengths are called, each an argument.
  std::vector<std::string> axes = {};

  // "number", "abs | odd | cosh".
  std::string values() const;
};

struct CatalogueEntry {
  // What it acts on: the scores of pairs (a similarity); nothing; the embeddings; the coordinates
  // of q and k; the scores, by offset in the sequence or along the axes of a grid (a bias), by a
  // table over a grid, by the key, by the pair, or by the product of the query and the rows of
  // tables (content); q and k, before all else (a norm); all scores of a row, as a factor
  // (temperature); the softmax, as one more score (a sink); or the output, as a factor (a gate).
  enum class Role {
    kSimilarity,
    kNone,
    kEmbedding,
    kRotation,
    kBias,
    kGridBias,
    kKeyBias,
    kPairBias,
    kContent,
    kNorm,
    kTemperature,
    kSink,
    kGate
  };

  std::string name;
  std::string title;  // as a person says it, "RoPE"
  std::string formula;
  // For pages: the formula in LaTeX, and what it leaves unsaid. Where both are empty, `formula` is
  // words.
  std::string latex = "";
  std::string note = "";
  // What else there is to know of a call: paragraphs with an empty line between them, and items of
  // a list, each a line that begins with "- ".
  std::string details = "";
  std::string source;
  Role role = Role::kSimilarity;
  std::vector<CatalogueParameter> parameters = {};
  // Operations for each pair of a query and a key in the forward pass, besides the inner product,
  // the scale and the exponential: "5 + 1", simple ones (arithmetic, comparisons, choices) and
  // special ones (roots, logarithms, angles, divisions).
  std::string cost = "";
  // What it needs of a call.
  bool needs_grid = false;
  bool needs_causal = false;
  bool needs_dot = false;
  bool takes_scale = false;  // of a similarity: whether the argument `scale` multiplies its scores
  // Its class in Python and its function in C++, "HyPE"; empty: it has none.
  std::string class_name = "";
  // The file that LoadTerms read it from; empty: the library's own.
  std::string library = "";

  const CatalogueParameter* Find(const std::string& parameter) const;
  // Whether it has a table that is indexed so.
  bool HasTable(CatalogueParameter::Index index) const;
  // "attention(), modules; dot and causal".
  std::string use() const;
  // Of a position: what its tokens lie on, "sequence, grid".
  std::string tokens() const;
};

// As a word: "similarity", "none", "embedding", "rotation", "bias", "grid_bias", "key_bias",
// "pair_bias", "content", "norm", "temperature", "sink", "gate".
const char* RoleName(CatalogueEntry::Role role);

// Both in the order in which they are listed: dot first, then by name; "none" first, then by role
// and by name.
std::vector<CatalogueEntry> SimilarityCatalogue();
std::vector<CatalogueEntry> PositionCatalogue();

// All of that as JSON: {"similarities": [...], "positions": [...]}, with the fields above.
std::string CatalogueJson();

// Loads a shared library of terms, made by gnomon_add_terms() of gnomon's CMake package, and
// returns their names, in the order of the catalogue. From then on they are terms as the library's
// own are. A library that is loaded already has none to add and returns them again. Throws
// c10::ValueError where there is no such file, where it was built for another gnomon or another
// PyTorch, where it has no terms, and where a name is taken; then it adds nothing.
std::vector<std::string> LoadTerms(const std::string& path);

// A specification as a person says it: "RoPE + learned HyPE" of "rope+hype:tau=learned". Mistakes
// throw c10::ValueError.
std::string SimilarityTitle(const std::string& specification);
std::string PositionTitle(const std::string& specification);

}  // namespace gnomon

#endif  // GNOMON_CATALOGUE_H_
