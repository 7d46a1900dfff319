// Times against torch's scaled_dot_product_attention (SDPA), in one process and interleaved: each
// round runs every case once, so that a change of the machine's clock meets all of them.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/flags.h"
#include "gnomon/attention.h"
#include "gnomon/torch/attention.h"
#include "models/strings.h"
#include "ops/executor.h"
#include "ops/operators.h"
#include "ops/registry.h"

namespace gnomon::cli {
namespace {

using models::StrCat;
using torch::Tensor;

constexpr double kPeakSeconds = 0.1;
constexpr double kHypeMu = 0.001;
constexpr int64_t kT5Buckets = 32;
constexpr int64_t kShawOffset = 16;

struct BenchFlags {
  int64_t batch = 1;
  int64_t heads = 8;
  int64_t length = 2048;
  int64_t dim = 64;
  int64_t repeats = 9;
  int64_t threads = 0;
  std::vector<std::string> cases;
  bool as_json = false;
};

// What a case computes and what its gradient is taken of.
struct Case {
  std::string name;
  std::string note;
  std::vector<Tensor> inputs;
  std::function<Tensor(bool causal)> run;
};

struct Mode {
  const char* name;
  bool causal;
  bool backward;
};

constexpr Mode kModes[] = {{"forward, full", false, false},
                           {"forward, causal", true, false},
                           {"forward + backward, full", false, true},
                           {"forward + backward, causal", true, true}};

Tensor Leaf(const Tensor& tensor) { return tensor.detach().clone().requires_grad_(true); }

// All cases on the same q, k and v, each with leaves of its own.
class Cases {
 public:
  explicit Cases(const BenchFlags& flags) : flags_(flags) {
    torch::manual_seed(0);
    const std::vector<int64_t> shape = {flags.batch, flags.heads, flags.length, flags.dim};
    q_ = torch::randn(shape);
    k_ = torch::randn(shape);
    v_ = torch::randn(shape);
    AddSdpa();
    Add("dot", "", similarity::Dot(), {});
    AddBiases();
    AddRelative();
    const Tensor gamma = torch::full({flags.heads}, 0.5);
    Add("laplacian", "", similarity::Laplacian(gamma), {}, {gamma});
    AddMapped("laplacian", gamma);
    if (flags.dim >= 2) {
      Add("umbral", "with its token map", similarity::Umbral(gamma), {}, {gamma});
      AddMapped("umbral", gamma);
      Add("penumbral", "with its token map", similarity::Penumbral(gamma), {}, {gamma});
      AddMapped("penumbral", gamma);
      Add("penumbral:score=height2", "with its token map",
          similarity::Penumbral(gamma, 1.0, "xi", "height2"), {}, {gamma});
      AddMapped("penumbral:score=height2", gamma);
    }
  }

  std::vector<Case> Chosen() const {
    if (flags_.cases.empty()) return cases_;
    std::vector<Case> chosen;
    std::vector<std::string> names;
    for (const Case& one : cases_) names.push_back(one.name);
    for (const std::string& name : flags_.cases) {
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        throw Error(
            StrCat("--cases: unknown case '", name, "'; known: ", models::Join(names, ", ")));
      }
    }
    for (const Case& one : cases_) {
      const bool asked =
          std::find(flags_.cases.begin(), flags_.cases.end(), one.name) != flags_.cases.end();
      // Every ratio is to one of these two.
      if (asked || one.name == "sdpa" || one.name == "dot") chosen.push_back(one);
    }
    return chosen;
  }

 private:
  void AddSdpa() {
    const std::vector<Tensor> inputs = {Leaf(q_), Leaf(k_), Leaf(v_)};
    cases_.push_back({"sdpa", "torch", inputs, [inputs](bool causal) {
                        return torch::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2],
                                                                   {}, 0.0, causal);
                      }});
    const Tensor positions = torch::arange(flags_.length, torch::kFloat);
    const Tensor relative = positions.unsqueeze(0) - positions.unsqueeze(1);
    const Tensor slopes = alibi_slopes(flags_.heads).to(torch::kFloat);
    const Tensor full = -slopes.view({-1, 1, 1}) * relative.abs();
    const Tensor causal_mask =
        full.masked_fill(relative > 0, -std::numeric_limits<float>::infinity());
    cases_.push_back({"sdpa+mask", "torch, ALiBi as a mask of L x L", inputs,
                      [inputs, full, causal_mask](bool causal) {
                        return torch::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2],
                                                                   causal ? causal_mask : full);
                      }});
  }

  void Add(const std::string& name, const std::string& note, const Similarity& similarity,
           const std::vector<Position>& positions, const std::vector<Tensor>& parameters = {}) {
    std::vector<Tensor> inputs = {Leaf(q_), Leaf(k_), Leaf(v_)};
    for (const Tensor& parameter : parameters) {
      if (parameter.requires_grad()) inputs.push_back(parameter);
    }
    cases_.push_back(
        {name, note, inputs, [inputs, similarity, positions](bool causal) {
           return attention(
               inputs[0], inputs[1], inputs[2],
               AttentionOptions().similarity(similarity).position(positions).causal(causal));
         }});
  }

  void AddBiases() {
    for (const bool learned : {false, true}) {
      const char* note = learned ? "learned" : "fixed";
      const std::string suffix = learned ? "-learned" : "";
      const auto make = [&](const Tensor& start) {
        return start.to(torch::kFloat).clone().requires_grad_(learned);
      };
      const Tensor slopes = make(alibi_slopes(flags_.heads));
      Add("alibi" + suffix, note, similarity::Dot(), {position::ALiBi(slopes)}, {slopes});
      const Tensor table = make(torch::randn({kT5Buckets, flags_.heads}));
      Add("t5" + suffix, note, similarity::Dot(), {position::T5(table, /*bidirectional=*/true)},
          {table});
      const Tensor tau = make(alibi_slopes(flags_.heads) / kHypeMu);
      const Tensor mu = make(torch::full({flags_.heads}, kHypeMu));
      Add("hype" + suffix, note, similarity::Dot(), {position::HyPE(tau, mu, "abs")}, {tau, mu});
    }
  }

  // Relative keys: clipped as in Shaw et al. 2018, and a row for every offset.
  void AddRelative() {
    for (const int64_t most : {kShawOffset, flags_.length - 1}) {
      const bool is_clipped = most == kShawOffset;
      const Tensor table = Leaf(torch::randn({2 * most + 1, flags_.dim}) /
                                std::sqrt(static_cast<double>(flags_.dim)));
      Add(is_clipped ? "relative-clipped" : "relative", is_clipped ? "learned, 33 rows" : "learned",
          similarity::Dot(), {position::Relative(table, most)}, {table});
    }
  }

  // The operator alone, on tokens mapped beforehand.
  void AddMapped(const std::string& spec, const Tensor& gamma) {
    const Component component = Component::Parse(spec);
    const MappedTokens tokens = FindSimilarity(component).map(component, q_, k_, gamma);
    std::vector<Tensor> inputs = {Leaf(tokens.x), Leaf(tokens.y), Leaf(v_)};
    OptionalTensor rows;
    OptionalTensor columns;
    if (tokens.row_scalars.defined()) {
      rows = Leaf(tokens.row_scalars);
      inputs.push_back(*rows);
    }
    if (tokens.column_scalars.defined()) {
      columns = Leaf(tokens.column_scalars);
      inputs.push_back(*columns);
    }
    const std::string function = tokens.function;
    const Tensor factor = tokens.factor.detach().clone();
    cases_.push_back({spec + " (operator)", "on mapped tokens", inputs,
                      [inputs, rows, columns, factor, function](bool causal) {
                        OperatorArguments call;
                        call.x = inputs[0];
                        call.y = inputs[1];
                        call.v = inputs[2];
                        call.row_scalars = rows;
                        call.column_scalars = columns;
                        call.factor = factor;
                        call.function = function;
                        if (causal) call.right = 0;
                        return std::get<0>(CallAttentionForward(call));
                      }});
  }

  const BenchFlags& flags_;
  Tensor q_;
  Tensor k_;
  Tensor v_;
  std::vector<Case> cases_;
};

double TimeOnce(const Case& one, const Mode& mode, const Tensor& d_o) {
  const Stopwatch clock;
  if (mode.backward) {
    torch::autograd::grad({one.run(mode.causal)}, one.inputs, {d_o});
  } else {
    const torch::NoGradGuard no_grad;
    one.run(mode.causal);
  }
  return clock.seconds();
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Multiplications and additions of the two GEMMs forward and the five backward; half of them where
// half of the pairs are masked.
double CountFlops(const BenchFlags& flags, const Mode& mode) {
  const auto pairs = static_cast<double>(flags.batch * flags.heads) *
                     static_cast<double>(flags.length) * static_cast<double>(flags.length);
  const double gemms = mode.backward ? 7 : 2;
  return 2 * pairs * static_cast<double>(flags.dim) * gemms * (mode.causal ? 0.5 : 1.0);
}

std::string Format(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

void PrintTable(const nlohmann::json& mode) {
  std::cout << "\n### " << mode["mode"].get<std::string>() << "; GEMM peak "
            << Format("%.0f", mode["peak_gflops"]) << " GFLOP/s\n\n"
            << "| case | | ms | / sdpa | / dot | GFLOP/s | of peak |\n"
            << "|:--|:--|--:|--:|--:|--:|--:|\n";
  for (const nlohmann::json& row : mode["cases"]) {
    std::cout << "| " << row["case"].get<std::string>() << " | " << row["note"].get<std::string>()
              << " | " << Format("%.2f", row["ms"]) << " | " << Format("%.2f", row["to_sdpa"])
              << " | " << Format("%.2f", row["to_dot"]) << " | " << Format("%.0f", row["gflops"])
              << " | " << Format("%.0f%%", 100 * row["of_peak"].get<double>()) << " |\n";
  }
  std::cout << std::flush;
}

int Run(const BenchFlags& flags) {
  SetThreads(flags.threads);
  const std::vector<Case> cases = Cases(flags).Chosen();
  CatchInterrupts();
  nlohmann::json record = {{"machine", DescribeMachine()},
                           {"versions", DescribeVersions()},
                           {"shape",
                            {{"batch", flags.batch},
                             {"heads", flags.heads},
                             {"length", flags.length},
                             {"dim", flags.dim}}},
                           {"repeats", flags.repeats},
                           {"modes", nlohmann::json::array()}};
  if (!flags.as_json) {
    const nlohmann::json& machine = record["machine"];
    std::cout << machine["cpu"].get<std::string>() << ", " << machine["threads"] << " threads, "
              << machine["instruction_set"].get<std::string>() << ", torch "
              << record["versions"]["torch"].get<std::string>() << "\nB " << flags.batch << ", H "
              << flags.heads << ", L " << flags.length << ", D " << flags.dim
              << ", fp32; medians of " << flags.repeats << ", interleaved\n";
  }
  const Tensor d_o = torch::randn({flags.batch, flags.heads, flags.length, flags.dim});
  Progress progress;
  for (const Mode& mode : kModes) {
    std::vector<std::vector<double>> seconds(cases.size());
    std::vector<double> peaks;
    // The first round only warms up.
    for (int64_t round = 0; round <= flags.repeats; ++round) {
      for (size_t c = 0; c < cases.size(); ++c) {
        if (Interrupted()) return kInterrupted;
        const double taken = TimeOnce(cases[c], mode, d_o);
        if (round > 0) seconds[c].push_back(taken);
      }
      peaks.push_back(MeasurePeakFlops(kPeakSeconds, TorchExecutor()));
      progress.Update(StrCat(mode.name, ": round ", round, " of ", flags.repeats));
    }
    const double peak = Median(peaks);
    std::vector<double> medians;
    double sdpa = 0;
    double dot = 0;
    for (size_t c = 0; c < cases.size(); ++c) {
      medians.push_back(Median(seconds[c]));
      if (cases[c].name == "sdpa") sdpa = medians[c];
      if (cases[c].name == "dot") dot = medians[c];
    }
    nlohmann::json rows = nlohmann::json::array();
    for (size_t c = 0; c < cases.size(); ++c) {
      const double rate = CountFlops(flags, mode) / medians[c];
      rows.push_back({{"case", cases[c].name},
                      {"note", cases[c].note},
                      {"ms", medians[c] * 1e3},
                      {"to_sdpa", medians[c] / sdpa},
                      {"to_dot", medians[c] / dot},
                      {"gflops", rate / 1e9},
                      {"of_peak", rate / peak}});
    }
    record["modes"].push_back({{"mode", mode.name}, {"peak_gflops", peak / 1e9}, {"cases", rows}});
    progress.Clear();
    if (!flags.as_json) PrintTable(record["modes"].back());
  }
  if (flags.as_json) std::cout << record.dump(2) << std::endl;
  return 0;
}

}  // namespace

void AddBench(CLI::App& app, Action* action) {
  CLI::App* command = app.add_subcommand(
      "bench",
      "Time the operator against torch's scaled_dot_product_attention, interleaved in one process: "
      "ratios of medians, forward and backward, and the share of the machine's GEMM peak");
  auto flags = std::make_shared<BenchFlags>();
  const auto add = [&](const char* name, int64_t* value, const char* help) {
    command->add_option(name, *value, help)
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
        ->capture_default_str();
  };
  add("--batch", &flags->batch, "Batches");
  add("--heads", &flags->heads, "Heads");
  add("--length", &flags->length, "Queries and keys");
  add("--dim", &flags->dim, "Columns of a head, up to 512");
  add("--repeats", &flags->repeats, "Rounds that the medians are of");
  AddThreadsFlag(command, &flags->threads);
  command
      ->add_option("--cases", flags->cases,
                   "Cases joined by commas, besides sdpa and dot; default: all")
      ->delimiter(',');
  command->add_flag("--json", flags->as_json, "Print JSON");
  command->callback([action, flags] { *action = [flags] { return Run(*flags); }; });
}

}  // namespace gnomon::cli
