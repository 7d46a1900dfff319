#include "models/trainer.h"

#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "models/windows.h"
#include "text/text_data.h"
#include "training/strings.h"

namespace gnomon::models {
namespace {

constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr double kEpsilon = 1e-8;

}  // namespace

int64_t NeededTokens(const TrainingOptions& options) {
  if (options.memory == 0) return options.length + 1;
  const int64_t windows = options.batch + 1;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return options.length > kMost / windows ? kMost : options.length * windows;
}

bool Decays(std::string_view name, const torch::Tensor& parameter) {
  return parameter.dim() >= 2 && name.ends_with(".weight");
}

std::array<std::string, 2> MomentsOf(const std::string& parameter) {
  return {"exp_avg." + parameter, "exp_avg_sq." + parameter};
}

Trainer::Trainer(LanguageModel model, TokenText text, const TrainingOptions& options,
                 ProcessesPtr processes)
    : model_(std::move(model)),
      text_(std::move(text)),
      options_(options),
      processes_(std::move(processes)) {
  CheckTrainingOptions(options_, processes_->size());
  CheckMemory(model_, options_.memory);
  const int64_t needed = NeededTokens(options_);
  if (text_.size() < needed) {
    throw Error(StrCat("training: the text has ", text_.size(), " tokens, and needs ", needed));
  }
  memory_.max_length = options_.memory;
  std::vector<torch::Tensor> decayed;
  std::vector<torch::Tensor> free;
  for (const auto& entry : model_->named_parameters()) {
    (Decays(entry.key(), entry.value()) ? decayed : free).push_back(entry.value());
  }
  const auto with_decay = [&](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(options_.learning_rate)
            .betas({kBeta1, kBeta2})
            .eps(kEpsilon)
            .weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decayed, with_decay(options_.weight_decay));
  groups.emplace_back(free, with_decay(0));
  optimizer_ = std::make_unique<torch::optim::AdamW>(groups);
  // Processors of different kinds may have drawn different weights.
  if (processes_->size() > 1) {
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> tensors = model_->parameters();
    for (const torch::Tensor& buffer : model_->buffers()) tensors.push_back(buffer);
    for (const torch::Tensor& tensor : tensors) {
      const torch::Tensor first = tensor.contiguous();
      processes_->Broadcast(first);
      tensor.copy_(first);
    }
  }
}

int64_t Trainer::FirstRowOf(int64_t rank) const {
  return FirstRow(options_.batch, rank, processes_->size());
}

int64_t Trainer::CountRowsOf(int64_t rank) const {
  return CountRows(options_.batch, rank, processes_->size());
}

torch::Tensor Trainer::GatherRows(const torch::Tensor& rows) const {
  const int64_t size = processes_->size();
  std::vector<int64_t> shape = rows.sizes().vec();
  shape[0] = (options_.batch + size - 1) / size;
  torch::Tensor padded = torch::zeros(shape, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  const torch::Tensor all = processes_->AllGather(padded);
  std::vector<torch::Tensor> parts;
  for (int64_t rank = 0; rank < size; ++rank) {
    parts.push_back(all[rank].narrow(0, 0, CountRowsOf(rank)));
  }
  return torch::cat(parts);
}

LanguageModelMemory Trainer::GatherMemory() const {
  LanguageModelMemory whole = memory_;
  if (processes_->size() == 1) return whole;
  for (torch::Tensor& layer : whole.layers) layer = GatherRows(layer);
  torch::Tensor& embeddings = whole.tokens.embeddings;
  if (embeddings.defined()) embeddings = GatherRows(embeddings);
  return whole;
}

double Trainer::SumGradients(const torch::Tensor& loss) {
  if (processes_->size() == 1) return loss.item<double>();
  // In one buffer: many small sums would wait for each other.
  std::vector<torch::Tensor> parts;
  for (const torch::Tensor& parameter : model_->parameters()) {
    if (parameter.grad().defined()) parts.push_back(parameter.grad().reshape({-1}));
  }
  parts.push_back(loss.detach().reshape({1}));
  const torch::Tensor sums = torch::cat(parts);
  processes_->AllReduce(sums);
  int64_t at = 0;
  for (const torch::Tensor& parameter : model_->parameters()) {
    if (!parameter.grad().defined()) continue;
    parameter.mutable_grad().copy_(sums.narrow(0, at, parameter.numel()).view(parameter.sizes()));
    at += parameter.numel();
  }
  return sums[at].item<double>();
}

double Trainer::Step() {
  model_->train();
  // Dropout's own stream for each step, so that a resumed run draws what the whole one drew.
  torch::manual_seed(static_cast<uint64_t>(options_.seed) * 0x9e3779b97f4a7c15 +
                     static_cast<uint64_t>(step_));
  const auto seed = static_cast<uint64_t>(options_.seed);
  LanguageModelMemory memory = memory_;
  std::vector<int64_t> starts;
  if (options_.memory == 0) {
    starts = TrainingStarts(text_.size(), options_.length, seed, step_, options_.batch);
  } else {
    const StreamStep stream =
        TrainingStream(text_.size(), options_.length, seed, step_, options_.batch);
    starts = stream.starts;
    if (stream.begins) memory.reset();
  }
  const int64_t first = FirstRowOf(processes_->rank());
  const int64_t count = CountRowsOf(processes_->rank());
  std::optional<BatchRows> rows;
  if (count < options_.batch) rows = BatchRows{first, options_.batch};
  const torch::Tensor losses =
      Losses(model_, Windows(text_, starts.data() + first, count, options_.length),
             options_.memory == 0 ? nullptr : &memory, rows);
  // The share of these rows in the mean.
  const torch::Tensor loss = losses.sum() / static_cast<double>(options_.batch * options_.length);
  optimizer_->zero_grad();
  loss.backward();
  const double value = SumGradients(loss);
  if (!std::isfinite(value)) return value;
  const double norm = torch::nn::utils::clip_grad_norm_(model_->parameters(), options_.clip);
  if (!std::isfinite(norm)) return norm;
  for (auto& group : optimizer_->param_groups()) {
    group.options().set_lr(LearningRate(options_, step_));
  }
  optimizer_->step();
  memory_ = std::move(memory);
  ++step_;
  return value;
}

std::map<std::string, torch::Tensor> Trainer::OptimizerState() const {
  std::map<std::string, torch::Tensor> state;
  for (const auto& entry : model_->named_parameters()) {
    const auto found = optimizer_->state().find(entry.value().unsafeGetTensorImpl());
    if (found == optimizer_->state().end()) continue;
    const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*found->second);
    const auto [first, second] = MomentsOf(entry.key());
    state[first] = moments.exp_avg();
    state[second] = moments.exp_avg_sq();
  }
  return state;
}

void Trainer::Restore(const std::map<std::string, torch::Tensor>& state, int64_t step,
                      const LanguageModelMemory& memory) {
  const auto take = [&](const std::string& name, const torch::Tensor& parameter) {
    const auto found = state.find(name);
    if (found == state.end()) {
      throw Error(StrCat("the optimizer's tensor '", name, "' is missing"));
    }
    if (found->second.sizes() != parameter.sizes()) {
      throw Error(StrCat("the optimizer's tensor '", name, "' is ", found->second.sizes(),
                         ", expected ", parameter.sizes()));
    }
    return found->second.clone();
  };
  if (step > 0) {
    for (const auto& entry : model_->named_parameters()) {
      auto moments = std::make_unique<torch::optim::AdamWParamState>();
      moments->step(step);
      const auto [first, second] = MomentsOf(entry.key());
      moments->exp_avg(take(first, entry.value()));
      moments->exp_avg_sq(take(second, entry.value()));
      optimizer_->state()[entry.value().unsafeGetTensorImpl()] = std::move(moments);
    }
  }
  step_ = step;
  memory_ = memory;
  memory_.max_length = options_.memory;
  const auto take_rows = [&](const torch::Tensor& all) {
    return all.narrow(0, FirstRowOf(processes_->rank()), CountRowsOf(processes_->rank()))
        .contiguous();
  };
  for (torch::Tensor& layer : memory_.layers) layer = take_rows(layer);
  torch::Tensor& embeddings = memory_.tokens.embeddings;
  if (embeddings.defined()) embeddings = take_rows(embeddings);
}

}  // namespace gnomon::models
