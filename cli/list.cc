#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "gnomon/catalogue.h"

namespace gnomon::cli {
namespace {

// What holds for every entry.
constexpr const char* kSupport =
    "All have a forward and a backward pass on the CPU. In attention(), float32, bfloat16 and "
    "float16 are fused, with sums in float32, and float64 runs on the reference.";
constexpr const char* kCost =
    "Cost counts the operations for each pair of a query and a key in the forward pass, besides "
    "the inner product, the scale and the exponential: simple ones (arithmetic, comparisons, "
    "choices) + special ones (roots, logarithms, angles, divisions).";

// The parameters that a text can set.
std::vector<CatalogueParameter> Options(const CatalogueEntry& entry) {
  std::vector<CatalogueParameter> options;
  for (const CatalogueParameter& parameter : entry.parameters) {
    if (parameter.kind != CatalogueParameter::Kind::kTable) options.push_back(parameter);
  }
  return options;
}

std::string Default(const CatalogueParameter& parameter) {
  if (parameter.default_value.empty()) return parameter.otherwise;
  if (parameter.otherwise.empty()) return parameter.default_value;
  return parameter.default_value + ", " + parameter.otherwise;
}

void PrintText(const char* title, const std::vector<CatalogueEntry>& entries) {
  std::cout << title << "\n";
  for (const CatalogueEntry& entry : entries) {
    std::cout << "\n  " << entry.name << "\n      " << entry.formula << "\n";
    for (const CatalogueParameter& parameter : Options(entry)) {
      std::cout << "      :" << parameter.name << "=" << parameter.values() << "  (default "
                << Default(parameter) << ")\n";
      if (!parameter.meaning.empty()) std::cout << "          " << parameter.meaning << "\n";
    }
    std::cout << "      cost: " << entry.cost << "\n      taken by: " << entry.use();
    if (!entry.tokens().empty()) std::cout << "; tokens: " << entry.tokens();
    std::cout << "\n      " << entry.source << "\n";
  }
  std::cout << "\n";
}

// A cell of a table, which "|" would end.
std::string Cell(const std::string& text) {
  std::string cell;
  for (const char character : text) {
    if (character == '|') cell += '\\';
    cell += character;
  }
  return cell;
}

void PrintMarkdown(const char* title, const std::vector<CatalogueEntry>& entries, bool positions) {
  std::cout << "\n## " << title << "\n\n| name | cost | taken by |"
            << (positions ? " tokens |\n|---|---|---|---|\n" : "\n|---|---|---|\n");
  for (const CatalogueEntry& entry : entries) {
    std::cout << "| [" << entry.name << "](#" << entry.name << ") | " << Cell(entry.cost) << " | "
              << Cell(entry.use()) << " |";
    if (positions) std::cout << " " << entry.tokens() << " |";
    std::cout << "\n";
  }
  for (const CatalogueEntry& entry : entries) {
    std::cout << "\n### " << entry.name << "\n\n";
    if (!entry.latex.empty()) std::cout << "$$\n" << entry.latex << "\n$$\n\n";
    const std::string& words = entry.latex.empty() ? entry.formula : entry.note;
    if (!words.empty()) std::cout << words << ".\n\n";
    if (!entry.details.empty()) std::cout << entry.details << "\n\n";
    std::cout << entry.source << ".\n";
    const std::vector<CatalogueParameter> options = Options(entry);
    if (options.empty()) continue;
    std::cout << "\n| parameter | values | default | meaning |\n|---|---|---|---|\n";
    for (const CatalogueParameter& parameter : options) {
      std::cout << "| " << parameter.name << " | " << Cell(parameter.values()) << " | "
                << Cell(Default(parameter)) << " | " << Cell(parameter.meaning) << " |\n";
    }
  }
}

enum class Format { kText, kJson, kMarkdown };

int Run(Format format) {
  switch (format) {
    case Format::kJson:
      std::cout << nlohmann::json::parse(CatalogueJson()).dump(2) << "\n";
      break;
    case Format::kMarkdown:
      std::cout << "# Catalogue\n\nWritten by `make facades`; `gnomon list` prints the same, with "
                   "the formulas as text."
                << "\n\n"
                << kSupport << "\n\n"
                << kCost << "\n";
      PrintMarkdown("Similarities", SimilarityCatalogue(), /*positions=*/false);
      PrintMarkdown("Positions", PositionCatalogue(), /*positions=*/true);
      break;
    case Format::kText:
      std::cout << kSupport << "\n" << kCost << "\n\n";
      PrintText("Similarities (--similarity)", SimilarityCatalogue());
      PrintText("Positions (--position); join them by +, give parameters after colons",
                PositionCatalogue());
      break;
  }
  return 0;
}

}  // namespace

void AddList(CLI::App& app, Action* action) {
  CLI::App* command = app.add_subcommand(
      "list", "List the similarities and positions: formula, parameters, cost, source");
  auto format = std::make_shared<Format>(Format::kText);
  CLI::Option* json =
      command->add_flag_callback("--json", [format] { *format = Format::kJson; }, "Print JSON");
  command
      ->add_flag_callback(
          "--markdown", [format] { *format = Format::kMarkdown; },
          "Print the page docs/catalogue.md")
      ->excludes(json);
  command->callback([action, format] { *action = [format] { return Run(*format); }; });
}

}  // namespace gnomon::cli
