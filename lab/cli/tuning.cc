#include "cli/tuning.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numeric>
#include <optional>
#include <sstream>
#include <type_traits>
#include <variant>

#include "cli/python.h"
#include "gnomon/attention.h"
#include "gnomon/specification.h"
#include "gnomon/torch/nn.h"
#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {

using nlohmann::json;

constexpr const char* kTuningFile = "lab/_tuning.py";

// The name by which --tune refers to an option.
std::string NameOf(const Option& option) { return option.flag().substr(2); }

bool IsInteger(const Option& option) { return !std::holds_alternative<double*>(option.value); }

bool IsNumber(const Option& option) {
  return std::visit(
      []<class T>(const T*) {
        return std::is_same_v<T, int64_t> || std::is_same_v<T, double> ||
               std::is_same_v<T, std::optional<int64_t>>;
      },
      option.value);
}

OptionList OnlyNumbers(OptionList list) {
  std::erase_if(list,
                [](const Option& option) { return !option.info.has_flag || !IsNumber(option); });
  return list;
}

// The task's numeric options that change the model or its training.
OptionList OfTask(TaskOptions& task) {
  OptionList list = OnlyNumbers(task.Options(Command::kCompare));
  std::erase_if(list, [](const Option& option) {
    return option.section != "model" && option.section != "training";
  });
  return list;
}

OptionList OfTraining(TrainingOptions* training) {
  return OnlyNumbers(Without(training->Options(), {"steps", "seed"}));
}

// Parses the entire text as a number; returns nothing if it is not one.
std::optional<double> FindNumber(const std::string& text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (text.empty() || error != std::errc() || stop != end) return std::nullopt;
  return number;
}

// The component's parameter of this name if it is numeric and not learned, otherwise null.
const CatalogueParameter* FindParameter(const SpecifiedTerm& component, const std::string& name) {
  const CatalogueEntry* const entry = FindCatalogueEntry(component.name);
  const CatalogueParameter* const parameter = entry == nullptr ? nullptr : entry->Find(name);
  if (parameter == nullptr) return nullptr;
  using Kind = CatalogueParameter::Kind;
  const Kind kind = parameter->kind;
  if (kind != Kind::kNumber && kind != Kind::kInteger && kind != Kind::kHeads) return nullptr;
  const std::string value = component.Find(name).value_or(parameter->default_value);
  return value.empty() || FindNumber(value) ? parameter : nullptr;
}

// Calls `visit` with each component of a specification, and returns the specification with each
// component replaced by the result.
template <class Visit>
std::string EachComponent(const std::string& text, const Visit& visit) {
  std::vector<std::string> layers;
  for (const std::string& layer : nn::layer_positions(text)) {
    std::vector<std::string> parts;
    for (const SpecifiedTerm& component : ParseSpecification(layer)) {
      parts.push_back(visit(component));
    }
    layers.push_back(Join(parts, "+"));
  }
  return Join(layers, ";");
}

std::string WithParameter(const std::string& text, const std::string& name,
                          const std::string& value) {
  return EachComponent(text, [&](const SpecifiedTerm& component) {
    if (FindParameter(component, name) == nullptr) return component.Text();
    SpecifiedTerm changed = component;
    std::erase_if(changed.options, [&](const auto& option) { return option.first == name; });
    changed.options.emplace_back(name, value);
    return changed.Text();
  });
}

// The tunable parameters of all components.
std::vector<const CatalogueParameter*> Parameters(const Terms& terms) {
  std::vector<const CatalogueParameter*> found;
  for (const std::string& text : {terms.similarity, terms.position}) {
    EachComponent(text, [&](const SpecifiedTerm& component) {
      const CatalogueEntry* const entry = FindCatalogueEntry(component.name);
      if (entry == nullptr) return std::string();
      for (const CatalogueParameter& parameter : entry->parameters) {
        if (FindParameter(component, parameter.name) != nullptr) found.push_back(&parameter);
      }
      return std::string();
    });
  }
  return found;
}

double ParseValue(const TunedOption& option, const std::string& word, double lowest,
                  double highest) {
  const std::optional<double> value = FindNumber(word);
  const bool is_number =
      value && std::isfinite(*value) && (!option.is_integer || std::trunc(*value) == *value);
  if (is_number && *value >= lowest && *value <= highest) return *value;
  throw Error(StrCat("--tune ", option.name, ": '", word, "' is not ",
                     option.is_integer ? "an integer" : "a number", " from ", lowest, " to ",
                     highest));
}

void SetNumber(const Option& option, const json& number) {
  std::visit(
      [&]<class T>(T* value) {
        if constexpr (std::is_same_v<T, double>) {
          *value = number.get<double>();
        } else if constexpr (std::is_same_v<T, int64_t> ||
                             std::is_same_v<T, std::optional<int64_t>>) {
          *value = number.get<int64_t>();
        }
      },
      option.value);
}

std::string TextOf(const json& number) {
  if (number.is_number_integer()) return number.dump();
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number.get<double>()).ptr;
  return {text.data(), end};
}

}  // namespace

Trial* Tuning::Find(int64_t combination, int64_t number) {
  const auto found = std::find_if(tried.begin(), tried.end(), [&](const Trial& trial) {
    return trial.combination == combination && trial.number == number;
  });
  return found == tried.end() ? nullptr : &*found;
}

json ToJson(const Tuning& tuning) {
  json object = {{"trials", tuning.trials ? json(*tuning.trials) : json()},
                 {"seed", tuning.seed},
                 {"finished", tuning.is_finished},
                 {"chosen", tuning.chosen},
                 {"options", json::array()},
                 {"tried", json::array()}};
  for (const TunedOption& option : tuning.options) {
    json& entry = object["options"].emplace_back(json{{"name", option.name},
                                                      {"integer", option.is_integer},
                                                      {"combinations", option.combinations}});
    if (option.values.empty()) {
      entry["range"] = {option.low, option.high};
    } else {
      entry["values"] = option.values;
    }
  }
  for (const Trial& trial : tuning.tried) {
    json& entry = object["tried"].emplace_back(json{{"combination", trial.combination},
                                                    {"number", trial.number},
                                                    {"values", trial.values},
                                                    {"steps", trial.steps},
                                                    {"held_out", json::array()},
                                                    {"seconds", trial.seconds}});
    for (const auto& [steps, value] : trial.measured) {
      entry["held_out"].push_back({{"step", steps}, {"value", value ? json(*value) : json()}});
    }
  }
  return object;
}

Tuning TuningFromJson(const json& object) {
  Tuning tuning;
  if (const json& trials = object.at("trials"); !trials.is_null()) {
    tuning.trials = trials.get<int64_t>();
  }
  tuning.seed = object.at("seed").get<int64_t>();
  tuning.is_finished = object.at("finished").get<bool>();
  tuning.chosen = object.at("chosen").get<std::vector<json>>();
  for (const json& entry : object.at("options")) {
    TunedOption& option = tuning.options.emplace_back();
    option.name = entry.at("name").get<std::string>();
    option.is_integer = entry.at("integer").get<bool>();
    option.combinations = entry.at("combinations").get<std::vector<int64_t>>();
    if (entry.contains("values")) {
      option.values = entry.at("values").get<std::vector<double>>();
    } else {
      option.low = entry.at("range").at(0).get<double>();
      option.high = entry.at("range").at(1).get<double>();
    }
  }
  for (const json& entry : object.at("tried")) {
    Trial& trial = tuning.tried.emplace_back();
    trial.combination = entry.at("combination").get<int64_t>();
    trial.number = entry.at("number").get<int64_t>();
    trial.values = entry.at("values");
    trial.steps = entry.at("steps").get<int64_t>();
    trial.seconds = entry.at("seconds").get<double>();
    for (const json& at : entry.at("held_out")) {
      const json& value = at.at("value");
      trial.measured.emplace_back(
          at.at("step").get<int64_t>(),
          value.is_null() ? std::nullopt : std::optional(value.get<double>()));
    }
  }
  return tuning;
}

TunedOption ParseTuned(const std::string& text, TaskOptions& task, TrainingOptions training,
                       const std::vector<Terms>& combinations) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0 || equals + 1 == text.size()) {
    throw Error(StrCat("--tune is '", text, "'; expected OPTION=VALUE,VALUE or OPTION=LOW..HIGH"));
  }
  TunedOption tuned;
  tuned.name = text.substr(0, equals);
  std::vector<std::string> names;
  double lowest = 0;
  double highest = 0;
  bool is_known = false;
  for (const Option& option : OfTask(task) + OfTraining(&training)) {
    names.push_back(NameOf(option));
    if (is_known || names.back() != tuned.name) continue;
    is_known = true;
    tuned.combinations.resize(combinations.size());
    std::iota(tuned.combinations.begin(), tuned.combinations.end(), 0);
    tuned.is_integer = IsInteger(option);
    lowest = option.info.lowest;
    highest = option.info.highest;
  }
  const bool is_option = is_known;
  for (size_t n = 0; n < combinations.size(); ++n) {
    for (const CatalogueParameter* const parameter : Parameters(combinations[n])) {
      if (std::find(names.begin(), names.end(), parameter->name) == names.end()) {
        names.push_back(parameter->name);
      }
      if (is_option || parameter->name != tuned.name) continue;
      is_known = true;
      const auto place = static_cast<int64_t>(n);
      if (tuned.combinations.empty() || tuned.combinations.back() != place) {
        tuned.combinations.push_back(place);
      }
      tuned.is_integer = parameter->kind == CatalogueParameter::Kind::kInteger;
      constexpr double kFar = 1e12;
      lowest = parameter->lowest.value_or(-kFar);
      highest = parameter->highest.value_or(kFar);
    }
  }
  if (!is_known) {
    const std::string near = DidYouMean(tuned.name, names);
    throw Error(StrCat("--tune: '", tuned.name,
                       "' is not a numeric option of the model or its training, nor a numeric "
                       "parameter of a compared similarity or position",
                       near.empty() ? "" : "; " + near));
  }
  const std::string what = text.substr(equals + 1);
  if (const size_t dots = what.find(".."); dots != std::string::npos) {
    tuned.low = ParseValue(tuned, what.substr(0, dots), lowest, highest);
    tuned.high = ParseValue(tuned, what.substr(dots + 2), lowest, highest);
    if (tuned.low >= tuned.high) {
      throw Error(StrCat("--tune ", tuned.name, ": the range ", what,
                         " is empty; expected LOW..HIGH with LOW below HIGH"));
    }
    return tuned;
  }
  std::istringstream words(what + ",");
  for (std::string word; std::getline(words, word, ',');) {
    const double value = ParseValue(tuned, word, lowest, highest);
    if (std::find(tuned.values.begin(), tuned.values.end(), value) != tuned.values.end()) {
      throw Error(StrCat("--tune ", tuned.name, ": ", word, " is given twice"));
    }
    tuned.values.push_back(value);
  }
  return tuned;
}

TunedModel::TunedModel(Task& task, const TrainingOptions& base, Terms base_terms,
                       const json& values)
    : terms(std::move(base_terms)), training(base) {
  if (!values.is_object()) return;
  options_ = OfTask(task);
  std::erase_if(options_, [&](const Option& option) { return !values.contains(NameOf(option)); });
  before_ = lab::ToJson(options_);
  json of_terms = values;
  for (const Option& option : options_ + OfTraining(&training)) {
    const auto found = values.find(NameOf(option));
    if (found == values.end()) continue;
    SetNumber(option, *found);
    of_terms.erase(NameOf(option));
  }
  for (const auto& [name, value] : of_terms.items()) {
    terms.similarity = WithParameter(terms.similarity, name, TextOf(value));
    terms.position = WithParameter(terms.position, name, TextOf(value));
  }
}

TunedModel::~TunedModel() { lab::FromJson(before_, options_); }

std::string DescribeValues(const json& values) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : values.items()) {
    parts.push_back(StrCat(name, " ", value.get<double>()));
  }
  return Join(parts, ", ");
}

void CheckOptuna() {
  try {
    AskPythonFile(kTuningFile, {"--check"});
  } catch (const Error& error) {
    throw Error(StrCat("compare: --tune: ", error.what()));
  }
}

bool NextTrials(const std::filesystem::path& folder, Tuning* tuning,
                std::vector<std::pair<int64_t, int64_t>>* trials) {
  const json answer = json::parse(AskPythonFile(kTuningFile, {folder.string()}));
  trials->clear();
  for (const json& next : answer.at("next")) {
    const auto combination = next.at("combination").get<int64_t>();
    const auto number = next.at("number").get<int64_t>();
    Trial* trial = tuning->Find(combination, number);
    if (trial == nullptr) {
      trial = &tuning->tried.emplace_back();
      trial->combination = combination;
      trial->number = number;
      trial->values = next.at("values");
    }
    trial->steps = next.at("steps").get<int64_t>();
    trials->emplace_back(combination, number);
  }
  if (!trials->empty()) return true;
  tuning->chosen = answer.at("chosen").get<std::vector<json>>();
  tuning->is_finished = true;
  return false;
}

}  // namespace gnomon::lab::cli
