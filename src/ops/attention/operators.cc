#include "ops/attention/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace gnomon {

Outputs CallAttentionForward(const OperatorArguments& arguments) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gnomon::attention_forward", "")
                             .typed<AttentionOperator::Forward>();
  return std::apply([](const auto&... flat) { return op.call(flat...); },
                    OperatorArguments::Tie(arguments));
}

Gradients CallAttentionBackward(const SavedOutputs& saved, const OperatorArguments& arguments,
                                const Needed& needed) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gnomon::attention_backward", "")
                             .typed<AttentionOperator::Backward>();
  return std::apply(
      [&](const auto&... flat) {
        return op.call(saved.d_o, saved.d_lse, saved.o, saved.lse, saved.statistics, flat...,
                       needed);
      },
      OperatorArguments::Tie(arguments));
}

}  // namespace gnomon
