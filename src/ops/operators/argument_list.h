// Operators whose arguments are the members of a struct, which a list declares. The list generates
// the struct, the operators' schemas, signatures and calls, the set of tensors that autograd saves
// and differentiates, the shape checks, and the vmap rules.
//
// A list is a macro that calls another macro for each argument:
//
//   ARGUMENT(at::Tensor, x, {}, kDifferentiable, "B H Q D")
//   ARGUMENT(OptionalTensor, key_starts, {}, kInteger, "B")
//   ARGUMENT(double, dropout, 0, kOption, "")
//
// The macro receives the member's type, name, initial value, kind and shape. Differentiable
// arguments come first: tokens have the dtype of the first argument, and other parameters have the
// compute dtype, which is float32 for lower-precision tokens. A constant has the compute dtype, and
// a constant token that of tokens; neither has a gradient. Integer tensors are on the device of the
// first argument, except host integers, which are read before the kernel starts. A shape has one
// letter per axis; a letter stands for the same length throughout the list. "1|H" is an axis of
// length 1 or H. In lists of user arguments, a shape may have several forms, such as "B Q or B Q A"
// (AxisOf).
#ifndef GNOMON_OPS_OPERATORS_ARGUMENT_LIST_H_
#define GNOMON_OPS_OPERATORS_ARGUMENT_LIST_H_

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace gnomon {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalSymInt = std::optional<c10::SymInt>;

// Converts between a possibly undefined tensor and an optional one.
inline OptionalTensor AsOptional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}
inline at::Tensor OrUndefined(const OptionalTensor& tensor) {
  return tensor.value_or(at::Tensor());
}

enum class ArgumentKind {
  kDifferentiable,
  kConstant,
  kInteger,
  kBoolean,
  kOption,
  kToken,
  kConstantToken,
  kHostInteger
};

constexpr bool HasGradient(ArgumentKind kind) {
  return kind == ArgumentKind::kToken || kind == ArgumentKind::kDifferentiable;
}

// The compute dtype for tensors of a given dtype.
inline at::ScalarType WideType(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf ? at::kFloat : type;
}

// The dtype expected of a token tensor, given its dtype and that of x. 16-bit and float32 tokens
// may be mixed; the kernels report which combinations they accept.
inline at::ScalarType TokenTypeBeside(at::ScalarType of_x, at::ScalarType type) {
  return WideType(type) == WideType(of_x) ? type : of_x;
}

// The axes of a tensor: a letter or a length per axis, and which axes may have length 1.
struct AxisLetters {
  static constexpr size_t kMost = 4;

  constexpr AxisLetters(const char* shape)  // NOLINT: implicit
      : AxisLetters(std::string_view(shape)) {}
  constexpr explicit AxisLetters(std::string_view shape) : text(shape) {
    for (std::string_view rest = text.substr(0, text.find(" or ")); !rest.empty(); ++rank) {
      shared[rank] = rest.starts_with("1|");
      if (shared[rank]) rest.remove_prefix(2);
      letters[rank] = rest[0];
      rest.remove_prefix(rest.size() > 1 ? 2 : 1);
    }
  }

  std::string_view text;
  size_t rank = 0;
  std::array<char, kMost> letters = {};
  std::array<bool, kMost> shared = {};
};

// The axis with a given letter, counted from the end (-1 is the last), in a tensor with `axes`
// axes; nullopt if there is none. Uses the form with this number of axes; if there is
// none, uses the trailing axes of the first form.
constexpr std::optional<int64_t> AxisOf(std::string_view forms, char letter, int64_t axes) {
  constexpr std::string_view kOr = " or ";
  const AxisLetters first(forms);
  AxisLetters form = first;
  for (std::string_view rest = forms; static_cast<int64_t>(form.rank) != axes;) {
    const size_t next = rest.find(kOr);
    if (next == std::string_view::npos) {
      form = first;
      break;
    }
    rest.remove_prefix(next + kOr.size());
    form = AxisLetters(rest);
  }
  for (size_t from_end = 1; from_end <= form.rank; ++from_end) {
    if (form.letters[form.rank - from_end] != letter) continue;
    const auto axis = static_cast<int64_t>(from_end);
    return axis <= axes ? std::optional(-axis) : std::nullopt;
  }
  return std::nullopt;
}

struct ArgumentField {
  std::string_view name;
  ArgumentKind kind;
  AxisLetters shape;
};

template <class... Members>
auto TieAll(int /*first*/, Members&... members) {
  return std::tie(members...);
}

// The members of the struct that a list declares.
#define GNOMON_ARGUMENT_MEMBER(type, name, initial, kind, shape) type name = initial;
#define GNOMON_ARGUMENT_FIELD(type, name, initial, kind, shape) \
  ArgumentField{#name, ArgumentKind::kind, shape},
#define GNOMON_ARGUMENT_TIED(type, name, initial, kind, shape) , arguments.name
#define GNOMON_ARGUMENTS(LIST)                                          \
  LIST(GNOMON_ARGUMENT_MEMBER)                                          \
  static constexpr auto Fields() {                                      \
    return std::to_array<ArgumentField>({LIST(GNOMON_ARGUMENT_FIELD)}); \
  }                                                                     \
  /* References to all members, in order. */                            \
  template <class Self>                                                 \
  static auto Tie(Self& arguments) {                                    \
    return TieAll(0 LIST(GNOMON_ARGUMENT_TIED));                        \
  }

template <class Arguments>
using MembersOf = decltype(Arguments::Tie(std::declval<Arguments&>()));

template <class T>
inline constexpr bool kIsTensor = std::is_same_v<std::remove_cv_t<T>, at::Tensor> ||
                                  std::is_same_v<std::remove_cv_t<T>, OptionalTensor>;

// The type of an operator's parameter for a member of type T.
template <class T>
using ParameterOf = std::conditional_t<kIsTensor<T>, const T&, T>;

// The schema type of a member of type T.
template <class T>
constexpr std::string_view SchemaType() {
  if constexpr (std::is_same_v<T, at::Tensor>) return "Tensor";
  if constexpr (std::is_same_v<T, OptionalTensor>) return "Tensor?";
  if constexpr (std::is_same_v<T, std::string_view> || std::is_same_v<T, std::string>) return "str";
  if constexpr (std::is_same_v<T, c10::SymInt>) return "SymInt";
  if constexpr (std::is_same_v<T, OptionalSymInt>) return "SymInt?";
  if constexpr (std::is_same_v<T, at::OptionalSymIntArrayRef>) return "SymInt[]?";
  if constexpr (std::is_same_v<T, std::optional<std::vector<int64_t>>>) return "int[]?";
  if constexpr (std::is_same_v<T, double>) return "float";
  if constexpr (std::is_same_v<T, std::optional<double>>) return "float?";
  if constexpr (std::is_same_v<T, bool>) return "bool";
}

// The schema of the members, such as "Tensor x, Tensor? bias".
template <class Arguments, class Members = MembersOf<Arguments>>
struct SchemaOf;
template <class Arguments, class... Members>
struct SchemaOf<Arguments, std::tuple<Members&...>> {
  static std::string Text() {
    constexpr auto kFields = Arguments::Fields();
    constexpr std::array<std::string_view, sizeof...(Members)> kTypes = {SchemaType<Members>()...};
    std::string text;
    for (size_t n = 0; n < kFields.size(); ++n) {
      if (n > 0) text += ", ";
      text.append(kTypes[n]).append(" ").append(kFields[n].name);
    }
    return text;
  }
};

template <class Fields>
constexpr size_t CountDifferentiable(const Fields& fields) {
  size_t count = 0;
  while (count < fields.size() && HasGradient(fields[count].kind)) ++count;
  return count;
}

// o, lse and the row statistics (gnomon/attention.h). The statistics have no gradient.
using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The arguments of a backward pass that precede those of the forward pass.
struct SavedOutputs {
  at::Tensor d_o;
  OptionalTensor d_lse;
  at::Tensor o;
  at::Tensor lse;
  at::Tensor statistics;
};

// One tangent per argument that has a gradient, in order; an absent tangent is 0. They form one
// list because PyTorch allows at most 64 arguments per operator.
using Tangents = c10::List<OptionalTensor>;

inline Tangents TangentsOf(const std::vector<at::Tensor>& tensors) {
  Tangents tangents;
  for (const at::Tensor& tensor : tensors) tangents.push_back(AsOptional(tensor));
  return tangents;
}

// The gradients of the outputs and, for forward-mode derivatives, their tangents.
struct Cotangents {
  at::Tensor d_o;
  OptionalTensor d_lse;
  OptionalTensor d_o_tangent;
  OptionalTensor d_lse_tangent;
};

// The operators gnomon::<Arguments::kName>_...
//   forward: returns Outputs in the shapes Arguments::kOutputs;
//   backward: returns a gradient per argument that has one, empty where it is not needed;
//   jvp: returns Outputs and the tangents of o and lse;
//   backward_jvp: returns the tangents of o and lse, the gradients and the tangents of the
//     gradients, empty where they are not needed; the last flag in `needed` is for o and lse. By
//     the symmetry of second derivatives, these are also the gradients of backward and of jvp.
template <class Arguments, class Members = MembersOf<Arguments>>
struct FusedOperator;
template <class Arguments, class... Members>
struct FusedOperator<Arguments, std::tuple<Members&...>> {
  static constexpr auto kFields = Arguments::Fields();
  static constexpr size_t kMembers = sizeof...(Members);
  static constexpr size_t kGradients = CountDifferentiable(kFields);
  using Needed = std::array<bool, kGradients>;

  template <size_t>
  using TensorOf = at::Tensor;
  template <size_t... kIndices>
  static auto TupleOf(std::index_sequence<kIndices...>) -> std::tuple<TensorOf<kIndices>...>;
  using Gradients = decltype(TupleOf(std::make_index_sequence<kGradients>()));

  using Forward = Outputs(ParameterOf<Members>...);
  using Backward = Gradients(const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                             const at::Tensor&, const at::Tensor&, ParameterOf<Members>..., Needed);

  using BothNeeded = std::array<bool, 2 * kGradients + 1>;
  using JvpOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  using Jvp = JvpOutputs(ParameterOf<Members>..., const Tangents&);
  using BackwardJvp = std::vector<at::Tensor>(const at::Tensor&, const OptionalTensor&,
                                              const OptionalTensor&, const OptionalTensor&,
                                              ParameterOf<Members>..., const Tangents&, BothNeeded);

  // Wrap functions that take the struct as operator kernels.
  template <Outputs (*run)(const Arguments&)>
  static Outputs RunForward(ParameterOf<Members>... members) {
    return run(Arguments{members...});
  }
  template <std::vector<at::Tensor> (*run)(const SavedOutputs&, const Arguments&, const Needed&)>
  static Gradients RunBackward(const at::Tensor& d_o, const OptionalTensor& d_lse,
                               const at::Tensor& o, const at::Tensor& lse,
                               const at::Tensor& statistics, ParameterOf<Members>... members,
                               Needed needed) {
    const std::vector<at::Tensor> gradients =
        run({d_o, d_lse, o, lse, statistics}, Arguments{members...}, needed);
    return [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
      return Gradients(gradients[kIndices]...);
    }(std::make_index_sequence<kGradients>());
  }

  template <JvpOutputs (*run)(const Arguments&, const Tangents&)>
  static JvpOutputs RunJvp(ParameterOf<Members>... members, const Tangents& tangents) {
    return run(Arguments{members...}, tangents);
  }
  template <std::vector<at::Tensor> (*run)(const Cotangents&, const Arguments&, const Tangents&,
                                           const BothNeeded&)>
  static std::vector<at::Tensor> RunBackwardJvp(const at::Tensor& d_o, const OptionalTensor& d_lse,
                                                const OptionalTensor& d_o_tangent,
                                                const OptionalTensor& d_lse_tangent,
                                                ParameterOf<Members>... members,
                                                const Tangents& tangents, BothNeeded needed) {
    return run({d_o, d_lse, d_o_tangent, d_lse_tangent}, Arguments{members...}, tangents, needed);
  }

  // Call the operators through the dispatcher.
  static Outputs CallForward(const Arguments& arguments) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(("gnomon::" + Name("_forward")).c_str(), "")
                               .template typed<Forward>();
    return std::apply([](const auto&... members) { return op.call(members...); },
                      Arguments::Tie(arguments));
  }
  static Gradients CallBackward(const SavedOutputs& saved, const Arguments& arguments,
                                const Needed& needed) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(("gnomon::" + Name("_backward")).c_str(), "")
                               .template typed<Backward>();
    return std::apply(
        [&](const auto&... members) {
          return op.call(saved.d_o, saved.d_lse, saved.o, saved.lse, saved.statistics, members...,
                         needed);
        },
        Arguments::Tie(arguments));
  }

  static JvpOutputs CallJvp(const Arguments& arguments, const Tangents& tangents) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(("gnomon::" + Name("_jvp")).c_str(), "")
                               .template typed<Jvp>();
    return std::apply([&](const auto&... members) { return op.call(members..., tangents); },
                      Arguments::Tie(arguments));
  }
  static std::vector<at::Tensor> CallBackwardJvp(const Cotangents& cotangents,
                                                 const Arguments& arguments,
                                                 const Tangents& tangents,
                                                 const BothNeeded& needed) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(("gnomon::" + Name("_backward_jvp")).c_str(), "")
                               .template typed<BackwardJvp>();
    return std::apply(
        [&](const auto&... members) {
          return op.call(cotangents.d_o, cotangents.d_lse, cotangents.d_o_tangent,
                         cotangents.d_lse_tangent, members..., tangents, needed);
        },
        Arguments::Tie(arguments));
  }

  static std::string ForwardSchema() {
    return Name("_forward(") + SchemaOf<Arguments>::Text() +
           ") -> (Tensor o, Tensor lse, Tensor statistics)";
  }
  static std::string BackwardSchema() {
    std::string gradients;
    for (size_t n = 0; n < kGradients; ++n) {
      gradients += (n > 0 ? ", Tensor d_" : "Tensor d_") + std::string(kFields[n].name);
    }
    return Name("_backward(") +
           "Tensor d_o, Tensor? d_lse, Tensor o, Tensor lse, Tensor statistics, " +
           SchemaOf<Arguments>::Text() + ", bool[" + std::to_string(kGradients) + "] needed) -> (" +
           gradients + ")";
  }

  static std::string JvpSchema() {
    return Name("_jvp(") + SchemaOf<Arguments>::Text() +
           ", Tensor?[] tangents) -> (Tensor o, Tensor lse, Tensor statistics, Tensor o_tangent, "
           "Tensor lse_tangent)";
  }
  static std::string BackwardJvpSchema() {
    return Name("_backward_jvp(") +
           "Tensor d_o, Tensor? d_lse, Tensor? d_o_tangent, Tensor? d_lse_tangent, " +
           SchemaOf<Arguments>::Text() + ", Tensor?[] tangents, bool[" +
           std::to_string(std::tuple_size_v<BothNeeded>) + "] needed) -> Tensor[]";
  }

  // Calls body(n, member) for every tensor or optional tensor; n is the member's index.
  template <class Self, class Body>
  static void ForEachTensor(Self& arguments, const Body& body) {
    size_t n = 0;
    const auto call = [&](auto& member) {
      if constexpr (kIsTensor<std::remove_reference_t<decltype(member)>>) body(n, member);
      ++n;
    };
    std::apply([&](auto&... members) { (call(members), ...); }, Arguments::Tie(arguments));
  }

  // The unqualified operator name.
  static std::string Name(const char* pass) { return Arguments::kName + std::string(pass); }
};

// Adapts a function of call arguments and other arguments to an operator kernel. The kernel takes
// the other arguments first, then the members of the struct as separate arguments.
template <class Arguments, class Members = MembersOf<Arguments>>
struct Flattened;
template <class Arguments, class... Members>
struct Flattened<Arguments, std::tuple<Members&...>> {
  template <auto run>
  struct Kernel;
  template <class Result, class... Others, Result (*run)(const Arguments&, Others...)>
  struct Kernel<run> {
    static Result Run(Others... others, ParameterOf<Members>... members) {
      return run(Arguments{std::move(members)...}, others...);
    }
  };
};

// The axis lengths of a list, by letter.
template <class Length>
class AxisLengths {
 public:
  AxisLengths() {
    for (char digit = '0'; digit <= '9'; ++digit) (*this)[digit] = Length(digit - '0');
  }
  std::optional<Length>& operator[](char letter) {
    return lengths_[static_cast<unsigned char>(letter) % kLetters];
  }

  // The sizes of a shape, all of whose axis lengths must be known.
  std::vector<Length> Sizes(const AxisLetters& shape) {
    std::vector<Length> sizes;
    for (size_t axis = 0; axis < shape.rank; ++axis) sizes.push_back(*(*this)[shape.letters[axis]]);
    return sizes;
  }

 private:
  static constexpr size_t kLetters = 128;
  std::array<std::optional<Length>, kLetters> lengths_;
};

// Checks a tensor's shape and dtype. Unknown axis lengths are set from the tensor. Throws
// c10::ValueError or c10::TypeError, with a message that starts with `operation`.
void ExpectTensor(const char* operation, std::string_view name, const at::Tensor& tensor,
                  const AxisLetters& shape, at::ScalarType dtype, AxisLengths<int64_t>& lengths);

// Throws c10::TypeError unless the tensor is on the given device.
void ExpectDevice(const char* operation, std::string_view name, const at::Tensor& tensor,
                  at::Device device);

// Checks all tensor arguments.
template <class Arguments>
void CheckArguments(const Arguments& arguments, AxisLengths<int64_t>& lengths) {
  static constexpr auto kFields = Arguments::Fields();
  FusedOperator<Arguments>::ForEachTensor(arguments, [&](size_t n, const OptionalTensor& tensor) {
    if (!tensor) return;
    const ArgumentKind kind = kFields[n].kind;
    if (kind == ArgumentKind::kHostInteger) {
      TORCH_CHECK_VALUE(tensor->numel() == 1 && tensor->scalar_type() == at::kLong &&
                            (tensor->is_cpu() || tensor->device() == arguments.x.device()),
                        Arguments::kOperation, ": ", kFields[n].name, " has shape ",
                        tensor->sizes(), " and dtype ", tensor->scalar_type(), " on ",
                        tensor->device(), "; expected one int64 on the CPU");
      return;
    }
    const at::ScalarType of_tokens = arguments.x.scalar_type();
    const at::ScalarType dtype =
        kind == ArgumentKind::kInteger   ? at::kLong
        : kind == ArgumentKind::kBoolean ? at::kBool
        : kind == ArgumentKind::kToken || kind == ArgumentKind::kConstantToken
            ? TokenTypeBeside(of_tokens, tensor->scalar_type())
            : WideType(of_tokens);
    ExpectTensor(Arguments::kOperation, kFields[n].name, *tensor, kFields[n].shape, dtype, lengths);
    ExpectDevice(Arguments::kOperation, kFields[n].name, *tensor, arguments.x.device());
  });
}

// Checks the outputs and the incoming gradients.
template <class Arguments>
void CheckSaved(const SavedOutputs& saved, const Arguments& arguments,
                AxisLengths<int64_t>& lengths) {
  const auto expect = [&](const char* name, const at::Tensor& tensor, const AxisLetters& shape) {
    ExpectTensor(Arguments::kOperation, name, tensor, shape, WideType(arguments.x.scalar_type()),
                 lengths);
    ExpectDevice(Arguments::kOperation, name, tensor, arguments.x.device());
  };
  expect("d_o", saved.d_o, Arguments::kOutputs[0]);
  if (saved.d_lse) expect("d_lse", *saved.d_lse, Arguments::kOutputs[1]);
  expect("o", saved.o, Arguments::kOutputs[0]);
  expect("lse", saved.lse, Arguments::kOutputs[1]);
  expect("statistics", saved.statistics, Arguments::kOutputs[2]);
}

// Creates an uninitialised contiguous tensor on the device of `beside`. With rows_first, (B, H, L,
// columns) is laid out as contiguous (B, L, H, columns).
using MakeEmpty = at::Tensor (*)(c10::SymIntArrayRef sizes, at::ScalarType type,
                                 const at::Tensor& beside, bool rows_first);
at::Tensor EmptyBeside(c10::SymIntArrayRef sizes, at::ScalarType type, const at::Tensor& beside,
                       bool rows_first);
// The equivalent for CPU kernels. Bypasses the dispatcher, whose overhead exceeds the cost of the
// allocation.
at::Tensor EmptyOnCpu(c10::SymIntArrayRef sizes, at::ScalarType type, const at::Tensor& beside,
                      bool rows_first);

// Uninitialised outputs of the forward operator; also its kernel for the meta device.
template <class Arguments, MakeEmpty make_empty = EmptyBeside>
Outputs EmptyOutputs(const Arguments& arguments) {
  static constexpr auto kFields = Arguments::Fields();
  AxisLengths<c10::SymInt> lengths;
  // The token tensors determine every output axis.
  const auto note = [&](size_t n, const at::Tensor& tensor) {
    for (size_t axis = 0; axis < kFields[n].shape.rank; ++axis) {
      lengths[kFields[n].shape.letters[axis]] = tensor.sym_size(static_cast<int64_t>(axis));
    }
  };
  note(0, arguments.x);
  note(2, arguments.v);
  const auto make = [&](const AxisLetters& shape, bool rows_first = false) {
    return make_empty(lengths.Sizes(shape), WideType(arguments.x.scalar_type()), arguments.x,
                      rows_first);
  };
  bool rows_first = false;
  if constexpr (requires { arguments.rows_first; }) rows_first = arguments.rows_first;
  return {make(Arguments::kOutputs[0], rows_first), make(Arguments::kOutputs[1]),
          make(Arguments::kOutputs[2])};
}

// The index of an argument in its list.
template <class Arguments>
size_t IndexOf(std::string_view name) {
  static constexpr auto kFields = Arguments::Fields();
  size_t n = 0;
  while (kFields.at(n).name != name) ++n;
  return n;
}

// Records the names of differentiable arguments under which a kernel has accessed their gradients
// or tangents, so that none is forgotten.
template <class Arguments>
class AccessedNames {
 public:
  size_t Index(std::string_view name) {
    const size_t n = IndexOf<Arguments>(name);
    accessed_.at(n) = true;
    return n;
  }

  // Throws if a tensor of(n) has numbers and its index was not requested. `what` is "gradient" or
  // "tangent".
  template <class Of>
  void CheckAll(const char* what, const Of& of) const {
    static constexpr auto kFields = Arguments::Fields();
    for (size_t n = 0; n < accessed_.size(); ++n) {
      if (accessed_[n]) continue;
      const at::Tensor tensor = of(n);
      TORCH_CHECK_NOT_IMPLEMENTED(!tensor.defined() || tensor.numel() == 0, Arguments::kOperation,
                                  ": the ", what, " of ", kFields[n].name, " is not available on ",
                                  tensor.device());
    }
  }

 private:
  std::array<bool, FusedOperator<Arguments>::kGradients> accessed_ = {};
};

// The gradients of a backward pass, by argument name. They start uninitialised, so Done() throws
// unless every needed gradient has been accessed.
template <class Arguments>
class NamedGradients {
 public:
  explicit NamedGradients(std::vector<at::Tensor>& gradients) : gradients_(gradients) {}

  at::Tensor& operator()(std::string_view name) { return gradients_[accessed_.Index(name)]; }

  void Done() const {
    accessed_.CheckAll("gradient", [&](size_t n) { return gradients_[n]; });
  }

 private:
  std::vector<at::Tensor>& gradients_;
  AccessedNames<Arguments> accessed_;
};

// Throws unless the list is empty or has an entry for each differentiable argument.
template <class Arguments>
void CheckTangentCount(const Tangents& tangents) {
  constexpr size_t kGradients = FusedOperator<Arguments>::kGradients;
  TORCH_CHECK_VALUE(tangents.empty() || tangents.size() == kGradients, "gnomon: tangents has ",
                    tangents.size(), " tensors; expected ", kGradients);
}

// The names and axes of the tensors that the forward operator takes and returns.
template <class Arguments>
std::vector<std::pair<std::string, std::string>> NamedAxes() {
  std::vector<std::pair<std::string, std::string>> axes;
  for (const ArgumentField& field : Arguments::Fields()) {
    if (field.kind != ArgumentKind::kOption) axes.emplace_back(field.name, field.shape.text);
  }
  for (size_t n = 0; n < 3; ++n) {
    axes.emplace_back(std::array{"o", "lse", "statistics"}[n], Arguments::kOutputs[n].text);
  }
  return axes;
}

// Uninitialised tensors for the needed gradients; the others are empty.
template <class Arguments, MakeEmpty make_empty = EmptyBeside>
std::vector<at::Tensor> EmptyGradients(const SavedOutputs& /*saved*/, const Arguments& arguments,
                                       const typename FusedOperator<Arguments>::Needed& needed) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(needed.size());
  FusedOperator<Arguments>::ForEachTensor(arguments, [&](size_t n, const OptionalTensor& of) {
    if (n >= needed.size()) return;
    gradients.push_back(
        needed[n] ? make_empty(of->sym_sizes(), of->scalar_type(), *of, false)
                  : make_empty({c10::SymInt(0)}, arguments.x.scalar_type(), arguments.x, false));
  });
  return gradients;
}

// Uninitialised results of the derivative operators; also their kernels for the meta device.
template <class Arguments, MakeEmpty make_empty = EmptyBeside>
typename FusedOperator<Arguments>::JvpOutputs EmptyJvpOutputs(const Arguments& arguments) {
  auto [o, lse, statistics] = EmptyOutputs<Arguments, make_empty>(arguments);
  auto [o_tangent, lse_tangent, unused] = EmptyOutputs<Arguments, make_empty>(arguments);
  return {o, lse, statistics, o_tangent, lse_tangent};
}
template <class Arguments>
typename FusedOperator<Arguments>::JvpOutputs EmptyJvp(const Arguments& arguments,
                                                       const Tangents& /*tangents*/) {
  return EmptyJvpOutputs(arguments);
}

// The tangents of o and lse, empty if they are not needed.
template <class Arguments>
std::vector<at::Tensor> EmptyOutputTangents(const Arguments& arguments, bool is_needed) {
  if (is_needed) {
    auto [o, lse, statistics] = EmptyOutputs<Arguments>(arguments);
    return {o, lse};
  }
  const auto none = [&] {
    return EmptyBeside({c10::SymInt(0)}, WideType(arguments.x.scalar_type()), arguments.x, false);
  };
  return {none(), none()};
}
template <class Arguments>
std::vector<at::Tensor> EmptyGradientTangents(
    const Cotangents& /*cotangents*/, const Arguments& arguments, const Tangents& /*tangents*/,
    const typename FusedOperator<Arguments>::BothNeeded& needed) {
  using Needed = typename FusedOperator<Arguments>::Needed;
  std::vector<at::Tensor> results = EmptyOutputTangents(arguments, needed.back());
  for (size_t half = 0; half < 2; ++half) {
    Needed own;
    std::copy_n(needed.begin() + half * own.size(), own.size(), own.begin());
    for (at::Tensor& gradient : EmptyGradients<Arguments>({}, arguments, own)) {
      results.push_back(std::move(gradient));
    }
  }
  return results;
}

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_ARGUMENT_LIST_H_
