// Similarities of tokens as they are: their definition says all of them
// (src/definitions/README.md).
#ifndef GNOMON_OPS_SIMILARITIES_DEFINITION_H_
#define GNOMON_OPS_SIMILARITIES_DEFINITION_H_

#include <iterator>
#include <string>
#include <vector>

#include "ops/catalogue/registry.h"

namespace gnomon {

// The words of a definition.
struct DefinitionText {
  const char* name;        // of the pair function, and of the similarity
  const char* class_name;  // of the struct
  const char* title;
  const char* formula;
  const char* source;
  const char* factor;
  const char* latex = "";
  const char* details = "";
  std::vector<const char*> heads = {};  // the names of its scalars of heads
};

// Throws std::runtime_error where the factor is none of those that there are.
SimilarityEntry SimilarityOf(const DefinitionText& text);

// Registers the similarity that a definition is by itself, if it says so.
template <class Definition>
void RegisterDefinition(const char* name, const char* class_name) {
  if constexpr (requires { Definition::kFormula; }) {
    static_assert(Definition::kRowScalars == 0 && Definition::kColumnScalars == 0,
                  "tokens as they are have no scalars: this similarity needs a token map");
    DefinitionText text{name,
                        class_name,
                        Definition::kTitle,
                        Definition::kFormula,
                        Definition::kSource,
                        Definition::kFactor};
    if constexpr (requires { Definition::kLatex; }) text.latex = Definition::kLatex;
    if constexpr (requires { Definition::kDetails; }) text.details = Definition::kDetails;
    if constexpr (requires { Definition::kHeads; }) {
      text.heads.assign(std::begin(Definition::kHeads), std::end(Definition::kHeads));
    }
    TORCH_CHECK(text.heads.size() == Definition::kHeadScalars, "gnomon: the definition ", name,
                " has ", Definition::kHeadScalars, " scalars of heads and ", text.heads.size(),
                " names of them, kHeads");
    const RegisterSimilarity registered(SimilarityOf(text));
  }
}

}  // namespace gnomon

#endif  // GNOMON_OPS_SIMILARITIES_DEFINITION_H_
