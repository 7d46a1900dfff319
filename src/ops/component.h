// The grammar of similarities and positions (gnomon/catalogue.h). Mistakes throw c10::ValueError.
#ifndef GNOMON_OPS_COMPONENT_H_
#define GNOMON_OPS_COMPONENT_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gnomon {

struct CatalogueEntry;

// One "name:key=value:flag".
class Component {
 public:
  static Component Parse(std::string_view text);

  const std::string& name() const { return name_; }
  const std::vector<std::pair<std::string, std::string>>& options() const { return options_; }
  // What Parse would read it from.
  std::string Text() const;
  std::optional<std::string> Find(std::string_view key) const;
  double Number(std::string_view key, double default_value) const;
  std::optional<double> FindNumber(std::string_view key) const;
  int64_t Integer(std::string_view key, int64_t default_value) const;
  // true or false; nullopt where the key is absent.
  std::optional<bool> FindFlag(std::string_view key) const;
  // Positive integers joined by x, "3x14x14"; nullopt where the key is absent.
  std::optional<std::vector<int64_t>> FindSizes(std::string_view key) const;
  // One of the choices, of which the first is the default.
  std::string Choice(std::string_view key, std::initializer_list<const char*> choices) const;

  // Adds key=value where the key is absent.
  void SetDefault(std::string_view key, std::string_view value);

  // Whether the parameter of that name is one of the tensors that come with the specification.
  bool IsTensor(std::string_view key) const;

  // Throws, naming the keys of the entry, if this has another one; a parameter among `tensors` may
  // be one that IsTensor.
  void CheckKeys(const CatalogueEntry& entry, const std::vector<std::string>& tensors = {}) const;

 private:
  [[noreturn]] void Fail(std::string_view key, std::string_view value,
                         const std::string& expected) const;

  std::string name_;
  std::vector<std::pair<std::string, std::string>> options_;
};

// The number that all of the text spells.
std::optional<double> ParseNumber(std::string_view text);

// The shortest text that reads back as the same number.
std::string NumberText(double number);

// Sizes as FindSizes reads them, "3x14x14".
std::string SizesText(const std::vector<int64_t>& sizes);

// The components of a sum, "a+b:c=1". A plus before a digit belongs to a number: "a:c=1e+20".
std::vector<Component> ParseSum(std::string_view text);

// The message for a name that is not known: the nearest known names, if any is near, and all of
// them. `kind` is "similarity", "position", ...
std::string UnknownName(std::string_view kind, std::string_view name,
                        const std::vector<std::string>& known);

}  // namespace gnomon

#endif  // GNOMON_OPS_COMPONENT_H_
