// The similarity and the position of a module: specifications whose parameters the module stores.
#ifndef GNOMON_OPS_NN_MODULE_TERMS_H_
#define GNOMON_OPS_NN_MODULE_TERMS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/attention/resolve.h"
#include "ops/catalogue/registry.h"

namespace gnomon {

// The epsilon of a module's RMS norm, added to the mean square.
inline constexpr double kRMSNormEpsilon = 1e-6;

// The part of a parameter that a module tensor holds: its value; for a per-head parameter, its
// initial value or the theta from which it is learned (LearnedNumber); or the weight or bias of its
// token projection.
enum class TensorPart { kValue, kStart, kTheta, kWeight, kBias };
// The part's name, such as "value".
const char* PartName(TensorPart part);
// The name of a tensor in a module, such as "gamma_theta" or "t5_table", where `name` is
// ModuleTerms::Use::name.
std::string TensorName(const std::string& name, TensorPart part);

// The resolved similarity and position of a module: catalogue entries, and the setting of each
// parameter.
class ModuleTerms {
 public:
  // The setting of a parameter that may be a tensor; never kNone.
  struct Use : Setting {
    bool keeps_start = false;  // per-head parameters: whether the module stores the initial value
    // The index of the position's component; -1 for the similarity.
    int64_t component = -1;
    // The prefix of its tensor names, such as "gamma" or "alibi2_slopes"; the parts, in order; and
    // the indices of its tensors within the module and within a call (ProjectTokens).
    std::string name = "";
    std::vector<TensorPart> parts = {};
    size_t first = 0;
    size_t first_of_call = 0;
    size_t count_of_call = 0;

    // Whether the user supplied a tensor.
    bool is_given() const { return kind == Kind::kTensor; }
    // Whether a module computes it from the tokens in each call.
    bool is_projected() const { return parameter->tensor.projection && !is_given(); }
  };
  struct Position : ParsedPosition<Use> {
    // The component used in causal calls, and the one used in other calls.
    std::shared_ptr<const Component> causal;
    std::shared_ptr<const Component> both_ways;
  };

  // The terms of two specifications. They are parsed when the first such module is built, and
  // cached for its calls and for later modules with the same specifications. Throws c10::ValueError
  // for an invalid specification.
  static std::shared_ptr<const ModuleTerms> Of(const std::string& similarity,
                                               const std::string& position);

  const ParsedSimilarity<Use>& similarity() const { return similarity_; }
  const std::vector<Position>& positions() const { return positions_; }
  // Calls visit(component, use) for every use, in the order of the tensors.
  template <class Visit>
  void ForEachUse(const Visit& visit) const {
    for (const Use& use : similarity_.settings) visit(*similarity_.component, use);
    for (const Position& position : positions_) {
      for (const Use& use : position.settings) visit(*position.component, use);
    }
  }
  // Throws unless the list contains all tensors of a module or, if of_call, of a call.
  void CheckCount(at::TensorList tensors, bool of_call) const;
  // The specifications as quoted in error messages.
  const std::string& text() const { return text_; }

 private:
  ModuleTerms(const std::string& similarity, const std::string& position);
  void AddUse(Use& use, const std::string& name);

  ParsedSimilarity<Use> similarity_;
  std::vector<Position> positions_;
  size_t count_ = 0;
  size_t count_of_call_ = 0;
  std::string text_;
};

// The component of a single-component specification; cached.
std::shared_ptr<const Component> ModuleComponent(const std::string& spec);

// Implements nn::learned_number.
at::Tensor LearnedNumber(const at::Tensor& start, const at::Tensor& theta);

// The sizes of a module, including sizes that its options omit. Throws c10::ValueError if they are
// inconsistent or the specification is invalid.
struct ModuleSizes {
  int64_t key_heads;
  int64_t head_dim;  // default: the similarity's fixed size, or embed_dim / num_heads
  int64_t key_dim;
  int64_t value_dim;
};
ModuleSizes SizesOfModule(const std::string& similarity, int64_t embed_dim, int64_t num_heads,
                          std::optional<int64_t> kv_heads, std::optional<int64_t> qk_dim,
                          std::optional<int64_t> kdim, std::optional<int64_t> vdim);

// The components of a position that act in attention, or "none".
std::string AttentionPosition(const std::string& position);

// Implements nn::layer_positions.
std::vector<std::string> LayerPositions(const std::string& pattern);

// Whether a position has tensors that a module computes from its tokens in each call.
bool HasProjections(const std::string& position);

// Features that can be set in a module or in its position, but not in both.
struct OwnTerms {
  bool sink = false;
  bool gate = false;
  bool qk_norm = false;
};

// Throws c10::ValueError, with a message that names `module`, if dropout or tolerance is out of
// range, or if a feature is set in both the module and the position.
void CheckModule(const char* module, double dropout, double tolerance, const OwnTerms& own,
                 const std::string& position);

}  // namespace gnomon

#endif  // GNOMON_OPS_NN_MODULE_TERMS_H_
