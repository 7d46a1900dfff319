// The similarities and positions that there are. Each is a file of similarities/, positions/ or
// encodings/: its functions, and an object that registers what the file says of itself; or a
// definition that is a similarity by itself (similarities/definition.h). There is no other list.
#ifndef GNOMON_OPS_CATALOGUE_REGISTRY_H_
#define GNOMON_OPS_CATALOGUE_REGISTRY_H_

#include <ATen/core/Tensor.h>
#include <gnomon/attention.h>
#include <gnomon/catalogue.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/catalogue/content.h"
#include "ops/catalogue/token_encoder.h"
#include "ops/catalogue/token_map.h"
#include "ops/coordinates/offset_range.h"
#include "ops/coordinates/token_positions.h"
#include "ops/grammar/component.h"

namespace gnomon {

// What the tensors of a module depend on, and the lengths of one of its calls.
struct ModuleShape {
  int64_t heads;
  int64_t head_dim;    // of q and k
  int64_t value_dim;   // of v
  int64_t max_length;  // rows of a table of positions where the component gives no length
  // Columns of the tokens that it projects.
  int64_t query_tokens = 0;
  int64_t key_tokens = 0;
  // Whether one column of a head is told apart, a height or a time, and stays where it is.
  bool has_height = false;
};
struct CallLengths {
  int64_t positions;  // one past the last query's
  int64_t keys;
  // Where tokens stand where the caller says, (): the greatest p_i - p_j. What is above does not
  // tell of positions then.
  std::optional<at::Tensor> farthest = std::nullopt;
};

// A tensor that a module makes of its tokens x (B, L, dim) in each call: x W^T + b, to so many
// columns for each head.
struct TokenProjection {
  // Of the tokens that keys come from, and so one of those that a cache keeps.
  bool of_keys = false;
  int64_t (*columns)(const Component& component, const ModuleShape& shape);
  // Where b (H,) starts, W then at 0; null: there is no b, and W starts as N(0, 1 / dim).
  at::Tensor (*bias_start)(int64_t heads) = nullptr;
  // The tensor, of the product (B, H, L, columns) in the computing type; null: that itself.
  at::Tensor (*finish)(const at::Tensor& product) = nullptr;
};

// A bias by offset (OffsetRange). tensors: those of the entry in its order, (H,) or a table, in the
// dtype of the bias.
using OffsetBiasFunction = at::Tensor (*)(const Component& component,
                                          const std::vector<at::Tensor>& tensors,
                                          const OffsetRange& range);

// What a parameter is that may be a tensor. In a module it is one value per head, which is
// start * exp(5 theta) where it is learned, or a table as it is.
struct TensorUse {
  // The start in a module, float64: (H,), or the whole table; null of a similarity's parameter,
  // which starts where the scores of N(0, 1) tokens have a spread of 1, and of a table that belongs
  // to a call, or that the caller holds.
  at::Tensor (*start)(const Component& component, const ModuleShape& shape) = nullptr;
  // Of one value a head: where the specification does not say.
  bool learned = true;
  bool of_values = false;  // whether it is added to the values
  // Whether a component has it; null: always.
  bool (*present)(const Component& component) = nullptr;
  // Of a module: what the operator reads, from what the module holds; null: the same.
  at::Tensor (*expand)(const Component& component, const at::Tensor& held,
                       const CallLengths& lengths) = nullptr;
  // Whether what the module holds is the table itself, indexed as the parameter is, and not what
  // `expand` makes it from; null: always.
  bool (*holds_table)(const Component& component) = nullptr;
  // In a module: made of its tokens, in place of a start.
  std::optional<TokenProjection> projection = std::nullopt;

  // Whether a module has it without being given one.
  bool HasStart() const { return start != nullptr || projection; }
  bool IsPresent(const Component& component) const {
    return present == nullptr || present(component);
  }
};

using Index = CatalogueParameter::Index;
// As a word, "near_offsets"; "" of kNone.
const char* IndexName(Index index);

struct Parameter : CatalogueParameter {
  TensorUse tensor = {};
  // Of a choice of maps: the one by which tokens are points already; empty: there is none.
  std::string points = "";

  bool is_per_head() const { return kind == Kind::kHeads; }

  // The same with one thing said of it, PositiveNumber("r", "1").Means("radius of the balls").
  Parameter Means(const char* text) const;
  // What it stands for where it has no default, or where it is not a number.
  Parameter Otherwise(const char* text) const;
  Parameter AtLeast(double number) const;
  Parameter AtMost(double number) const;
  // As an argument of a call: one that must be given, or none.
  Parameter Required() const;
  Parameter NoArgument() const;
  // Of an encoding: as an argument of another name.
  Parameter Called(const char* other_name) const;
  // Of a shape: the names of the lengths of its axes.
  Parameter OfAxes(std::vector<std::string> names) const;
  // Of a choice of maps: the one by which tokens are points already.
  Parameter Points(const char* choice) const;
};

// Parameters as the files of terms write them. Values for heads and tables are required arguments,
// the others optional ones.
Parameter Number(const char* name, const char* default_value);
Parameter PositiveNumber(const char* name, const char* default_value);
Parameter Integer(const char* name, const char* default_value);
Parameter Flag(const char* name, const char* default_value);
// The first is the default.
Parameter Choice(const char* name, std::vector<std::string> choices);
// Positive numbers joined by x.
Parameter Numbers(const char* name);
// One value a head; default_value "learned", "fixed" or a number.
Parameter PerHead(const char* name, const char* default_value, const TensorUse& tensor = {});
// A tensor that no text stands for.
Parameter Table(const char* name, CatalogueParameter::Index index, const TensorUse& tensor);
// Of a position that knows grids: "shape" and "prefix", and of a bias the "axis" that it lies
// along; a sum over axes gives a bias all three.
Parameter Shape();
std::vector<Parameter> OnGrid(std::vector<Parameter> parameters, const Parameter& shape = Shape());
std::vector<Parameter> OnAxis(std::vector<Parameter> parameters);
// Of modules alone: "length", the positions that a table is for, and their number; "per_head".
Parameter Length();
Parameter TablePerHead();
std::optional<int64_t> LengthOf(const Component& component, int64_t otherwise);

struct SimilarityEntry {
  CatalogueEntry catalogue;
  std::vector<Parameter> parameters = {};
  TokenMap map;
  // Whether map gives q and k as they are, of whatever type.
  bool keeps_tokens = false;
  // Its pair functions, where they are not the one of its name: what chooses them, and their names.
  std::vector<std::pair<std::string, std::string>> functions = {};
  // Whether the last coordinate of a token is told apart, a height; null: it is not.
  bool (*has_height)(const Component& component) = nullptr;
  // Whether callers have that coordinate first, as a time; null: last. Maps have it last.
  bool (*height_is_first)(const Component& component) = nullptr;
  // Of tokens that are points of hyperboloids (x.x)_L = -c: c (H), of what other_head_parameters
  // are; null: 1.
  at::Tensor (*curvature)(const std::vector<at::Tensor>& others) = nullptr;
  // The one number of columns that tokens have; 0: any.
  int64_t columns = 0;

  // The parameter that multiplies the scores of each head, "gamma" or "beta"; null: none.
  const Parameter* head_parameter() const;
  // What else there is one of for each head, in their order.
  std::vector<const Parameter*> other_head_parameters() const;
  // Tokens (..., D) of a caller as maps and rotations take them.
  at::Tensor WithHeightLast(const Component& component, const at::Tensor& tokens) const;
  bool HasHeight(const Component& component) const {
    return has_height != nullptr && has_height(component);
  }
  // The parameter by which the tokens of a component are points already; null: they need not be.
  const Parameter* points_parameter(const Component& component) const;
  // Throws c10::ValueError, "<operation><what><head_dim>; ...", unless tokens may have that many
  // columns.
  void CheckColumns(const Component& component, int64_t head_dim, const char* operation,
                    const char* what) const;
};

// What is rotated: the first coordinates of x (B, H, L, D), q or k.
struct RotationCall {
  at::Tensor x;
  c10::SymInt position;              // of the first row
  std::optional<at::Tensor> firsts;  // (B,), that of each batch
  c10::SymInt length;                // one past the farthest position of q and k
  bool of_keys;
  bool is_product;      // whether the similarity is that of an inner product
  bool last_is_height;  // the last coordinate then stays where it is
  int64_t heads = 1;    // of q, and of k
  int64_t key_heads = 1;
  // Instead of position, firsts and length.
  std::optional<TokenPositions> positions = std::nullopt;
  const char* operation = "gnomon.attention";  // of messages
};
// Keys come back with the heads of q where those turn them differently; tensors are those of the
// entry.
using RotationFunction = at::Tensor (*)(const Component& component,
                                        const std::vector<at::Tensor>& tensors,
                                        const RotationCall& call);

// q or k, normed; tensors are those of the entry.
using NormFunction = at::Tensor (*)(const Component& component,
                                    const std::vector<at::Tensor>& tensors, const at::Tensor& x,
                                    bool of_keys);

// The rows that a temperature is of.
struct TemperatureCall {
  at::Tensor positions;  // (Lq,) or (B, 1, Lq), float64
  at::Tensor seen;       // how many keys are at hand up to there, likewise; at least 1
};
// What multiplies the scores: it broadcasts with (B, H, Lq).
using TemperatureFunction = at::Tensor (*)(const Component& component,
                                           const std::vector<at::Tensor>& tensors,
                                           const TemperatureCall& call);

// What a component is used in.
struct ComponentUse {
  // Whether tables by offset are of positions, their middle the offset 0, as those of modules are;
  // else of the rows and columns of one call.
  bool has_tables_of_positions = false;
  // Whether a token may see those behind it: not where a call is causal, in a sequence.
  bool looks_ahead = true;
};

// Of Role::kGridBias, kSink and kGate the first tensor says all, and there is no function; of
// Role::kKeyBias the first tensor, (1 or B, 1 or H, Lk), is what `bias` is given.
struct PositionEntry {
  using Role = CatalogueEntry::Role;

  CatalogueEntry catalogue;
  std::vector<Parameter> parameters = {};
  // Of Role::kBias: (H, entries), by offset. Of Role::kKeyBias: (1 or B, H, Lk), -inf masks a
  // key, in the type of the scores or in float64, which is then kept to its digits. Of
  // Role::kPairBias: what broadcasts to (B, H, Lq, Lk).
  OffsetBiasFunction bias = nullptr;
  RotationFunction rotate = nullptr;          // of Role::kRotation
  TokenEncoderFactory encoder = nullptr;      // of Role::kEmbedding
  ContentFunction content = nullptr;          // of Role::kContent
  NormFunction norm = nullptr;                // of Role::kNorm
  TemperatureFunction temperature = nullptr;  // of Role::kTemperature
  // Whether it goes by RotationCall::length, the length of the whole call; null: it does not.
  bool (*goes_by_length)(const Component& component) = nullptr;
  // What a component says where it is used so and says nothing itself: whatever its functions then
  // read from it. Null: the same as anywhere.
  Component (*complete)(Component component, const ComponentUse& use) = nullptr;
  // Of a module: the positions at which it is defined; null: all, or those of its grid.
  std::optional<int64_t> (*max_length)(const Component& component, int64_t otherwise) = nullptr;

  Role role() const { return catalogue.role; }
  bool GoesByLength(const Component& component) const {
    return goes_by_length != nullptr && goes_by_length(component);
  }
  Component Complete(Component component, const ComponentUse& use) const {
    return complete == nullptr ? std::move(component) : complete(std::move(component), use);
  }
  // Those of the parameters that may be tensors and that a component has, in their order.
  std::vector<const Parameter*> Tensors(const Component& component) const;
};

// An object of these in a file makes its entry, or its pair function, one of the library's. A name
// that there is already, or an entry without what its role asks for, is an error that LoadTerms
// throws, and terminates the program otherwise.
struct RegisterSimilarity {
  explicit RegisterSimilarity(SimilarityEntry entry);
};
struct RegisterPosition {
  explicit RegisterPosition(PositionEntry entry);
};
struct RegisterPairFunction {
  explicit RegisterPairFunction(const PairFunction& function);
};

// What the objects above register while `load` runs, under the name of a library: it is added when
// `load` has returned, all of it or, if a name is taken, nothing. Returns the names of the terms.
std::vector<std::string> RegisterTogether(const std::string& library,
                                          const std::function<void()>& load);

const PositionEntry* FindPositionEntry(const std::string& name);

// The entry of that name; checks the component's keys and values. Throws c10::ValueError naming the
// nearest and all known ones.
const SimilarityEntry& FindSimilarity(const Component& component);
const PositionEntry& FindPosition(const Component& component);
// The same where positions act in attention: throws, beginning with `operation`, for a position
// that is added to embeddings, and names only those that a specification alone says all of there,
// with tables where the caller holds them.
const PositionEntry& FindPositionInAttention(const char* operation, const Component& component,
                                             bool holds_tables);

// The positions at which all of a sum is defined in a module; nullopt: all.
std::optional<int64_t> LongestSequence(const std::vector<Component>& components,
                                       int64_t max_length);

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_REGISTRY_H_
