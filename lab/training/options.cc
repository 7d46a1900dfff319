#include "training/options.h"

#include <algorithm>
#include <iterator>
#include <type_traits>
#include <utility>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

using nlohmann::json;

template <class T>
bool HasType(const json& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value.is_boolean();
  } else if constexpr (std::is_same_v<T, std::string>) {
    return value.is_string();
  } else if constexpr (std::is_integral_v<T>) {
    return value.is_number_integer();
  } else if constexpr (std::is_floating_point_v<T>) {
    return value.is_number();
  } else if constexpr (std::is_same_v<T, std::optional<int64_t>>) {
    return value.is_null() || value.is_number_integer();
  } else {
    return value.is_array() &&
           std::all_of(value.begin(), value.end(), HasType<typename T::value_type>);
  }
}

template <class T>
T Get(const json& value) {
  if constexpr (std::is_same_v<T, std::optional<int64_t>>) {
    return value.is_null() ? std::nullopt : std::optional(value.get<int64_t>());
  } else {
    return value.get<T>();
  }
}

template <class T>
json Put(const T& value) {
  if constexpr (std::is_same_v<T, std::optional<int64_t>>) {
    return value ? json(*value) : json();
  } else {
    return value;
  }
}

template <class T>
constexpr const char* Kind() {
  if constexpr (std::is_same_v<T, bool>) return "flag";
  if constexpr (std::is_same_v<T, double>) return "number";
  if constexpr (std::is_same_v<T, std::string>) return "text";
  if constexpr (std::is_same_v<T, std::vector<int64_t>>) return "integers";
  if constexpr (std::is_same_v<T, std::vector<std::string>>) return "texts";
  return "integer";
}

// The object that contains a section's fields; empty if there is none.
const json& SectionOf(const json& object, const std::string& section) {
  static const json none = json::object();
  if (section.empty()) return object;
  const auto found = object.is_object() ? object.find(section) : object.end();
  if (!object.is_object() || found == object.end()) return none;
  if (!found->is_object())
    throw Error(StrCat("the field '", section, "' has the wrong type; expected an object"));
  return *found;
}

bool IsOneOf(const std::string& key, const std::vector<std::string>& keys) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

std::string NameIn(const std::string& where, const Option& option) {
  return where.empty() ? option.flag() : where + ": " + option.key;
}

void CheckNumber(const Option& option, double value, const std::string& where) {
  if (value >= option.info.lowest && value <= option.info.highest) return;
  throw Error(StrCat(NameIn(where, option), " is ", value, "; expected ", option.info.lowest,
                     " to ", option.info.highest));
}

void CheckChoice(const Option& option, const std::string& value, const std::string& where) {
  const std::vector<std::string>& choices = option.info.choices;
  if (choices.empty() || IsOneOf(value, choices)) return;
  throw Error(
      StrCat(NameIn(where, option), " is '", value, "'; expected one of ", Join(choices, ", ")));
}

}  // namespace

std::string Option::flag() const {
  std::string flag = StrCat("--", info.flag != nullptr ? info.flag : key);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

void AddOption(const char* name, const OptionInfo& info, const Option::Value& value,
               OptionList* list) {
  list->push_back({name, info, value});
}

OptionList operator+(OptionList first, OptionList second) {
  std::move(second.begin(), second.end(), std::back_inserter(first));
  return first;
}

OptionList InSection(const std::string& section, OptionList list) {
  for (Option& option : list) option.section = section;
  return list;
}

OptionList Without(OptionList list, const std::vector<std::string>& keys) {
  std::erase_if(list, [&](const Option& option) { return IsOneOf(option.key, keys); });
  return list;
}

OptionList WithoutFlags(OptionList list, const std::vector<std::string>& keys) {
  for (Option& option : list) {
    if (IsOneOf(option.key, keys)) option.info.has_flag = false;
  }
  return list;
}

OptionList Renamed(OptionList list, const std::string& key, const std::string& name) {
  for (Option& option : list) {
    if (option.key == key) option.key = name;
  }
  return list;
}

json ToJson(const OptionList& list) {
  json object = json::object();
  for (const Option& option : list) {
    json& section = option.section.empty() ? object : object[option.section];
    std::visit([&](const auto* value) { section[option.key] = Put(*value); }, option.value);
  }
  return object;
}

template <class T>
T Field(const json& object, const std::string& name) {
  if (!object.is_object() || !object.contains(name)) {
    throw Error(StrCat("the field '", name, "' is missing"));
  }
  const auto found = object.find(name);
  if (!HasType<T>(*found)) throw Error(StrCat("the field '", name, "' has the wrong type"));
  return Get<T>(*found);
}

template int64_t Field(const json&, const std::string&);
template double Field(const json&, const std::string&);
template bool Field(const json&, const std::string&);
template std::string Field(const json&, const std::string&);
template std::vector<int64_t> Field(const json&, const std::string&);
template std::vector<std::string> Field(const json&, const std::string&);

void FromJson(const json& object, const OptionList& list) {
  for (const Option& option : list) {
    const json& section = SectionOf(object, option.section);
    if (option.info.may_lack && !section.contains(option.key)) continue;
    std::visit([&]<class T>(T* value) { *value = Field<T>(section, option.key); }, option.value);
  }
}

void CheckRanges(const OptionList& list, const std::string& where) {
  for (const Option& option : list) {
    std::visit(
        [&]<class T>(const T* value) {
          if constexpr (std::is_same_v<T, std::string>) {
            CheckChoice(option, *value, where);
          } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
            for (const int64_t n : *value) CheckNumber(option, static_cast<double>(n), where);
          } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
            for (const std::string& word : *value) CheckChoice(option, word, where);
          } else if constexpr (std::is_same_v<T, std::optional<int64_t>>) {
            if (*value) CheckNumber(option, static_cast<double>(**value), where);
          } else if constexpr (!std::is_same_v<T, bool>) {
            CheckNumber(option, static_cast<double>(*value), where);
          }
        },
        option.value);
  }
}

json DescribeOption(const Option& option) {
  return std::visit(
      [&]<class T>(const T* value) -> json {
        return {{"key", option.key},
                {"kind", Kind<T>()},
                {"default", Put(*value)},
                {"lowest", option.info.lowest},
                {"highest", option.info.highest},
                {"may_lack", option.info.may_lack},
                {"choices", option.info.choices}};
      },
      option.value);
}

}  // namespace gnomon::lab
