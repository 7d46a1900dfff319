// Parameters of the catalogue's entries, as the files of terms write them.
#ifndef GNOMON_OPS_CATALOGUE_PARAMETERS_H_
#define GNOMON_OPS_CATALOGUE_PARAMETERS_H_

#include <ATen/core/Tensor.h>
#include <gnomon/catalogue.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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
  int64_t (*columns)(const Component& component, const ModuleShape& shape) = nullptr;
  // Where b (H,) starts, W then at 0; null: there is no b, and W starts as N(0, 1 / dim).
  at::Tensor (*bias_start)(int64_t heads) = nullptr;
  // The tensor, of the product (B, H, L, columns) in the computing type; null: that itself.
  at::Tensor (*finish)(const at::Tensor& product) = nullptr;
};

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

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_PARAMETERS_H_
