// The similarity and the position of a module: specifications whose parameters the module holds.
#ifndef GNOMON_OPS_NN_MODULE_TERMS_H_
#define GNOMON_OPS_NN_MODULE_TERMS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/catalogue/registry.h"

namespace gnomon {

// What is added to the mean of the squares that a module's RMS norm divides by.
inline constexpr double kRMSNormEpsilon = 1e-6;

// What a tensor of a module is to its parameter: its value; of one value per head, where that
// starts and theta, from which it is learned (LearnedNumber); what makes it of the module's tokens.
enum class TensorPart { kValue, kStart, kTheta, kWeight, kBias };
// As a word, "value".
const char* PartName(TensorPart part);
// The name of a tensor in a module, "gamma_theta" or "t5_table", where its parameter's is `name`
// (ModuleTerms::Use::name).
std::string TensorName(const std::string& name, TensorPart part);

// The similarity and the position of a module, resolved: which entries the specifications name, and
// how they set each parameter.
class ModuleTerms {
 public:
  // What a specification says of a parameter that may be a tensor.
  struct Use {
    const Parameter* parameter;
    // Where it has one value per head: a number, the start, a start that is learned from, or a
    // tensor that the module was given.
    enum class Setting { kNumber, kFixed, kLearned, kTensor } setting;
    double number = 0;         // of kNumber
    bool is_given = false;     // whether it is a tensor that the module was given
    bool keeps_start = false;  // of one value per head: whether the module holds where it starts
    // Which component of the position it is of; -1: the similarity.
    int64_t component = -1;
    // What the names of its tensors in a module begin with, "gamma" or "alibi2_slopes"; what these
    // are, in their order; where they are among those of the module, and among those of a call
    // (ProjectTokens).
    std::string name = "";
    std::vector<TensorPart> parts = {};
    size_t first = 0;
    size_t first_of_call = 0;
    size_t count_of_call = 0;

    // Whether a module makes it of its tokens in each call.
    bool is_projected() const { return parameter->tensor.projection && !is_given; }
  };
  struct Position {
    const PositionEntry* entry;
    Component component;
    std::vector<Use> uses;
    // The component as calls take it, those that are causal and those that are not.
    std::shared_ptr<const Component> causal;
    std::shared_ptr<const Component> both_ways;
  };

  // Those of two specifications. They are read when the first module of them is built; its calls
  // and those of the modules after it find what was read, by the text that operators take. Throws
  // c10::ValueError for a mistake.
  static std::shared_ptr<const ModuleTerms> Of(const std::string& similarity,
                                               const std::string& position);

  const SimilarityEntry& similarity() const { return *similarity_; }
  const Component& component() const { return *component_; }
  const std::shared_ptr<const Component>& shared_component() const { return component_; }
  // gamma or beta; nullopt where the similarity has none.
  const std::optional<Use>& head() const { return head_; }
  // The similarity's other parameters with one value per head.
  const std::vector<Use>& others() const { return others_; }
  const std::vector<Position>& positions() const { return positions_; }
  // All of them in the order of their tensors: visit(component, use).
  template <class Visit>
  void ForEachUse(const Visit& visit) const {
    if (head_) visit(*component_, *head_);
    for (const Use& use : others_) visit(*component_, use);
    for (const Position& position : positions_) {
      for (const Use& use : position.uses) visit(position.component, use);
    }
  }
  // Throws unless a list of tensors has all of a module, or all of a call.
  void CheckCount(at::TensorList tensors, bool of_call) const;
  // The specifications as a message quotes them.
  const std::string& text() const { return text_; }

 private:
  ModuleTerms(const std::string& similarity, const std::string& position);
  void Place(Use& use, const std::string& name);

  const SimilarityEntry* similarity_;
  std::shared_ptr<const Component> component_;
  std::optional<Use> head_;
  std::vector<Use> others_;
  std::vector<Position> positions_;
  size_t count_ = 0;
  size_t count_of_call_ = 0;
  std::string text_;
};

// The component of a module that is one, of a specification that is read once.
std::shared_ptr<const Component> ModuleComponent(const std::string& spec);

// nn::learned_number.
at::Tensor LearnedNumber(const at::Tensor& start, const at::Tensor& theta);

// The sizes of a module, with those that its options leave out. Throws c10::ValueError unless they
// fit together, and for a mistake in the specification.
struct ModuleSizes {
  int64_t key_heads;
  int64_t head_dim;  // by default the only one that the similarity takes, or embed_dim / num_heads
  int64_t key_dim;
  int64_t value_dim;
};
ModuleSizes SizesOfModule(const std::string& similarity, int64_t embed_dim, int64_t num_heads,
                          std::optional<int64_t> kv_heads, std::optional<int64_t> qk_dim,
                          std::optional<int64_t> kdim, std::optional<int64_t> vdim);

// The components of a position that act in attention, "none" where there are none.
std::string AttentionPosition(const std::string& position);

// nn::layer_positions.
std::vector<std::string> LayerPositions(const std::string& pattern);

// Whether a position has tensors that a module makes of its tokens in each call.
bool HasProjections(const std::string& position);

// What a module may have of its own that a position may have, too.
struct OwnTerms {
  bool sink = false;
  bool gate = false;
  bool qk_norm = false;
};

// Throws c10::ValueError, in the name of `module`, unless dropout and tolerance are in their
// ranges, and where the position has what the module has of its own.
void CheckModule(const char* module, double dropout, double tolerance, const OwnTerms& own,
                 const std::string& position);

}  // namespace gnomon

#endif  // GNOMON_OPS_NN_MODULE_TERMS_H_
