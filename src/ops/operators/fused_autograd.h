// Autograd and meta-device kernels for a pair of operators (argument_list.h).
#ifndef GNOMON_OPS_OPERATORS_FUSED_AUTOGRAD_H_
#define GNOMON_OPS_OPERATORS_FUSED_AUTOGRAD_H_

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/operators/argument_list.h"
#include "ops/operators/autograd.h"
#include "ops/operators/second_derivatives.h"

namespace gnomon {

// The non-tensor members, saved by name for autograd if they differ from their initial values.
class SavedOptions {
 public:
  // Whether a member still has its initial value.
  template <class T>
  static bool IsUnset(const T& member, const T& initial) {
    if constexpr (std::is_same_v<T, OptionalSymInt> ||
                  std::is_same_v<T, at::OptionalSymIntArrayRef>) {
      return !member.has_value();
    } else if constexpr (std::is_same_v<T, c10::SymInt>) {
      // Traced values must not be inspected.
      return member.maybe_as_int().has_value() && member.maybe_as_int() == initial.maybe_as_int();
    } else {
      return member == initial;
    }
  }

  template <class T>
  static c10::IValue Keep(const T& member) {
    if constexpr (std::is_same_v<T, std::string_view>) {
      return std::string(member);
    } else if constexpr (std::is_same_v<T, at::OptionalSymIntArrayRef>) {
      if (!member) return {};
      return std::vector<c10::SymInt>(member->begin(), member->end());
    } else {
      return member;
    }
  }

  // String views refer to data that the value or this object owns.
  void Restore(const c10::IValue& value, std::string_view& member) const {
    member = value.toStringRef();
  }
  void Restore(const c10::IValue& value, c10::SymInt& member) const { member = value.toSymInt(); }
  void Restore(const c10::IValue& value, OptionalSymInt& member) const {
    if (!value.isNone()) member = value.toSymInt();
  }
  void Restore(const c10::IValue& value, at::OptionalSymIntArrayRef& member) {
    if (!value.isNone()) member = numbers_.emplace_back(value.toSymIntVector());
  }
  void Restore(const c10::IValue& value, double& member) const { member = value.toDouble(); }
  void Restore(const c10::IValue& value, bool& member) const { member = value.toBool(); }

 private:
  std::deque<std::vector<c10::SymInt>> numbers_;
};

// The backward pass calls its operator instead of the kernel, so that torch.compile sees it.
template <class Arguments>
class RecordedOperator : public torch::autograd::Function<RecordedOperator<Arguments>> {
 public:
  using Operator = FusedOperator<Arguments>;
  using Needed = typename Operator::Needed;
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  // Takes the members of the arguments separately, because autograd looks for its inputs among the
  // parameters.
  template <class... Members>
  static Tensors forward(Context* context, const Outputs& outputs, Needed needed,
                         const Members&... members) {
    const Arguments arguments{members...};
    const auto& [o, lse, statistics] = outputs;
    Tensors saved = {o, lse, statistics};
    saved.reserve(3 + Operator::kMembers);
    ForEachMember(arguments, [&](std::string_view name, const auto& member, const auto& initial) {
      using Member = std::decay_t<decltype(member)>;
      if constexpr (std::is_same_v<Member, at::Tensor>) {
        saved.push_back(member);
      } else if constexpr (std::is_same_v<Member, OptionalTensor>) {
        saved.push_back(OrUndefined(member));
      } else if (!SavedOptions::IsUnset(member, initial)) {
        context->saved_data[std::string(name)] = SavedOptions::Keep(member);
      }
    });
    context->save_for_backward(std::move(saved));
    context->saved_data["needed"] = c10::List<bool>(c10::ArrayRef<bool>(needed));
    context->set_materialize_grads(false);
    return {o, lse};
  }

  static Tensors backward(Context* context, const Tensors& d_outputs) {
    const Tensors saved = context->get_saved_variables();
    SavedOptions options;
    Arguments arguments;
    size_t next = 3;
    ForEachMember(arguments, [&](std::string_view name, auto& member, const auto& /*initial*/) {
      if constexpr (kIsTensor<std::decay_t<decltype(member)>>) {
        const at::Tensor& tensor = saved[next++];
        if (tensor.defined()) member = tensor;
      } else {
        const auto option = context->saved_data.find(std::string(name));
        if (option != context->saved_data.end()) options.Restore(option->second, member);
      }
    });
    Needed needed;
    const c10::List<bool> flags = context->saved_data["needed"].toBoolList();
    for (size_t n = 0; n < needed.size(); ++n) needed[n] = flags[n];
    const at::Tensor& o = saved[0];
    const at::Tensor d_o = d_outputs[0].defined() ? d_outputs[0] : at::zeros_like(o);
    const typename Operator::Gradients gradients = Operator::CallBackward(
        {d_o, AsOptional(d_outputs[1]), o, saved[1], saved[2]}, arguments, needed);
    // One gradient for each argument of forward(); the first two are `outputs` and `needed`.
    Tensors all(2 + Operator::kMembers);
    std::apply(
        [&](const auto&... gradient) {
          size_t n = 0;
          ((all[2 + n] = needed[n] ? gradient : at::Tensor(), ++n), ...);
        },
        gradients);
    return all;
  }

  // The autograd kernel of the forward operator.
  static Outputs Run(const Arguments& arguments) {
    Needed needed;
    Operator::ForEachTensor(arguments, [&](size_t n, const OptionalTensor& tensor) {
      CheckNoTangent(Arguments::kOperation, tensor);
      if (n < needed.size()) needed[n] = tensor && tensor->requires_grad();
    });
    const Outputs outputs = BelowAutograd([&] { return Operator::CallForward(arguments); });
    if (!RecordsGradients(needed)) return outputs;
    const Tensors recorded = std::apply(
        [&](const auto&... members) {
          return ApplyFunction<RecordedOperator>(outputs, needed, members...);
        },
        Arguments::Tie(arguments));
    return {recorded[0], recorded[1], std::get<2>(outputs)};
  }

 private:
  // Calls body(name, member, initial value).
  template <class Self, class Body>
  static void ForEachMember(Self& arguments, const Body& body) {
    static const Arguments initial;
    const auto members = Arguments::Tie(arguments);
    const auto initials = Arguments::Tie(initial);
    [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
      (body(Operator::kFields[kIndices].name, std::get<kIndices>(members),
            std::get<kIndices>(initials)),
       ...);
    }(std::make_index_sequence<Operator::kMembers>());
  }
};

template <class Arguments>
void RegisterAutograd(torch::Library& m) {
  using Operator = FusedOperator<Arguments>;
  m.impl(Operator::Name("_forward").c_str(),
         &Operator::template RunForward<RecordedOperator<Arguments>::Run>);
  m.impl(Operator::Name("_backward").c_str(), WithoutSecondDerivatives());
}

template <class Arguments>
void RegisterMeta(torch::Library& m) {
  using Operator = FusedOperator<Arguments>;
  m.impl(Operator::Name("_forward").c_str(),
         &Operator::template RunForward<EmptyOutputs<Arguments>>);
  m.impl(Operator::Name("_backward").c_str(),
         &Operator::template RunBackward<EmptyGradients<Arguments>>);
}

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_FUSED_AUTOGRAD_H_
