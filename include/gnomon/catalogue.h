// The similarities and positions of the library, as data. The data defines which specifications
// calls, modules and the command line accept; `gnomon list` prints it. This header does not depend
// on PyTorch.
//
//   similarity = component
//   position   = component ("+" component)*          their sum
//   component  = name (":" key "=" value | ":" flag)*     a flag is key=true
//
// For example, "rope:layout=half+hype:mu=0.001:tau=learned" is a sum of two components.
#ifndef GNOMON_CATALOGUE_H_
#define GNOMON_CATALOGUE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gnomon {

struct CatalogueParameter {
  // The values that a specification accepts, in the order of the enumerators: a number; an integer;
  // "true" or "false"; one of the choices; the sizes of a grid's axes ("14x14"); numbers in the
  // same form ("1x1.5x2"); a number for all heads, "learned" or "fixed"; and none, because only a
  // tensor is valid.
  enum class Kind { kNumber, kInteger, kFlag, kChoice, kShape, kNumbers, kHeads, kTable };
  // The quantity that indexes a table's entries (its last axis) or rows (its second-to-last axis).
  enum class Index {
    kNone,         // independent of positions
    kBuckets,      // buckets of offsets
    kOffsets,      // all offsets from rows to columns of the call
    kNearOffsets,  // offsets up to a maximum
    kDistances,    // distances p_i - p_j
    kKeys,         // columns of the call, one row each
    kKeyEntries,   // columns of the call, one entry each
    kGrid,         // offsets on a grid
    kFirstAxis,    // offsets along the first axis of a grid
    kSecondAxis,   // offsets along the second axis
    kQueries,      // rows of the call
    kPairs,        // pairs of a row and a column
    kTokens,       // tokens, whether rows or columns
    kBucketRows    // buckets of distances p_i - p_j, one row each
  };
  // Whether the term's Python class and C++ function have an argument for the parameter: none (a
  // module, a grid or a table determines the value), required, or optional with the default.
  enum class Argument { kNone, kRequired, kOptional };

  std::string name;
  Kind kind = Kind::kNumber;
  // The default, as written in a specification; empty if it has no such form, in which case
  // `otherwise` describes it, if there is one.
  std::string default_value = "";
  std::string otherwise = "";
  // Description, including the shape of a table: one or more phrases.
  std::string meaning = "";
  // The choice that this parameter refines; classes accept both in one argument, such as
  // scaling="yarn:factor=4".
  std::string detail_of = "";
  // The values of that choice that use the parameter; setting it with another value is an error.
  // If empty, all values use it.
  std::vector<std::string> read_by = {};
  std::vector<std::string> choices = {};
  // The range of a number or an integer. If `above` is true, the lowest value is excluded.
  std::optional<double> lowest = std::nullopt;
  std::optional<double> highest = std::nullopt;
  bool above = false;
  // Whether the value may be a tensor: "name=tensor", with the tensor passed along with the
  // specification.
  bool takes_tensor = false;
  Index index = Index::kNone;  // of a table
  Argument argument = Argument::kNone;
  // For encodings: the name of the argument; if empty, the parameter's name is used.
  std::string argument_name = "";
  // For tables: whether only calls accept it, because modules have no initial value for it.
  bool of_call = false;
  // For a shape with a fixed number of axes: the names of the axis lengths, which are separate
  // arguments.
  std::vector<std::string> axes = {};

  // Returns the accepted values as text, such as "number" or "abs | odd | cosh".
  std::string values() const;
};

struct CatalogueEntry {
  enum class Role {
    kSimilarity,   // computes the scores of pairs
    kNone,         // has no effect
    kEmbedding,    // is added to the embeddings
    kRotation,     // rotates coordinates of q and k
    kBias,         // adds a bias for each offset in the sequence or along the axes of a grid
    kGridBias,     // adds a bias for each offset on a grid, from a table
    kKeyBias,      // adds a bias for each key
    kPairBias,     // adds a bias for each pair
    kContent,      // adds products of queries or keys with table rows to scores
    kNorm,         // normalises q and k before all other terms
    kTemperature,  // multiplies all scores of a row
    kSink,         // adds one more score to the softmax
    kGate          // multiplies the output
  };

  std::string name;
  std::string title;  // display name, such as "RoPE"
  std::string formula;
  // For documentation pages: the formula in LaTeX, and sentences that explain its symbols. If both
  // are empty, `formula` consists of words.
  std::string latex = "";
  std::string note = "";
  // Further information for callers: paragraphs separated by empty lines, and list items, each on a
  // line that begins with "- ".
  std::string details = "";
  std::string source;
  Role role = Role::kSimilarity;
  std::vector<CatalogueParameter> parameters = {};
  // Operations per query-key pair in the forward pass, in addition to the inner product, the scale
  // and the exponential: simple ones (arithmetic, comparisons, selections) plus special ones
  // (roots, logarithms, angles, divisions), such as "5 + 1".
  std::string cost = "";
  // Requirements on the call.
  bool needs_grid = false;
  bool needs_causal = false;
  bool needs_dot = false;
  // Whether its value for a key is a sum over other keys, so that a subset of the keys is not
  // enough to compute it.
  bool sums_over_keys = false;
  bool takes_scale = false;  // for similarities: whether the argument `scale` multiplies the scores
  // For encodings: whether a token's encoding depends on other tokens. The class then has the
  // argument `causal`, which excludes later tokens.
  bool takes_causal = false;
  // Name of the Python class and the C++ function, such as "HyPE"; empty if there is none.
  std::string class_name = "";
  // The file that LoadTerms loaded it from; empty for built-in terms.
  std::string library = "";

  const CatalogueParameter* Find(const std::string& parameter) const;
  // For documentation pages: returns the beginning of the sentence that ends with the formula in
  // LaTeX.
  const char* lead() const;
  // Returns whether it has a table with this index.
  bool HasTable(CatalogueParameter::Index index) const;
  // Returns where the term can be used, and its requirements, such as "attention(), modules; dot
  // and causal".
  std::string use() const;
  // For positions: returns the supported arrangements of tokens, such as "sequence, grid".
  std::string tokens() const;
};

// The role as a word: "similarity", "none", "embedding", "rotation", "bias", "grid_bias",
// "key_bias", "pair_bias", "content", "norm", "temperature", "sink", "gate".
const char* RoleName(CatalogueEntry::Role role);

// Return the entries in listing order. Similarities: "dot", then the others by name. Positions:
// "none", then the others by role and name.
std::vector<CatalogueEntry> SimilarityCatalogue();
std::vector<CatalogueEntry> PositionCatalogue();

// Returns both catalogues as JSON: {"similarities": [...], "positions": [...]}, with the fields
// above.
std::string CatalogueJson();

// Loads a shared library of terms, built with gnomon_add_terms() of gnomon's CMake package, and
// returns their names. The terms can then be used like built-in ones. Loading a library again adds
// nothing and returns the same names, even if the file has changed. Throws c10::ValueError, without
// adding anything, if the file does not exist, if it was built for a different version of gnomon or
// PyTorch, if it contains no terms, or if a name is already in use.
std::vector<std::string> LoadTerms(const std::string& path);

// Returns the display name of a specification: "RoPE + learned HyPE" for "rope+hype:tau=learned".
// Throws c10::ValueError if it is invalid.
std::string SimilarityTitle(const std::string& specification);
std::string PositionTitle(const std::string& specification);

}  // namespace gnomon

#endif  // GNOMON_CATALOGUE_H_
