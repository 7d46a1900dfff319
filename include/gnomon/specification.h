// Parsed specifications of similarities and positions, for programs that read or change them. The
// grammar is in gnomon/catalogue.h. This header does not depend on PyTorch.
#ifndef GNOMON_SPECIFICATION_H_
#define GNOMON_SPECIFICATION_H_

#include <gnomon/catalogue.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gnomon {

// One component: "name:key=value:flag".
struct SpecifiedTerm {
  std::string name;
  std::vector<std::pair<std::string, std::string>> options = {};  // the value of a flag is "true"

  // Returns the value that the text gives for an option; defaults are not applied.
  std::optional<std::string> Find(std::string_view key) const;
  // Returns the component as text that ParseSpecification can parse.
  std::string Text() const;
};

// Returns the components of a similarity, or of a sum of positions. Throws c10::ValueError for a
// syntax error; names and values are not checked.
std::vector<SpecifiedTerm> ParseSpecification(std::string_view text);

// Returns the catalogue entry of a similarity or position, which is valid until the program ends;
// null if there is none.
const CatalogueEntry* FindCatalogueEntry(const std::string& name);

// Returns a suggestion for an unknown name, with up to three of the most similar known names, such
// as "did you mean rope or rope_mixed?"; empty if no name is similar.
std::string DidYouMean(std::string_view name, const std::vector<std::string>& known);

}  // namespace gnomon

#endif  // GNOMON_SPECIFICATION_H_
