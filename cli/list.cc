#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"
#include "gnomon/catalogue.h"

namespace gnomon::cli {
namespace {

void PrintText(const char* title, const std::vector<CatalogueEntry>& entries) {
  std::cout << title << "\n";
  for (const CatalogueEntry& entry : entries) {
    std::cout << "\n  " << entry.name << "\n";
    if (!entry.formula.empty()) std::cout << "      " << entry.formula << "\n";
    for (const CatalogueParameter& parameter : entry.parameters) {
      std::cout << "      :" << parameter.name << "=" << parameter.values;
      if (!parameter.default_value.empty()) {
        std::cout << "  (default " << parameter.default_value << ")";
      }
      std::cout << "\n";
    }
    if (!entry.citation.empty()) std::cout << "      " << entry.citation << "\n";
  }
  std::cout << "\n";
}

nlohmann::json ToJson(const std::vector<CatalogueEntry>& entries) {
  nlohmann::json list = nlohmann::json::array();
  for (const CatalogueEntry& entry : entries) {
    nlohmann::json parameters = nlohmann::json::array();
    for (const CatalogueParameter& parameter : entry.parameters) {
      parameters.push_back({{"name", parameter.name},
                            {"values", parameter.values},
                            {"default", parameter.default_value}});
    }
    list.push_back({{"name", entry.name},
                    {"formula", entry.formula},
                    {"citation", entry.citation},
                    {"parameters", parameters}});
  }
  return list;
}

int Run(bool as_json) {
  if (as_json) {
    std::cout << nlohmann::json{{"similarities", ToJson(SimilarityCatalogue())},
                                {"positions", ToJson(PositionCatalogue())}}
                     .dump(2)
              << "\n";
  } else {
    PrintText("Similarities (--similarity)", SimilarityCatalogue());
    PrintText("Positions (--position); join them by +, give parameters after colons",
              PositionCatalogue());
  }
  return 0;
}

}  // namespace

void AddList(CLI::App& app, Action* action) {
  CLI::App* command = app.add_subcommand("list", "List the similarities and positions");
  auto as_json = std::make_shared<bool>(false);
  command->add_flag("--json", *as_json, "Print JSON");
  command->callback([action, as_json] { *action = [as_json] { return Run(*as_json); }; });
}

}  // namespace gnomon::cli
