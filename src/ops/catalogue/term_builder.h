// Builds terms from names and values, for the functions of gnomon/torch/terms.h.
#ifndef GNOMON_OPS_CATALOGUE_TERM_BUILDER_H_
#define GNOMON_OPS_CATALOGUE_TERM_BUILDER_H_

#include <c10/util/Exception.h>
#include <gnomon/torch/term.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/grammar/component.h"

namespace gnomon {

// Throws c10::ValueError unless a word is followed only by its own options, as in "yarn:factor=4".
// `spec` is the specification of the term so far.
void CheckDetails(const std::string& spec, const char* key, const std::string& words);

// A term with an option for each given value, and the tensors in catalogue order.
class TermBuilder {
 public:
  explicit TermBuilder(const char* name) { term_.spec = name; }

  TermBuilder& With(const char* key, const std::string& word) {
    TORCH_CHECK_VALUE(word.find_first_of(":+=") == std::string::npos, "gnomon: ", term_.spec,
                      " has ", key, " = \"", word, "\"; expected a word without :, + or =");
    return Append(key, word);
  }
  TermBuilder& With(const char* key, double number) { return Append(key, NumberText(number)); }
  TermBuilder& With(const char* key, int64_t number) { return Append(key, std::to_string(number)); }
  TermBuilder& With(const char* key, bool flag) { return Append(key, flag ? "true" : "false"); }
  TermBuilder& With(const char* key, const std::vector<int64_t>& shape) {
    return shape.empty() ? *this : Append(key, SizesText(shape));
  }
  TermBuilder& With(const char* key, torch::Tensor tensor) {
    term_.tensors.push_back(std::move(tensor));
    return Append(key, "tensor");
  }
  TermBuilder& With(const char* key, const HeadValue& value) {
    return value.is_number() ? With(key, value.number()) : With(key, value.tensor());
  }
  // A word that may be followed by its own options, such as "yarn:factor=4".
  TermBuilder& WithDetails(const char* key, const std::optional<std::string>& words) {
    if (!words) return *this;
    CheckDetails(term_.spec, key, *words);
    return Append(key, *words);
  }
  template <class Value>
  TermBuilder& With(const char* key, const std::optional<Value>& value) {
    return value ? With(key, *value) : *this;
  }

  template <class Kind>
  Kind Build() {
    return Kind(std::move(term_));
  }

 private:
  TermBuilder& Append(const char* key, const std::string& text) {
    term_.spec.append(":").append(key).append("=").append(text);
    return *this;
  }

  Term term_;
};

}  // namespace gnomon

#endif  // GNOMON_OPS_CATALOGUE_TERM_BUILDER_H_
