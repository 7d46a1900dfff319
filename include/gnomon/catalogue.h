// The similarities and positions of the library, as data: what `gnomon list` prints, what the
// specifications of calls, modules and the command line may contain, and what a program may ask
// about a term that it does not know. No Torch.
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
  // What a specification may give, in the order of the names: a number, an integer, "true" or
  // "false", one of the choices, the lengths of a grid's axes ("14x14"), numbers in the same way
  // ("1x1.5x2"), a number for all heads or "learned" or "fixed", or nothing, since only a tensor
  // will do.
  enum class Kind { kNumber, kInteger, kFlag, kChoice, kShape, kNumbers, kHeads, kTable };
  // What the entries of a table (its last axis) or its rows (the last axis but one) belong to.
  enum class Index {
    kNone,         // nothing that depends on places
    kBuckets,      // buckets of offsets
    kOffsets,      // all offsets from a row of the call to a column
    kNearOffsets,  // offsets up to some largest one
    kDistances,    // distances to the past
    kKeys,         // columns of the call, a row of the table each
    kKeyEntries,   // columns of the call, an entry each
    kGrid,         // offsets on a grid
    kFirstAxis,    // offsets along the first axis of a grid
    kSecondAxis,   // and along the second
    kQueries,      // rows of the call
    kPairs,        // pairs of a row and a column
    kTokens,       // tokens, whether rows or columns
    kBucketRows    // buckets of distances p_i - p_j, a row each
  };
  // As an argument of the term's class in Python and of its function in C++: none, since a module,
  // a grid or a table says it; one that a caller must give; or one that may be left out, with the
  // parameter's default.
  enum class Argument { kNone, kRequired, kOptional };

  std::string name;
  Kind kind = Kind::kNumber;
  // The value where a specification does not mention it, as a specification would give it; where
  // that depends on something else it is empty, and `otherwise` says what it is.
  std::string default_value = "";
  std::string otherwise = "";
  // What it is, with the shape of a table: a phrase, or several.
  std::string meaning = "";
  // The choice that it gives details of; classes take both together, scaling="yarn:factor=4".
  std::string detail_of = "";
  // The values of that choice which read it; with others it is refused. Empty: all read it.
  std::vector<std::string> read_by = {};
  std::vector<std::string> choices = {};
  // The range of a number or an integer; `above`: the lowest itself is excluded.
  std::optional<double> lowest = std::nullopt;
  std::optional<double> highest = std::nullopt;
  bool above = false;
  // Whether it may be a tensor, "name=tensor" with the tensor beside the specification.
  bool takes_tensor = false;
  Index index = Index::kNone;  // of a table
  Argument argument = Argument::kNone;
  // Of an encoding: what the argument is called; empty: as the parameter is.
  std::string argument_name = "";
  // Of a table: whether only calls take it, since no module has one to begin with.
  bool of_call = false;
  // Of a shape that always has the same axes: what their lengths are called, each an argument.
  std::vector<std::string> axes = {};

  // "number", "abs | odd | cosh".
  std::string values() const;
};

struct CatalogueEntry {
  // What it does.
  enum class Role {
    kSimilarity,   // gives the scores of pairs
    kNone,         // nothing
    kEmbedding,    // is added to the embeddings
    kRotation,     // rotates coordinates of q and k
    kBias,         // is added to scores, by offset in the sequence or along the axes of a grid
    kGridBias,     // is added to scores, from a table over the offsets on a grid
    kKeyBias,      // is added to scores, by key
    kPairBias,     // is added to scores, by pair
    kContent,      // adds products of the query and the rows of tables to scores
    kNorm,         // normalises q and k before anything else acts on them
    kTemperature,  // multiplies all scores of a row
    kSink,         // is one more score in the softmax
    kGate          // multiplies the output
  };

  std::string name;
  std::string title;  // as a person says it, "RoPE"
  std::string formula;
  // For pages: the formula in LaTeX, and what it leaves unsaid. Where both are empty, `formula` is
  // words.
  std::string latex = "";
  std::string note = "";
  // What else a caller should know: paragraphs with an empty line between them, and items of a
  // list, each a line that begins with "- ".
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
  // Whether what it gives a key is a sum over other keys, which those of one part do not know.
  bool sums_over_keys = false;
  bool takes_scale = false;  // of a similarity: whether the argument `scale` multiplies its scores
  // Of an encoding: whether it reads other tokens, of which a causal one sees the earlier alone.
  // Its class has the argument `causal` then.
  bool takes_causal = false;
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
// returns their names. From then on they can be used like the library's own. Loading a library
// again adds nothing and returns the same names, even if the file is another one by now. Throws
// c10::ValueError if there is no such file, if it was built for another gnomon or another PyTorch,
// if it has no terms, or if a name is taken; then it adds nothing.
std::vector<std::string> LoadTerms(const std::string& path);

// A specification as a person would say it: "RoPE + learned HyPE" for "rope+hype:tau=learned".
// Mistakes throw c10::ValueError.
std::string SimilarityTitle(const std::string& specification);
std::string PositionTitle(const std::string& specification);

}  // namespace gnomon

#endif  // GNOMON_CATALOGUE_H_
