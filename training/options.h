// Options, each said once: in a list that makes the members of a struct, its flags on the command
// line, the checks of their ranges, and the fields of a file.
#ifndef GNOMON_TRAINING_OPTIONS_H_
#define GNOMON_TRAINING_OPTIONS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace gnomon::models {

// More than any count that a run can have, and less than what could overflow beside another.
inline constexpr int64_t kMany = 1'000'000'000'000;
// The largest seed: what JSON keeps exactly.
inline constexpr int64_t kLargestSeed = int64_t{1} << 53;

// What a list says of an option beside its type, name and default.
struct OptionInfo {
  const char* help = "";
  // The range of a number, of each number of a list.
  double lowest = 0;
  double highest = static_cast<double>(kMany);
  // Its flag's name, without dashes in front; by default its name in files, with dashes within.
  const char* flag = nullptr;
  // Without, it stands in files alone.
  bool has_flag = true;
  // Whether --help shows the default. Not where it depends on something, which `help` says then.
  bool shows_default = true;
  // Files may lack it, and have the default then.
  bool may_lack = false;
  // Whether a run that is resumed takes another value.
  bool may_change = false;
  // Of several texts: whether commas separate them, or each is an argument of its own and may have
  // commas.
  bool has_commas = true;
  // Of text: what it may be. Empty: anything.
  std::vector<std::string> choices = {};
};

// An option of a struct at hand.
struct Option {
  using Value = std::variant<int64_t*, double*, bool*, std::string*, std::optional<int64_t>*,
                             std::vector<int64_t>*, std::vector<std::string>*>;

  std::string key;
  OptionInfo info;
  Value value;
  // The object within a file that holds it, and the group of its flag; empty: the outermost one.
  std::string section = "";

  // "--learning-rate" of "learning_rate".
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
#define GNOMON_OPTIONS(LIST)               \
  LIST(GNOMON_OPTION_MEMBER)               \
  ::gnomon::models::OptionList Options() { \
    ::gnomon::models::OptionList list;     \
    LIST(GNOMON_OPTION_ENTRY)              \
    return list;                           \
  }
#define GNOMON_OPTION_MEMBER(Type, name, default_value, ...) Type name = default_value;
#define GNOMON_OPTION_ENTRY(Type, name, default_value, ...) \
  ::gnomon::models::AddOption(#name, {__VA_ARGS__}, &name, &list);

void AddOption(const char* name, const OptionInfo& info, const Option::Value& value,
               OptionList* list);

// Both lists as one.
OptionList operator+(OptionList first, OptionList second);
// All of them in a section of files.
OptionList InSection(const std::string& section, OptionList list);
// Without those of these keys; or with those in files alone, without a flag.
OptionList Without(OptionList list, const std::vector<std::string>& keys);
OptionList WithoutFlags(OptionList list, const std::vector<std::string>& keys);
// With another name for one of them.
OptionList Renamed(OptionList list, const std::string& key, const std::string& name);

// The values as a file holds them.
nlohmann::json ToJson(const OptionList& list);

// Sets the values from a file; throws Error where a field or a section is missing or of the wrong
// type.
void FromJson(const nlohmann::json& object, const OptionList& list);

// Throws Error for an option that is out of its range: "WHERE: KEY is ...", or "--FLAG is ..."
// where `where` is empty.
void CheckRanges(const OptionList& list, const std::string& where);

// One field of an object; throws Error where it is missing or of the wrong type. For int64_t,
// double, bool, std::string and vectors of the first and the last.
template <class T>
T Field(const nlohmann::json& object, const std::string& name);

// For programs in other languages: key, kind ("integer", "number", "flag", "text", "integers",
// "texts"), default, the range of numbers, whether files may lack it, and what a text may be.
nlohmann::json DescribeOption(const Option& option);

}  // namespace gnomon::models

#endif  // GNOMON_TRAINING_OPTIONS_H_
