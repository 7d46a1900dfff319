// Similarities of unmapped tokens, described completely by their definition
// (src/definitions/README.md). Includes no PyTorch headers, so that definitions compile in seconds.
#ifndef GNOMON_OPS_SIMILARITIES_DEFINITION_H_
#define GNOMON_OPS_SIMILARITIES_DEFINITION_H_

#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "ops/catalogue/pair_function.h"

namespace gnomon {

// The texts of a definition.
struct DefinitionText {
  const char* name;        // of the pair function and the similarity
  const char* class_name;  // name of the struct
  const char* title;
  const char* formula;
  const char* source;
  const char* factor;
  const char* latex = "";
  const char* details = "";
  std::vector<const char*> heads = {};  // names of its head scalars
};

// Whether the text is a factor: "scale", or a name such as "gamma" or "-gamma".
constexpr bool IsFactor(std::string_view text) { return !text.empty() && text != "-"; }

void RegisterDefinitionText(const DefinitionText& text);

// Registers a definition as a similarity, if it describes one.
template <class Definition>
void RegisterDefinition(const char* name, const char* class_name) {
  if constexpr (requires { Definition::kFormula; }) {
    static_assert(Definition::kRowScalars == 0 && Definition::kColumnScalars == 0,
                  "unmapped tokens have no scalars; this similarity needs a token map");
    static_assert(IsFactor(Definition::kFactor),
                  "kFactor is \"scale\" or a name, such as \"gamma\" or \"-gamma\"");
    DefinitionText text{name,
                        class_name,
                        Definition::kTitle,
                        Definition::kFormula,
                        Definition::kSource,
                        Definition::kFactor};
    if constexpr (requires { Definition::kLatex; }) text.latex = Definition::kLatex;
    if constexpr (requires { Definition::kDetails; }) text.details = Definition::kDetails;
    if constexpr (requires { Definition::kHeads; }) {
      static_assert(std::size(Definition::kHeads) == Definition::kHeadScalars,
                    "kHeads must have one name for each per-head scalar");
      text.heads.assign(std::begin(Definition::kHeads), std::end(Definition::kHeads));
    } else {
      static_assert(Definition::kHeadScalars == 0, "kHeads must name the per-head scalars");
    }
    RegisterDefinitionText(text);
  }
}

}  // namespace gnomon

#endif  // GNOMON_OPS_SIMILARITIES_DEFINITION_H_
