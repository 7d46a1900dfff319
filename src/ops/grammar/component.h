// The grammar of similarity and position specifications (gnomon/catalogue.h). Invalid
// specifications throw c10::ValueError.
#ifndef GNOMON_OPS_GRAMMAR_COMPONENT_H_
#define GNOMON_OPS_GRAMMAR_COMPONENT_H_

#include <gnomon/specification.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gnomon {

// One component, such as "name:key=value:flag", and its catalogue entry, which defines the valid
// keys, their values and their defaults.
class Component {
 public:
  // Uses the entry in the library's catalogue, if any (see FindSimilarity and FindPosition).
  static Component Parse(std::string_view text);
  // Uses the given entry, which must outlive the component.
  static Component Parse(std::string_view text, const CatalogueEntry& entry);

  const std::string& name() const { return name_; }
  const std::vector<std::pair<std::string, std::string>>& options() const { return options_; }
  // The component as text that Parse can read.
  std::string Text() const;
  // The value in the text; ignores defaults.
  std::optional<std::string> Find(std::string_view key) const;
  // Whether the key is absent or set to its default. (The term classes also write defaults into
  // specifications, so a key that is present may still have its default.)
  bool HasDefault(std::string_view key) const;

  // The value of the parameter, or its default. A parameter without a default must be present.
  double Number(std::string_view key) const;
  int64_t Integer(std::string_view key) const;
  bool Flag(std::string_view key) const;
  std::string Choice(std::string_view key) const;
  // nullopt if neither the text nor a default provides a value.
  std::optional<double> FindNumber(std::string_view key) const;
  std::optional<int64_t> FindInteger(std::string_view key) const;
  std::optional<bool> FindFlag(std::string_view key) const;
  std::optional<std::vector<int64_t>> FindShape(std::string_view key) const;
  std::optional<std::vector<double>> FindNumbers(std::string_view key) const;

  // Adds key=value if the key is absent, for defaults that only the caller knows.
  void SetDefault(std::string_view key, std::string_view value);

  // Whether the value of the parameter is one of the tensors passed with the specification.
  bool IsTensor(std::string_view key) const;

  // Throws unless each key belongs to the entry and each value is valid.
  void Check() const;

 private:
  // The value in the text, or the default.
  std::optional<std::string> Value(std::string_view key) const;
  [[noreturn]] void Fail(std::string_view key, std::string_view value,
                         const std::string& expected) const;

  std::string name_;
  std::vector<std::pair<std::string, std::string>> options_;
  const CatalogueEntry* entry_ = nullptr;
};

// The number that the whole text represents, if float can represent it.
std::optional<double> ParseNumber(std::string_view text);

// The shortest text that reads back as the same number.
std::string NumberText(double number);

// Sizes as text, which FindShape can read: "3x14x14".
std::string SizesText(const std::vector<int64_t>& sizes);

// The components of a sum, "a+b:c=1". A plus before a digit belongs to a number: "a:c=1e+20".
std::vector<Component> ParseSum(std::string_view text);

// The message for an unknown name, with the nearest known names, if any, and all known names.
// `kind` is "similarity", "position", ...
std::string UnknownName(std::string_view kind, std::string_view name,
                        const std::vector<std::string>& known);

}  // namespace gnomon

#endif  // GNOMON_OPS_GRAMMAR_COMPONENT_H_
