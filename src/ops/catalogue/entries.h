// What a file of a similarity or a position says of it.
#ifndef GNOMON_OPS_CATALOGUE_ENTRIES_H_
#define GNOMON_OPS_CATALOGUE_ENTRIES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <gnomon/catalogue.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/catalogue/content.h"
#include "ops/catalogue/parameters.h"
#include "ops/catalogue/token_encoder.h"
#include "ops/catalogue/token_map.h"
#include "ops/coordinates/offset_range.h"
#include "ops/coordinates/token_positions.h"
#include "ops/grammar/component.h"

namespace gnomon {

// A bias by offset (OffsetRange). tensors: those of the entry in its order, (H,) or a table, in the
// dtype of the bias.
using OffsetBiasFunction = at::Tensor (*)(const Component& component,
                                          const std::vector<at::Tensor>& tensors,
                                          const OffsetRange& range);

// What a bias of keys may read beside its tensor.
struct KeyBiasCall {
  // (1 or B, Lk): the columns of the keys in the order of their segments and positions, where it is
  // another one than theirs.
  std::optional<at::Tensor> key_order = std::nullopt;
  // With segments, of the same size: where in that order the segment of each key there begins.
  std::optional<at::Tensor> segment_begin = std::nullopt;
};
// tensors: those of the entry, the first (1 or B, 1 or H, Lk), 0 where keys are hidden. Gives
// (1 or B, 1 or H, Lk), -inf masks a key, in the type of the scores or in float64, which is then
// kept to its digits.
using KeyBiasFunction = at::Tensor (*)(const Component& component,
                                       const std::vector<at::Tensor>& tensors,
                                       const KeyBiasCall& call);

// What broadcasts to (B, H, Lq, Lk), of the tensors of the entry alone, each pair by itself: where
// tokens stand is nothing that it is told, and where a call is computed in parts, the tensors are
// those of some rows and keys. One that reads others sets sums_over_keys.
using PairBiasFunction = at::Tensor (*)(const Component& component,
                                        const std::vector<at::Tensor>& tensors);

struct SimilarityEntry {
  CatalogueEntry catalogue;
  std::vector<Parameter> parameters = {};
  TokenMap map;
  // Whether map gives q and k as they are, of whatever type.
  bool keeps_tokens = false;
  // Whether its scores are products of the tokens as they are, times `scale`: what adds products to
  // these, or multiplies both tokens, goes with it alone.
  bool is_product = false;
  // Its pair functions: what chooses them, and their names. Registered without, it has the one of
  // its own name.
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
  bool HeightIsFirst(const Component& component) const {
    return height_is_first != nullptr && height_is_first(component);
  }
  // The parameter by which the tokens of a component are points already; null: they need not be.
  const Parameter* points_parameter(const Component& component) const;
  // What `map` gives for q (B, H, Lq, D), k (B, Hkv, Lk, D) and parameters (H,). Throws
  // c10::ValueError unless it is what MappedTokens says.
  MappedTokens Mapped(const Component& component, const at::Tensor& q, const at::Tensor& k,
                      const HeadParameters& heads) const;
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
  at::Tensor positions;  // (1 or B, 1, Lq), float64
  at::Tensor seen;       // how many keys are at hand up to there; at least 1; broadcasts with it
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

// Of Role::kGridBias, kSink and kGate the first tensor says all, and there is no function.
struct PositionEntry {
  using Role = CatalogueEntry::Role;

  CatalogueEntry catalogue;
  std::vector<Parameter> parameters = {};
  OffsetBiasFunction bias = nullptr;          // of Role::kBias
  KeyBiasFunction key_bias = nullptr;         // of Role::kKeyBias; null: its tensor
  PairBiasFunction pair_bias = nullptr;       // of Role::kPairBias; null: its tensor
  RotationFunction rotate = nullptr;          // of Role::kRotation
  TokenEncoderFactory encoder = nullptr;      // of Role::kEmbedding
  ContentFunction content = nullptr;          // of Role::kContent
  NormFunction norm = nullptr;                // of Role::kNorm
  TemperatureFunction temperature = nullptr;  // of Role::kTemperature
  // Whether it goes by the whole call, a rotation by RotationCall::length and a bias by offset by
  // anything of OffsetRange but the offsets, as keys, queries or query_offset; null: it does not.
  bool (*goes_by_length)(const Component& component) = nullptr;
  // What a component says where it is used so and says nothing itself: whatever its functions then
  // read from it. Null: the same as anywhere.
  Component (*complete)(Component component, const ComponentUse& use) = nullptr;
  // Of a module: the positions at which it is defined; null: all, or those of its grid.
  std::optional<int64_t> (*max_length)(const Component& component, int64_t otherwise) = nullptr;
  // Of a module: how many coordinates the positions of its calls have; null: one, or any number.
  int64_t (*axes)(const Component& component) = nullptr;

  Role role() const { return catalogue.role; }
  bool GoesByLength(const Component& component) const {
    return goes_by_length != nullptr && goes_by_length(component);
  }
  Component Complete(Component component, const ComponentUse& use) const {
    return complete == nullptr ? std::move(component) : complete(std::move(component), use);
  }
  // As its class is called or, without one, as specifications name it.
  const std::string& shown_name() const {
    return catalogue.class_name.empty() ? catalogue.name : catalogue.class_name;
  }
  // Those of the parameters that may be tensors and that a component has, in their order.
  std::vector<const Parameter*> Tensors(const Component& component) const;
  // What the functions of an entry give; throw c10::ValueError for what they must not.
  // `bias`: (H, entries), or, where batches have offsets of their own, (B, H, entries).
  at::Tensor BiasByOffset(const Component& component, const std::vector<at::Tensor>& tensors,
                          const OffsetRange& range) const;
  // `rotate`: tokens as they came; keys may have the heads of q.
  at::Tensor Rotated(const Component& component, const std::vector<at::Tensor>& tensors,
                     const RotationCall& call) const;
  // `norm`: tokens as they came.
  at::Tensor Normed(const Component& component, const std::vector<at::Tensor>& tensors,
                    const at::Tensor& x, bool of_keys) const;
};

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_ENTRIES_H_
