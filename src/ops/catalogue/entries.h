// The registered description of a similarity or a position.
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
#include "ops/operators/pair_rotation.h"

namespace gnomon {

// Computes an offset bias (OffsetRange). tensors: the entry's tensors in its order, (H,) or a
// table, in the dtype of the bias.
using OffsetBiasFunction = at::Tensor (*)(const Component& component,
                                          const std::vector<at::Tensor>& tensors,
                                          const OffsetRange& range);

// Additional inputs of a key bias.
struct KeyBiasCall {
  // (1 or B, Lk): the columns of the keys, ordered by segment and position; nullopt if this is the
  // order of the columns.
  std::optional<at::Tensor> key_order = std::nullopt;
  // If there are segments, a tensor of the same shape: for each key, the index in that order at
  // which its segment begins.
  std::optional<at::Tensor> segment_begin = std::nullopt;
};
// tensors: the entry's tensors, of which the first is (1 or B, 1 or H, Lk), 0 for masked keys.
// Returns (1 or B, 1 or H, Lk), where -inf masks a key, in the type of the scores or in float64,
// whose precision is then preserved.
using KeyBiasFunction = at::Tensor (*)(const Component& component,
                                       const std::vector<at::Tensor>& tensors,
                                       const KeyBiasCall& call);

// Returns an array that broadcasts to (B, H, Lq, Lk), computed per pair from the entry's tensors
// only. The function does not receive the tokens' positions. If a call is computed in parts, the
// tensors contain only some rows and keys. An entry whose function reads the values of other pairs
// must set sums_over_keys.
using PairBiasFunction = at::Tensor (*)(const Component& component,
                                        const std::vector<at::Tensor>& tensors);

struct SimilarityEntry {
  CatalogueEntry catalogue;
  std::vector<Parameter> parameters = {};
  TokenMap map = nullptr;
  // A map that also rotates tokens, for which GPUs have one kernel; null if there is none. `map` is
  // then derived from it.
  RawTokenMap raw_map = nullptr;
  // Whether `map` returns q and k unchanged, whatever their dtype.
  bool keeps_tokens = false;
  // Whether its scores are products of the unmapped tokens times `scale`. Terms that add products
  // to these scores, or scale both tokens, work only with such similarities.
  bool is_product = false;
  // Its pair functions: for each, the choice that selects it, and its name. Default: the pair
  // function with the entry's name.
  std::vector<std::pair<std::string, std::string>> functions = {};
  // Whether the last coordinate of a token is a separate height; null means no.
  bool (*has_height)(const Component& component) = nullptr;
  // Whether callers pass that coordinate first, as a time; null means last. Maps receive it last.
  bool (*height_is_first)(const Component& component) = nullptr;
  // For tokens that are hyperboloid points (x.x)_L = -c: c (H), computed from
  // other_head_parameters; null means 1.
  at::Tensor (*curvature)(const std::vector<at::Tensor>& others) = nullptr;
  // The required number of columns of tokens; 0 means any number.
  int64_t columns = 0;

  // The parameter that multiplies the scores of each head, such as "gamma"; null if there is none.
  const Parameter* head_parameter() const;
  // The other per-head parameters, in order.
  std::vector<const Parameter*> other_head_parameters() const;
  // The caller's tokens (..., D) in the form that maps and rotations expect.
  at::Tensor WithHeightLast(const Component& component, const at::Tensor& tokens) const;
  bool HasHeight(const Component& component) const {
    return has_height != nullptr && has_height(component);
  }
  bool HeightIsFirst(const Component& component) const {
    return height_is_first != nullptr && height_is_first(component);
  }
  // The parameter that states that a component's tokens are already points; null if they are not.
  const Parameter* points_parameter(const Component& component) const;
  // The result of `map` for q (B, H, Lq, D), k (B, Hkv, Lk, D) and parameters (H,). Throws
  // c10::ValueError unless the result has the form of MappedTokens.
  MappedTokens Mapped(const Component& component, const at::Tensor& q, const at::Tensor& k,
                      const HeadParameters& heads) const;
  // The same for tokens that only raw_map can map.
  MappedTokens Mapped(const Component& component, const RawTokens& tokens,
                      const HeadParameters& heads) const;
  // Throws c10::ValueError, "<operation><what><head_dim>; ...", if tokens cannot have head_dim
  // columns.
  void CheckColumns(const Component& component, int64_t head_dim, const char* operation,
                    const char* what) const;

 private:
  // The result of a map for q and k, whose x and y must have the dtype `type`.
  MappedTokens Checked(MappedTokens tokens, const at::Tensor& q, const at::Tensor& k,
                       at::ScalarType type, const HeadParameters& heads) const;
};

// A rotation of the first coordinates of x (B, H, L, D), which is q or k.
struct RotationCall {
  at::Tensor x;
  c10::SymInt position;              // of the first row
  std::optional<at::Tensor> firsts;  // (B,), per batch
  c10::SymInt length;                // one past the farthest position of q and k
  bool of_keys;
  bool is_product;        // whether the similarity is an inner product
  bool last_is_height;    // whether the last coordinate is a height, which is not rotated
  int64_t heads = 1;      // of q
  int64_t key_heads = 1;  // of k
  // Replaces position, firsts and length.
  std::optional<TokenPositions> positions = std::nullopt;
  const char* operation = "gnomon.attention";  // for messages
  // If defined, a tensor to write the result to, with the shape and dtype of x, whose last axis has
  // stride 1. An entry may ignore it.
  at::Tensor to = {};
  // If not null, the entry may store its rotation here and return x unchanged, and x may be of low
  // precision. A result that is rotated then has the computing type.
  PendingRotation* pending = nullptr;
  // For keys at the positions of the queries: the pending rotation of the queries. Otherwise, null.
  const PendingRotation* as_queries = nullptr;
};
// Keys are returned with the heads of q if the query heads rotate them differently. tensors: the
// entry's tensors.
using RotationFunction = at::Tensor (*)(const Component& component,
                                        const std::vector<at::Tensor>& tensors,
                                        const RotationCall& call);

// Returns q or k, normalised. tensors: the entry's tensors.
using NormFunction = at::Tensor (*)(const Component& component,
                                    const std::vector<at::Tensor>& tensors, const at::Tensor& x,
                                    bool of_keys);

// The rows for which a temperature is computed.
struct TemperatureCall {
  at::Tensor positions;  // (1 or B, 1, Lq), float64
  at::Tensor seen;       // number of keys up to each position, at least 1; broadcasts similarly
};
// Returns the factor of the scores, which broadcasts with (B, H, Lq).
using TemperatureFunction = at::Tensor (*)(const Component& component,
                                           const std::vector<at::Tensor>& tensors,
                                           const TemperatureCall& call);

// The context of a component.
struct ComponentUse {
  // Whether offset tables are indexed by positions, with offset 0 in the middle, as in modules;
  // otherwise they are indexed by the rows and columns of one call.
  bool has_tables_of_positions = false;
  // Whether a token may attend to later tokens; false in a causal call on a sequence.
  bool looks_ahead = true;
};

// Entries with the roles kGridBias, kSink and kGate need no function: their first tensor is
// sufficient.
struct PositionEntry {
  using Role = CatalogueEntry::Role;

  CatalogueEntry catalogue;
  std::vector<Parameter> parameters = {};
  OffsetBiasFunction bias = nullptr;          // of Role::kBias
  KeyBiasFunction key_bias = nullptr;         // of Role::kKeyBias; if null, the bias is its tensor
  PairBiasFunction pair_bias = nullptr;       // of Role::kPairBias; if null, the bias is its tensor
  RotationFunction rotate = nullptr;          // of Role::kRotation
  bool may_wait = false;                      // whether `rotate` supports RotationCall::pending
  TokenEncoderFactory encoder = nullptr;      // of Role::kEmbedding
  ContentFunction content = nullptr;          // of Role::kContent
  NormFunction norm = nullptr;                // of Role::kNorm
  TemperatureFunction temperature = nullptr;  // of Role::kTemperature
  // Whether the entry depends on the whole call: a rotation may depend on RotationCall::length, and
  // an offset bias on parts of OffsetRange other than the offsets, such as keys, queries or
  // query_offset. Null means no.
  bool (*goes_by_length)(const Component& component) = nullptr;
  // Sets the context-dependent defaults of a component; null if there are none.
  Component (*complete)(Component component, const ComponentUse& use) = nullptr;
  // For modules: the number of positions at which the entry is defined; null if this is unlimited
  // or given by the grid.
  std::optional<int64_t> (*max_length)(const Component& component, int64_t otherwise) = nullptr;
  // For modules: the number of coordinates per position in its calls; null if it is one or any
  // number.
  int64_t (*axes)(const Component& component) = nullptr;

  Role role() const { return catalogue.role; }
  bool GoesByLength(const Component& component) const {
    return goes_by_length != nullptr && goes_by_length(component);
  }
  Component Complete(Component component, const ComponentUse& use) const {
    return complete == nullptr ? std::move(component) : complete(std::move(component), use);
  }
  // The name of its class or, without one, its name in specifications.
  const std::string& shown_name() const {
    return catalogue.class_name.empty() ? catalogue.name : catalogue.class_name;
  }
  // The parameters of a component that may be tensors, in order.
  std::vector<const Parameter*> Tensors(const Component& component) const;
  // Call the entry's functions and check their results; throw c10::ValueError if a result is
  // invalid. BiasByOffset: (H, entries), or (B, H, entries) if batches have their own offsets.
  at::Tensor BiasByOffset(const Component& component, const std::vector<at::Tensor>& tensors,
                          const OffsetRange& range) const;
  // Returns a tensor with the shape of the tokens, except that keys may have the heads of q.
  at::Tensor Rotated(const Component& component, const std::vector<at::Tensor>& tensors,
                     const RotationCall& call) const;
  // Returns a tensor with the shape of the tokens.
  at::Tensor Normed(const Component& component, const std::vector<at::Tensor>& tensors,
                    const at::Tensor& x, bool of_keys) const;
};

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_ENTRIES_H_
