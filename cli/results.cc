#include "cli/results.h"

#include <cmath>

#include "cli/progress.h"
#include "gnomon/attention.h"
#include "gnomon/catalogue.h"
#include "training/strings.h"

namespace gnomon::cli {
namespace {

using models::StrCat;
using nlohmann::json;

json OrNull(const std::optional<double>& value) { return value ? json(*value) : json(); }

json MeanAndSpread(const std::vector<double>& values) {
  if (values.empty()) return {{"mean", nullptr}, {"spread", nullptr}};
  double sum = 0;
  for (const double value : values) sum += value;
  const double mean = sum / static_cast<double>(values.size());
  if (values.size() == 1) return {{"mean", mean}, {"spread", nullptr}};
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return {{"mean", mean}, {"spread", std::sqrt(squares / static_cast<double>(values.size() - 1))}};
}

std::string FormatCell(const json& cell) {
  std::string text = FormatNumber(cell["mean"], "%.3f");
  if (cell["spread"].is_number()) text += " ± " + FormatNumber(cell["spread"], "%.3f");
  return text;
}

}  // namespace

Combination ParseCombination(const std::string& option, const std::string& text) {
  const size_t slash = text.find('/');
  if (slash == std::string::npos || slash == 0 || slash + 1 == text.size()) {
    throw Error(StrCat(option, ": '", text, "' is not SIMILARITY/POSITION"));
  }
  return {text.substr(0, slash), text.substr(slash + 1)};
}

json ToJson(const models::LengthLoss& loss) {
  return {{"length", loss.length},
          {"loss", OrNull(loss.loss)},
          {"last", OrNull(loss.last)},
          {"bits_per_byte", OrNull(loss.bits_per_byte)},
          {"windows", loss.windows}};
}

models::OptionList CompareSettings::Options() {
  using models::InSection;
  return evaluation.Options() + tokens.Options() + InSection("model", model.Options()) +
         InSection("training", training.Options());
}

json ToJson(const CompareSettings& settings) {
  json combinations = json::array();
  for (const Combination& combination : settings.combinations) {
    combinations.push_back({{"similarity", combination.similarity},
                            {"position", combination.position},
                            {"label", combination.label()},
                            {"similarity_title", SimilarityTitle(combination.similarity)},
                            {"position_title", PositionTitle(combination.position)}});
  }
  CompareSettings copy = settings;
  json object = models::ToJson(copy.Options());
  object["combinations"] = combinations;
  object["seeds"] = settings.seeds;
  return object;
}

CompareSettings CompareFromJson(const json& object) {
  CompareSettings settings;
  const char* field = "";
  const auto at = [&](const char* name) { return object.at(field = name); };
  try {
    for (const json& combination : at("combinations")) {
      settings.combinations.push_back({combination.at("similarity").get<std::string>(),
                                       combination.at("position").get<std::string>()});
    }
    settings.seeds = at("seeds").get<std::vector<int64_t>>();
    models::FromJson(object, settings.Options());
    models::CheckTrainingOptions(settings.training);
    if (!settings.evaluation.evaluation_memory) {
      settings.evaluation.evaluation_memory = settings.training.memory;
    }
  } catch (const json::exception& error) {
    throw Error(StrCat("its settings: ", field, ": ", error.what()));
  } catch (const Error& error) {
    throw Error(StrCat("its settings: ", error.what()));
  }
  if (settings.combinations.empty() || settings.evaluation.lengths.empty() || settings.seeds.empty()) {
    throw Error("its settings name no combination, length or seed");
  }
  return settings;
}

json ToJson(const RunResult& run) {
  json losses = json::array();
  for (const models::LengthLoss& at : run.losses) losses.push_back(ToJson(at));
  return {{"combination", run.combination},
          {"seed", run.seed},
          {"status", run.diverged ? "diverged" : "done"},
          {"parameters", run.parameters},
          {"ms_per_step", run.ms_per_step},
          {"ms_quartiles",
           run.ms_quartiles ? json{run.ms_quartiles->first, run.ms_quartiles->second} : json()},
          {"others", OrNull(run.others)},
          {"seconds", run.seconds},
          {"curve", {{"step", run.curve_steps}, {"loss", run.curve_losses}}},
          {"losses", losses}};
}

RunResult RunFromJson(const CompareSettings& settings, const json& object) {
  RunResult run;
  const char* field = "";
  const auto at = [&](const char* name) { return object.at(field = name); };
  const auto number = [](const json& value) {
    return value.is_null() ? std::nullopt : std::optional(value.get<double>());
  };
  try {
    run.combination = at("combination").get<int64_t>();
    run.seed = at("seed").get<int64_t>();
    run.diverged = at("status").get<std::string>() == "diverged";
    run.parameters = at("parameters").get<int64_t>();
    run.ms_per_step = at("ms_per_step").get<double>();
    // Records may lack these two.
    field = "ms_quartiles";
    const json quartiles = object.value(field, json());
    if (!quartiles.is_null()) run.ms_quartiles = quartiles.get<std::pair<double, double>>();
    field = "others";
    run.others = number(object.value(field, json()));
    run.seconds = at("seconds").get<double>();
    const json curve = at("curve");
    run.curve_steps = curve.at("step").get<std::vector<int64_t>>();
    run.curve_losses = curve.at("loss").get<std::vector<double>>();
    for (const json& loss : at("losses")) {
      run.losses.push_back({loss.at("length").get<int64_t>(), number(loss.at("loss")),
                            number(loss.at("last")), number(loss.at("bits_per_byte")),
                            loss.at("windows").get<int64_t>()});
    }
  } catch (const json::exception& error) {
    throw Error(StrCat("one of its runs: ", field, ": ", error.what()));
  }
  const bool known =
      run.combination >= 0 && run.combination < static_cast<int64_t>(settings.combinations.size());
  if (!known) throw Error(StrCat("one of its runs: there is no combination ", run.combination));
  if (run.losses.size() != (run.diverged ? 0 : settings.evaluation.lengths.size())) {
    throw Error(StrCat("one of its runs: there are ", run.losses.size(), " losses"));
  }
  return run;
}

json Summarize(const CompareSettings& settings, const std::vector<RunResult>& runs) {
  json summary = json::array();
  for (size_t c = 0; c < settings.combinations.size(); ++c) {
    int64_t finished = 0;
    int64_t diverged = 0;
    json parameters;
    std::vector<double> milliseconds;
    const size_t lengths = settings.evaluation.lengths.size();
    std::vector<std::vector<double>> loss(lengths);
    std::vector<std::vector<double>> last(lengths);
    std::vector<std::vector<double>> bits(lengths);
    for (const RunResult& run : runs) {
      if (run.combination != static_cast<int64_t>(c)) continue;
      ++finished;
      diverged += run.diverged ? 1 : 0;
      parameters = run.parameters;
      milliseconds.push_back(run.ms_per_step);
      for (size_t n = 0; n < run.losses.size(); ++n) {
        if (run.losses[n].loss) loss[n].push_back(*run.losses[n].loss);
        if (run.losses[n].last) last[n].push_back(*run.losses[n].last);
        if (run.losses[n].bits_per_byte) bits[n].push_back(*run.losses[n].bits_per_byte);
      }
    }
    json losses = json::array();
    for (size_t n = 0; n < lengths; ++n) {
      losses.push_back({{"length", settings.evaluation.lengths[n]},
                        {"loss", MeanAndSpread(loss[n])},
                        {"last", MeanAndSpread(last[n])},
                        {"bits_per_byte", MeanAndSpread(bits[n])}});
    }
    summary.push_back({{"combination", c},
                       {"label", settings.combinations[c].label()},
                       {"runs", finished},
                       {"diverged", diverged},
                       {"parameters", parameters},
                       {"ms_per_step", MeanAndSpread(milliseconds)},
                       {"losses", losses}});
  }
  return summary;
}

std::string FormatTable(const CompareSettings& settings, const json& summary) {
  std::string table = "| similarity/position | parameters | ms per step |";
  std::string rule = "|:--|--:|--:|";
  // Of bytes it is the loss in another unit.
  const bool shows_bits = settings.tokens.kind != "bytes";
  std::vector<std::pair<const char*, const char*>> columns = {{"loss", "loss at "},
                                                              {"last", "last 32 at "}};
  if (shows_bits) columns.emplace_back("bits_per_byte", "bits per byte at ");
  for (const auto& [kind, title] : columns) {
    for (const int64_t length : settings.evaluation.lengths) {
      table += StrCat(" ", title, length, " |");
      rule += "--:|";
    }
  }
  table += "\n" + rule + "\n";
  bool any_diverged = false;
  for (const json& row : summary) {
    const bool diverged = row["diverged"] > 0;
    any_diverged = any_diverged || diverged;
    table += StrCat("| ", row["label"].get<std::string>(), diverged ? " *" : "", " | ",
                    FormatNumber(row["parameters"], "%.0f"), " | ",
                    FormatNumber(row["ms_per_step"]["mean"], "%.1f"), " |");
    for (const auto& [kind, title] : columns) {
      for (const json& at : row["losses"]) table += StrCat(" ", FormatCell(at[kind]), " |");
    }
    table += "\n";
  }
  const std::string& tokens = settings.tokens.kind;
  const auto memory = [](int64_t length) {
    return length > 0 ? StrCat(" with a memory of ", length) : "";
  };
  table += StrCat("\nNats per ", models::TokenUnit(tokens), ", mean",
                  settings.seeds.size() > 1 ? " ± standard deviation" : "", " over ",
                  settings.seeds.size(), " seed", settings.seeds.size() > 1 ? "s" : "",
                  ", trained at length ", settings.evaluation.lengths[0], memory(settings.training.memory),
                  " for ", settings.training.steps, " steps of ",
                  settings.training.batch * settings.evaluation.lengths[0], " ", tokens);
  if (settings.evaluation.evaluation_memory != settings.training.memory) {
    table += StrCat(", evaluated with a memory of ", *settings.evaluation.evaluation_memory);
  }
  table += StrCat("; \"last 32\": over the last 32 ", tokens,
                  " of each window. A dash: not defined at that length, or not finished.\n");
  if (any_diverged) table += "\\* the loss of at least one seed became infinite.\n";
  return table;
}

}  // namespace gnomon::cli
