// Parameters of catalogue entries, as written in the files of terms.
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

// The sizes that the tensors of a module depend on, and the lengths of one of its calls.
struct ModuleShape {
  int64_t heads;
  int64_t head_dim;    // of q and k
  int64_t value_dim;   // of v
  int64_t max_length;  // rows of a position table if the component has no length
  // Columns of the projected tokens.
  int64_t query_tokens = 0;
  int64_t key_tokens = 0;
  // Whether one column of a head is separate (a height or a time) and not rotated.
  bool has_height = false;
};
struct CallLengths {
  int64_t positions;  // one past the last query's position
  int64_t keys;
  // The largest p_i - p_j, (), if the caller gives positions. In this case, the lengths above do
  // not describe positions.
  std::optional<at::Tensor> farthest = std::nullopt;
};

// A tensor that a module computes from its tokens x (B, L, dim) in each call: x W^T + b, with this
// many columns per head.
struct TokenProjection {
  // Whether the tensor is computed from the tokens of keys, so that a cache must store it.
  bool of_keys = false;
  int64_t (*columns)(const Component& component, const ModuleShape& shape) = nullptr;
  // The initial value of b (H,), with W = 0. If null, there is no b, and W is initialised from N(0,
  // 1 / dim).
  at::Tensor (*bias_start)(int64_t heads) = nullptr;
  // Computes the tensor from the product (B, H, L, columns) in the computing type; null means the
  // identity.
  at::Tensor (*finish)(const at::Tensor& product) = nullptr;
};

// How a parameter that may be a tensor is used. In a module, the tensor is a per-head value,
// start * exp(5 theta) if learned, or a plain table.
struct TensorUse {
  // The initial value in a module, float64: (H,), or the whole table. Null for a similarity's
  // parameter, which is initialised so that the scores of N(0, 1) tokens have a standard deviation
  // of 1, and for tables that the caller passes.
  at::Tensor (*start)(const Component& component, const ModuleShape& shape) = nullptr;
  // For per-head values: whether they are learned if the specification does not set them.
  bool learned = true;
  bool of_values = false;  // whether the tensor is added to the values
  // Whether a component has the tensor; null means always.
  bool (*present)(const Component& component) = nullptr;
  // For modules: converts the stored tensor to the form that the operator reads; null means the
  // identity.
  at::Tensor (*expand)(const Component& component, const at::Tensor& held,
                       const CallLengths& lengths) = nullptr;
  // Whether the module stores the table itself, indexed like the parameter, rather than an input of
  // `expand`; null means always.
  bool (*holds_table)(const Component& component) = nullptr;
  // For modules: the projection that computes the tensor from tokens, instead of an initial value.
  std::optional<TokenProjection> projection = std::nullopt;

  // Whether a module creates the tensor by default.
  bool HasStart() const { return start != nullptr || projection; }
  bool IsPresent(const Component& component) const {
    return present == nullptr || present(component);
  }
};

using Index = CatalogueParameter::Index;
// The name, such as "near_offsets"; "" for kNone.
const char* IndexName(Index index);

struct Parameter : CatalogueParameter {
  TensorUse tensor = {};
  // For a choice of maps: the map for tokens that are already points; empty if there is none.
  std::string points = "";

  bool is_per_head() const { return kind == Kind::kHeads; }

  // Setters for chained calls, such as PositiveNumber("r", "1").Means("radius of the balls").
  Parameter Means(const char* text) const;
  // Describes the default in words, if there is no default value.
  Parameter Otherwise(const char* text) const;
  Parameter AtLeast(double number) const;
  Parameter AtMost(double number) const;
  // Make the parameter a required argument of calls, or no argument.
  Parameter Required() const;
  Parameter NoArgument() const;
  // For encodings: sets the name of the argument, if it differs from the parameter's name.
  Parameter Called(const char* other_name) const;
  // For shapes: sets the names of the axis lengths.
  Parameter OfAxes(std::vector<std::string> names) const;
  // For a choice of maps: sets the map for tokens that are already points.
  Parameter Points(const char* choice) const;
};

// Parameters of terms. Per-head values and tables are required arguments; the others are optional.
Parameter Number(const char* name, const char* default_value);
Parameter PositiveNumber(const char* name, const char* default_value);
Parameter Integer(const char* name, const char* default_value);
Parameter Flag(const char* name, const char* default_value);
// The first choice is the default.
Parameter Choice(const char* name, std::vector<std::string> choices);
// Positive numbers separated by "x".
Parameter Numbers(const char* name);
// One value per head; default_value is "learned", "fixed" or a number.
Parameter PerHead(const char* name, const char* default_value, const TensorUse& tensor = {});
// A tensor, which a specification cannot contain.
Parameter Table(const char* name, CatalogueParameter::Index index, const TensorUse& tensor);
// For positions that support grids: "shape" and "prefix", and for biases also "axis". The position
// Grid sets all three.
Parameter Shape();
std::vector<Parameter> OnGrid(std::vector<Parameter> parameters, const Parameter& shape = Shape());
std::vector<Parameter> OnAxis(std::vector<Parameter> parameters);
// Parameters for modules only: "length", the number of positions in a table, whose value LengthOf
// returns, and "per_head".
Parameter Length();
Parameter TablePerHead();
std::optional<int64_t> LengthOf(const Component& component, int64_t otherwise);

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_PARAMETERS_H_
