#include "ops/nn/module_terms.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "base/kept.h"
#include "ops/attention/call_checks.h"

namespace gnomon {
namespace {

using Use = ModuleTerms::Use;
using Kind = Setting::Kind;

Use UseOf(const Component& component, const Parameter& parameter) {
  Use use{SettingOf(component, parameter)};
  if (use.kind == Kind::kNone) use.kind = parameter.tensor.learned ? Kind::kLearned : Kind::kFixed;
  return use;
}

}  // namespace

const char* PartName(TensorPart part) {
  constexpr std::array kNames = {"value", "start", "theta", "weight", "bias"};
  static_assert(kNames.size() == static_cast<size_t>(TensorPart::kBias) + 1);
  return kNames[static_cast<size_t>(part)];
}

std::string TensorName(const std::string& name, TensorPart part) {
  return part == TensorPart::kValue ? name : name + "_" + PartName(part);
}

ModuleTerms::ModuleTerms(const std::string& similarity, const std::string& position)
    : similarity_(ParseSimilarity<Use>(similarity, UseOf)),
      text_("\"" + similarity + "\" and \"" + position + "\"") {
  for (Use& use : similarity_.settings) {
    use.keeps_start = IsHeadParameter(*similarity_.entry, *use.parameter);
    AddUse(use, use.parameter->name);
  }
  std::map<std::string, int> names;
  for (ParsedPosition<Use>& parsed : ParsePositions<Use>("gnomon.nn.MultiheadAttention", position,
                                                         /*holds_tables=*/true, UseOf)) {
    const Component& term = *parsed.component;
    for (Use& use : parsed.settings) {
      // Further components with the same name are numbered.
      const int count = ++names[term.name() + "_" + use.parameter->name];
      use.component = static_cast<int64_t>(positions_.size());
      AddUse(use,
             term.name() + (count == 1 ? "" : std::to_string(count)) + "_" + use.parameter->name);
    }
    const auto called = [&](bool looks_ahead) {
      return std::make_shared<const Component>(parsed.entry->Complete(
          term, {.has_tables_of_positions = true, .looks_ahead = looks_ahead}));
    };
    // On a grid axis, a token attends in both directions, even in a causal call.
    const bool lies_on_grid = term.Find("shape").has_value();
    const auto causal = called(lies_on_grid);
    positions_.push_back({std::move(parsed), causal, called(true)});
  }
}

void ModuleTerms::AddUse(Use& use, const std::string& name) {
  use.name = name;
  use.first = count_;
  use.first_of_call = count_of_call_;
  if (use.is_projected()) {
    use.parts = {TensorPart::kWeight};
    if (use.parameter->tensor.projection->bias_start != nullptr) {
      use.parts.push_back(TensorPart::kBias);
    }
  } else if (use.is_given() || !use.parameter->is_per_head()) {
    use.parts = {TensorPart::kValue};
  } else if (use.kind != Kind::kNumber) {
    if (use.keeps_start) use.parts.push_back(TensorPart::kStart);
    if (use.kind == Kind::kLearned) use.parts.push_back(TensorPart::kTheta);
  }
  use.count_of_call = use.is_projected() ? 1 : use.parts.size();
  count_ += use.parts.size();
  count_of_call_ += use.count_of_call;
}

void ModuleTerms::CheckCount(at::TensorList tensors, bool of_call) const {
  const size_t expected = of_call ? count_of_call_ : count_;
  TORCH_CHECK_VALUE(tensors.size() == expected, "gnomon.nn: got ", tensors.size(), " tensors for ",
                    text_, "; expected ", expected);
}

std::shared_ptr<const ModuleTerms> ModuleTerms::Of(const std::string& similarity,
                                                   const std::string& position) {
  static Kept<std::pair<std::string, std::string>, std::shared_ptr<const ModuleTerms>> known;
  return known.Get({similarity, position}, [&] {
    return std::shared_ptr<const ModuleTerms>(new ModuleTerms(similarity, position));
  });
}

std::shared_ptr<const Component> ModuleComponent(const std::string& spec) {
  static Kept<std::string, std::shared_ptr<const Component>> known;
  return known.Get(spec, [&] { return std::make_shared<const Component>(Component::Parse(spec)); });
}

at::Tensor LearnedNumber(const at::Tensor& start, const at::Tensor& theta) {
  return start * (theta * 5).exp();
}

ModuleSizes SizesOfModule(const std::string& similarity, int64_t embed_dim, int64_t num_heads,
                          std::optional<int64_t> kv_heads, std::optional<int64_t> qk_dim,
                          std::optional<int64_t> kdim, std::optional<int64_t> vdim) {
  constexpr const char* kName = "gnomon.nn.MultiheadAttention: ";
  TORCH_CHECK_VALUE(num_heads >= 1 && embed_dim >= 1 && embed_dim % num_heads == 0, kName,
                    "embed_dim is ", embed_dim, " and num_heads is ", num_heads,
                    "; embed_dim must be a positive multiple of num_heads");
  const int64_t columns = FindSimilarity(Component::Parse(similarity)).columns;
  const ModuleSizes sizes{
      .key_heads = kv_heads.value_or(num_heads),
      .head_dim = qk_dim.value_or(columns == 0 ? embed_dim / num_heads : columns),
      .key_dim = kdim.value_or(embed_dim),
      .value_dim = vdim.value_or(embed_dim)};
  TORCH_CHECK_VALUE(sizes.key_heads >= 1 && num_heads % sizes.key_heads == 0, kName, "kv_heads is ",
                    sizes.key_heads, "; expected a divisor of num_heads = ", num_heads);
  for (const auto& [name, size] :
       {std::pair("qk_dim", sizes.head_dim), std::pair("kdim", sizes.key_dim),
        std::pair("vdim", sizes.value_dim)}) {
    TORCH_CHECK_VALUE(size >= 1, kName, name, " is ", size, "; expected at least 1");
  }
  return sizes;
}

std::string AttentionPosition(const std::string& position) {
  std::string text;
  for (const Component& term : ParseSum(position)) {
    const PositionEntry::Role role = FindPosition(term).role();
    if (role == PositionEntry::Role::kEmbedding || role == PositionEntry::Role::kNone) continue;
    if (!text.empty()) text += '+';
    text += term.Text();
  }
  return text.empty() ? "none" : text;
}

std::vector<std::string> LayerPositions(const std::string& pattern) {
  std::vector<std::string> positions;
  for (size_t begin = 0; begin <= pattern.size();) {
    const size_t end = std::min(pattern.find_first_of(";,", begin), pattern.size());
    positions.push_back(pattern.substr(begin, end - begin));
    begin = end + 1;
  }
  return positions;
}

void CheckModule(const char* module, double dropout, double tolerance, const OwnTerms& own,
                 const std::string& position) {
  using Role = PositionEntry::Role;
  CheckDropoutRate(module, dropout);
  CheckTolerance(module, tolerance);
  if (!own.sink && !own.gate && !own.qk_norm) return;
  for (const Component& term : ParseSum(position)) {
    const Role role = FindPosition(term).role();
    const char* twice = own.sink && role == Role::kSink      ? "sink"
                        : own.gate && role == Role::kGate    ? "gate"
                        : own.qk_norm && role == Role::kNorm ? "qk_norm"
                                                             : nullptr;
    TORCH_CHECK_VALUE(twice == nullptr, module, ": ", twice, " is set, and position contains ",
                      term.name(), "; use only one of them");
  }
}

bool HasProjections(const std::string& position) {
  for (const Component& term : ParseSum(position)) {
    for (const Parameter* parameter : FindPosition(term).Tensors(term)) {
      if (parameter->tensor.projection && !term.IsTensor(parameter->name)) return true;
    }
  }
  return false;
}

}  // namespace gnomon
