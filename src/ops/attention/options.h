// The operators' arguments from the options of the C++ interface.
#ifndef GNOMON_OPS_ATTENTION_OPTIONS_H_
#define GNOMON_OPS_ATTENTION_OPTIONS_H_

#include <ATen/ops/scalar_tensor.h>
#include <gnomon/torch/attention.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

#include "ops/attention/call.h"

namespace gnomon {

// What an option says, as the operators take it.
template <typename Argument, typename Option>
Argument ToArgument(const Option& option) {
  if constexpr (std::is_same_v<Argument, OptionalTensor> &&
                std::is_same_v<Option, std::optional<int64_t>>) {
    return option ? OptionalTensor(at::scalar_tensor(*option, at::kLong)) : std::nullopt;
  } else {
    return option;
  }
}

// Whether there is an option for each argument.
template <typename Options>
constexpr bool SaysAll() {
  bool all = requires(const Options& options) { options.window(); };
#define GNOMON_SAYS(type, name, ...)                                                       \
  all = all && (std::string_view(#name) == "left" || std::string_view(#name) == "right" || \
                requires(const Options& options) { options.name(); });
  GNOMON_CALL_ARGUMENTS(GNOMON_SAYS)
#undef GNOMON_SAYS
  return all;
}
static_assert(SaysAll<AttentionOptions>());

// What the options say, each of which is a setter or a member with the argument's name. Both sides
// of the window are one of them.
template <typename Options>
CallArguments ArgumentsOf(const Options& options) {
  CallArguments arguments;
#define GNOMON_TAKE(type, name, ...)                       \
  if constexpr (requires { options.name(); }) {            \
    arguments.name = ToArgument<type>(options.name());     \
  } else if constexpr (requires { type(options.name); }) { \
    arguments.name = ToArgument<type>(options.name);       \
  }
  GNOMON_CALL_ARGUMENTS(GNOMON_TAKE)
#undef GNOMON_TAKE
  std::optional<AttentionOptions::Window> window;
  if constexpr (requires { options.window(); }) {
    window = options.window();
  } else {
    window = options.window;
  }
  if (window) {
    arguments.left = window->first;
    arguments.right = window->second;
  }
  return arguments;
}

}  // namespace gnomon

#endif  // GNOMON_OPS_ATTENTION_OPTIONS_H_
