// Converts options of the C++ interface to the operators' arguments.
#ifndef GNOMON_OPS_ATTENTION_OPTIONS_H_
#define GNOMON_OPS_ATTENTION_OPTIONS_H_

#include <ATen/ops/scalar_tensor.h>
#include <gnomon/torch/attention.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <type_traits>

#include "ops/attention/call.h"

namespace gnomon {

// The value of an option, in the operators' form.
template <typename Argument, typename Option>
Argument ToArgument(const Option& option) {
  if constexpr (std::is_same_v<Argument, OptionalTensor> &&
                std::is_same_v<Option, std::optional<int64_t>>) {
    return option ? OptionalTensor(at::scalar_tensor(*option, at::kLong)) : std::nullopt;
  } else {
    return option;
  }
}

// Whether each argument is either an option or listed as omitted (not both), and every listed name
// is an argument. The two sides of the window are one option.
template <typename Options>
constexpr bool SaysAllBut(std::initializer_list<std::string_view> left_out) {
  constexpr bool kHasWindow = requires(const Options& options) { options.window(); } ||
                              requires(const Options& options) { options.window; };
  bool all = true;
  size_t found = 0;
#define GNOMON_SAYS(type, name, ...)                                                               \
  {                                                                                                \
    constexpr std::string_view kName = #name;                                                      \
    constexpr bool kIsSide = kName == "left" || kName == "right";                                  \
    constexpr bool kIsSetter = requires(const Options& options) { options.name(); };               \
    constexpr bool kIsMember = requires(const Options& options) { type(options.name); };           \
    const bool is_left_out = std::find(left_out.begin(), left_out.end(), kName) != left_out.end(); \
    all = all && (kIsSide ? kHasWindow : kIsSetter || kIsMember) != is_left_out;                   \
    found += is_left_out ? 1 : 0;                                                                  \
  }
  GNOMON_CALL_ARGUMENTS(GNOMON_SAYS)
#undef GNOMON_SAYS
  return all && found == left_out.size();
}
static_assert(SaysAllBut<AttentionOptions>({}));

// The arguments from options, each of which is a setter or a member with the argument's name.
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
