#include "ops/nn/module_attention.h"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "ops/attention/attention_weights.h"
#include "ops/attention/call_checks.h"
#include "ops/attention/compose.h"
#include "ops/attention/starts.h"
#include "ops/operators/autograd.h"
#include "ops/operators/kept_tensor.h"
#include "ops/operators/tensors.h"

namespace gnomon {

ProjectedTensors ProjectTokens(const ModuleTerms& terms, int64_t heads, at::TensorList tensors,
                               const at::Tensor& query_tokens, const at::Tensor& key_tokens) {
  terms.CheckCount(tensors, /*of_call=*/false);
  ProjectedTensors call;
  terms.ForEachUse([&](const Component& /*term*/, const ModuleTerms::Use& use) {
    if (!use.is_projected()) {
      for (size_t n = 0; n < use.parts.size(); ++n) call.tensors.push_back(tensors[use.first + n]);
      return;
    }
    const TokenProjection& projection = *use.parameter->tensor.projection;
    const at::Tensor& tokens = projection.of_keys ? key_tokens : query_tokens;
    const OptionalTensor bias =
        use.parts.size() == 1 ? std::nullopt : OptionalTensor(tensors[use.first + 1]);
    const at::Tensor product =
        at::linear(tokens, tensors[use.first], bias).unflatten(2, {heads, -1}).transpose(1, 2);
    // Many gates close to 1 are multiplied, so gates rounded to low precision would be too
    // inaccurate.
    const at::Tensor computed = product.to(ComputingType(product));
    if (projection.of_keys) call.of_keys.push_back(static_cast<int64_t>(call.tensors.size()));
    call.tensors.push_back(projection.finish == nullptr ? computed : projection.finish(computed));
  });
  return call;
}

namespace {

using Use = ModuleTerms::Use;

CallLengths LengthsOf(const at::Tensor& q, const at::Tensor& k, const CallArguments& arguments) {
  if (arguments.positions && arguments.positions->dim() > 0 && SizeOf(q, 2) * SizeOf(k, 2) > 0) {
    const at::Tensor& keys = arguments.key_positions.value_or(*arguments.positions);
    TORCH_CHECK_VALUE(keys.dim() > 0,
                      "gnomon.attention: key_positions has shape (); expected (B, Lk) or (Lk,)");
    const at::Tensor& queries = *arguments.positions;
    // The largest distance in either direction.
    return {SizeOf(q, 2), SizeOf(k, 2),
            at::maximum((queries.amax(-1) - keys.amin(-1)).max(),
                        (keys.amax(-1) - queries.amin(-1)).max())};
  }
  int64_t offset = arguments.query_offset ? Concrete(*arguments.query_offset) : 0;
  if (arguments.query_offsets && arguments.query_offsets->numel() > 0) {
    offset = arguments.query_offsets->max().item<int64_t>();
  }
  return {SizeOf(q, 2) + offset, SizeOf(k, 2)};
}

// The values of parameters in a call of a module with q. `held` contains the tensors of the call,
// in the computing type.
class ModuleValues {
 public:
  ModuleValues(const at::Tensor& q, const at::Tensor& k, const CallArguments& arguments,
               std::vector<at::Tensor> held)
      : q_(q), k_(k), arguments_(arguments), held_(std::move(held)) {}

  at::Tensor HeadParameter(const SimilarityEntry& /*entry*/, const Component& term,
                           const Use& use) const {
    return Heads(term, use);
  }

  at::Tensor Heads(const Component& term, const Use& use) const {
    const bool is_held = use.count_of_call > 0 && (use.is_given() || use.keeps_start);
    const at::Tensor value = HeadValueIn(
        q_, term, use, is_held ? OptionalTensor(held_[use.first_of_call]) : std::nullopt);
    if (use.kind == Setting::Kind::kLearned) {
      return LearnedNumber(value, held_[use.first_of_call + use.count_of_call - 1]);
    }
    return is_held ? value.expand({SizeOf(q_, 1)}) : value;
  }

  at::Tensor Table(const Component& term, const Use& use) const {
    const at::Tensor& table = held_[use.first_of_call];
    const auto expand = use.parameter->tensor.expand;
    return expand == nullptr ? table : expand(term, table, LengthsOf(q_, k_, arguments_));
  }

 private:
  const at::Tensor& q_;
  const at::Tensor& k_;
  const CallArguments& arguments_;
  std::vector<at::Tensor> held_;
};

}  // namespace

ResolvedTerms ResolveModule(const at::Tensor& q, const at::Tensor& k, const ModuleTerms& terms,
                            at::TensorList tensors, const CallArguments& arguments) {
  terms.CheckCount(tensors, /*of_call=*/true);
  std::vector<at::Tensor> held;
  for (const at::Tensor& tensor : tensors) {
    held.push_back(AsParameter(tensor, q, "gnomon.nn: a parameter"));
  }
  const ModuleValues values(q, k, arguments, std::move(held));
  ResolvedTerms resolved{Resolve(terms.similarity(), values), {}};
  for (const ModuleTerms::Position& position : terms.positions()) {
    if (position.entry->role() == PositionEntry::Role::kNone) continue;
    ResolvedPosition& at = resolved.positions.emplace_back(Resolve(position, values));
    at.component = arguments.causal ? position.causal : position.both_ways;
    at.of_module = true;
  }
  return resolved;
}

std::vector<at::Tensor> SimilarityTensors(const at::Tensor& q, const ModuleTerms& terms,
                                          at::TensorList tensors) {
  const WithoutAutocast guard;
  terms.CheckCount(tensors, /*of_call=*/true);
  std::vector<at::Tensor> held;
  for (const at::Tensor& tensor : tensors) held.push_back(tensor.to(ComputingType(q)));
  // A similarity has no tables, which alone depend on the keys and arguments of a call.
  const CallArguments arguments;
  const ModuleValues values(q, /*k=*/q, arguments, std::move(held));
  std::vector<at::Tensor> returned;
  terms.ForEachUse([&](const Component& term, const Use& use) {
    if (!use.parts.empty()) returned.push_back(values.Heads(term, use));
  });
  return returned;
}

namespace {

// The rotation after which keys can be cached (TurnsKeysOnce), or null.
const ModuleTerms::Position* FindLastingRotation(const ModuleTerms& terms) {
  if (terms.similarity().entry->HasHeight(*terms.similarity().component)) return nullptr;
  const ModuleTerms::Position* rotation = nullptr;
  for (const ModuleTerms::Position& position : terms.positions()) {
    const PositionEntry::Role role = position.entry->role();
    if (role == PositionEntry::Role::kNorm || role == PositionEntry::Role::kContent) return nullptr;
    if (role != PositionEntry::Role::kRotation) continue;
    const Component& component = *position.component;
    const bool lasts = rotation == nullptr && component.name() == "rope" &&
                       position.settings.empty() && !position.entry->GoesByLength(component) &&
                       !component.Flag("xpos") && !component.Find("shape") &&
                       !component.Find("sections");
    if (!lasts) return nullptr;
    rotation = &position;
  }
  return rotation;
}

}  // namespace

bool TurnsKeysOnce(const ModuleTerms& terms) { return FindLastingRotation(terms) != nullptr; }

at::Tensor TurnedKeys(const at::Tensor& k, const ModuleTerms& terms, int64_t heads,
                      const c10::SymInt& first, const OptionalTensor& positions,
                      const at::Tensor& to) {
  const WithoutAutocast guard;
  const ModuleTerms::Position* const rotation = FindLastingRotation(terms);
  TORCH_CHECK_VALUE(rotation != nullptr, "gnomon.module_turned_keys: position is ", terms.text(),
                    "; expected RoPE with frequencies that do not depend on the sequence length");
  RotationCall call{.x = k,
                    .position = first,
                    .firsts = std::nullopt,
                    .length = first + k.sym_size(2),
                    .of_keys = true,
                    .is_product = terms.similarity().entry->is_product,
                    .last_is_height = false,
                    .heads = heads,
                    .key_heads = SizeOf(k, 1),
                    .to = to};
  if (positions) {
    const at::Tensor of_tokens = positions->dim() == 1 ? positions->unsqueeze(0) : *positions;
    call.positions = {of_tokens, of_tokens};
  }
  return rotation->entry->Rotated(*rotation->both_ways, {}, call);
}

at::Tensor ModuleAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const ModuleTerms& terms, at::TensorList tensors,
                           const CallArguments& arguments) {
  const WithoutAutocast guard;
  CheckTokens("gnomon.attention", q, k, v);
  const ResolvedTerms resolved = ResolveModule(q, k, terms, tensors, arguments);
  return std::get<0>(Compose(q, k, v, resolved.similarity, resolved.positions, arguments));
}

at::Tensor ModuleAttentionOfTurnedKeys(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const ModuleTerms& terms,
                                       at::TensorList tensors, const OptionalTensor& new_keys,
                                       const CallArguments& arguments) {
  const WithoutAutocast guard;
  CheckTokens("gnomon.attention", q, k, v);
  ResolvedTerms resolved = ResolveModule(q, k, terms, tensors, arguments);
  for (ResolvedPosition& position : resolved.positions) {
    position.of_turned_keys = position.entry->role() == PositionEntry::Role::kRotation;
  }
  if (new_keys) {
    const int64_t count = SizeOf(*new_keys, 2);
    const int64_t first = SizeOf(k, 2) - count;
    TORCH_CHECK_VALUE(first >= 0 && new_keys->scalar_type() == k.scalar_type(),
                      "gnomon.module_attention_of_turned_keys: new_keys has ", count, " tokens (",
                      new_keys->scalar_type(), ") and k has ", SizeOf(k, 2), " (", k.scalar_type(),
                      "); expected new_keys to be the last tokens of k, with the same dtype");
    OptionalTensor positions = arguments.key_positions;
    if (positions) positions = positions->narrow(-1, first, count);
    const at::Tensor rows = BelowAutograd([&] { return k.narrow(2, first, count); });
    const at::Tensor turned = TurnedKeys(*new_keys, terms, SizeOf(q, 1), first, positions, rows);
    if (!turned.is_same(rows)) rows.copy_(turned);
  }
  return std::get<0>(Compose(q, k, v, resolved.similarity, resolved.positions, arguments));
}

at::Tensor ModuleAttentionWeights(const at::Tensor& q, const at::Tensor& k,
                                  const std::vector<int64_t>& rows, const ModuleTerms& terms,
                                  at::TensorList tensors, const CallArguments& arguments) {
  const WithoutAutocast guard;
  CheckTokens("gnomon.attention_weights", q, k, k);
  ResolvedTerms resolved = ResolveModule(q, k, terms, tensors, arguments);
  return AttentionWeights(q, k, rows, resolved.similarity, std::move(resolved.positions),
                          arguments);
}

}  // namespace gnomon
