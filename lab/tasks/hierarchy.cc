// The task `hierarchy`: predict ancestors in a hierarchy. Each node is a low-dimensional point. The
// similarity of two points should be higher for pairs of the transitive closure than for all other
// pairs (Nickel and Kiela 2017; Ganea et al. 2018).
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "gnomon/torch/attention.h"
#include "models/learned_similarity.h"
#include "models/sparse_matrix.h"
#include "models/splits.h"
#include "training/arrays.h"
#include "training/processes.h"
#include "training/strings.h"
#include "training/task.h"

namespace gnomon::lab {
namespace hierarchy {
namespace {

using nlohmann::json;

// Ranks up to this number count as hits.
constexpr int64_t kHits = 10;
// For the average precision, each pair is compared with this many wrong ancestors and this many
// wrong descendants.
constexpr int64_t kWrong = 5;
constexpr uint64_t kWrongSeed = 20171207;
// An upper bound on the number of nodes, small enough that a pair of nodes fits in 64 bits.
constexpr int64_t kMostNodes = 1'000'000'000;
// The maximum number of coordinates in an evaluation batch, unless a single pair exceeds it.
constexpr int64_t kBatchNumbers = int64_t{1} << 21;

#define GNOMON_HIERARCHY_MODEL_OPTIONS(OPTION)                   \
  /* The number of nodes in the data; 0 before they are read. */ \
  OPTION(int64_t, nodes, 0, .has_flag = false)                   \
  OPTION(int64_t, dim, 5, .help = "Dimension of the node embeddings", .lowest = 1)

#define GNOMON_HIERARCHY_TRAINING_OPTIONS(OPTION)                                            \
  OPTION(int64_t, negatives, 50, .help = "Number of negative samples per pair", .lowest = 1) \
  OPTION(std::string, corrupt, "both",                                                       \
         .help =                                                                             \
             "Node of a pair that negative samples replace: ancestor, descendant, or both "  \
             "(one at a time)",                                                              \
         .choices = {"ancestor", "descendant", "both"})

#define GNOMON_HIERARCHY_SPLIT_OPTIONS(OPTION)                                             \
  OPTION(double, held_out, 0.05,                                                           \
         .help =                                                                           \
             "If the data has no valid.pairs: fraction of the pairs implied by others to " \
             "hold out for validation; the same number is held out for testing",           \
         .highest = 0.5)                                                                   \
  OPTION(int64_t, split_seed, 0, .help = "Random seed for choosing the held-out pairs",    \
         .highest = static_cast<double>(kLargestSeed))

struct HierarchyModelOptions {
  GNOMON_OPTIONS(GNOMON_HIERARCHY_MODEL_OPTIONS)
};

struct HierarchyTrainingOptions {
  GNOMON_OPTIONS(GNOMON_HIERARCHY_TRAINING_OPTIONS)
};

struct HierarchySplitOptions {
  GNOMON_OPTIONS(GNOMON_HIERARCHY_SPLIT_OPTIONS)
};

// A set of (descendant, ancestor) pairs, stored as sorted integers for fast lookup.
class PairSet {
 public:
  PairSet() = default;
  PairSet(const torch::Tensor& pairs, int64_t nodes)
      : nodes_(nodes),
        numbers_(std::get<0>(torch::_unique(pairs.select(1, 0) * nodes + pairs.select(1, 1),
                                            /*sorted=*/true))) {}

  int64_t size() const { return numbers_.defined() ? numbers_.size(0) : 0; }
  // Returns all pairs, (size, 2).
  torch::Tensor pairs() const {
    return torch::stack({numbers_.div(nodes_, "floor"), numbers_.remainder(nodes_)}, 1);
  }
  // Returns whether the set contains each pair. The two tensors are broadcast against each other.
  torch::Tensor Has(const torch::Tensor& descendants, const torch::Tensor& ancestors) const {
    const torch::Tensor asked = descendants * nodes_ + ancestors;
    const torch::Tensor places = torch::searchsorted(numbers_, asked).clamp_max(size() - 1);
    return numbers_.take(places).eq(asked);
  }

 private:
  int64_t nodes_ = 0;
  torch::Tensor numbers_;
};

// The area under the precision-recall curve, computed as a sum over its steps. Pairs with equal
// scores form one step.
double AveragePrecision(const torch::Tensor& scores, const torch::Tensor& are_right) {
  const auto [sorted, order] =
      scores.to(torch::kDouble).sort(/*stable=*/true, /*dim=*/0, /*descending=*/true);
  const torch::Tensor right = are_right.index_select(0, order).to(torch::kDouble).contiguous();
  const double* score = sorted.const_data_ptr<double>();
  const double* is_right = right.const_data_ptr<double>();
  const auto all = right.sum().item<double>();
  double found = 0;
  double area = 0;
  for (int64_t n = 0; n < right.size(0);) {
    double more = 0;
    const double level = score[n];
    for (; n < right.size(0) && score[n] == level; ++n) more += is_right[n];
    found += more;
    area += more / all * found / static_cast<double>(n);
  }
  return area;
}

// A model with one point per node. Ancestors are queries and descendants are keys, as for
// entailment cones, where a key lies in the cone of the query.
class HierarchyModelImpl : public torch::nn::Module {
 public:
  HierarchyModelImpl(int64_t nodes, int64_t dim, const std::string& similarity) {
    similarity_ = register_module("similarity", LearnedSimilarity(similarity, 1, dim));
    points_ = register_parameter("points", torch::randn({nodes, dim}));
  }

  // The device of the model, to which nodes and masks must be moved.
  torch::Device device() const { return points_.device(); }

  // Returns the scores (B, N) of `ancestors` (B, N) with `descendants` (B,). Each query has a
  // single key, so that the log-sum-exp is the key's score.
  torch::Tensor ScoreAncestors(const torch::Tensor& ancestors, const torch::Tensor& descendants) {
    return LogSumExp(Points(ancestors), Points(descendants.unsqueeze(1)), std::nullopt);
  }
  // Returns the log-sum-exp (B,) of the scores of `ancestors` (B,) with `descendants` (B, N) where
  // `mask` (B, N) is true. This is the logarithm of attention's denominator.
  torch::Tensor SumDescendants(const torch::Tensor& ancestors, const torch::Tensor& descendants,
                               const torch::Tensor& mask) {
    return LogSumExp(Points(ancestors.unsqueeze(1)), Points(descendants),
                     mask.unsqueeze(1).unsqueeze(1).to(device()))
        .squeeze(1);
  }

 private:
  // The points of nodes (B, N), as (B, 1, N, dim).
  torch::Tensor Points(const torch::Tensor& nodes) {
    return TakeRows(points_, nodes.flatten().to(device()))
        .view({nodes.size(0), 1, nodes.size(1), -1});
  }
  torch::Tensor LogSumExp(const torch::Tensor& q, const torch::Tensor& k,
                          const std::optional<torch::Tensor>& mask) {
    const torch::Tensor no_values = torch::zeros({k.size(0), 1, k.size(2), 1}, k.options());
    return std::get<1>(
               attention_with_lse(q, k, no_values,
                                  AttentionOptions().similarity(similarity_->term()).mask(mask)))
        .squeeze(1);
  }

  LearnedSimilarity similarity_{nullptr};
  torch::Tensor points_;
};
TORCH_MODULE(HierarchyModel);

class HierarchyTask final : public SplitsTask {
 public:
  const char* name() const override { return "hierarchy"; }
  TaskDescription description() const override {
    return {.summary = "low-dimensional embeddings that predict which nodes are ancestors of which",
            .data_help =
                "A file with the array train.pairs, with a descendant and an ancestor per row, and "
                "either both or neither of the arrays valid.pairs and test.pairs (docs/tasks.md)",
            .data_noun = "hierarchy",
            .loss_unit = "nats per pair",
            .examples = "pairs"};
  }

  TrainingOptions DefaultTraining(Command /*command*/) const override {
    TrainingOptions training;
    training.batch = 256;
    training.steps = 1500;
    training.learning_rate = 0.05;
    training.weight_decay = 0;
    return training;
  }
  OptionList Options(Command command) override;
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

  std::vector<Metric> metrics() const override {
    return {{.key = "mrr",
             .title = "mean reciprocal rank of the ancestor",
             .column = "MRR",
             .higher_is_better = true},
            {.key = "hits",
             .title = StrCat("ancestors among the top ", kHits),
             .column = StrCat("hits@", kHits),
             .higher_is_better = true},
            {.key = "average_precision",
             .title = "average precision",
             .column = "AP",
             .higher_is_better = true}};
  }
  std::string TrainedAs(const TrainingOptions& training) const override;

  const HierarchyModelOptions& model() const { return model_; }
  const HierarchyTrainingOptions& learning() const { return learning_; }
  const PairSet& PairsOf(const std::string& part) const { return parts_.at(part); }
  // The pairs of all splits.
  const PairSet& known() const { return known_; }

 private:
  torch::Tensor ReadPairs(const Arrays& arrays, const std::string& part,
                          std::map<std::string, int64_t>* numbers) const;
  void SplitPairs(const PairSet& all);

  HierarchyModelOptions model_;
  HierarchyTrainingOptions learning_;
  HierarchySplitOptions split_;
  std::map<std::string, PairSet> parts_;
  PairSet known_;
};

const RegisterTask<HierarchyTask> registered;

class HierarchyLearner final : public Learner {
 public:
  HierarchyLearner(const HierarchyTask& task, HierarchyModel model, Terms terms)
      : task_(task), model_(std::move(model)), terms_(std::move(terms)) {}

  torch::nn::Module& module() override { return *model_; }
  torch::Tensor Probe() override;
  torch::Tensor Loss(const Batch& batch) override;
  std::vector<Measurement> Evaluate(const std::function<bool()>& proceed) override;

 private:
  // Returns the rank (pairs,) of each pair's ancestor among all nodes that are not ancestors of its
  // descendant. A tie counts as half a rank. The result is undefined if `proceed` returned false.
  torch::Tensor Ranks(const torch::Tensor& pairs, const std::function<bool()>& proceed);
  double PrecisionOf(const torch::Tensor& pairs);

  const HierarchyTask& task_;
  HierarchyModel model_;
  Terms terms_;
};

OptionList HierarchyTask::Options(Command command) {
  if (command == Command::kEval) return evaluation_.Options();
  return evaluation_.Options() + split_.Options() + InSection("model", model_.Options()) +
         InSection("training", learning_.Options());
}

std::string HierarchyTask::StepFlags(Command /*command*/, const TrainingOptions& training) const {
  return StrCat("--batch ", training.batch, ", --negatives ", learning_.negatives, " and --dim ",
                model_.dim);
}

void HierarchyTask::CheckModelFits() const {
  CheckMemoryHolds(StrCat("--dim ", model_.dim), sizeof(float) * static_cast<double>(model_.nodes) *
                                                     static_cast<double>(model_.dim));
}

void HierarchyTask::CheckFits(const TrainingOptions& training, int64_t processes) const {
  const auto dim = static_cast<double>(model_.dim);
  // Memory must hold the weights, their gradients and Adam's two moments, and the points in each
  // row with their gradients.
  const double rows = static_cast<double>(CountRows(training.batch, 0, processes)) *
                      static_cast<double>(learning_.negatives);
  CheckMemoryHolds(StepFlags(Command::kTrain, training),
                   sizeof(float) * dim * (4 * static_cast<double>(model_.nodes) + 2 * rows));
}

// Reads the pairs of a split. If the nodes have names, the training pairs must be read first: they
// assign a number to each name, and other pairs must not contain new names.
torch::Tensor HierarchyTask::ReadPairs(const Arrays& arrays, const std::string& part,
                                       std::map<std::string, int64_t>* numbers) const {
  const std::string name = part + ".pairs";
  const std::string names = name + "_names";
  const auto fail = [&](int64_t row, const std::string& fault) {
    throw Error(
        StrCat(path_, ": the array '", name, "' contains a pair ", fault, " at [", row, "]"));
  };
  const bool is_first = part == "train";
  torch::Tensor pairs;
  if (arrays.Has(names)) {
    std::vector<int64_t> number_of;
    for (const torch::Tensor& row : arrays.Rows(names, 1)) {
      if (row.scalar_type() != torch::kByte) {
        throw Error(StrCat(path_, ": the array '", names, "' has dtype ", row.scalar_type(),
                           "; expected bytes"));
      }
      const std::string text(reinterpret_cast<const char*>(row.const_data_ptr<uint8_t>()),
                             static_cast<size_t>(row.size(0)));
      if (is_first) numbers->emplace(text, static_cast<int64_t>(numbers->size()));
      const auto found = numbers->find(text);
      if (found == numbers->end()) {
        throw Error(StrCat(path_, ": the array '", names, "' contains '", text,
                           "', which is not a node of the training pairs"));
      }
      number_of.push_back(found->second);
    }
    const auto count = static_cast<int64_t>(number_of.size());
    pairs = torch::tensor(number_of).take(arrays.Integers(name, 2, 0, count - 1));
  } else {
    if (!is_first && !numbers->empty()) arrays.Get(names, 1);  // throws if it is missing
    pairs = arrays.Integers(name, 2, 0,
                            (is_first && model_.nodes == 0 ? kMostNodes : model_.nodes) - 1);
  }
  if (pairs.size(1) != 2) {
    throw Error(StrCat(path_, ": the array '", name, "' has shape ", pairs.sizes(),
                       "; expected (pairs, 2)"));
  }
  const torch::Tensor selves = pairs.select(1, 0).eq(pairs.select(1, 1)).nonzero();
  if (selves.size(0) > 0) fail(selves[0][0].item<int64_t>(), "of a node with itself");
  return pairs.contiguous();
}

// Holds out only pairs implied by two other pairs, so that the training pairs still determine the
// transitive closure.
void HierarchyTask::SplitPairs(const PairSet& all) {
  const torch::Tensor pairs = all.pairs();
  const int64_t* values = pairs.const_data_ptr<int64_t>();
  std::map<int64_t, std::vector<int64_t>> ancestors;
  for (int64_t n = 0; n < all.size(); ++n) ancestors[values[2 * n]].push_back(values[2 * n + 1]);
  std::vector<int64_t> implied;
  std::unordered_set<int64_t> farther;
  for (int64_t n = 0; n < all.size(); ++n) {
    const int64_t node = values[2 * n];
    if (n == 0 || node != values[2 * n - 2]) {
      farther.clear();
      for (const int64_t parent : ancestors[node]) {
        const auto found = ancestors.find(parent);
        if (found != ancestors.end()) farther.insert(found->second.begin(), found->second.end());
      }
    }
    if (farther.contains(values[2 * n + 1])) implied.push_back(n);
  }
  const auto count = static_cast<int64_t>(split_.held_out * static_cast<double>(implied.size()));
  at::Generator generator =
      at::detail::createCPUGenerator(static_cast<uint64_t>(split_.split_seed));
  const torch::Tensor order =
      torch::tensor(implied, torch::kLong)
          .take(torch::randperm(static_cast<int64_t>(implied.size()), generator, torch::kLong));
  const auto part = [&](const torch::Tensor& rows) {
    return PairSet(pairs.index_select(0, rows), model_.nodes);
  };
  torch::Tensor is_left = torch::ones({all.size()}, torch::kBool);
  is_left.index_fill_(0, order.narrow(0, 0, 2 * count), false);
  parts_["train"] = part(is_left.nonzero().squeeze(1));
  if (count == 0) return;
  parts_["valid"] = part(order.narrow(0, 0, count));
  parts_["test"] = part(order.narrow(0, count, count));
}

void HierarchyTask::ReadData(const std::string& path) {
  const Arrays arrays = ReadFile(path);
  parts_.clear();
  std::map<std::string, int64_t> numbers;
  const torch::Tensor train = ReadPairs(arrays, "train", &numbers);
  const int64_t nodes =
      numbers.empty() ? train.max().item<int64_t>() + 1 : static_cast<int64_t>(numbers.size());
  if (model_.nodes == 0) model_.nodes = nodes;
  if (nodes > model_.nodes) {
    throw Error(StrCat(path_, ": the array 'train.pairs' has ", nodes, " nodes, but the model has ",
                       model_.nodes));
  }
  std::vector<torch::Tensor> all = {train};
  parts_["train"] = PairSet(train, model_.nodes);
  for (const char* part : {"valid", "test"}) {
    if (!arrays.Has(StrCat(part, ".pairs"))) continue;
    all.push_back(ReadPairs(arrays, part, &numbers));
    parts_[part] = PairSet(all.back(), model_.nodes);
  }
  known_ = PairSet(torch::cat(all), model_.nodes);
  const torch::Tensor pairs = known_.pairs();
  const torch::Tensor loops = known_.Has(pairs.select(1, 1), pairs.select(1, 0)).nonzero();
  if (loops.size(0) > 0) {
    const torch::Tensor pair = pairs[loops[0][0].item<int64_t>()];
    throw Error(StrCat(path_, ": nodes ", pair[0].item<int64_t>(), " and ", pair[1].item<int64_t>(),
                       " are ancestors of each other; remove one of the two pairs"));
  }
  if (!parts_.contains("valid")) {
    if (parts_.contains("test")) arrays.Get("valid.pairs", 2);  // throws if it is missing
    SplitPairs(known_);
  }
}

std::string HierarchyTask::HoldOut() {
  if (!parts_.contains("valid")) {
    throw Error(StrCat(
        path_,
        ": there are no validation pairs, because --held-out is 0 or too few pairs are implied by "
        "others; increase --held-out, or add the arrays 'valid.pairs' and 'test.pairs'"));
  }
  HoldOutValid();
  return StrCat(parts_.at("valid").size(), " validation pairs");
}

void HierarchyTask::CheckData(const TrainingOptions* /*training*/) const {
  for (const std::string& split : splits()) {
    if (parts_.contains(split)) continue;
    const bool is_held_out = split == "test" && parts_.contains("valid");
    throw Error(StrCat(path_, ": there are no ", split, " pairs, which --splits ",
                       Join(splits(), ","), " needs: ",
                       is_held_out ? "the array 'test.pairs' is missing"
                                   : "--held-out is 0 or too few pairs are implied by others; "
                                     "increase --held-out, or add valid.pairs and test.pairs"));
  }
}

json HierarchyTask::DescribeData() const {
  const auto count = [&](const char* part) {
    const auto found = parts_.find(part);
    return found == parts_.end() ? 0 : found->second.size();
  };
  return {{"data",
           {{"path", path_},
            {"sha256", sha256_},
            {"nodes", model_.nodes},
            {"train_pairs", count("train")},
            {"valid_pairs", count("valid")},
            {"test_pairs", count("test")}}}};
}

std::string HierarchyTask::DescribeSize() const {
  return StrCat(parts_.at("train").size(), " pairs of ", model_.nodes, " nodes");
}

std::unique_ptr<Learner> HierarchyTask::MakeLearner(const Terms& terms,
                                                    const TrainingOptions& /*training*/) {
  return std::make_unique<HierarchyLearner>(
      *this, HierarchyModel(model_.nodes, model_.dim, terms.similarity), terms);
}

void HierarchyTask::CheckSizes(const StoredSizes& file) const {
  file.Expect("points", {model_.nodes, model_.dim});
}

std::string HierarchyTask::TrainedAs(const TrainingOptions& training) const {
  return StrCat("in ", model_.dim, " dimensions, trained for ", training.steps, " steps of ",
                training.batch, " pairs against ", learning_.negatives, " negative samples each");
}

torch::Tensor HierarchyLearner::Probe() {
  if (terms_.position != "none")
    throw Error("the nodes of a hierarchy have no order; expected the position 'none'");
  const torch::Tensor nodes = torch::arange(std::min<int64_t>(8, task_.model().nodes));
  return model_->ScoreAncestors(nodes.expand({nodes.size(0), -1}), nodes);
}

torch::Tensor HierarchyLearner::Loss(const Batch& batch) {
  const HierarchyTrainingOptions& learning = task_.learning();
  const PairSet& train = task_.PairsOf("train");
  const torch::Tensor pairs = train.pairs();
  const torch::Tensor picked = torch::randint(pairs.size(0), {batch.total});
  // Every process draws random numbers for the whole batch, so that all draw the same ones.
  const torch::Tensor drawn =
      torch::randint(task_.model().nodes, {2, batch.total, learning.negatives});
  const torch::Tensor own = pairs.index_select(0, picked.narrow(0, batch.first, batch.count));
  const torch::Tensor descendants = own.select(1, 0);
  const torch::Tensor ancestors = own.select(1, 1);
  // Returns the correct node, followed by the negative samples. Samples that form a training pair
  // are masked.
  const auto candidates = [&](int64_t side, const torch::Tensor& right) {
    const torch::Tensor wrong = drawn.select(0, side).narrow(0, batch.first, batch.count);
    return torch::cat({right.unsqueeze(1), wrong}, 1);
  };
  const auto mask_of = [&](const torch::Tensor& are_right) {
    torch::Tensor mask = are_right.logical_not();
    mask.select(1, 0).fill_(true);
    return mask;
  };
  torch::Tensor sum = torch::zeros({}, model_->device());
  double sides = 0;
  torch::Tensor scores;  // per pair
  if (learning.corrupt != "descendant") {
    const torch::Tensor nodes = candidates(0, ancestors);
    const torch::Tensor child = descendants.unsqueeze(1);
    const torch::Tensor mask = mask_of(train.Has(child, nodes).logical_or(nodes.eq(child)));
    const torch::Tensor all = model_->ScoreAncestors(nodes, descendants);
    scores = all.select(1, 0);
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    const torch::Tensor hidden = mask.logical_not().to(all.device());
    sum = sum + (all.masked_fill(hidden, kHidden).logsumexp(1) - scores).sum();
    ++sides;
  }
  if (learning.corrupt != "ancestor") {
    const torch::Tensor nodes = candidates(1, descendants);
    const torch::Tensor parent = ancestors.unsqueeze(1);
    const torch::Tensor mask = mask_of(train.Has(nodes, parent).logical_or(nodes.eq(parent)));
    if (!scores.defined()) scores = model_->ScoreAncestors(parent, descendants).squeeze(1);
    sum = sum + (model_->SumDescendants(ancestors, nodes, mask) - scores).sum();
    ++sides;
  }
  return sum / (sides * static_cast<double>(batch.total));
}

torch::Tensor HierarchyLearner::Ranks(const torch::Tensor& pairs,
                                      const std::function<bool()>& proceed) {
  const HierarchyModelOptions& model = task_.model();
  const torch::Tensor nodes = torch::arange(model.nodes);
  const int64_t rows = std::max<int64_t>(kBatchNumbers / (model.nodes * model.dim), 1);
  std::vector<torch::Tensor> ranks;
  for (const torch::Tensor& part : pairs.split(rows)) {
    if (!proceed()) return {};
    const torch::Tensor child = part.narrow(1, 0, 1);
    const torch::Tensor parent = part.narrow(1, 1, 1);
    const torch::Tensor scores =
        model_->ScoreAncestors(nodes.expand({part.size(0), -1}), child.squeeze(1)).cpu();
    const torch::Tensor own = scores.gather(1, parent);
    const torch::Tensor others =
        task_.known().Has(child, nodes).logical_or(nodes.eq(child)).logical_not();
    const auto count = [&](const torch::Tensor& are) {
      return are.logical_and(others).sum(1).to(torch::kDouble);
    };
    const torch::Tensor rank = 1 + count(scores.gt(own)) + count(scores.eq(own)) / 2;
    // The ranks of a diverged model are NaN.
    ranks.push_back(rank.masked_fill(scores.isfinite().all(1).logical_not(), NAN));
  }
  return torch::cat(ranks);
}

double HierarchyLearner::PrecisionOf(const torch::Tensor& pairs) {
  at::Generator generator = at::detail::createCPUGenerator(kWrongSeed);
  const torch::Tensor drawn =
      torch::randint(0, task_.model().nodes, {2, pairs.size(0), kWrong}, generator, torch::kLong);
  const torch::Tensor child = pairs.narrow(1, 0, 1).expand({-1, kWrong});
  const torch::Tensor parent = pairs.narrow(1, 1, 1).expand({-1, kWrong});
  const torch::Tensor wrong = torch::cat({torch::stack({child.flatten(), drawn[0].flatten()}, 1),
                                          torch::stack({drawn[1].flatten(), parent.flatten()}, 1)});
  const torch::Tensor is_wrong = task_.known()
                                     .Has(wrong.select(1, 0), wrong.select(1, 1))
                                     .logical_or(wrong.select(1, 0).eq(wrong.select(1, 1)))
                                     .logical_not();
  const torch::Tensor all = torch::cat({pairs, wrong.index({is_wrong})});
  const torch::Tensor scores =
      model_->ScoreAncestors(all.narrow(1, 1, 1), all.select(1, 0)).squeeze(1).cpu();
  if (!scores.isfinite().all().item<bool>()) return NAN;
  return AveragePrecision(scores, torch::arange(all.size(0)) < pairs.size(0));
}

std::vector<Measurement> HierarchyLearner::Evaluate(const std::function<bool()>& proceed) {
  const torch::NoGradGuard no_grad;
  model_->eval();
  const auto finite = [](double value) {
    return std::isfinite(value) ? std::optional(value) : std::nullopt;
  };
  std::vector<Measurement> measured;
  for (const std::string& split : task_.splits()) {
    const torch::Tensor pairs = task_.PairsOf(split).pairs();
    const torch::Tensor ranks = Ranks(pairs, proceed);
    if (!ranks.defined()) return {};
    const auto reciprocal = ranks.reciprocal().mean().item<double>();
    const auto hits = (ranks <= kHits).to(torch::kDouble).mean().item<double>();
    measured.push_back(
        {split,
         {finite(reciprocal), std::isfinite(reciprocal) ? std::optional(hits) : std::nullopt,
          finite(PrecisionOf(pairs))},
         pairs.size(0)});
  }
  return measured;
}

}  // namespace
}  // namespace hierarchy
}  // namespace gnomon::lab
