#include "ops/grammar/component.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>

namespace gnomon {
namespace {

using Kind = CatalogueParameter::Kind;

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::string Join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::optional<int64_t> ParseInteger(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// Parses positive integers joined by "x", such as "3x14x14".
std::optional<std::vector<int64_t>> ParseShape(std::string_view text) {
  std::vector<int64_t> sizes;
  for (const std::string_view part : Split(text, 'x')) {
    const std::optional<int64_t> size = ParseInteger(part);
    if (!size || *size < 1) return std::nullopt;
    sizes.push_back(*size);
  }
  return sizes;
}

// Parses the whole text as a number.
std::optional<double> ParseDouble(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

constexpr const char* kNumbersExpected = "positive numbers joined by x, as in 1x1.5x2";

std::optional<std::vector<double>> ParseNumbers(std::string_view text) {
  std::vector<double> numbers;
  for (const std::string_view part : Split(text, 'x')) {
    const std::optional<double> number = ParseNumber(part);
    if (!number || !(*number > 0)) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

bool IsWithin(const CatalogueParameter& parameter, double number) {
  if (parameter.lowest && number < *parameter.lowest) return false;
  if (parameter.above && number == *parameter.lowest) return false;
  return !parameter.highest || number <= *parameter.highest;
}

bool Takes(const CatalogueParameter& parameter, const std::string& value) {
  if (parameter.takes_tensor && value == "tensor") return true;
  switch (parameter.kind) {
    case Kind::kNumber: {
      const std::optional<double> number = ParseNumber(value);
      return number && IsWithin(parameter, *number);
    }
    case Kind::kInteger: {
      const std::optional<int64_t> number = ParseInteger(value);
      return number && IsWithin(parameter, static_cast<double>(*number));
    }
    case Kind::kFlag:
      return value == "true" || value == "false";
    case Kind::kChoice:
      return std::find(parameter.choices.begin(), parameter.choices.end(), value) !=
             parameter.choices.end();
    case Kind::kShape:
      return ParseShape(value).has_value();
    case Kind::kNumbers:
      return ParseNumbers(value).has_value();
    case Kind::kHeads: {
      const std::optional<double> number = ParseNumber(value);
      return value == "learned" || value == "fixed" || (number && IsWithin(parameter, *number));
    }
    case Kind::kTable:
      break;
  }
  return false;
}

// The message for an unknown option, listing the options that a specification can set.
std::string UnknownOption(const std::string& term, const CatalogueEntry& entry,
                          const std::string& key) {
  std::vector<std::string> names;
  for (const CatalogueParameter& parameter : entry.parameters) {
    if (parameter.kind != Kind::kTable) names.push_back(parameter.name);
  }
  const std::string near = DidYouMean(key, names);
  return "gnomon: " + term + " has no option \"" + key + "\"; " +
         (near.empty() ? "it has " : near + " It has ") + (names.empty() ? "none" : Join(names));
}

// Describes the values that Takes() accepts.
std::string Expected(const CatalogueParameter& parameter) {
  const auto bounded = [&](const char* words, const char* positive) -> std::string {
    if (!parameter.lowest) {
      if (!parameter.highest) return words;
      return std::string(words) + " of at most " + NumberText(*parameter.highest);
    }
    if (parameter.above && *parameter.lowest == 0) return positive;
    const std::string lowest = NumberText(*parameter.lowest);
    if (parameter.highest) {
      return std::string(words) + " from " + lowest + " to " + NumberText(*parameter.highest);
    }
    return std::string(words) + (parameter.above ? " above " : " of at least ") + lowest;
  };
  switch (parameter.kind) {
    case Kind::kNumber:
      return bounded("a number", "a positive number");
    case Kind::kInteger:
      return bounded("an integer", "a positive integer");
    case Kind::kFlag:
      return "true or false";
    case Kind::kChoice:
      return "one of " + Join(parameter.choices);
    case Kind::kShape:
      return "positive integers joined by x, as in 14x14";
    case Kind::kNumbers:
      return kNumbersExpected;
    case Kind::kHeads:
      return "learned, fixed or " + bounded("a number", "a positive number");
    case Kind::kTable:
      break;
  }
  return "a tensor";
}

}  // namespace

std::string CatalogueParameter::values() const {
  std::string text;
  switch (kind) {
    case Kind::kNumber:
      text = "number";
      break;
    case Kind::kInteger:
      text = "integer";
      break;
    case Kind::kFlag:
      text = "true | false";
      break;
    case Kind::kChoice:
      for (const std::string& choice : choices) text += (text.empty() ? "" : " | ") + choice;
      break;
    case Kind::kShape:
      text = "sizes joined by x: 14x14, 4x8x8";
      break;
    case Kind::kNumbers:
      text = "numbers joined by x: 1x1.5x2";
      break;
    case Kind::kHeads:
      text = "learned | fixed | number";
      break;
    case Kind::kTable:
      text = "tensor";
      break;
  }
  return text;
}

Component Component::Parse(std::string_view text) {
  Component component;
  const std::vector<std::string_view> parts = Split(text, ':');
  component.name_ = parts.front();
  component.entry_ = FindCatalogueEntry(component.name_);
  for (size_t i = 1; i < parts.size(); ++i) {
    const size_t equals = parts[i].find('=');
    const std::string key(parts[i].substr(0, equals));
    TORCH_CHECK_VALUE(!key.empty(), "gnomon: \"", text,
                      "\" has an empty option; expected name:key=value");
    TORCH_CHECK_VALUE(!component.Find(key), "gnomon: \"", text, "\" sets ", key, " twice");
    component.options_.emplace_back(
        key, equals == std::string_view::npos ? "true" : std::string(parts[i].substr(equals + 1)));
  }
  return component;
}

Component Component::Parse(std::string_view text, const CatalogueEntry& entry) {
  Component component = Parse(text);
  component.entry_ = &entry;
  return component;
}

std::optional<std::string> Component::Find(std::string_view key) const {
  for (const auto& [name, value] : options_) {
    if (name == key) return value;
  }
  return std::nullopt;
}

std::optional<std::string> Component::Value(std::string_view key) const {
  if (std::optional<std::string> value = Find(key)) return value;
  const CatalogueParameter* parameter =
      entry_ == nullptr ? nullptr : entry_->Find(std::string(key));
  if (parameter == nullptr || parameter->default_value.empty()) return std::nullopt;
  return parameter->default_value;
}

bool Component::HasDefault(std::string_view key) const {
  const std::optional<std::string> given = Find(key);
  const CatalogueParameter* parameter = entry_->Find(std::string(key));
  if (!given || *given == parameter->default_value) return true;
  const std::optional<double> number = ParseNumber(*given);
  return number && number == ParseNumber(parameter->default_value);
}

void Component::Fail(std::string_view key, std::string_view value,
                     const std::string& expected) const {
  TORCH_CHECK_VALUE(false, "gnomon: ", name_, ":", key, "=", value, " is invalid; expected ",
                    expected);
}

std::string Component::Text() const {
  std::string text = name_;
  for (const auto& [key, value] : options_) text.append(":").append(key).append("=").append(value);
  return text;
}

std::optional<double> Component::FindNumber(std::string_view key) const {
  const std::optional<std::string> value = Value(key);
  if (!value) return std::nullopt;
  const std::optional<double> number = ParseNumber(*value);
  if (!number) Fail(key, *value, "a number");
  return number;
}

std::optional<int64_t> Component::FindInteger(std::string_view key) const {
  const std::optional<std::string> value = Value(key);
  if (!value) return std::nullopt;
  const std::optional<int64_t> number = ParseInteger(*value);
  if (!number) Fail(key, *value, "an integer");
  return number;
}

std::optional<bool> Component::FindFlag(std::string_view key) const {
  const std::optional<std::string> value = Value(key);
  if (!value) return std::nullopt;
  if (*value != "true" && *value != "false") Fail(key, *value, "true or false");
  return *value == "true";
}

std::optional<std::vector<int64_t>> Component::FindShape(std::string_view key) const {
  const std::optional<std::string> value = Value(key);
  if (!value) return std::nullopt;
  std::optional<std::vector<int64_t>> shape = ParseShape(*value);
  if (!shape) Fail(key, *value, "positive integers joined by x, as in 14x14");
  return shape;
}

std::optional<std::vector<double>> Component::FindNumbers(std::string_view key) const {
  const std::optional<std::string> value = Value(key);
  if (!value) return std::nullopt;
  std::optional<std::vector<double>> numbers = ParseNumbers(*value);
  if (!numbers) Fail(key, *value, kNumbersExpected);
  return numbers;
}

double Component::Number(std::string_view key) const {
  const std::optional<double> number = FindNumber(key);
  if (!number) Fail(key, "", "a number");
  return *number;
}

int64_t Component::Integer(std::string_view key) const {
  const std::optional<int64_t> number = FindInteger(key);
  if (!number) Fail(key, "", "an integer");
  return *number;
}

bool Component::Flag(std::string_view key) const {
  const std::optional<bool> flag = FindFlag(key);
  if (!flag) Fail(key, "", "true or false");
  return *flag;
}

std::string Component::Choice(std::string_view key) const {
  std::optional<std::string> value = Value(key);
  if (!value) Fail(key, "", "a choice");
  return *value;
}

void Component::SetDefault(std::string_view key, std::string_view value) {
  if (!Find(key)) options_.emplace_back(key, value);
}

bool Component::IsTensor(std::string_view key) const { return Find(key) == "tensor"; }

void Component::Check() const {
  for (const auto& [key, value] : options_) {
    const CatalogueParameter* parameter = entry_->Find(key);
    TORCH_CHECK_VALUE(
        parameter != nullptr && (parameter->kind != Kind::kTable || value == "tensor"),
        UnknownOption(name_, *entry_, key));
    if (!Takes(*parameter, value)) {
      const bool is_number = ParseDouble(value) && !ParseNumber(value);
      Fail(key, value, Expected(*parameter) + (is_number ? " that float32 can represent" : ""));
    }
    const std::vector<std::string>& readers = parameter->read_by;
    if (readers.empty()) continue;
    const std::string choice = Choice(parameter->detail_of);
    TORCH_CHECK_VALUE(std::find(readers.begin(), readers.end(), choice) != readers.end(),
                      "gnomon: ", name_, " has ", key, " with ", parameter->detail_of, "=", choice,
                      ", which ignores it; expected ", parameter->detail_of,
                      readers.size() == 1 ? "=" : " one of ", Join(readers), ", or no ", key);
  }
}

std::optional<double> ParseNumber(std::string_view text) {
  const std::optional<double> number = ParseDouble(text);
  // The number may be stored in a float tensor, so it must be within the range of float.
  using Limits = std::numeric_limits<float>;
  const double size = std::fabs(number.value_or(0));
  const bool fits = size == 0 || (size >= Limits::min() && size <= Limits::max());
  return fits ? number : std::nullopt;
}

std::string NumberText(double number) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return {text.data(), end};
}

std::string SizesText(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) {
    if (!text.empty()) text += 'x';
    text += std::to_string(size);
  }
  return text;
}

std::vector<Component> ParseSum(std::string_view text) {
  std::vector<Component> components;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    const bool ends = i == text.size() ||
                      (text[i] == '+' && (i + 1 == text.size() ||
                                          !std::isdigit(static_cast<unsigned char>(text[i + 1]))));
    if (!ends) continue;
    components.push_back(Component::Parse(text.substr(begin, i - begin)));
    begin = i + 1;
  }
  return components;
}

std::string UnknownName(std::string_view kind, std::string_view name,
                        const std::vector<std::string>& known) {
  const std::string near = DidYouMean(name, known);
  return "gnomon: unknown " + std::string(kind) + " \"" + std::string(name) + "\"; " +
         (near.empty() ? "known: " : near + " Known: ") + Join(known);
}

}  // namespace gnomon
