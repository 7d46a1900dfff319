// The grammar of similarities and positions (gnomon/catalogue.h). Mistakes throw c10::ValueError.
#ifndef GNOMON_OPS_GRAMMAR_COMPONENT_H_
#define GNOMON_OPS_GRAMMAR_COMPONENT_H_

#include <gnomon/catalogue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gnomon {

// The entry of a name, a similarity or a position; null: none. The catalogue has it (registry.cc).
const CatalogueEntry* FindCatalogueEntry(const std::string& name);

// One "name:key=value:flag", and the entry of that name, which says what its keys are, what they
// stand for where they are absent, and what they may be.
class Component {
 public:
  // Of the entry that the library has, if any: see FindSimilarity and FindPosition.
  static Component Parse(std::string_view text);
  // Of an entry that must outlive it.
  static Component Parse(std::string_view text, const CatalogueEntry& entry);

  const std::string& name() const { return name_; }
  const std::vector<std::pair<std::string, std::string>>& options() const { return options_; }
  // What Parse would read it from.
  std::string Text() const;
  // What the text says, without defaults.
  std::optional<std::string> Find(std::string_view key) const;
  // Whether the key is absent or has its default: classes write defaults into texts, too.
  bool HasDefault(std::string_view key) const;

  // Values of the parameter, or its default. One that has no default must be there.
  double Number(std::string_view key) const;
  int64_t Integer(std::string_view key) const;
  bool Flag(std::string_view key) const;
  std::string Choice(std::string_view key) const;
  // Nullopt where neither the text nor a default says it.
  std::optional<double> FindNumber(std::string_view key) const;
  std::optional<int64_t> FindInteger(std::string_view key) const;
  std::optional<bool> FindFlag(std::string_view key) const;
  std::optional<std::vector<int64_t>> FindShape(std::string_view key) const;
  std::optional<std::vector<double>> FindNumbers(std::string_view key) const;

  // Adds key=value where the key is absent: what a caller knows and the text does not say.
  void SetDefault(std::string_view key, std::string_view value);

  // Whether the parameter of that name is one of the tensors that come with the specification.
  bool IsTensor(std::string_view key) const;

  // Throws unless each key is one of the entry's and each value what that takes.
  void Check() const;

 private:
  // What the text says, or else the default.
  std::optional<std::string> Value(std::string_view key) const;
  [[noreturn]] void Fail(std::string_view key, std::string_view value,
                         const std::string& expected) const;

  std::string name_;
  std::vector<std::pair<std::string, std::string>> options_;
  const CatalogueEntry* entry_ = nullptr;
};

// The number that all of the text spells, if a float holds it.
std::optional<double> ParseNumber(std::string_view text);

// The shortest text that reads back as the same number.
std::string NumberText(double number);

// Sizes as FindShape reads them, "3x14x14".
std::string SizesText(const std::vector<int64_t>& sizes);

// The components of a sum, "a+b:c=1". A plus before a digit belongs to a number: "a:c=1e+20".
std::vector<Component> ParseSum(std::string_view text);

// The message for a name that is not known: the nearest known names, if any is near, and all of
// them. `kind` is "similarity", "position", ...
std::string UnknownName(std::string_view kind, std::string_view name,
                        const std::vector<std::string>& known);

}  // namespace gnomon

#endif  // GNOMON_OPS_GRAMMAR_COMPONENT_H_
