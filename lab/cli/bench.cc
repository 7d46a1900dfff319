// Times the operators against PyTorch's scaled_dot_product_attention (SDPA) in one process. Each
// round runs every case once, so that changes in clock frequency affect all cases equally. On a
// GPU, times are measured with CUDA events, and each SDPA kernel is a separate case.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_model.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/interrupts.h"
#include "cli/measure.h"
#include "cli/progress.h"
#include "cli/record.h"
#include "cli/shortage.h"
#include "cli/timer.h"
#include "gnomon/attention.h"
#include "gnomon/torch/attention.h"
#include "gnomon/torch/measurement.h"
#include "training/device.h"
#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {

using torch::Tensor;

constexpr double kPeakSeconds = 0.1;
constexpr double kHypeMu = 0.001;
constexpr int64_t kT5Buckets = 32;
constexpr int64_t kShawOffset = 16;

struct BenchFlags {
  // Sizes of the operator's inputs or, with --model, of the model. The two have different defaults.
  std::optional<int64_t> batch;
  std::optional<int64_t> heads;
  std::optional<int64_t> length;
  std::optional<int64_t> dim;
  std::optional<int64_t> depth;
  std::optional<int64_t> mlp;
  int64_t repeats = 9;
  std::string dtype = "float32";
  std::string device = "cpu";
  int64_t threads = 0;
  std::vector<std::string> cases;
  std::vector<std::string> models;
  bool as_json = false;
};

struct Shape {
  int64_t batch = 1;
  int64_t heads = 8;
  int64_t length = 2048;
  int64_t dim = 64;
  torch::TensorOptions tokens = torch::TensorOptions();  // dtype and device

  std::vector<int64_t> sizes() const { return {batch, heads, length, dim}; }
};

// Normally distributed numbers, identical on all devices.
Tensor Normal(const std::vector<int64_t>& sizes, const torch::TensorOptions& options) {
  return torch::randn(sizes).to(options);
}

// The SDPA kernels on a GPU.
constexpr const char* kSdpaKernels[] = {"cudnn", "flash", "efficient"};

// While this object exists, SDPA uses only the kernel `name`; if `name` is null, SDPA chooses one.
class OneSdpaKernel {
 public:
  explicit OneSdpaKernel(const char* name) { Use(name); }
  ~OneSdpaKernel() { Use(nullptr); }
  OneSdpaKernel(const OneSdpaKernel&) = delete;
  OneSdpaKernel& operator=(const OneSdpaKernel&) = delete;

 private:
  static void Use(const char* name) {
    const auto uses = [&](std::string_view kernel) { return name == nullptr || name == kernel; };
    at::Context& context = at::globalContext();
    context.setSDPUseCuDNN(uses("cudnn"));
    context.setSDPUseFlash(uses("flash"));
    context.setSDPUseMemEfficient(uses("efficient"));
    context.setSDPUseMath(name == nullptr);
  }
};

// A benchmark case: its computation, and the inputs whose gradients it computes.
struct Case {
  std::string name;
  std::string note;
  std::vector<Tensor> inputs;
  std::function<Tensor(bool causal)> run;
  bool is_sdpa = false;  // SDPA without a mask
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

// All cases use the same q, k and v, but each has its own leaf tensors.
class Cases {
 public:
  explicit Cases(const Shape& shape) : shape_(shape) {
    torch::manual_seed(0);
    q_ = Normal(shape.sizes(), shape.tokens);
    k_ = Normal(shape.sizes(), shape.tokens);
    v_ = Normal(shape.sizes(), shape.tokens);
    AddSdpa();
    Add("dot", "", similarity::Dot(), {});
    AddBiases();
    AddRelative();
    const Tensor gamma = torch::full({shape.heads}, 0.5).to(shape.tokens.device());
    Add("laplacian", "", similarity::Laplacian(gamma), {}, {gamma});
    AddMapped("laplacian", gamma);
    if (shape.dim >= 2) {
      Add("umbral", "including its token map", similarity::Umbral(gamma), {}, {gamma});
      AddMapped("umbral", gamma);
      Add("penumbral", "including its token map", similarity::Penumbral(gamma), {}, {gamma});
      AddMapped("penumbral", gamma);
      Add("penumbral:score=height2", "including its token map",
          similarity::Penumbral(gamma, 1.0, "xi", "height2"), {}, {gamma});
      AddMapped("penumbral:score=height2", gamma);
    }
  }

  // Returns the selected cases along with SDPA and dot, or all cases if none were selected.
  std::vector<Case> Chosen(const std::vector<std::string>& asked_for) const {
    if (asked_for.empty()) return cases_;
    std::vector<Case> chosen;
    std::vector<std::string> names;
    for (const Case& one : cases_) names.push_back(one.name);
    for (const std::string& name : asked_for) {
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        throw Error(
            StrCat("--cases contains '", name, "'; expected cases from ", Join(names, ", ")));
      }
    }
    for (const Case& one : cases_) {
      const bool asked = std::find(asked_for.begin(), asked_for.end(), one.name) != asked_for.end();
      // SDPA and dot always run, because all ratios are relative to them.
      if (asked || one.is_sdpa || one.name == "dot") chosen.push_back(one);
    }
    return chosen;
  }

 private:
  void AddSdpa() {
    const std::vector<Tensor> inputs = {Leaf(q_), Leaf(k_), Leaf(v_)};
    const auto add = [&](const std::string& name, const char* note, const char* kernel) {
      cases_.push_back({name, note, inputs,
                        [inputs, kernel](bool causal) {
                          const OneSdpaKernel one(kernel);
                          return torch::scaled_dot_product_attention(inputs[0], inputs[1],
                                                                     inputs[2], {}, 0.0, causal);
                        },
                        /*is_sdpa=*/true});
    };
    add("sdpa", "torch", nullptr);
    for (const char* kernel : kSdpaKernels) {
      if (shape_.tokens.device().is_cuda() && Takes(kernel)) {
        add(StrCat("sdpa-", kernel), "PyTorch, this kernel", kernel);
      }
    }
    // The L x L masks are created when the case first runs.
    auto masks = std::make_shared<std::pair<Tensor, Tensor>>();
    cases_.push_back({"sdpa+mask", "PyTorch, ALiBi as an L x L mask", inputs,
                      [inputs, masks, shape = shape_](bool causal) {
                        if (!masks->first.defined()) *masks = AlibiMasks(shape);
                        return torch::scaled_dot_product_attention(
                            inputs[0], inputs[1], inputs[2], causal ? masks->second : masks->first);
                      }});
  }

  // Whether an SDPA kernel supports the sizes and dtype of the tokens.
  bool Takes(const char* kernel) const {
    try {
      const torch::NoGradGuard no_grad;
      const OneSdpaKernel one(kernel);
      torch::scaled_dot_product_attention(q_, k_, v_, {}, 0.0, /*is_causal=*/true);
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }

  // The masks for full and for causal attention.
  static std::pair<Tensor, Tensor> AlibiMasks(const Shape& shape) {
    const Tensor positions = torch::arange(shape.length, torch::kFloat).to(shape.tokens.device());
    const Tensor relative = positions.unsqueeze(0) - positions.unsqueeze(1);
    const Tensor slopes =
        alibi_slopes(shape.heads).to(shape.tokens.device(), torch::kFloat).view({-1, 1, 1});
    const Tensor full = (-slopes * relative.abs()).to(shape.tokens);
    return {full, full.masked_fill(relative > 0, -std::numeric_limits<float>::infinity())};
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
        return start.to(shape_.tokens.device(), torch::kFloat).clone().requires_grad_(learned);
      };
      const Tensor slopes = make(alibi_slopes(shape_.heads));
      Add("alibi" + suffix, note, similarity::Dot(), {position::ALiBi(slopes)}, {slopes});
      const Tensor table = make(torch::randn({kT5Buckets, shape_.heads}));
      Add("t5" + suffix, note, similarity::Dot(), {position::T5(table, /*bidirectional=*/true)},
          {table});
      const Tensor tau = make(alibi_slopes(shape_.heads) / kHypeMu);
      const Tensor mu = make(torch::full({shape_.heads}, kHypeMu));
      Add("hype" + suffix, note, similarity::Dot(), {position::HyPE(tau, mu, "abs")}, {tau, mu});
    }
  }

  // Two tables of relative keys: one clipped as in Shaw et al. 2018, one with a row for every
  // offset.
  void AddRelative() {
    for (const int64_t most : {kShawOffset, shape_.length - 1}) {
      const bool is_clipped = most == kShawOffset;
      const Tensor rows = torch::randn({2 * most + 1, shape_.dim}).to(shape_.tokens.device());
      const Tensor table = Leaf(rows / std::sqrt(static_cast<double>(shape_.dim)));
      Add(is_clipped ? "relative-clipped" : "relative", is_clipped ? "learned, 33 rows" : "learned",
          similarity::Dot(), {position::Relative(table, most)}, {table});
    }
  }

  // Times only the operator: the tokens are mapped in advance.
  void AddMapped(const std::string& spec, const Tensor& gamma) {
    // attention() maps low-precision tokens in float32, so the time of the operator alone would not
    // be comparable to the time of a call.
    if (q_.scalar_type() != torch::kFloat) return;
    const MappedAttention mapped(spec, q_, k_, v_, gamma);
    cases_.push_back({spec + " (operator)", "on mapped tokens", mapped.inputs(), mapped});
  }

  Shape shape_;
  Tensor q_;
  Tensor k_;
  Tensor v_;
  std::vector<Case> cases_;
};

// Returns the output, and the gradients of all inputs if there is a backward pass.
std::vector<Tensor> RunOnce(const Case& one, const Mode& mode, const Tensor& d_o) {
  if (!mode.backward) {
    const torch::NoGradGuard no_grad;
    return {one.run(mode.causal)};
  }
  const Tensor o = one.run(mode.causal);
  std::vector<Tensor> results = torch::autograd::grad({o}, one.inputs, {d_o});
  results.push_back(o);
  return results;
}

double TimeOnce(const Case& one, const Mode& mode, const Tensor& d_o) {
  return TimeOn(d_o.device(), [&] { RunOnce(one, mode, d_o); });
}

// The peak memory in MiB, excluding inputs, output and gradients; null if the system does not
// report it.
nlohmann::json PeakMebibytes(const Case& one, const Mode& mode, const Tensor& d_o) {
  int64_t results = 0;
  const auto run = [&] {
    for (const Tensor& tensor : RunOnce(one, mode, d_o)) {
      results += static_cast<int64_t>(tensor.nbytes());
    }
  };
  const std::optional<int64_t> peak =
      d_o.is_cpu() ? PeakBytes(run) : PeakBytesOn(d_o.device(), run);
  if (!peak) return {};
  return static_cast<double>(std::max<int64_t>(*peak - results, 0)) / (1 << 20);
}

// The fraction of unmasked pairs that are computed; the rest are skipped as negligible. Null if no
// fused kernel runs.
nlohmann::json ComputedShare(const Case& one, const Mode& mode, const Tensor& d_o) {
  const PairCounts count = CountPairs([&] { RunOnce(one, mode, d_o); });
  if (count.seen == 0) return {};
  return static_cast<double>(count.computed) / static_cast<double>(count.seen);
}

// Floating-point operations of the GEMMs (two forward, five backward); half as many with a causal
// mask.
double CountFlops(const Shape& shape, const Mode& mode) {
  const auto pairs = static_cast<double>(shape.batch * shape.heads) *
                     static_cast<double>(shape.length) * static_cast<double>(shape.length);
  const double gemms = mode.backward ? 7 : 2;
  return 2 * pairs * static_cast<double>(shape.dim) * gemms * (mode.causal ? 0.5 : 1.0);
}

// GEMM throughput in floating-point operations per second. On the CPU, this measures gnomon's own
// GEMM; on other devices, it measures PyTorch's, for L x L matrices (at most 8192 x 8192) with the
// dtype of the tokens.
double MeasurePeak(const Tensor& like) {
  if (like.is_cpu()) return MeasurePeakFlops(kPeakSeconds);
  const int64_t rows = std::min<int64_t>(like.size(2), 8192);
  const Tensor a = torch::randn({rows, rows}).to(like.options());
  const double seconds = TimeOn(like.device(), [&] { torch::matmul(a, a); });
  return 2 * std::pow(static_cast<double>(rows), 3) / seconds;
}

void PrintMode(const nlohmann::json& mode) {
  std::cout << "\n### " << mode["mode"].get<std::string>() << "; GEMM peak "
            << FormatNumber(mode["peak_gflops"], "%.0f") << " GFLOP/s\n\n"
            << "| case | | ms | / sdpa | / dot | GFLOP/s | of peak | MiB | pairs |\n"
            << "|:--|:--|--:|--:|--:|--:|--:|--:|--:|\n";
  for (const nlohmann::json& row : mode["cases"]) {
    std::cout << "| " << row["case"].get<std::string>() << " | " << row["note"].get<std::string>()
              << " | " << FormatNumber(row["ms"], "%.2f") << " | "
              << FormatNumber(row["to_sdpa"], "%.2f") << " | "
              << FormatNumber(row["to_dot"], "%.2f") << " | " << FormatNumber(row["gflops"], "%.0f")
              << " | " << FormatNumber(100 * row["of_peak"].get<double>(), "%.0f%%") << " | "
              << FormatNumber(row["memory_mib"], "%.1f") << " | "
              << (row["computed"].is_null()
                      ? "-"
                      : FormatNumber(100 * row["computed"].get<double>(), "%.0f%%"))
              << " |\n";
  }
  std::cout << std::flush;
}

// Returns the record of one mode, without the memory use and the fraction of computed pairs;
// nullopt after Ctrl-C.
std::optional<nlohmann::json> TimeMode(const std::vector<Case>& cases, const Mode& mode,
                                       const Shape& shape, int64_t repeats, const Tensor& d_o,
                                       Progress* progress) {
  std::vector<std::vector<double>> seconds(cases.size());
  std::vector<double> peaks;
  // The first round is a warm-up.
  for (int64_t round = 0; round <= repeats; ++round) {
    for (size_t c = 0; c < cases.size(); ++c) {
      if (Interrupted()) return std::nullopt;
      const double taken = TimeOnce(cases[c], mode, d_o);
      if (round > 0) seconds[c].push_back(taken);
    }
    peaks.push_back(MeasurePeak(d_o));
    progress->Update(StrCat(mode.name, ": round ", round, " of ", repeats));
  }
  const double peak = Median(peaks);
  std::vector<double> medians;
  double sdpa = 0;
  double dot = 0;
  for (size_t c = 0; c < cases.size(); ++c) {
    medians.push_back(Median(seconds[c]));
    if (cases[c].is_sdpa) sdpa = sdpa == 0 ? medians[c] : std::min(sdpa, medians[c]);
    if (cases[c].name == "dot") dot = medians[c];
  }
  nlohmann::json rows = nlohmann::json::array();
  for (size_t c = 0; c < cases.size(); ++c) {
    const double rate = CountFlops(shape, mode) / medians[c];
    rows.push_back({{"case", cases[c].name},
                    {"note", cases[c].note},
                    {"ms", medians[c] * 1e3},
                    {"to_sdpa", medians[c] / sdpa},
                    {"to_dot", medians[c] / dot},
                    {"gflops", rate / 1e9},
                    {"of_peak", rate / peak},
                    {"memory_mib", nullptr},
                    {"computed", nullptr}});
  }
  return nlohmann::json{{"mode", mode.name}, {"peak_gflops", peak / 1e9}, {"cases", rows}};
}

int BenchOperator(const Shape& shape, const BenchFlags& flags) {
  const std::vector<Case> cases = Cases(shape).Chosen(flags.cases);
  const torch::Device device = shape.tokens.device();
  nlohmann::json record = {{"machine", DescribeMachine(device)},
                           {"versions", DescribeVersions()},
                           {"shape",
                            {{"batch", shape.batch},
                             {"heads", shape.heads},
                             {"length", shape.length},
                             {"dim", shape.dim},
                             {"dtype", flags.dtype}}},
                           {"repeats", flags.repeats},
                           {"modes", nlohmann::json::array()}};
  if (!flags.as_json) {
    std::cout << MachineLine(device) << "\nB " << shape.batch << ", H " << shape.heads << ", L "
              << shape.length << ", D " << shape.dim << ", " << flags.dtype << "; medians of "
              << flags.repeats << ", interleaved" << std::endl;
  }
  const Tensor d_o = Normal(shape.sizes(), shape.tokens);
  Progress progress;
  for (const Mode& mode : kModes) {
    if (const auto timed = TimeMode(cases, mode, shape, flags.repeats, d_o, &progress)) {
      record["modes"].push_back(*timed);
    }
  }
  // GiveBackFreedMemory() slows down later allocations, so memory is measured last.
  GiveBackFreedMemory();
  for (size_t m = 0; m < record["modes"].size(); ++m) {
    for (size_t c = 0; c < cases.size() && !Interrupted(); ++c) {
      nlohmann::json& row = record["modes"][m]["cases"][c];
      row["memory_mib"] = PeakMebibytes(cases[c], kModes[m], d_o);
      row["computed"] = ComputedShare(cases[c], kModes[m], d_o);
    }
    progress.Update(StrCat(kModes[m].name, ": memory"));
  }
  progress.Clear();
  if (!flags.as_json) {
    for (const nlohmann::json& mode : record["modes"]) PrintMode(mode);
  } else if (!Interrupted()) {
    std::cout << record.dump(2) << std::endl;
  }
  return Interrupted() ? kInterrupted : 0;
}

void Set(const std::optional<int64_t>& given, int64_t* value) {
  if (given) *value = *given;
}

torch::ScalarType FindType(const std::string& name) {
  for (const auto& [known, type] :
       {std::pair("float32", torch::kFloat), std::pair("bfloat16", torch::kBFloat16),
        std::pair("float16", torch::kHalf)}) {
    if (name == known) return type;
  }
  throw Error(StrCat("--dtype is '", name, "'; expected float32, bfloat16 or float16"));
}

int Run(const BenchFlags& flags) {
  SetThreads(flags.threads);
  const torch::Device device = FindDevice(flags.device);
  CatchInterrupts();
  if (flags.models.empty()) {
    Shape shape;
    Set(flags.batch, &shape.batch);
    Set(flags.heads, &shape.heads);
    Set(flags.length, &shape.length);
    Set(flags.dim, &shape.dim);
    shape.tokens = torch::TensorOptions(device).dtype(FindType(flags.dtype));
    int code = 0;
    NamingOptions(StrCat("--batch ", shape.batch, ", --heads ", shape.heads, ", --length ",
                         shape.length, " and --dim ", shape.dim),
                  [&] { code = BenchOperator(shape, flags); });
    return code;
  }
  ModelBench bench;
  bench.device = device;
  Set(flags.batch, &bench.training.batch);
  Set(flags.length, &bench.text.window.length);
  Set(flags.heads, &bench.text.model.heads);
  Set(flags.dim, &bench.text.model.dim);
  Set(flags.depth, &bench.text.model.depth);
  Set(flags.mlp, &bench.text.model.mlp);
  bench.models = flags.models;
  bench.repeats = flags.repeats;
  bench.as_json = flags.as_json;
  return BenchModels(bench);
}

}  // namespace

void AddBench(CLI::App& app, Action* action) {
  CLI::App* command = app.add_subcommand(
      "bench",
      "Time gnomon's attention against PyTorch's scaled_dot_product_attention, with interleaved "
      "calls in one process. For the forward pass alone and for both passes, prints the median "
      "times and their ratios to sdpa and dot; the throughput as a fraction of the machine's GEMM "
      "peak (counting all pairs); the peak memory of a call in MiB, excluding inputs, output and "
      "gradients; and the fraction of pairs that are computed (the rest are skipped as "
      "negligible). With --model, time training steps of the language model instead.");
  auto flags = std::make_shared<BenchFlags>();
  const auto add = [&](const char* name, std::optional<int64_t>* value, const char* help) {
    return AddNumber(command, name, value, 1, kMany, help);
  };
  add("--batch", &flags->batch, "Batch size; default: 1, or 16 with --model");
  add("--heads", &flags->heads, "Number of heads; default: 8, or 4 with --model");
  add("--length", &flags->length,
      "Sequence length of queries and keys; default: 2048, or 256 with --model");
  add("--dim", &flags->dim,
      "Head dimension; default: 64. With --model: model dimension; default: 128");
  AddNumber(command, "--repeats", &flags->repeats, 1, int64_t{1} << 30,
            "Number of rounds; the results are medians over all rounds")
      ->capture_default_str();
  CLI::Option* dtype =
      command
          ->add_option("--dtype", flags->dtype, "Dtype of q, k and v: float32, bfloat16 or float16")
          ->capture_default_str();
  AddDeviceFlag(command, &flags->device, "to run the benchmark");
  AddThreadsFlag(command, &flags->threads);
  CLI::Option* cases = AddList(command, "--cases", &flags->cases,
                               "Comma-separated cases to time besides sdpa and dot; default: all");
  CLI::Option* model =
      AddList(
          command, "--model", &flags->models,
          "Comma-separated SIMILARITY/POSITION pairs: time training steps of the language model "
          "with each pair, and print the ratios of these times to the first pair's")
          ->excludes(cases)
          ->excludes(dtype);
  add("--depth", &flags->depth, "With --model: number of layers; default: 4")->needs(model);
  add("--mlp", &flags->mlp, "With --model: hidden units of each layer's MLP; default: 512")
      ->needs(model);
  command->add_flag("--json", flags->as_json, "Print JSON");
  command->callback([action, flags] { *action = [flags] { return Run(*flags); }; });
}

}  // namespace gnomon::lab::cli
