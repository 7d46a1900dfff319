// Each option is defined once, in a list. The list generates the members of a struct, the
// command-line flags, the range checks and the fields in files.
#ifndef GNOMON_TRAINING_OPTIONS_H_
#define GNOMON_TRAINING_OPTIONS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace gnomon::lab {

// A maximum for counts: larger than any realistic count, but small enough that sums do not
// overflow.
inline constexpr int64_t kMany = 1'000'000'000'000;
// The largest seed that JSON represents exactly.
inline constexpr int64_t kLargestSeed = int64_t{1} << 53;

// Properties of an option other than its type, name and default.
struct OptionInfo {
  const char* help = "";
  // The range of the number, or of each number in a list.
  double lowest = 0;
  double highest = static_cast<double>(kMany);
  // The flag's name without leading dashes. The default is the option's key, with dashes instead of
  // underscores.
  const char* flag = nullptr;
  // If false, the option exists only in files.
  bool has_flag = true;
  // Whether --help shows the default; false if it depends on something that `help` describes.
  bool shows_default = true;
  // Whether files may omit the option, which then keeps its default.
  bool may_lack = false;
  // Whether the value may change when a run is resumed.
  bool may_change = false;
  // For lists of texts: whether commas separate the items. If false, each item is a separate
  // argument and may contain commas.
  bool has_commas = true;
  // For texts: the valid values. If empty, all values are valid.
  std::vector<std::string> choices = {};
};

// An option of a struct, with a pointer to its member.
struct Option {
  using Value = std::variant<int64_t*, double*, bool*, std::string*, std::optional<int64_t>*,
                             std::vector<int64_t>*, std::vector<std::string>*>;

  std::string key;
  OptionInfo info;
  Value value;
  // The name of the object that contains the option in files, and of its flag's group in --help.
  // Empty for the top level.
  std::string section = "";

  // "--learning-rate" for "learning_rate".
  std::string flag() const;
};

using OptionList = std::vector<Option>;

// Defines the members of a struct and the function Options(), which returns their list.
// LIST(OPTION) must call OPTION(type, name, default, info...) for each option:
//
//   #define GNOMON_LOOK_OPTIONS(OPTION) OPTION(int64_t, width, 80, .help = "Columns", .lowest = 1)
//   struct LookOptions {
//     GNOMON_OPTIONS(GNOMON_LOOK_OPTIONS)
//   };
//
// The list points to the struct's members, so the struct must outlive it.
#define GNOMON_OPTIONS(LIST)            \
  LIST(GNOMON_OPTION_MEMBER)            \
  ::gnomon::lab::OptionList Options() { \
    ::gnomon::lab::OptionList list;     \
    LIST(GNOMON_OPTION_ENTRY)           \
    return list;                        \
  }
#define GNOMON_OPTION_MEMBER(Type, name, default_value, ...) Type name = default_value;
#define GNOMON_OPTION_ENTRY(Type, name, default_value, ...) \
  ::gnomon::lab::AddOption(#name, {__VA_ARGS__}, &name, &list);

void AddOption(const char* name, const OptionInfo& info, const Option::Value& value,
               OptionList* list);

// Concatenates two lists.
OptionList operator+(OptionList first, OptionList second);
// Returns the list with all options moved to a section.
OptionList InSection(const std::string& section, OptionList list);
// Without() removes the options with the given keys. WithoutFlags() keeps them in files but removes
// their flags.
OptionList Without(OptionList list, const std::vector<std::string>& keys);
OptionList WithoutFlags(OptionList list, const std::vector<std::string>& keys);
// Returns the list with one option renamed.
OptionList Renamed(OptionList list, const std::string& key, const std::string& name);

// Returns the values as they are stored in files.
nlohmann::json ToJson(const OptionList& list);

// Sets the values from a file; throws Error if a field or section is missing or has the wrong type.
void FromJson(const nlohmann::json& object, const OptionList& list);

// Throws Error if an option is out of range: "WHERE: KEY is ...", or "--FLAG is ..." if `where` is
// empty.
void CheckRanges(const OptionList& list, const std::string& where);

// Returns a field of an object; throws Error if it is missing or has the wrong type. T is int64_t,
// double, bool, std::string, or a vector of int64_t or std::string.
template <class T>
T Field(const nlohmann::json& object, const std::string& name);

// Describes an option for programs in other languages: key, kind ("integer", "number", "flag",
// "text", "integers", "texts"), default, range of numbers, whether files may omit it, and valid
// values of texts.
nlohmann::json DescribeOption(const Option& option);

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_OPTIONS_H_
