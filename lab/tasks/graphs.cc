// Node classification on one graph, where the classes of some nodes are known (Kipf and Welling
// 2017; Velickovic et al. 2018).
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "models/graph_network.h"
#include "models/splits.h"
#include "training/arrays.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab {
namespace graphs {
namespace {

using nlohmann::json;

constexpr const char* kBest = "best.";
constexpr const char* kSelection = "selection";

#define GNOMON_GRAPHS_TRAINING_OPTIONS(OPTION)                                                    \
  OPTION(                                                                                         \
      double, l2, 5e-4,                                                                           \
      .help =                                                                                     \
          "L2 penalty: the loss includes this factor times half the sum of all squared weights",  \
      .highest = 1e3)                                                                             \
  OPTION(std::string, selection, "accuracy",                                                      \
         .help =                                                                                  \
             "Weights to keep: those with the best validation accuracy (accuracy) or validation " \
             "loss (loss), or those of the last step (last)",                                     \
         .choices = {"accuracy", "loss", "last"})

struct GraphsTrainingOptions {
  GNOMON_OPTIONS(GNOMON_GRAPHS_TRAINING_OPTIONS)
};

// A model's results on a set of nodes.
struct Outcome {
  double accuracy = 0;
  double loss = 0;
};

class GraphsTask final : public SplitsTask {
 public:
  const char* name() const override { return "graphs"; }
  TaskDescription description() const override {
    return {.summary = "a graph attention network that classifies the nodes of a graph",
            .data_help =
                "A file with the arrays graph.edges, graph.labels, train.nodes, valid.nodes, "
                "test.nodes, and either graph.words or graph.features (docs/tasks.md)",
            .data_noun = "graph",
            .loss_unit = "nats per node",
            .examples = "nodes"};
  }

  // The settings of Velickovic et al. 2018: a constant learning rate and an L2 penalty. `selection`
  // replaces early stopping. A batch contains all training nodes of the usual datasets.
  TrainingOptions DefaultTraining(Command /*command*/) const override {
    TrainingOptions training;
    training.batch = 1024;
    training.steps = 300;
    training.learning_rate = 5e-3;
    training.final_fraction = 1;
    training.weight_decay = 0;
    return training;
  }
  OptionList Options(Command command) override;
  void Settle(Command command, bool is_resumed, const TrainingOptions* training) override;
  std::string StepFlags(Command command, const TrainingOptions& training) const override;
  void CheckModelFits() const override;
  void CheckFits(const TrainingOptions& training, int64_t processes) const override;

  void ReadData(const std::string& path) override;
  std::string HoldOut() override;
  json DescribeData() const override;
  std::string DescribeSize() const override;
  void CheckData(const TrainingOptions* training) const override;

  std::unique_ptr<Learner> MakeLearner(const Terms& terms,
                                       const TrainingOptions& training) override;
  void CheckSizes(const StoredSizes& file) const override;
  std::vector<std::string> state_fields() const override { return {kSelection}; }

  std::vector<Metric> metrics() const override {
    return {
        {.key = "accuracy", .title = "accuracy", .column = "accuracy", .higher_is_better = true},
        {.key = "loss", .title = "loss, " + description().loss_unit, .column = "loss"}};
  }
  std::string TrainedAs(const TrainingOptions& training) const override;

  const GraphNetworkOptions& model() const { return model_; }
  const GraphsTrainingOptions& learning() const { return learning_; }
  const Graph& graph() const { return graph_; }
  const torch::Tensor& labels() const { return labels_; }
  // The nodes of a split; undefined if the data have no such split.
  const torch::Tensor& NodesOf(const std::string& part) const;

 private:
  void ReadFeatures(const Arrays& arrays);
  void ReadNodes(const Arrays& arrays);
  int64_t CountNodes(const std::string& part) const;

  GraphNetworkOptions model_;
  GraphsTrainingOptions learning_;
  Graph graph_;
  torch::Tensor labels_;
  std::map<std::string, torch::Tensor> nodes_;  // by part
};

const RegisterTask<GraphsTask> registered;

class GraphsLearner final : public Learner {
 public:
  GraphsLearner(const GraphsTask& task, GraphNetwork model, Terms terms)
      : task_(task), model_(std::move(model)), terms_(std::move(terms)) {}

  torch::nn::Module& module() override { return *model_; }
  torch::Tensor Probe() override;
  torch::Tensor Loss(const Batch& batch) override;
  void Keep() override;
  std::vector<Measurement> Evaluate(const std::function<bool()>& proceed) override;
  LearnerState State(const Gather& gather) const override;
  size_t CheckState(const LearnerState& state) const override;
  void Restore(const LearnerState& state, int64_t first, int64_t count) override;

 private:
  // The best weights so far, according to the validation nodes.
  struct Best {
    int64_t step = 0;  // number of completed steps
    Outcome outcome;
    std::map<std::string, torch::Tensor> weights;
  };

  bool IsBetter(const Outcome& outcome) const;
  // Computes logits without dropout and returns them on the CPU.
  torch::Tensor Logits();
  // The task's graph, on the model's device.
  const Graph& graph();
  Outcome Measure(const torch::Tensor& logits, const std::string& part) const;

  const GraphsTask& task_;
  GraphNetwork model_;
  Graph graph_;
  Terms terms_;
  int64_t taken_ = 0;
  bool is_last_ = false;  // whether this is the last training step
  std::optional<Best> best_;
};

OptionList GraphsTask::Options(Command command) {
  if (command == Command::kEval) return evaluation_.Options();
  return evaluation_.Options() + InSection("model", model_.Options()) +
         InSection("training", learning_.Options());
}

void GraphsTask::Settle(Command command, bool is_resumed, const TrainingOptions* training) {
  for (const auto& [flag, value] : {std::pair("--dropout", model_.dropout),
                                    std::pair("--attention-dropout", model_.attention_dropout)}) {
    if (value == 1) throw Error(StrCat(flag, " is 1; expected a probability below 1"));
  }
  SplitsTask::Settle(command, is_resumed, training);
}

std::string GraphsTask::StepFlags(Command /*command*/, const TrainingOptions& /*training*/) const {
  return StrCat("--depth ", model_.depth, ", --heads ", model_.heads, " and --hidden ",
                model_.hidden);
}

void GraphsTask::CheckModelFits() const {
  const double width = static_cast<double>(model_.heads) * static_cast<double>(model_.hidden);
  const double out = static_cast<double>(model_.out_heads) * static_cast<double>(model_.classes);
  const auto features = static_cast<double>(model_.features);
  const double hidden_layers = static_cast<double>(model_.depth) - 1;
  const double numbers =
      hidden_layers == 0 ? features * out : width * (features + (hidden_layers - 1) * width + out);
  CheckMemoryHolds(StrCat(StepFlags(Command::kTrain, {}), " and --out-heads ", model_.out_heads),
                   sizeof(float) * numbers);
}

void GraphsTask::CheckFits(const TrainingOptions& /*training*/, int64_t /*processes*/) const {
  // Memory must hold the keys and values of every edge in each hidden layer, and their gradients.
  const double width = static_cast<double>(model_.heads) * static_cast<double>(model_.hidden);
  const double numbers = 4 * (static_cast<double>(model_.depth) - 1) * width *
                         static_cast<double>(graph_.indices.size(0));
  CheckMemoryHolds(StepFlags(Command::kTrain, {}), sizeof(float) * numbers);
}

void GraphsTask::ReadFeatures(const Arrays& arrays) {
  constexpr const char* kWords = "graph.words";
  constexpr const char* kLengths = "graph.words_lengths";
  constexpr const char* kFeatures = "graph.features";
  const int64_t nodes = graph_.nodes;
  int64_t& features = model_.features;
  if (!arrays.Has(kWords) && arrays.Has(kFeatures)) {
    graph_.dense_features = arrays.Numbers(kFeatures, 2);
    arrays.CheckRows("graph.labels", kFeatures);
    const int64_t columns = graph_.dense_features.size(1);
    if (features != 0 && columns != features) {
      throw Error(StrCat(path_, ": the array '", kFeatures, "' has ", columns,
                         " columns, but the model expects ", features));
    }
    features = columns;
    return;
  }
  const int64_t highest = features == 0 ? kMany : features - 1;
  torch::Tensor words;
  torch::Tensor counts;
  if (arrays.Has(kLengths)) {
    words = arrays.Integers(kWords, 1, 0, highest);
    arrays.Rows(kWords, 1);  // checks the number of words against the lengths
    counts = arrays.Integers(kLengths, 1, 0, words.size(0));
    arrays.CheckRows("graph.labels", kLengths);
  } else {
    const torch::Tensor table = arrays.Integers(kWords, 2, 0, highest);
    arrays.CheckRows("graph.labels", kWords);
    words = table.flatten();
    counts = torch::full({nodes}, table.size(1), torch::kLong);
  }
  if (features == 0) features = words.max().item<int64_t>() + 1;
  CheckModelFits();
  const torch::Tensor starts = torch::cat({torch::zeros({1}, torch::kLong), counts.cumsum(0)});
  // Scales the features of each node so that they sum to 1.
  const torch::Tensor shares =
      torch::repeat_interleave(counts.clamp_min(1).to(torch::kFloat).reciprocal(), counts);
  graph_.sparse_features = SparseMatrix(starts, words, features, shares);
}

void GraphsTask::ReadNodes(const Arrays& arrays) {
  nodes_.clear();
  std::vector<const char*> part_of(static_cast<size_t>(graph_.nodes), nullptr);
  const int64_t* labels = labels_.const_data_ptr<int64_t>();
  for (const char* part : {"train", "valid", "test"}) {
    const std::string name = StrCat(part, ".nodes");
    if (!arrays.Has(name)) continue;
    const torch::Tensor nodes = arrays.Integers(name, 1, 0, graph_.nodes - 1);
    const int64_t* values = nodes.const_data_ptr<int64_t>();
    for (int64_t n = 0; n < nodes.size(0); ++n) {
      const int64_t node = values[n];
      const auto fail = [&](const std::string& fault) {
        throw Error(StrCat(path_, ": the array '", name, "' contains node ", node, " at [", n,
                           "], ", fault));
      };
      const char*& other = part_of[static_cast<size_t>(node)];
      if (other != nullptr) fail(StrCat("which '", other, ".nodes' also contains"));
      if (labels[node] < 0) fail("which has no label");
      other = part;
    }
    nodes_[part] = nodes;
  }
}

void GraphsTask::ReadData(const std::string& path) {
  const Arrays arrays = ReadFile(path);
  int64_t& classes = model_.classes;
  labels_ = arrays.Integers("graph.labels", 1, -1, classes == 0 ? kMany : classes - 1);
  if (classes == 0) classes = labels_.max().item<int64_t>() + 1;
  if (classes < 2) {
    throw Error(
        StrCat(path_, ": the array 'graph.labels' has ", classes, " class; expected two or more"));
  }
  const int64_t nodes = labels_.size(0);
  const torch::Tensor edges = arrays.Integers("graph.edges", 2, 0, nodes - 1);
  if (edges.size(1) != 2) {
    throw Error(StrCat(path_, ": the array 'graph.edges' has shape ", edges.sizes(),
                       "; expected (edges, 2)"));
  }
  graph_ = MakeGraph(nodes, edges, model_.directed);
  ReadFeatures(arrays);
  ReadNodes(arrays);
}

std::string GraphsTask::HoldOut() {
  if (CountNodes("valid") == 0) throw Error(StrCat(path_, ": the array 'valid.nodes' is missing"));
  HoldOutValid();
  return StrCat(CountNodes("valid"), " validation nodes");
}

const torch::Tensor& GraphsTask::NodesOf(const std::string& part) const {
  static const torch::Tensor none;
  const auto found = nodes_.find(part);
  return found == nodes_.end() ? none : found->second;
}

int64_t GraphsTask::CountNodes(const std::string& part) const {
  const torch::Tensor& nodes = NodesOf(part);
  return nodes.defined() ? nodes.size(0) : 0;
}

void GraphsTask::CheckData(const TrainingOptions* training) const {
  const auto expect = [&](const std::string& part, const std::string& flag,
                          const std::string& instead = "") {
    if (NodesOf(part).defined()) return;
    throw Error(StrCat(path_, ": the array '", part, ".nodes' is missing, but ", flag, " needs it",
                       instead));
  };
  if (training != nullptr) {
    expect("train", "training");
    if (learning_.selection != "last") expect("valid", "--selection " + learning_.selection);
  }
  for (const std::string& split : splits()) {
    const std::string other = split == "test" ? "valid" : "test";
    const std::string instead =
        NodesOf(other).defined() ? "; use --splits " + other + " instead" : "";
    expect(split, "--splits " + Join(splits(), ","), instead);
  }
}

json GraphsTask::DescribeData() const {
  return {{"data",
           {{"path", path_},
            {"sha256", sha256_},
            {"nodes", graph_.nodes},
            // The number of edges in the network, including reversed edges and self-loops.
            {"edges", graph_.indices.size(0)},
            {"features", model_.features},
            {"classes", model_.classes},
            {"train_nodes", CountNodes("train")},
            {"valid_nodes", CountNodes("valid")},
            {"test_nodes", CountNodes("test")}}}};
}

std::string GraphsTask::DescribeSize() const {
  return StrCat(CountNodes("train"), " of ", graph_.nodes, " nodes");
}

std::unique_ptr<Learner> GraphsTask::MakeLearner(const Terms& terms,
                                                 const TrainingOptions& /*training*/) {
  return std::make_unique<GraphsLearner>(*this, GraphNetwork(model_, terms.similarity), terms);
}

void GraphsTask::CheckSizes(const StoredSizes& file) const {
  file.ExpectLayers(model_.depth);
  const bool is_flat = model_.depth == 1;
  file.Expect("layers.0.weight", {model_.features, is_flat ? model_.out_heads : model_.heads,
                                  is_flat ? model_.classes : model_.hidden});
  file.Expect(StrCat("layers.", model_.depth - 1, ".bias"), {model_.out_heads, model_.classes});
}

std::string GraphsTask::TrainedAs(const TrainingOptions& training) const {
  const int64_t nodes = std::min(training.batch, CountNodes("train"));
  const std::string chosen =
      learning_.selection == "last"
          ? ""
          : StrCat(", evaluated with the weights of the best validation ", learning_.selection);
  return StrCat("trained for ", training.steps, " steps of ", nodes, " nodes", chosen);
}

torch::Tensor GraphsLearner::Probe() {
  if (terms_.position != "none") {
    throw Error("the nodes of a graph have no order; expected the position 'none'");
  }
  // The probe graph has two nodes and one edge.
  const GraphNetworkOptions& options = task_.model();
  Graph graph = MakeGraph(2, torch::tensor({{int64_t{0}, int64_t{1}}}), options.directed);
  graph.sparse_features = SparseMatrix(torch::tensor({0, 1, 2}, torch::kLong),
                                       torch::tensor({int64_t{0}, options.features - 1}),
                                       options.features, torch::ones({2}));
  model_->eval();
  return model_->forward(graph.To(model_->device()));
}

torch::Tensor GraphsLearner::Loss(const Batch& batch) {
  taken_ = batch.step + 1;
  is_last_ = batch.is_last;
  torch::Tensor nodes = task_.NodesOf("train");
  if (batch.total < nodes.size(0)) {
    nodes = nodes.index_select(0, torch::randperm(nodes.size(0)).narrow(0, 0, batch.total));
  }
  // A batch divides the nodes among its rows; there may be fewer nodes than rows.
  const int64_t count = nodes.size(0);
  const int64_t first = batch.first * count / batch.total;
  const int64_t last = (batch.first + batch.count) * count / batch.total;
  const torch::Tensor own = nodes.narrow(0, first, last - first);
  const torch::Tensor logits = model_->forward(graph());
  const torch::Tensor losses = torch::nn::functional::cross_entropy(
      logits.index_select(0, own.to(logits.device())),
      task_.labels().index_select(0, own).to(logits.device()),
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  const double share = static_cast<double>(batch.count) / static_cast<double>(batch.total);
  return losses / static_cast<double>(count) + share * task_.learning().l2 * model_->Penalty();
}

const Graph& GraphsLearner::graph() {
  const torch::Device device = model_->device();
  if (!graph_.indptr.defined() || graph_.indptr.device() != device) {
    graph_ = task_.graph().To(device);
  }
  return graph_;
}

torch::Tensor GraphsLearner::Logits() {
  const torch::NoGradGuard no_grad;
  model_->eval();
  return model_->forward(graph()).cpu();
}

Outcome GraphsLearner::Measure(const torch::Tensor& logits, const std::string& part) const {
  const torch::Tensor& nodes = task_.NodesOf(part);
  const torch::Tensor labels = task_.labels().index_select(0, nodes);
  const torch::Tensor rows = logits.index_select(0, nodes);
  return {rows.argmax(1).eq(labels).to(torch::kDouble).mean().item<double>(),
          torch::nn::functional::cross_entropy(rows.to(torch::kDouble), labels).item<double>()};
}

bool GraphsLearner::IsBetter(const Outcome& outcome) const {
  if (!best_) return true;
  const Outcome& best = best_->outcome;
  if (task_.learning().selection == "loss" || outcome.accuracy == best.accuracy) {
    return outcome.loss < best.loss;
  }
  return outcome.accuracy > best.accuracy;
}

void GraphsLearner::Keep() {
  if (task_.learning().selection == "last") return;
  const torch::NoGradGuard no_grad;
  const Outcome outcome = Measure(Logits(), "valid");
  if (IsBetter(outcome)) {
    best_ = {taken_, outcome, {}};
    for (const auto& entry : model_->named_parameters()) {
      best_->weights[entry.key()] = entry.value().detach().clone();
    }
  }
  if (!is_last_) return;
  for (auto& entry : model_->named_parameters()) entry.value().copy_(best_->weights[entry.key()]);
  best_.reset();
}

std::vector<Measurement> GraphsLearner::Evaluate(const std::function<bool()>& proceed) {
  if (!proceed()) return {};
  const torch::Tensor logits = Logits();
  std::vector<Measurement> measured;
  for (const std::string& split : task_.splits()) {
    const Outcome outcome = Measure(logits, split);
    measured.push_back({split, {outcome.accuracy, outcome.loss}, task_.NodesOf(split).size(0)});
  }
  return measured;
}

LearnerState GraphsLearner::State(const Gather& /*gather*/) const {
  LearnerState state;
  state.fields[kSelection] = nullptr;
  if (!best_) return state;
  state.fields[kSelection] = {
      {"step", best_->step}, {"accuracy", best_->outcome.accuracy}, {"loss", best_->outcome.loss}};
  for (const auto& [name, weights] : best_->weights) state.tensors[kBest + name] = weights;
  return state;
}

size_t GraphsLearner::CheckState(const LearnerState& state) const {
  const auto found = state.fields.find(kSelection);
  if (found == state.fields.end()) throw Error(StrCat("the field '", kSelection, "' is missing"));
  if (found->is_null()) return 0;
  Field<int64_t>(*found, "step");
  Field<double>(*found, "accuracy");
  Field<double>(*found, "loss");
  size_t count = 0;
  for (const auto& entry : model_->named_parameters()) {
    const std::string name = kBest + entry.key();
    const auto tensor = state.tensors.find(name);
    if (tensor == state.tensors.end()) throw Error(StrCat("the tensor '", name, "' is missing"));
    if (tensor->second.sizes() != entry.value().sizes() ||
        tensor->second.scalar_type() != torch::kFloat) {
      throw Error(StrCat("the tensor '", name, "' is ", tensor->second.scalar_type(), " ",
                         tensor->second.sizes(), "; expected Float ", entry.value().sizes()));
    }
    ++count;
  }
  return count;
}

void GraphsLearner::Restore(const LearnerState& state, int64_t /*first*/, int64_t /*count*/) {
  best_.reset();
  const json selection = state.fields.value(kSelection, json());
  if (selection.is_null()) return;
  best_ = {Field<int64_t>(selection, "step"),
           {Field<double>(selection, "accuracy"), Field<double>(selection, "loss")},
           {}};
  for (const auto& entry : model_->named_parameters()) {
    best_->weights[entry.key()] = state.tensors.at(kBest + entry.key()).clone();
  }
}

}  // namespace
}  // namespace graphs
}  // namespace gnomon::lab
