#include "ops/nn/module_tensors.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "base/kept.h"
#include "ops/attention/starts.h"
#include "ops/catalogue/random_rows.h"
#include "ops/coordinates/token_grid.h"
#include "ops/nn/module_attention.h"

namespace gnomon {
namespace {

using Use = ModuleTerms::Use;
using Kind = Setting::Kind;

// The initial weight (H columns, dim) and bias (H,) of a token projection.
at::Tensor ProjectionStart(const TokenProjection& projection, const Component& component,
                           TensorPart part, const ModuleShape& shape) {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  if (part == TensorPart::kBias) return projection.bias_start(shape.heads).to(options);
  const int64_t columns = projection.columns(component, shape);
  TORCH_CHECK_VALUE(columns >= 1, "gnomon.nn: a projection of ", component.name(),
                    " has dimension ", columns, " per head; expected at least 1");
  const int64_t rows = shape.heads * columns;
  const int64_t dim = projection.of_keys ? shape.key_tokens : shape.query_tokens;
  return projection.bias_start == nullptr ? RandomRows(/*stream=*/6, {rows}, dim)
                                          : at::zeros({rows, dim}, options);
}

// Whether a position has a user-supplied table, which may fit only calls of certain lengths.
bool HasGivenTable(const ModuleTerms::Position& position) {
  return std::any_of(position.settings.begin(), position.settings.end(), [](const Use& use) {
    return use.is_given() && !use.parameter->is_per_head();
  });
}

// Computes attention for an empty batch, which throws the error that every call of the module would
// throw, if any.
void CheckCall(const ModuleTerms& terms, const ModuleShape& shape,
               const std::vector<ModuleTensor>& tensors) {
  const at::NoGradGuard no_grad;
  const auto ones = [](at::IntArrayRef sizes) {
    return at::ones(sizes, at::TensorOptions().dtype(at::kFloat).device(at::kCPU));
  };
  std::vector<Component> components;
  int64_t axes = 1;
  for (const ModuleTerms::Position& position : terms.positions()) {
    components.push_back(*position.component);
    const auto axes_of = position.entry->axes;
    if (axes_of != nullptr) axes = std::max(axes, axes_of(*position.component));
  }
  const int64_t tokens = SmallestGrid(components).value_or(1);
  const auto heads_of = [&](int64_t columns) { return ones({0, shape.heads, tokens, columns}); };
  std::vector<at::Tensor> held;
  for (const ModuleTensor& tensor : tensors) held.push_back(ones(tensor.start.sizes()));
  const ProjectedTensors call =
      ProjectTokens(terms, shape.heads, held, ones({0, tokens, shape.query_tokens}),
                    ones({0, tokens, shape.key_tokens}));
  const auto attend = [&](bool causal) {
    CallArguments arguments;
    arguments.causal = causal;
    if (axes > 1) arguments.positions = ones({1, tokens, axes}).to(at::kLong);
    ModuleAttention(heads_of(shape.head_dim), heads_of(shape.head_dim), heads_of(shape.value_dim),
                    terms, call.tensors, arguments);
  };
  // Some terms require a causal mask, and others have different limits with one.
  try {
    attend(/*causal=*/true);
  } catch (const c10::Error&) {
    try {
      attend(/*causal=*/false);
    } catch (const c10::Error&) {
      // Both calls failed; this throws the error of the causal one.
      attend(/*causal=*/true);
    }
  }
}

// Calls CheckCall once for equal modules, such as the layers of a model. The sizes identify a
// module, because CheckCall does not use the values of tensors.
void CheckCallOnce(const ModuleTerms& terms, const ModuleShape& shape,
                   const std::vector<ModuleTensor>& tensors) {
  std::vector<int64_t> sizes = {shape.heads,      shape.head_dim,     shape.value_dim,
                                shape.max_length, shape.query_tokens, shape.key_tokens};
  for (const ModuleTensor& tensor : tensors) {
    sizes.push_back(tensor.start.dim());
    sizes.insert(sizes.end(), tensor.start.sizes().begin(), tensor.start.sizes().end());
  }
  static Kept<std::pair<std::string, std::vector<int64_t>>, bool> known;
  known.Get({terms.text(), sizes}, [&] {
    CheckCall(terms, shape, tensors);
    return true;
  });
}

// Like CheckCall, for the positions without user-supplied tables.
void CheckOthers(const ModuleTerms& terms, const std::string& positions, const ModuleShape& shape,
                 at::TensorList given) {
  std::vector<at::Tensor> kept;
  size_t next = 0;
  const auto take = [&](const Use& use, bool is_kept) {
    if (!use.is_given()) return;
    if (is_kept) kept.push_back(given[next]);
    ++next;
  };
  for (const Use& use : terms.similarity().settings) take(use, true);
  for (const ModuleTerms::Position& position : terms.positions()) {
    for (const Use& use : position.settings) take(use, !HasGivenTable(position));
  }
  ModuleTensors(*ModuleTerms::Of(terms.similarity().component->Text(), positions), shape, kept);
}

}  // namespace

std::vector<ModuleTensor> ModuleTensors(const ModuleTerms& terms, const ModuleShape& outer,
                                        at::TensorList given) {
  constexpr const char* kName = "gnomon.nn.MultiheadAttention";
  ModuleShape shape = outer;
  std::vector<ModuleTensor> tensors;
  size_t next = 0;
  const auto take = [&](const Component& term, const Parameter& parameter) {
    TORCH_CHECK_VALUE(next < given.size(), kName, ": ", parameter.name, " of ", term.name(),
                      " is missing");
    const at::Tensor& tensor = given[next++];
    TORCH_CHECK_TYPE(tensor.is_floating_point(), kName, ": ", parameter.name, " of ", term.name(),
                     " has dtype ", tensor.scalar_type(), "; expected a floating-point dtype");
    TORCH_CHECK_VALUE(!parameter.is_per_head() || tensor.dim() == 0 ||
                          (tensor.dim() == 1 && tensor.size(0) == shape.heads),
                      kName, ": ", parameter.name, " of ", term.name(), " has shape ",
                      tensor.sizes(), "; expected (H,) = (", shape.heads,
                      ",), or () if shared by all heads");
    return tensor;
  };
  const SimilarityEntry& entry = *terms.similarity().entry;
  const Component& similarity = *terms.similarity().component;
  shape.has_height = entry.HasHeight(similarity);
  entry.CheckColumns(similarity, shape.head_dim, kName, ": qk_dim is ");
  for (const ModuleTerms::Position& position : terms.positions()) {
    TokenGrid::Find(*position.component);  // throws an error for an invalid grid
  }
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  terms.ForEachUse([&](const Component& term, const Use& use) {
    const Parameter& parameter = *use.parameter;
    if (parameter.is_per_head() && !use.is_given() && !use.keeps_start &&
        use.kind != Kind::kNumber) {
      StartOf(parameter, term, shape);  // throws an error for a value that cannot be learned
    }
    for (const TensorPart part : use.parts) {
      ModuleTensor tensor{TensorName(use.name, part), {}, /*learned=*/true};
      if (use.is_given()) {
        tensor.start = take(term, parameter);
        tensor.learned = tensor.start.requires_grad();
      } else if (use.is_projected()) {
        tensor.start = ProjectionStart(*parameter.tensor.projection, term, part, shape);
      } else if (part == TensorPart::kStart) {
        const double start = HeadParameterStart(entry, term, shape.head_dim);
        tensor.start = at::scalar_tensor(start, options);
        tensor.learned = false;
      } else if (part == TensorPart::kTheta) {
        tensor.start = at::zeros({shape.heads}, options);
      } else {
        tensor.start = StartOf(parameter, term, shape);
      }
      tensors.push_back(std::move(tensor));
    }
  });
  TORCH_CHECK_VALUE(next == given.size(), kName, ": got ", given.size(), " tensors; expected ",
                    next);
  std::string rest;
  bool is_whole = true;
  for (const ModuleTerms::Position& position : terms.positions()) {
    if (HasGivenTable(position)) {
      is_whole = false;
    } else {
      if (!rest.empty()) rest += '+';
      rest += position.component->Text();
    }
  }
  if (is_whole) {
    CheckCallOnce(terms, shape, tensors);
  } else {
    CheckOthers(terms, rest.empty() ? "none" : rest, outer, given);
  }
  return tensors;
}

std::vector<TensorOrigin> TensorOrigins(const ModuleTerms& terms) {
  std::vector<TensorOrigin> origins;
  terms.ForEachUse([&](const Component& term, const Use& use) {
    const auto holds_table = use.parameter->tensor.holds_table;
    for (const TensorPart part : use.parts) {
      const bool is_table =
          part == TensorPart::kValue && (holds_table == nullptr || holds_table(term));
      origins.push_back({TensorName(use.name, part), use.component, use.parameter, part,
                         is_table ? use.parameter->index : Index::kNone});
    }
  });
  return origins;
}

std::vector<LearnedTensor> LearnedTensors(const ModuleTerms& terms, const ModuleShape& shape,
                                          at::TensorList tensors) {
  terms.CheckCount(tensors, /*of_call=*/false);
  std::vector<LearnedTensor> learned;
  terms.ForEachUse([&](const Component& term, const Use& use) {
    // A projection depends on the tokens, not only on the module.
    if (use.parts.empty() || use.is_projected()) return;
    const at::Tensor last = tensors[use.first + use.parts.size() - 1];
    if (use.is_given()) {
      // Buffers are skipped.
      if (last.requires_grad()) learned.push_back({use.name, last.detach(), std::nullopt});
    } else if (!use.parameter->is_per_head()) {
      learned.push_back({use.name, last.detach(), std::nullopt});
    } else if (use.kind == Kind::kLearned) {
      const at::Tensor theta = last.detach();
      const at::Tensor start = use.keeps_start
                                   ? tensors[use.first].detach().expand({shape.heads})
                                   : StartOf(*use.parameter, term, shape).to(theta.options());
      learned.push_back({use.name, LearnedNumber(start, theta), start});
    }
  });
  return learned;
}

}  // namespace gnomon
