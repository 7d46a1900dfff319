#include "ops/catalogue/parameters.h"

#include <c10/util/Exception.h>

#include <utility>

namespace gnomon {
namespace {

using Kind = CatalogueParameter::Kind;

Parameter Of(Kind kind, const char* name, const char* default_value) {
  Parameter parameter;
  parameter.name = name;
  parameter.kind = kind;
  parameter.default_value = default_value;
  parameter.argument = CatalogueParameter::Argument::kOptional;
  return parameter;
}

}  // namespace

Parameter Parameter::Means(const char* text) const {
  Parameter parameter = *this;
  parameter.meaning = text;
  return parameter;
}

Parameter Parameter::Otherwise(const char* text) const {
  Parameter parameter = *this;
  parameter.otherwise = text;
  return parameter;
}

Parameter Parameter::AtLeast(double number) const {
  Parameter parameter = *this;
  parameter.lowest = number;
  return parameter;
}

Parameter Parameter::AtMost(double number) const {
  Parameter parameter = *this;
  parameter.highest = number;
  return parameter;
}

Parameter Parameter::Required() const {
  Parameter parameter = *this;
  parameter.argument = Argument::kRequired;
  return parameter;
}

Parameter Parameter::NoArgument() const {
  Parameter parameter = *this;
  parameter.argument = Argument::kNone;
  return parameter;
}

Parameter Parameter::Called(const char* other_name) const {
  Parameter parameter = *this;
  parameter.argument_name = other_name;
  return parameter;
}

Parameter Parameter::OfAxes(std::vector<std::string> names) const {
  Parameter parameter = *this;
  parameter.axes = std::move(names);
  return parameter;
}

Parameter Parameter::Points(const char* choice) const {
  Parameter parameter = *this;
  parameter.points = choice;
  return parameter;
}

Parameter Number(const char* name, const char* default_value) {
  return Of(Kind::kNumber, name, default_value);
}

Parameter PositiveNumber(const char* name, const char* default_value) {
  Parameter parameter = Number(name, default_value).AtLeast(0);
  parameter.above = true;
  return parameter;
}

Parameter Numbers(const char* name) { return Of(Kind::kNumbers, name, ""); }

Parameter Integer(const char* name, const char* default_value) {
  return Of(Kind::kInteger, name, default_value);
}

Parameter Flag(const char* name, const char* default_value) {
  return Of(Kind::kFlag, name, default_value);
}

Parameter Choice(const char* name, std::vector<std::string> choices) {
  Parameter parameter = Of(Kind::kChoice, name, choices.empty() ? "" : choices.front().c_str());
  parameter.choices = std::move(choices);
  return parameter;
}

Parameter PerHead(const char* name, const char* default_value, const TensorUse& tensor) {
  Parameter parameter = Of(Kind::kHeads, name, default_value).Required();
  parameter.takes_tensor = true;
  parameter.tensor = tensor;
  parameter.tensor.learned = parameter.default_value == "learned";
  return parameter;
}

Parameter Table(const char* name, Index index, const TensorUse& tensor) {
  Parameter parameter = Of(Kind::kTable, name, "").Required();
  parameter.index = index;
  parameter.takes_tensor = true;
  parameter.tensor = tensor;
  return parameter;
}

Parameter Shape() {
  return Of(Kind::kShape, "shape", "")
      .Means("axis sizes of the grid, which the tokens fill in row-major order")
      .Otherwise("no grid (a sequence)");
}

std::vector<Parameter> OnGrid(std::vector<Parameter> parameters, const Parameter& shape) {
  parameters.push_back(shape);
  parameters.push_back(Integer("prefix", "0")
                           .Means("number of tokens before the grid, such as a class token")
                           .AtLeast(0));
  return parameters;
}

std::vector<Parameter> OnAxis(std::vector<Parameter> parameters) {
  parameters = OnGrid(std::move(parameters), Shape().NoArgument());
  parameters.back() = parameters.back().NoArgument();
  parameters.push_back(Integer("axis", "")
                           .Means("grid axis whose coordinates replace the positions")
                           .Otherwise("all axes, summed")
                           .NoArgument());
  return parameters;
}

Parameter Length() {
  return Integer("length", "")
      .Means("number of positions in a module's table")
      .Otherwise("the module's")
      .AtLeast(1)
      .NoArgument();
}

Parameter TablePerHead() {
  return Flag("per_head", "false")
      .Means("whether each head of a module has its own table")
      .NoArgument();
}

std::optional<int64_t> LengthOf(const Component& component, int64_t otherwise) {
  const int64_t length = component.FindInteger("length").value_or(otherwise);
  TORCH_CHECK_VALUE(length > 0, "gnomon: ", component.name(), ":length=", length,
                    " is invalid; expected an integer of at least 1");
  return length;
}

}  // namespace gnomon
