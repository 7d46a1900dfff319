// Options, each defined once: a list generates the members of a struct, the command-line flags, the
// range checks and the fields of files.
#ifndef GNOMON_TRAINING_OPTIONS_H_
#define GNOMON_TRAINING_OPTIONS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace gnomon::lab {

// Larger than any realistic count, and small enough that sums do not overflow.
inline constexpr int64_t kMany = 1'000'000'000'000;
// The largest seed that JSON represents exactly.
inline constexpr int64_t kLargestSeed = int64_t{1} << 53;

// Properties of an option other than its type, name and default.
struct OptionInfo {
  const char* help = "";
  // The range of a number, of each number of a list.
  double lowest = 0;
  double highest = static_cast<double>(kMany);
  // The flag's name without leading dashes; default: its name in files, with dashes.
  const char* flag = nullptr;
  // If false, it exists only in files.
  bool has_flag = true;
  // Whether --help shows the default; false if it depends on something that `help` describes.
  bool shows_default = true;
  // Files may omit it; it then has the default.
  bool may_lack = false;
  // Whether a resumed run accepts another value.
  bool may_change = false;
  // For lists of texts: whether commas separate them, or each is a separate argument that may
  // contain commas.
  bool has_commas = true;
  // For texts: the valid values. Empty: any.
  std::vector<std::string> choices = {};
};

// An option bound to a struct.
struct Option {
  using Value = std::variant<int64_t*, double*, bool*, std::string*, std::optional<int64_t>*,
                             std::vector<int64_t>*, std::vector<std::string>*>;

  std::string key;
  OptionInfo info;
  Value value;
  // The object in files that contains it, and the group of its flag; empty: the top level.
  std::string section = "";

  // "--learning-rate" for "learning_rate".
  std::string flag() const;
};

using OptionList = std::vector<Option>;

// The members of a struct and Options(), their list, from LIST(OPTION), which calls
// OPTION(type, name, default, info...) for each:
//
//   #define GNOMON_LOOK_OPTIONS(OPTION) OPTION(int64_t, width, 80, .help = "Columns", .lowest = 1)
//   struct LookOptions {
//     GNOMON_OPTIONS(GNOMON_LOOK_OPTIONS)
//   };
//
// The pointers are to the struct's own members: it must outlive the list.
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

// The concatenation of both lists.
OptionList operator+(OptionList first, OptionList second);
// The list with all options in a section.
OptionList InSection(const std::string& section, OptionList list);
// The list without the given keys; or with their options only in files, without flags.
OptionList Without(OptionList list, const std::vector<std::string>& keys);
OptionList WithoutFlags(OptionList list, const std::vector<std::string>& keys);
// The list with another name for one option.
OptionList Renamed(OptionList list, const std::string& key, const std::string& name);

// The values in file form.
nlohmann::json ToJson(const OptionList& list);

// Sets the values from a file; throws Error if a field or section is missing or has the wrong type.
void FromJson(const nlohmann::json& object, const OptionList& list);

// Throws Error if an option is out of range: "WHERE: KEY is ...", or "--FLAG is ..." if `where` is
// empty.
void CheckRanges(const OptionList& list, const std::string& where);

// One field of an object; throws Error if it is missing or has the wrong type. For int64_t, double,
// bool, std::string, and vectors of int64_t and std::string.
template <class T>
T Field(const nlohmann::json& object, const std::string& name);

// For programs in other languages: key, kind ("integer", "number", "flag", "text", "integers",
// "texts"), default, the range of numbers, whether files may omit it, and the valid values of
// texts.
nlohmann::json DescribeOption(const Option& option);

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_OPTIONS_H_
