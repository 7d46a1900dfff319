// Runs operators on the CPU for tensors on a GPU, for calls that have no GPU kernel. The arguments
// are copied to the CPU, and the results back, so these calls wait for the GPU.
#ifndef GNOMON_OPS_OPERATORS_ON_CPU_H_
#define GNOMON_OPS_OPERATORS_ON_CPU_H_

#include <ATen/core/Tensor.h>

#include <tuple>
#include <utility>
#include <vector>

#include "ops/operators/argument_list.h"

namespace gnomon {

template <class Arguments>
class OnCpu {
  using Operator = FusedOperator<Arguments>;

 public:
  static Outputs Forward(const Arguments& a) {
    return Back(Operator::CallForward(CpuArguments(a)), a);
  }

  static std::vector<at::Tensor> Backward(const SavedOutputs& saved, const Arguments& a,
                                          const typename Operator::Needed& needed) {
    const SavedOutputs copies = {Copy(saved.d_o), Copy(saved.d_lse), Copy(saved.o), Copy(saved.lse),
                                 Copy(saved.statistics)};
    std::vector<at::Tensor> gradients;
    std::apply([&](const auto&... tensors) { (gradients.push_back(tensors), ...); },
               Operator::CallBackward(copies, CpuArguments(a), needed));
    return Back(std::move(gradients), a);
  }

  static typename Operator::JvpOutputs Jvp(const Arguments& a, const Tangents& tangents) {
    return Back(Operator::CallJvp(CpuArguments(a), Copy(tangents)), a);
  }

  static std::vector<at::Tensor> BackwardJvp(const Cotangents& cotangents, const Arguments& a,
                                             const Tangents& tangents,
                                             const typename Operator::BothNeeded& needed) {
    const Cotangents copies = {Copy(cotangents.d_o), Copy(cotangents.d_lse),
                               Copy(cotangents.d_o_tangent), Copy(cotangents.d_lse_tangent)};
    return Back(Operator::CallBackwardJvp(copies, CpuArguments(a), Copy(tangents), needed), a);
  }

 private:
  static at::Tensor Copy(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(at::kCPU) : tensor;
  }
  static OptionalTensor Copy(const OptionalTensor& tensor) {
    return tensor ? OptionalTensor(Copy(*tensor)) : tensor;
  }
  static Tangents Copy(const Tangents& tangents) {
    Tangents copies;
    for (const OptionalTensor& tangent : tangents) copies.push_back(Copy(tangent));
    return copies;
  }
  static Arguments CpuArguments(Arguments a) {
    Operator::ForEachTensor(a, [](size_t /*n*/, auto& tensor) { tensor = Copy(tensor); });
    return a;
  }

  static std::vector<at::Tensor> Back(std::vector<at::Tensor> tensors, const Arguments& a) {
    for (at::Tensor& tensor : tensors) tensor = tensor.to(a.x.device());
    return tensors;
  }
  template <class... T>
  static std::tuple<T...> Back(std::tuple<T...> tensors, const Arguments& a) {
    std::apply([&](auto&... tensor) { ((tensor = tensor.to(a.x.device())), ...); }, tensors);
    return tensors;
  }
};

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_ON_CPU_H_
