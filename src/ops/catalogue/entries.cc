#include "ops/catalogue/entries.h"

#include <ATen/ATen.h>
#include <gnomon/attention.h>

#include <initializer_list>

#include "ops/operators/tensors.h"

namespace gnomon {

const Parameter* SimilarityEntry::head_parameter() const {
  if (catalogue.takes_scale) return nullptr;
  for (const Parameter& parameter : parameters) {
    if (parameter.is_per_head()) return &parameter;
  }
  return nullptr;
}

std::vector<const Parameter*> SimilarityEntry::other_head_parameters() const {
  std::vector<const Parameter*> others;
  for (const Parameter& parameter : parameters) {
    if (parameter.is_per_head() && &parameter != head_parameter()) others.push_back(&parameter);
  }
  return others;
}

at::Tensor SimilarityEntry::WithHeightLast(const Component& component,
                                           const at::Tensor& tokens) const {
  return HeightIsFirst(component) ? tokens.roll(-1, -1) : tokens;
}

std::vector<const Parameter*> PositionEntry::Tensors(const Component& component) const {
  std::vector<const Parameter*> tensors;
  for (const Parameter& parameter : parameters) {
    if (parameter.takes_tensor && parameter.tensor.IsPresent(component)) {
      tensors.push_back(&parameter);
    }
  }
  return tensors;
}

MappedTokens SimilarityEntry::Mapped(const Component& component, const at::Tensor& q,
                                     const at::Tensor& k, const HeadParameters& heads) const {
  return Checked(map(component, q, k, heads), q, k, q.scalar_type(), heads);
}

MappedTokens SimilarityEntry::Mapped(const Component& component, const RawTokens& tokens,
                                     const HeadParameters& heads) const {
  return Checked(raw_map(component, tokens, heads), tokens.q, tokens.k, tokens.type, heads);
}

MappedTokens SimilarityEntry::Checked(MappedTokens tokens, const at::Tensor& q, const at::Tensor& k,
                                      at::ScalarType type, const HeadParameters& heads) const {
  const char* const name = catalogue.name.c_str();
  const PairFunction* function = nullptr;
  try {
    if (tokens.function != nullptr) function = &FindPairFunction(tokens.function);
  } catch (const Error&) {
    // An unknown name is reported like a missing one.
  }
  TORCH_CHECK_VALUE(function != nullptr, "gnomon.attention: the map of ", name,
                    " returns the pair function \"",
                    tokens.function == nullptr ? "" : tokens.function,
                    "\", which does not exist; expected the name of a registered pair function");
  const auto expect = [&](const char* what, const at::Tensor& tensor, at::ScalarType of,
                          std::initializer_list<c10::SymInt> sizes) {
    TORCH_CHECK_VALUE(tensor.defined() && tensor.sym_sizes() == c10::SymIntArrayRef(sizes),
                      "gnomon.attention: the map of ", name, " returns ", what, " of shape ",
                      tensor.defined() ? tensor.sym_sizes() : c10::SymIntArrayRef(), "; expected ",
                      c10::SymIntArrayRef(sizes));
    TORCH_CHECK_TYPE(tensor.scalar_type() == of, "gnomon.attention: the map of ", name, " returns ",
                     what, " of dtype ", tensor.scalar_type(), "; expected ", of);
  };
  TORCH_CHECK_VALUE(
      tokens.x.defined() && tokens.x.dim() == 4 && tokens.y.defined() && tokens.y.dim() == 4,
      "gnomon.attention: the map of ", name,
      " returns x or y without four axes; expected (B, H, Lq, D') and (B, Hkv, Lk, D')");
  const c10::SymInt width = tokens.x.sym_size(3);
  expect("x", tokens.x, type, {q.sym_size(0), q.sym_size(1), q.sym_size(2), width});
  // Keys that differ per query head have the heads of q.
  const c10::SymInt key_heads =
      tokens.y.sym_size(1) == q.sym_size(1) ? q.sym_size(1) : k.sym_size(1);
  expect("y", tokens.y, type, {k.sym_size(0), key_heads, k.sym_size(2), width});
  const at::ScalarType of_numbers = heads.factor.scalar_type();
  expect("a factor", tokens.factor, of_numbers, {q.sym_size(1)});
  const auto expect_scalars = [&](const char* what, const at::Tensor& scalars, int64_t count,
                                  std::initializer_list<c10::SymInt> sizes) {
    if (count > 0 || scalars.defined()) expect(what, scalars, of_numbers, sizes);
  };
  const int64_t rows = function->row_scalars;
  const int64_t of_keys = function->column_scalars;
  const int64_t of_heads = function->head_scalars;
  expect_scalars("row_scalars", tokens.row_scalars, rows,
                 {rows, q.sym_size(0), q.sym_size(1), q.sym_size(2)});
  expect_scalars("column_scalars", tokens.column_scalars, of_keys,
                 {of_keys, k.sym_size(0), key_heads, k.sym_size(2)});
  expect_scalars("head_scalars", tokens.head_scalars, of_heads, {of_heads, q.sym_size(1)});
  return tokens;
}

namespace {

// Throws unless the result of a function has the given dtype and the sizes of the tokens; the
// number of heads may also be `heads`.
void CheckLike(const Component& component, const char* what, const at::Tensor& made,
               const at::Tensor& tokens, const c10::SymInt& heads, at::ScalarType type) {
  const bool fits = made.defined() && made.dim() == 4 && made.sym_size(0) == tokens.sym_size(0) &&
                    (made.sym_size(1) == tokens.sym_size(1) || made.sym_size(1) == heads) &&
                    made.sym_size(2) == tokens.sym_size(2) &&
                    made.sym_size(3) == tokens.sym_size(3);
  TORCH_CHECK_VALUE(fits, "gnomon.attention: ", component.name(), " returns ", what, " of shape ",
                    made.defined() ? made.sym_sizes() : c10::SymIntArrayRef(), "; expected ",
                    tokens.sym_sizes());
  TORCH_CHECK_TYPE(made.scalar_type() == type, "gnomon.attention: ", component.name(), " returns ",
                   what, " of dtype ", made.scalar_type(), "; expected ", type);
}

}  // namespace

at::Tensor PositionEntry::Rotated(const Component& component,
                                  const std::vector<at::Tensor>& tensors,
                                  const RotationCall& call) const {
  at::Tensor rotated = rotate(component, tensors, call);
  const bool widens = call.pending != nullptr && rotated.defined() &&
                      rotated.scalar_type() == ComputingType(call.x);
  CheckLike(component, call.of_keys ? "keys" : "queries", rotated, call.x, call.heads,
            widens ? rotated.scalar_type() : call.x.scalar_type());
  return rotated;
}

at::Tensor PositionEntry::Normed(const Component& component, const std::vector<at::Tensor>& tensors,
                                 const at::Tensor& x, bool of_keys) const {
  at::Tensor normed = norm(component, tensors, x, of_keys);
  CheckLike(component, of_keys ? "keys" : "queries", normed, x, x.sym_size(1), x.scalar_type());
  return normed;
}

at::Tensor PositionEntry::BiasByOffset(const Component& component,
                                       const std::vector<at::Tensor>& tensors,
                                       const OffsetRange& range) const {
  at::Tensor by_offset = bias(component, tensors, range);
  TORCH_CHECK_VALUE(by_offset.defined() &&
                        (by_offset.dim() == 2 || (range.query_offsets && by_offset.dim() == 3)) &&
                        by_offset.sym_size(-2) == range.heads &&
                        by_offset.sym_size(-1) == range.size(),
                    "gnomon.attention: the bias of ", component.name(), " has shape ",
                    by_offset.defined() ? by_offset.sym_sizes() : c10::SymIntArrayRef(),
                    "; expected (H, entries) = (", range.heads, ", ", range.size(), ")");
  const at::ScalarType type = c10::typeMetaToScalarType(range.options.dtype());
  TORCH_CHECK_TYPE(by_offset.scalar_type() == type, "gnomon.attention: the bias of ",
                   component.name(), " has dtype ", by_offset.scalar_type(), "; expected ", type);
  return by_offset;
}

const Parameter* SimilarityEntry::points_parameter(const Component& component) const {
  for (const Parameter& parameter : parameters) {
    const std::string value = component.Find(parameter.name).value_or(parameter.default_value);
    if (!parameter.points.empty() && value == parameter.points) return &parameter;
  }
  return nullptr;
}

void SimilarityEntry::CheckColumns(const Component& component, int64_t head_dim,
                                   const char* operation, const char* what) const {
  TORCH_CHECK_VALUE(
      !HasHeight(component) || head_dim >= 2, operation, what, head_dim, "; ", catalogue.name,
      " needs at least 2, because the ",
      HeightIsFirst(component) ? "first coordinate is the time" : "last coordinate is the height");
  TORCH_CHECK_VALUE(columns == 0 || head_dim == columns, operation, what, head_dim, "; ",
                    catalogue.name, " needs ", columns);
}

}  // namespace gnomon
