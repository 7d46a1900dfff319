#include "cli/results.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "cli/progress.h"
#include "gnomon/attention.h"
#include "gnomon/catalogue.h"
#include "gnomon/torch/nn.h"
#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {

using nlohmann::json;

json OrNull(const std::optional<double>& value) { return value ? json(*value) : json(); }

std::optional<double> NumberOrNone(const json& value) {
  return value.is_null() ? std::nullopt : std::optional(value.get<double>());
}

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

std::string Capitalized(std::string text) {
  if (!text.empty()) text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  return text;
}

OptionList Options(CompareSettings* settings, TaskOptions& task) {
  return task.Options(Command::kCompare) + InSection("training", settings->training.Options());
}

}  // namespace

bool IsFlat(const UntilFlat& how, const std::vector<int64_t>& steps,
            const std::vector<double>& values, int64_t total, bool higher_is_better) {
  if (steps.empty()) return false;
  const double sign = higher_is_better ? 1 : -1;
  const double before = static_cast<double>(steps.back()) - how.share * static_cast<double>(total);
  std::optional<double> earlier;
  std::optional<double> best;
  for (size_t n = 0; n < steps.size(); ++n) {
    const double value = sign * values[n];
    best = std::max(best.value_or(value), value);
    if (static_cast<double>(steps[n]) <= before) earlier = best;
  }
  return earlier && *best - *earlier < how.margin * std::abs(*earlier);
}

std::vector<std::pair<int64_t, int64_t>> CompareSettings::Runs() const {
  std::vector<std::pair<int64_t, int64_t>> runs;
  for (const int64_t seed : seeds) {
    for (size_t c = 0; c < combinations.size(); ++c) {
      runs.emplace_back(static_cast<int64_t>(c), seed);
    }
  }
  for (const AddedSeed& more : added) {
    for (const int64_t combination : more.combinations) runs.emplace_back(combination, more.seed);
  }
  return runs;
}

Terms ParseTerms(const std::string& option, const std::string& text) {
  const size_t slash = text.find('/');
  if (slash == std::string::npos || slash == 0 || slash + 1 == text.size()) {
    throw Error(StrCat(option, ": '", text, "' is invalid; expected SIMILARITY/POSITION"));
  }
  return {text.substr(0, slash), text.substr(slash + 1)};
}

json DescribeTask(const Task& task) {
  json metrics = json::array();
  for (const Metric& metric : task.metrics()) {
    metrics.push_back({{"key", metric.key},
                       {"title", metric.title},
                       {"column", metric.column},
                       {"higher_is_better", metric.higher_is_better},
                       {"is_compared", metric.is_compared}});
  }
  const Conditions conditions = task.conditions();
  return {{"name", task.name()},
          {"loss_unit", task.description().loss_unit},
          {"metrics", metrics},
          {"conditions",
           {{"key", conditions.key},
            {"title", conditions.title},
            {"values", conditions.values},
            {"trained", conditions.trained ? json(*conditions.trained) : json()}}},
          {"examples", task.description().examples}};
}

std::optional<std::string> TaskOfRecord(const std::filesystem::path& file) {
  std::ifstream in(file);
  const json record = json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!record.is_object()) return std::nullopt;
  // Old versions had only one task and did not record it.
  if (!record.contains("task")) return kTextTask;
  const json& task = record["task"];
  if (!task.is_object() || !task.contains("name") || !task["name"].is_string()) {
    return std::nullopt;
  }
  return task["name"].get<std::string>();
}

namespace {

// The title of a per-layer pattern; for "rope;none", this is "RoPE | no position".
std::string TitleOfPattern(const std::string& position) {
  std::vector<std::string> titles;
  for (const std::string& part : nn::layer_positions(position)) {
    titles.push_back(PositionTitle(part));
  }
  return Join(titles, " | ");
}

}  // namespace

json ToJson(const CompareSettings& settings, TaskOptions& task) {
  json combinations = json::array();
  for (const Terms& terms : settings.combinations) {
    combinations.push_back({{"similarity", terms.similarity},
                            {"position", terms.position},
                            {"label", terms.label()},
                            {"similarity_title", SimilarityTitle(terms.similarity)},
                            {"position_title", TitleOfPattern(terms.position)}});
  }
  CompareSettings copy = settings;
  json object = lab::ToJson(Options(&copy, task));
  object["combinations"] = combinations;
  object["seeds"] = settings.seeds;
  object["margin"] = OrNull(settings.margin);
  object["seed_range"] =
      settings.seed_range ? json{settings.seed_range->first, settings.seed_range->second} : json();
  object["until_flat"] = settings.until_flat ? json{{"margin", settings.until_flat->margin},
                                                    {"share", settings.until_flat->share}}
                                             : json();
  object["tuning"] = settings.tuning ? ToJson(*settings.tuning) : json();
  object["added_seeds"] = json::array();
  for (const AddedSeed& more : settings.added) {
    object["added_seeds"].push_back({{"seed", more.seed}, {"combinations", more.combinations}});
  }
  return object;
}

CompareSettings CompareFromJson(const json& object, TaskOptions& task) {
  CompareSettings settings;
  const char* field = "";
  const auto at = [&](const char* name) { return object.at(field = name); };
  try {
    for (const json& combination : at("combinations")) {
      settings.combinations.push_back({combination.at("similarity").get<std::string>(),
                                       combination.at("position").get<std::string>()});
    }
    settings.seeds = at("seeds").get<std::vector<int64_t>>();
    // Older records may lack the following fields.
    settings.margin = NumberOrNone(object.value(field = "margin", json()));
    if (const json range = object.value(field = "seed_range", json()); !range.is_null()) {
      settings.seed_range = range.get<std::pair<int64_t, int64_t>>();
    }
    if (const json how = object.value(field = "until_flat", json()); !how.is_null()) {
      settings.until_flat = {how.at("margin").get<double>(), how.at("share").get<double>()};
    }
    if (const json tuning = object.value(field = "tuning", json()); !tuning.is_null()) {
      settings.tuning = TuningFromJson(tuning);
    }
    for (const json& more : object.value(field = "added_seeds", json::array())) {
      settings.added.push_back(
          {more.at("seed").get<int64_t>(), more.at("combinations").get<std::vector<int64_t>>()});
      for (const int64_t combination : settings.added.back().combinations) {
        if (combination >= 0 && combination < std::ssize(settings.combinations)) continue;
        throw Error(StrCat("added_seeds contains the unknown combination ", combination));
      }
    }
    const OptionList options = Options(&settings, task);
    lab::FromJson(object, options);
    for (const Option& option : options) CheckRanges({option}, option.section);
    CheckTrainingOptions(settings.training);
  } catch (const json::exception& error) {
    throw Error(StrCat("its settings: ", field, ": ", error.what()));
  } catch (const Error& error) {
    throw Error(StrCat("its settings: ", error.what()));
  }
  if (settings.combinations.empty() || settings.seeds.empty()) {
    throw Error("its settings contain no combinations or no seeds");
  }
  return settings;
}

std::string FormatCondition(const json& condition) {
  return condition.is_string() ? condition.get<std::string>() : condition.dump();
}

json ToJson(const TaskResults& task, const Measurement& measurement) {
  const std::vector<Metric> metrics = task.metrics();
  json object = {{task.conditions().key, measurement.condition},
                 {task.description().examples, measurement.examples}};
  for (size_t n = 0; n < metrics.size(); ++n) {
    object[metrics[n].key] = OrNull(measurement.values[n]);
  }
  return object;
}

json ToJson(const TaskResults& task, const RunResult& run) {
  json losses = json::array();
  for (const Measurement& at : run.measurements) losses.push_back(ToJson(task, at));
  return {
      {"combination", run.combination},
      {"seed", run.seed},
      {"status", run.diverged ? "diverged" : "done"},
      {"parameters", run.parameters},
      {"ms_per_step", run.ms_per_step},
      {"ms_quartiles",
       run.ms_quartiles ? json{run.ms_quartiles->first, run.ms_quartiles->second} : json()},
      {"others", OrNull(run.others)},
      {"processor_ms_per_step", OrNull(run.processor_ms_per_step)},
      {"seconds", run.seconds},
      {"curve", {{"step", run.curve_steps}, {"loss", run.curve_losses}}},
      {"losses", losses},
      {"stopped_at", run.ended ? json(run.ended->step) : json()},
      {"flat", run.ended ? json(run.ended->is_flat) : json()},
      {"held_out",
       run.ended ? json{{"step", run.ended->steps}, {"value", run.ended->values}} : json()},
      {"picture",
       run.picture ? json{{"title", run.picture->first}, {"file", run.picture->second}} : json()}};
}

RunResult RunFromJson(const TaskResults& task, const CompareSettings& settings,
                      const json& object) {
  RunResult run;
  std::string field;
  const auto at = [&](const char* name) { return object.at(field = name); };
  const Conditions conditions = task.conditions();
  try {
    run.combination = at("combination").get<int64_t>();
    run.seed = at("seed").get<int64_t>();
    run.diverged = at("status").get<std::string>() == "diverged";
    run.parameters = at("parameters").get<int64_t>();
    run.ms_per_step = at("ms_per_step").get<double>();
    // Older records may lack the fields that are read with value().
    field = "ms_quartiles";
    const json quartiles = object.value(field, json());
    if (!quartiles.is_null()) run.ms_quartiles = quartiles.get<std::pair<double, double>>();
    field = "others";
    run.others = NumberOrNone(object.value(field, json()));
    field = "processor_ms_per_step";
    run.processor_ms_per_step = NumberOrNone(object.value(field, json()));
    field = "stopped_at";
    if (const json step = object.value(field, json()); !step.is_null()) {
      const json held_out = at("held_out");
      run.ended = {step.get<int64_t>(), at("flat").get<bool>(),
                   held_out.at("step").get<std::vector<int64_t>>(),
                   held_out.at("value").get<std::vector<double>>()};
    }
    field = "picture";
    if (const json picture = object.value(field, json()); !picture.is_null()) {
      run.picture = {picture.at("title").get<std::string>(), picture.at("file").get<std::string>()};
    }
    run.seconds = at("seconds").get<double>();
    const json curve = at("curve");
    run.curve_steps = curve.at("step").get<std::vector<int64_t>>();
    run.curve_losses = curve.at("loss").get<std::vector<double>>();
    for (const json& loss : at("losses")) {
      Measurement& measured = run.measurements.emplace_back();
      measured.condition = loss.at(conditions.key);
      measured.examples = loss.at(task.description().examples).get<int64_t>();
      for (const Metric& metric : task.metrics()) {
        measured.values.push_back(NumberOrNone(loss.at(metric.key)));
      }
    }
  } catch (const json::exception& error) {
    throw Error(StrCat("one of its runs: ", field, ": ", error.what()));
  }
  const bool known =
      run.combination >= 0 && run.combination < static_cast<int64_t>(settings.combinations.size());
  if (!known) throw Error(StrCat("one of its runs has the unknown combination ", run.combination));
  if (run.measurements.size() != (run.diverged ? 0 : conditions.values.size())) {
    throw Error(StrCat("one of its runs has ", run.measurements.size(), " losses; expected ",
                       run.diverged ? 0 : conditions.values.size()));
  }
  return run;
}

json Summarize(const TaskResults& task, const CompareSettings& settings,
               const std::vector<RunResult>& runs) {
  const std::vector<Metric> metrics = task.metrics();
  const Conditions conditions = task.conditions();
  json summary = json::array();
  for (size_t c = 0; c < settings.combinations.size(); ++c) {
    std::vector<const RunResult*> of_this;
    int64_t diverged = 0;
    int64_t not_converged = 0;
    json parameters;
    std::vector<double> milliseconds;
    for (const RunResult& run : runs) {
      if (run.combination != static_cast<int64_t>(c)) continue;
      of_this.push_back(&run);
      diverged += run.diverged ? 1 : 0;
      not_converged += run.ended && !run.ended->is_flat && !run.diverged ? 1 : 0;
      parameters = run.parameters;
      milliseconds.push_back(run.ms_per_step);
    }
    json losses = json::array();
    for (size_t n = 0; n < conditions.values.size(); ++n) {
      json& at = losses.emplace_back(json{{conditions.key, conditions.values[n]}});
      for (size_t m = 0; m < metrics.size(); ++m) {
        std::vector<double> values;
        for (const RunResult* run : of_this) {
          if (run->diverged) continue;
          const std::optional<double>& value = run->measurements[n].values[m];
          if (value) values.push_back(*value);
        }
        at[metrics[m].key] = MeanAndSpread(values);
      }
    }
    summary.push_back({{"combination", c},
                       {"label", settings.combinations[c].label()},
                       {"runs", of_this.size()},
                       {"diverged", diverged},
                       {"not_converged", settings.until_flat ? json(not_converged) : json()},
                       {"parameters", parameters},
                       {"ms_per_step", MeanAndSpread(milliseconds)},
                       {"losses", losses}});
  }
  return summary;
}

namespace {

// The conditions at which a metric is shown: all except those at which the first metric is known
// but this one is not.
std::vector<size_t> MeasuredAt(const json& summary, size_t conditions, const std::string& first,
                               const std::string& key) {
  std::vector<size_t> places;
  for (size_t n = 0; n < conditions; ++n) {
    const auto is_known = [&](const std::string& name) {
      return std::any_of(summary.begin(), summary.end(), [&](const json& row) {
        return !row["losses"][n][name]["mean"].is_null();
      });
    };
    if (is_known(key) || !is_known(first)) places.push_back(n);
  }
  return places;
}

std::string DescribeSeeds(const CompareSettings& settings) {
  const std::string all = Counted(std::ssize(settings.seeds), "seed");
  if (settings.added.empty()) return all;
  return StrCat(settings.seeds.size(), " to ",
                Counted(std::ssize(settings.seeds) + std::ssize(settings.added), "seed"));
}

}  // namespace

std::string FormatTable(const TaskResults& task, const CompareSettings& settings,
                        const json& summary) {
  const Conditions conditions = task.conditions();
  std::string table = "| similarity/position | parameters | ms per step |";
  std::string rule = "|:--|--:|--:|";
  std::vector<std::pair<std::string, size_t>> columns;  // metric key and condition index
  const std::vector<Metric> metrics = task.metrics();
  for (const Metric& metric : metrics) {
    if (!metric.is_compared) continue;
    for (const size_t n :
         MeasuredAt(summary, conditions.values.size(), metrics[0].key, metric.key)) {
      columns.emplace_back(metric.key, n);
      table += StrCat(" ", metric.column, " at ", FormatCondition(conditions.values[n]), " |");
      rule += "--:|";
    }
  }
  table += "\n" + rule + "\n";
  bool any_diverged = false;
  bool any_unfinished = false;
  for (const json& row : summary) {
    const bool diverged = row["diverged"] > 0;
    const bool unfinished = row["not_converged"].is_number() && row["not_converged"] > 0;
    any_diverged = any_diverged || diverged;
    any_unfinished = any_unfinished || unfinished;
    table += StrCat("| ", row["label"].get<std::string>(), diverged ? " *" : "",
                    unfinished ? " †" : "", " | ", FormatNumber(row["parameters"], "%.0f"), " | ",
                    FormatNumber(row["ms_per_step"]["mean"], "%.1f"), " |");
    for (const auto& [key, n] : columns) {
      table += StrCat(" ", FormatCell(row["losses"][n][key]), " |");
    }
    table += "\n";
  }
  table += StrCat("\n", Capitalized(task.description().loss_unit), ", mean",
                  settings.seeds.size() > 1 ? " ± standard deviation" : "", " over ",
                  DescribeSeeds(settings), ", ", task.TrainedAs(settings.training),
                  ". A dash marks a value that is undefined under this condition or belongs to an "
                  "unfinished run.\n");
  if (settings.until_flat) {
    table +=
        "Each run ends once its loss on held-out training data is flat; the number of steps is "
        "an upper limit.\n";
  }
  if (settings.tuning && settings.tuning->is_finished) {
    table +=
        "These values were chosen on held-out training data, with a seed that no run above uses:\n";
    for (size_t c = 0; c < settings.combinations.size(); ++c) {
      const json& values = settings.tuning->chosen[c];
      table += StrCat("- ", settings.combinations[c].label(), ": ",
                      values.is_null() ? "none, because all trials diverged"
                      : values.empty() ? "nothing to tune"
                                       : DescribeValues(values),
                      "\n");
    }
  }
  if (any_diverged) table += "\\* The loss diverged for at least one seed.\n";
  if (any_unfinished) {
    table += StrCat("† not converged: at least one seed was still improving at the end of its ",
                    settings.training.steps, " steps.\n");
  }
  return table;
}

}  // namespace gnomon::lab::cli
