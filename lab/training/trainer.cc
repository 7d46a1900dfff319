#include "training/trainer.h"

#include <cmath>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr double kEpsilon = 1e-8;

}  // namespace

bool Decays(std::string_view name, const torch::Tensor& parameter) {
  return parameter.dim() >= 2 && name.ends_with(".weight");
}

std::array<std::string, 2> MomentsOf(const std::string& parameter) {
  return {"exp_avg." + parameter, "exp_avg_sq." + parameter};
}

Trainer::Trainer(std::unique_ptr<Learner> learner, const TrainingOptions& options,
                 ProcessesPtr processes)
    : learner_(std::move(learner)),
      module_(learner_->module()),
      options_(options),
      processes_(std::move(processes)),
      end_(options.steps) {
  CheckTrainingOptions(options_, processes_->size());
  learner_->CheckTraining();
  std::vector<torch::Tensor> decayed;
  std::vector<torch::Tensor> free;
  for (const auto& entry : module_.named_parameters()) {
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
  // Processors of different types may draw slightly different weights, so process 0 broadcasts its
  // weights.
  if (processes_->size() > 1) {
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> tensors = module_.parameters();
    for (const torch::Tensor& buffer : module_.buffers()) tensors.push_back(buffer);
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

LearnerState Trainer::GatherState() const {
  return learner_->State([this](const torch::Tensor& rows) {
    return processes_->size() == 1 ? rows : GatherRows(rows);
  });
}

double Trainer::SumGradients(const torch::Tensor& loss) {
  if (processes_->size() == 1) return loss.item<double>();
  // All gradients are reduced in one buffer, because many small reductions would be slow.
  std::vector<torch::Tensor> parts;
  for (const torch::Tensor& parameter : module_.parameters()) {
    if (parameter.grad().defined()) parts.push_back(parameter.grad().reshape({-1}));
  }
  parts.push_back(loss.detach().reshape({1}));
  const torch::Tensor sums = torch::cat(parts);
  processes_->AllReduce(sums);
  int64_t at = 0;
  for (const torch::Tensor& parameter : module_.parameters()) {
    if (!parameter.grad().defined()) continue;
    parameter.mutable_grad().copy_(sums.narrow(0, at, parameter.numel()).view(parameter.sizes()));
    at += parameter.numel();
  }
  return sums[at].item<double>();
}

double Trainer::Step() {
  module_.train();
  // Reseed at each step, so that a resumed run draws the same numbers as an uninterrupted one.
  torch::manual_seed(static_cast<uint64_t>(options_.seed) * 0x9e3779b97f4a7c15 +
                     static_cast<uint64_t>(step_));
  const int64_t rank = processes_->rank();
  const torch::Tensor loss = learner_->Loss({.step = step_,
                                             .first = FirstRowOf(rank),
                                             .count = CountRowsOf(rank),
                                             .total = options_.batch,
                                             .is_last = step_ + 1 >= end_});
  optimizer_->zero_grad();
  loss.backward();
  const double value = SumGradients(loss);
  if (!std::isfinite(value)) return value;
  const double norm = torch::nn::utils::clip_grad_norm_(module_.parameters(), options_.clip);
  if (!std::isfinite(norm)) return norm;
  for (auto& group : optimizer_->param_groups()) {
    group.options().set_lr(LearningRate(options_, step_, end_));
  }
  optimizer_->step();
  learner_->Keep();
  ++step_;
  return value;
}

std::map<std::string, torch::Tensor> Trainer::OptimizerState() const {
  std::map<std::string, torch::Tensor> state;
  for (const auto& entry : module_.named_parameters()) {
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
                      const LearnerState& learner_state) {
  const auto take = [&](const std::string& name, const torch::Tensor& parameter) {
    const auto found = state.find(name);
    if (found == state.end()) {
      throw Error(StrCat("the optimizer's tensor '", name, "' is missing"));
    }
    if (found->second.sizes() != parameter.sizes()) {
      throw Error(StrCat("the optimizer's tensor '", name, "' has shape ", found->second.sizes(),
                         "; expected ", parameter.sizes()));
    }
    return found->second.to(parameter.device(), /*non_blocking=*/false, /*copy=*/true);
  };
  if (step > 0) {
    for (const auto& entry : module_.named_parameters()) {
      auto moments = std::make_unique<torch::optim::AdamWParamState>();
      moments->step(step);
      const auto [first, second] = MomentsOf(entry.key());
      moments->exp_avg(take(first, entry.value()));
      moments->exp_avg_sq(take(second, entry.value()));
      optimizer_->state()[entry.value().unsafeGetTensorImpl()] = std::move(moments);
    }
  }
  step_ = step;
  const int64_t rank = processes_->rank();
  learner_->Restore(learner_state, FirstRowOf(rank), CountRowsOf(rank));
}

}  // namespace gnomon::lab
