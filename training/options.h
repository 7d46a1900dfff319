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
  // Its name in files where that is not the member's; its flag is the same with dashes.
  const char* key = nullptr;
  // Without, it stands in files alone.
  bool has_flag = true;
  // Whether --help shows the default. Not where it depends on something, which `help` says then.
  bool shows_default = true;
  // Files may lack it: from before there was one.
  bool may_lack = false;
  // Of text: what it may be. Empty: anything.
  std::vector<std::string> choices = {};
};

// An option of a struct at hand.
struct Option {
  using Value =
      std::variant<int64_t*, double*, bool*, std::string*, std::optional<int64_t>*,
                   std::vector<int64_t>*, std::vector<std::string>*>;

  std::string key;
  OptionInfo info;
  Value value;
  // The object within a file that holds it; empty: the outermost one.
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
#define GNOMON_OPTIONS(LIST)                 \
  LIST(GNOMON_OPTION_MEMBER)                 \
  ::gnomon::models::OptionList Options() {   \
    ::gnomon::models::OptionList list;       \
    LIST(GNOMON_OPTION_ENTRY)                \
    return list;                             \
  }
#define GNOMON_OPTION_MEMBER(Type, name, default_value, ...) Type name = default_value;
#define GNOMON_OPTION_ENTRY(Type, name, default_value, ...) \
  ::gnomon::models::AddOption(#name, {__VA_ARGS__}, &name, &list);

void AddOption(const char* name, const OptionInfo& info, const Option::Value& value,
               OptionList* list);

// Both lists as one, the second in a section of files.
OptionList operator+(OptionList first, OptionList second);
OptionList InSection(const std::string& section, OptionList list);
// Without those of these keys.
OptionList Without(OptionList list, const std::vector<std::string>& keys);

// The values as a file holds them.
nlohmann::json ToJson(const OptionList& list);
template <class Struct>
nlohmann::json OptionsToJson(Struct options) {
  return ToJson(options.Options());
}

// Sets the values from a file; throws Error where a field is missing or of the wrong type.
void FromJson(const nlohmann::json& object, const OptionList& list);

// Throws Error for an option that is out of its range: "WHERE: KEY is ...", or "--FLAG is ..." where
// `where` is empty.
void CheckRanges(const OptionList& list, const std::string& where);

// One field of an object; throws Error where it is missing or of the wrong type. For int64_t,
// double, bool, std::string and vectors of the first and the last.
template <class T>
T Field(const nlohmann::json& object, const std::string& name);

// What is in a list, for programs in other languages: key, kind ("integer", "number", "flag",
// "text", "integers", "texts"), default, and the range of numbers.
nlohmann::json DescribeOptions(const OptionList& list);

}  // namespace gnomon::models

#endif  // GNOMON_TRAINING_OPTIONS_H_
