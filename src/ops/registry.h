// The one list of similarities and positions: what each is called, what it says of itself, and the
// function that computes it. A new one is a function and an entry in registry.cc.
#ifndef GNOMON_OPS_REGISTRY_H_
#define GNOMON_OPS_REGISTRY_H_

#include <ATen/core/Tensor.h>
#include <gnomon/catalogue.h>

#include <optional>
#include <string>
#include <vector>

#include "ops/component.h"
#include "ops/content.h"
#include "ops/offset_bias.h"
#include "ops/token_encoding.h"
#include "ops/token_map.h"

namespace gnomon {

// What the tensors of a module depend on, and the lengths of one of its calls.
struct ModuleShape {
  int64_t heads;
  int64_t head_dim;    // of q and k
  int64_t value_dim;   // of v
  int64_t max_length;  // rows of a table of positions where the component gives no length
};
struct CallLengths {
  int64_t positions;  // one past the last query's
  int64_t keys;
};

// A tensor that an entry reads. A specification may give a number for it instead, which then stands
// for every head, and in a module "learned" or "fixed".
struct TensorParameter {
  // Of a module: a table as it is (T5), or one value a head, which is start * exp(5 theta) where it
  // is learned.
  enum class Kind { kHeads, kTable };

  std::string name;
  Kind kind;
  bool learned;  // in a module, where the specification does not say
  // The start in a module, float64: (H,), or the whole table.
  at::Tensor (*start)(const Component& component, const ModuleShape& shape);
  // Whether a component has it; null: always.
  bool (*present)(const Component& component) = nullptr;
  // Of a module: what the operator reads, from what the module holds; null: the same.
  at::Tensor (*expand)(const Component& component, const at::Tensor& held,
                       const CallLengths& lengths) = nullptr;

  bool IsPresent(const Component& component) const {
    return present == nullptr || present(component);
  }
};

struct SimilarityEntry {
  CatalogueEntry catalogue;
  TokenMap map;
  // The parameter that multiplies the scores of each head, "gamma" or "beta"; null: none.
  const char* head_parameter = nullptr;
  // Whether the last coordinate of a token is told apart, a height; null: it is not.
  bool (*has_height)(const Component& component) = nullptr;
  // The one number of columns that tokens have; 0: any.
  int64_t columns = 0;
  // Whether the argument `scale` of attention multiplies the scores.
  bool takes_scale = false;

  bool HasHeight(const Component& component) const {
    return has_height != nullptr && has_height(component);
  }
  // Throws c10::ValueError, which begins with `what`, unless tokens may have that many columns.
  void CheckColumns(const Component& component, int64_t head_dim, const std::string& what) const;
};

struct PositionEntry {
  // What it acts on: nothing, the embeddings, the coordinates of q and k, or the scores; by offset
  // in the sequence or along the axes of a grid (kBias), by a table over a grid (kGridBias), or by
  // the product of the query and rows of tables (kContent).
  enum class Role { kNone, kEmbedding, kRotation, kBias, kGridBias, kContent };

  CatalogueEntry catalogue;
  Role role;
  std::vector<TensorParameter> tensors;
  OffsetBiasFunction bias = nullptr;      // of Role::kBias
  TokenEncoderFactory encoder = nullptr;  // of Role::kEmbedding
  ContentFunction content = nullptr;      // of Role::kContent
  // Of a module: the positions at which it is defined; null: all, or those of its grid.
  std::optional<int64_t> (*max_length)(const Component& component, int64_t otherwise) = nullptr;
};

const std::vector<SimilarityEntry>& SimilarityEntries();
const std::vector<PositionEntry>& PositionEntries();

// The entry of that name; checks the component's keys. Throws c10::ValueError naming the nearest
// and all known ones.
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

#endif  // GNOMON_OPS_REGISTRY_H_
