// Autograd and meta-device kernels for the operators of an argument list (argument_list.h).
#ifndef GNOMON_OPS_OPERATORS_FUSED_AUTOGRAD_H_
#define GNOMON_OPS_OPERATORS_FUSED_AUTOGRAD_H_

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
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

  // Restored views refer to data that the value or this object owns.
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

// The part of a call that autograd saves for the backward pass: tensors, then options.
template <class Arguments>
class SavedCall {
 public:
  using Operator = FusedOperator<Arguments>;
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  // `first`: tensors to save in addition to the arguments.
  static void Save(Context* context, Tensors first, const Arguments& arguments) {
    first.reserve(first.size() + Operator::kMembers);
    ForEachMember(arguments, [&](std::string_view name, const auto& member, const auto& initial) {
      using Member = std::decay_t<decltype(member)>;
      if constexpr (std::is_same_v<Member, at::Tensor>) {
        first.push_back(member);
      } else if constexpr (std::is_same_v<Member, OptionalTensor>) {
        first.push_back(OrUndefined(member));
      } else if (!SavedOptions::IsUnset(member, initial)) {
        context->saved_data[std::string(name)] = SavedOptions::Keep(member);
      }
    });
    context->save_for_backward(std::move(first));
  }

  SavedCall(Context* context, size_t first) : tensors(context->get_saved_variables()) {
    ForEachMember(arguments, [&](std::string_view name, auto& member, const auto& /*initial*/) {
      if constexpr (kIsTensor<std::decay_t<decltype(member)>>) {
        const at::Tensor& tensor = tensors[first++];
        if (tensor.defined()) member = tensor;
      } else {
        const auto option = context->saved_data.find(std::string(name));
        if (option != context->saved_data.end()) options_.Restore(option->second, member);
      }
    });
  }

  Tensors tensors;
  Arguments arguments;

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

  SavedOptions options_;
};

// The derivatives of a call. They call the operators rather than their kernels, because otherwise
// torch.compile could not trace them.
//
// If inputs have tangents, autograd records the call on the primals, and a second recorded operator
// computes the tangents of the outputs. The backward pass uses the inputs with their tangents, so
// gradients have tangents as well (forward over reverse).
template <class Arguments>
class RecordedOperator {
 public:
  using Operator = FusedOperator<Arguments>;
  using Needed = typename Operator::Needed;
  using BothNeeded = typename Operator::BothNeeded;
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;
  static constexpr size_t kGradients = Operator::kGradients;

  // The autograd kernel of the forward operator.
  static Outputs RunForward(const Arguments& arguments) {
    Arguments primals = arguments;
    const Tensors tangents = TakeTangents(primals);
    const Needed needed = NeededOf(primals);
    const bool is_recorded = RecordsGradients(needed);
    if constexpr (requires { arguments.page_table; }) {
      TORCH_CHECK_NOT_IMPLEMENTED(!arguments.page_table || (!is_recorded && tangents.empty()),
                                  Arguments::kOperation,
                                  ": keys in pages have no derivatives; gather them first");
    }
    if (is_recorded) SetRecorded(primals);
    const auto set_tangents = [](Outputs& outputs, const auto& jvp) {
      std::get<0>(outputs)._set_fw_grad(std::get<3>(jvp), /*level=*/0, /*is_inplace_op=*/false);
      std::get<1>(outputs)._set_fw_grad(std::get<4>(jvp), /*level=*/0, /*is_inplace_op=*/false);
    };
    if (!tangents.empty() && !is_recorded) {
      const auto jvp = Operator::CallJvp(primals, TangentsOf(tangents));
      Outputs outputs = {std::get<0>(jvp), std::get<1>(jvp), std::get<2>(jvp)};
      set_tangents(outputs, jvp);
      return outputs;
    }
    Outputs outputs = BelowAutograd([&] { return Operator::CallForward(primals); });
    if (is_recorded) {
      const ForwardPass pass{arguments, outputs, needed};
      const Tensors recorded = std::apply(
          [&](const auto&... members) { return ApplyFunction<Forward>(pass, members...); },
          Arguments::Tie(primals));
      outputs = {recorded[0], recorded[1], std::get<2>(outputs)};
    }
    if (!tangents.empty()) {
      set_tangents(outputs, Operator::CallJvp(primals, TangentsOf(tangents)));
    }
    return outputs;
  }

  // The autograd kernel of the backward operator, which is a function of the arguments and of the
  // gradients of o and lse: o, lse and the statistics follow from the arguments.
  static Tensors RunBackward(const SavedOutputs& saved, const Arguments& arguments,
                             const Needed& needed) {
    Arguments primals = arguments;
    Tensors tangents = TakeTangents(primals);
    SavedOutputs outputs = saved;
    const at::Tensor d_o_tangent = TakeTangent(outputs.d_o);
    at::Tensor d_lse = OrUndefined(outputs.d_lse);
    const at::Tensor d_lse_tangent = TakeTangent(d_lse);
    outputs.d_lse = AsOptional(d_lse);
    const auto call = [&] {
      return std::apply([](const auto&... gradients) { return Tensors{gradients...}; },
                        Operator::CallBackward(outputs, primals, needed));
    };
    Tensors gradients = BelowAutograd(call);
    const bool is_recorded =
        at::GradMode::is_enabled() &&
        (outputs.d_o.requires_grad() || (d_lse.defined() && d_lse.requires_grad()) ||
         RecordsGradients(NeededOf(primals)));
    if (is_recorded) {
      Tensors inputs = {outputs.d_o, d_lse};
      const Tensors members = Differentiable(primals);
      inputs.insert(inputs.end(), members.begin(), members.end());
      FillUndefined(inputs);
      const BackwardPass pass{arguments, saved, gradients};
      gradients = ApplyFunction<Backward>(at::TensorList(inputs), pass);
    }
    if (tangents.empty() && !d_o_tangent.defined() && !d_lse_tangent.defined()) return gradients;
    tangents.resize(kGradients);
    BothNeeded both = {};
    std::copy(needed.begin(), needed.end(), both.begin() + kGradients);
    const Tensors results = Operator::CallBackwardJvp(
        {outputs.d_o, outputs.d_lse, AsOptional(d_o_tangent), AsOptional(d_lse_tangent)}, primals,
        TangentsOf(tangents), both);
    for (size_t n = 0; n < kGradients; ++n) {
      if (!needed[n]) continue;
      gradients[n]._set_fw_grad(results[2 + kGradients + n], /*level=*/0,
                                /*is_inplace_op=*/false);
    }
    return gradients;
  }

  // The autograd kernel of the operator of forward-mode derivatives.
  static typename Operator::JvpOutputs RunJvp(const Arguments& arguments,
                                              const Tangents& tangents) {
    Tensors inputs = Differentiable(arguments);
    for (size_t n = 0; n < tangents.size(); ++n) inputs.push_back(OrUndefined(tangents.get(n)));
    inputs.resize(2 * kGradients);
    bool is_needed = false;
    for (const at::Tensor& input : inputs) {
      CheckNoTangent(Arguments::kOperation, input);
      is_needed = is_needed || (input.defined() && input.requires_grad());
    }
    const auto outputs = BelowAutograd([&] { return Operator::CallJvp(arguments, tangents); });
    if (!is_needed || !at::GradMode::is_enabled()) return outputs;
    const Tensors directions(inputs.begin() + kGradients, inputs.end());
    FillUndefined(inputs);
    const Tensors recorded =
        ApplyFunction<Jvp>(at::TensorList(inputs), JvpPass{arguments, outputs, directions});
    return {recorded[0], recorded[1], std::get<2>(outputs), recorded[2], recorded[3]};
  }

 private:
  struct ForwardPass {
    const Arguments& saved;
    const Outputs& outputs;
    const Needed& needed;
  };
  class Forward : public torch::autograd::Function<Forward> {
   public:
    // The arguments are passed one by one because autograd looks for its inputs among them.
    template <class... Members>
    static Tensors forward(Context* context, const ForwardPass& pass,
                           const Members&... /*members*/) {
      const auto& [o, lse, statistics] = pass.outputs;
      SavedCall<Arguments>::Save(context, {o, lse, statistics}, pass.saved);
      context->saved_data["needed"] = c10::List<bool>(c10::ArrayRef<bool>(pass.needed));
      context->set_materialize_grads(false);
      return {o, lse};
    }

    static Tensors backward(Context* context, const Tensors& d_outputs) {
      SavedCall<Arguments> call(context, 3);
      SetRecorded(call.arguments);
      Needed needed;
      const c10::List<bool> flags = context->saved_data["needed"].toBoolList();
      for (size_t n = 0; n < needed.size(); ++n) needed[n] = flags[n];
      const at::Tensor& o = call.tensors[0];
      const at::Tensor d_o = d_outputs[0].defined() ? d_outputs[0] : at::zeros_like(o);
      const typename Operator::Gradients gradients = Operator::CallBackward(
          {d_o, AsOptional(d_outputs[1]), o, call.tensors[1], call.tensors[2]}, call.arguments,
          needed);
      // One gradient per argument of forward(), the first of which is `pass`.
      Tensors all(1 + Operator::kMembers);
      std::apply(
          [&](const auto&... gradient) {
            size_t n = 0;
            ((all[1 + n] = needed[n] ? gradient : at::Tensor(), ++n), ...);
          },
          gradients);
      return all;
    }
  };

  struct BackwardPass {
    const Arguments& arguments;
    const SavedOutputs& saved;
    const Tensors& gradients;
  };
  class Backward : public torch::autograd::Function<Backward> {
   public:
    // Inputs: d_o, d_lse and the arguments with gradients.
    static Tensors forward(Context* context, at::TensorList /*inputs*/, const BackwardPass& pass) {
      SavedCall<Arguments>::Save(context, {pass.saved.d_o, OrUndefined(pass.saved.d_lse)},
                                 pass.arguments);
      context->set_materialize_grads(false);
      return pass.gradients;
    }

    // Second derivatives are symmetric, so their product with u is the derivative in direction u.
    static Tensors backward(Context* context, const Tensors& u) {
      const SavedCall<Arguments> call(context, 2);
      BothNeeded needed = {};
      for (size_t n = 0; n < kGradients; ++n) {
        needed[kGradients + n] = context->needs_input_grad(2 + n);
      }
      needed.back() = context->needs_input_grad(0) || context->needs_input_grad(1);
      const Tensors results = Operator::CallBackwardJvp(
          {call.tensors[0], AsOptional(call.tensors[1]), std::nullopt, std::nullopt},
          call.arguments, TangentsOf(u), needed);
      Tensors all(2 + kGradients + 1);
      for (size_t n = 0; n < 2; ++n) {
        if (context->needs_input_grad(n)) all[n] = results[n];
      }
      for (size_t n = 0; n < kGradients; ++n) {
        if (needed[kGradients + n]) all[2 + n] = results[2 + kGradients + n];
      }
      return all;
    }
  };

  struct JvpPass {
    const Arguments& arguments;
    const typename Operator::JvpOutputs& outputs;
    const Tensors& tangents;
  };
  class Jvp : public torch::autograd::Function<Jvp> {
   public:
    // Inputs: the arguments with gradients, and their tangents.
    static Tensors forward(Context* context, at::TensorList /*inputs*/, const JvpPass& pass) {
      const auto& [o, lse, statistics, o_tangent, lse_tangent] = pass.outputs;
      Tensors saved = {o, lse, statistics};
      saved.insert(saved.end(), pass.tangents.begin(), pass.tangents.end());
      SavedCall<Arguments>::Save(context, std::move(saved), pass.arguments);
      context->set_materialize_grads(false);
      return {o, lse, o_tangent, lse_tangent};
    }

    // The tangents of the outputs are linear in the tangents of the arguments. Their derivative
    // with respect to the arguments is the tangent of the gradient. The gradients of o and lse
    // contribute terms of the same form, so one pass computes everything.
    static Tensors backward(Context* context, const Tensors& d_outputs) {
      const SavedCall<Arguments> call(context, 3 + kGradients);
      const at::Tensor& o = call.tensors[0];
      Tensors all(2 * kGradients + 1);
      if (!d_outputs[2].defined() && !d_outputs[3].defined()) {
        SetGradients(context, call, d_outputs, all);
        return all;
      }
      BothNeeded needed = {};
      for (size_t n = 0; n < kGradients; ++n) {
        needed[n] = context->needs_input_grad(kGradients + n);
        needed[kGradients + n] = context->needs_input_grad(n);
      }
      const Tensors tangents(call.tensors.begin() + 3, call.tensors.begin() + 3 + kGradients);
      const at::Tensor d_o = d_outputs[2].defined() ? d_outputs[2] : at::zeros_like(o);
      const Tensors results = Operator::CallBackwardJvp(
          {d_o, AsOptional(d_outputs[3]), AsOptional(d_outputs[0]), AsOptional(d_outputs[1])},
          call.arguments, TangentsOf(tangents), needed);
      for (size_t n = 0; n < kGradients; ++n) {
        if (needed[kGradients + n]) all[n] = results[2 + kGradients + n];
        if (needed[n]) all[kGradients + n] = results[2 + n];
      }
      return all;
    }

   private:
    // If only the gradients of o and lse are given, the results are those of the backward operator.
    static void SetGradients(Context* context, const SavedCall<Arguments>& call,
                             const Tensors& d_outputs, Tensors& all) {
      Needed needed;
      for (size_t n = 0; n < kGradients; ++n) needed[n] = context->needs_input_grad(n);
      if (!d_outputs[0].defined() && !d_outputs[1].defined()) return;
      const at::Tensor& o = call.tensors[0];
      const at::Tensor d_o = d_outputs[0].defined() ? d_outputs[0] : at::zeros_like(o);
      const typename Operator::Gradients gradients = Operator::CallBackward(
          {d_o, AsOptional(d_outputs[1]), o, call.tensors[1], call.tensors[2]}, call.arguments,
          needed);
      std::apply(
          [&](const auto&... gradient) {
            size_t n = 0;
            ((all[n] = needed[n] ? gradient : at::Tensor(), ++n), ...);
          },
          gradients);
    }
  };

  // Tells the kernels, if they ask, that autograd records the forward pass.
  static void SetRecorded(Arguments& arguments) {
    if constexpr (requires { arguments.recorded; }) arguments.recorded = true;
  }

  static Needed NeededOf(const Arguments& arguments) {
    Needed needed = {};
    Operator::ForEachTensor(arguments, [&](size_t n, const OptionalTensor& tensor) {
      if (n < kGradients) needed[n] = tensor && tensor->requires_grad();
    });
    return needed;
  }

  // The arguments that have gradients; undefined where an argument is absent.
  static Tensors Differentiable(const Arguments& arguments) {
    Tensors tensors;
    Operator::ForEachTensor(arguments, [&](size_t n, const OptionalTensor& tensor) {
      if (n < kGradients) tensors.push_back(OrUndefined(tensor));
    });
    return tensors;
  }

  // Replaces undefined inputs with tensors that need no gradient: a Function requires defined ones.
  static void FillUndefined(Tensors& inputs) {
    for (at::Tensor& input : inputs) {
      if (!input.defined()) input = EmptyOnCpu({c10::SymInt(0)}, at::kFloat, input, false);
    }
  }

  // Replaces a tensor by its primal and returns its tangent, undefined if there is none.
  static at::Tensor TakeTangent(at::Tensor& tensor) {
    if (!tensor.defined()) return {};
    const at::Tensor tangent = tensor._fw_grad(/*level=*/0);
    if (tangent.defined()) tensor = tensor._fw_primal(/*level=*/0);
    return tangent;
  }

  // Calls TakeTangent for all arguments; returns an empty list if none has a tangent.
  static Tensors TakeTangents(Arguments& arguments) {
    Tensors tangents;
    Operator::ForEachTensor(arguments, [&](size_t n, auto& member) {
      if (n >= kGradients) return;
      at::Tensor tensor = OrUndefined(member);
      const at::Tensor tangent = TakeTangent(tensor);
      if (!tangent.defined()) return;
      tangents.resize(kGradients);
      tangents[n] = tangent;
      member = tensor;
    });
    return tangents;
  }
};

template <class Arguments>
void RegisterAutograd(torch::Library& m) {
  using Operator = FusedOperator<Arguments>;
  using Recorded = RecordedOperator<Arguments>;
  m.impl(Operator::Name("_forward").c_str(), &Operator::template RunForward<Recorded::RunForward>);
  m.impl(Operator::Name("_backward").c_str(),
         &Operator::template RunBackward<Recorded::RunBackward>);
  m.impl(Operator::Name("_jvp").c_str(), &Operator::template RunJvp<Recorded::RunJvp>);
  m.impl(Operator::Name("_backward_jvp").c_str(), WithoutThirdDerivatives());
}

template <class Arguments>
void RegisterMeta(torch::Library& m) {
  using Operator = FusedOperator<Arguments>;
  m.impl(Operator::Name("_forward").c_str(),
         &Operator::template RunForward<EmptyOutputs<Arguments>>);
  m.impl(Operator::Name("_backward").c_str(),
         &Operator::template RunBackward<EmptyGradients<Arguments>>);
  m.impl(Operator::Name("_jvp").c_str(), &Operator::template RunJvp<EmptyJvp<Arguments>>);
  m.impl(Operator::Name("_backward_jvp").c_str(),
         &Operator::template RunBackwardJvp<EmptyGradientTangents<Arguments>>);
}

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_FUSED_AUTOGRAD_H_
