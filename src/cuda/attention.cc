#include "cuda/attention.h"

#include <array>
#include <bit>
#include <cstdint>
#include <string>

#include "base/call_log.h"
#include "cuda/derivative_plan.h"
#include "cuda/launch_context.h"
#include "cuda/parameters.h"
#include "cuda/plan.h"
#include "gnomon/table_layout.h"

namespace gnomon::cuda {

std::string Unsupported(const PairFunction& function, const Input& in) {
  constexpr int64_t kMostColumns = 256;
  constexpr int64_t kMostKeys = int64_t{1} << 24;
  const auto wide = [](const char* name, int64_t columns) {
    return std::string(name) + " is " + std::to_string(columns) + "; expected at most 256";
  };
  const AttentionShape& n = in.shape;
  if (function.input != PairInput::kNone && n.dim > kMostColumns) return wide("head_dim", n.dim);
  if (n.value_dim > kMostColumns) return wide("head_dim of v", n.value_dim);
  // Statistics store key indices as floats, which are exact up to this limit.
  if (n.keys > kMostKeys) {
    return "k has " + std::to_string(n.keys) + " keys; expected at most " +
           std::to_string(kMostKeys);
  }
  if (in.pages.table != nullptr && !std::has_single_bit(static_cast<uint64_t>(in.pages.size))) {
    return "the page size is " + std::to_string(in.pages.size) + "; expected a power of 2";
  }
  LayoutParameters layout;
  if (in.bias.table != nullptr && in.bias.layout != nullptr &&
      !DescribeLayout(*in.bias.layout, &layout)) {
    return "bias has a layout that is not supported on a GPU";
  }
  if (in.relative.layout != nullptr && !DescribeLayout(*in.relative.layout, &layout)) {
    return "relative has a layout that is not supported on a GPU";
  }
  return "";
}

namespace {

void Check(const PairFunction& function, const Input& in) {
  const std::string problem = Unsupported(function, in);
  if (!problem.empty()) throw Error("attention on CUDA: " + problem);
}

void Log(const char* operation, const PairFunction& function, const Input& input,
         const Plan& plan) {
  if (!LogsCalls()) return;
  std::string kind = std::string(operation) + ": " + DescribeCall(function, input) + ", CUDA";
  if (!plan.kernels().empty()) kind += ", kernels " + plan.kernels();
  LogCall(kind, DescribeSizes(input.shape));
}

// Whether one query of each head attends to keys that several query heads share, without terms that
// differ between these heads, except for factors, temperatures and the scalars of rows.
bool CanBePacked(const PairFunction& function, const Input& in) {
  const AttentionShape& n = in.shape;
  return n.queries == 1 && n.heads > n.key_heads && function.head_scalars == 0 &&
         in.bias.table == nullptr && in.key_bias == nullptr && in.pair_bias.data == nullptr &&
         in.relative.layout == nullptr && in.mask.pairs.data == nullptr &&
         in.mask.query_segments == nullptr && in.query_positions == nullptr &&
         in.key_rows == nullptr && in.dropout.rate == 0;
}

// Turns query heads that share a key head into queries of this head: the rows of one tile, for
// which keys and values are read only once.
void Pack(Input* in, Output* out) {
  AttentionShape& n = in->shape;
  const int64_t group = n.heads / n.key_heads;
  n.queries = group;
  n.heads = n.key_heads;
  for (std::array<int64_t, 3>* stride : {&in->x.stride, &out->o.stride}) {
    *stride = {(*stride)[0], group * (*stride)[1], (*stride)[1]};
  }
  in->packed = true;
}

}  // namespace

void Forward(const PairFunction& function, const Input& given, const Output& to, Backend& backend) {
  Check(function, given);
  Input input = given;
  Output output = to;
  if (CanBePacked(function, given)) Pack(&input, &output);
  Plan plan(function, input, backend);
  plan.PrepareRows(/*is_forward=*/true);
  plan.Forward(output);
  Log("forward", function, given, plan);
}

void Backward(const PairFunction& function, const Input& input, const Saved& saved,
              const Gradient& gradient, Backend& backend) {
  Check(function, input);
  Plan plan(function, input, backend);
  Saved complete = saved;
  const AttentionShape& n = input.shape;
  const int64_t rows = n.batch * n.heads * n.queries;
  const bool is_forward = saved.statistics == nullptr && rows > 0;
  plan.PrepareRows(is_forward);
  if (is_forward) {
    const auto bytes = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
    const int64_t of_head = n.queries * n.value_dim;
    Output out;
    out.o = {backend.Scratch(bytes(rows * n.value_dim)), {n.heads * of_head, of_head, n.value_dim}};
    out.exact_o = static_cast<float*>(backend.Scratch(bytes(rows * n.value_dim)));
    out.statistics = static_cast<float*>(backend.Scratch(bytes(3 * rows)));
    out.precise = true;
    plan.Forward(out);
    complete.o = {out.o.data, out.o.stride, input.x.type};
    complete.exact_o = out.exact_o;
    complete.statistics = out.statistics;
    complete.precise = out.precise;
  }
  plan.Backward(complete, gradient);
  Log("backward", function, input, plan);
}

void ForwardTangents(const PairFunction& function, const Input& input, const Input& tangent,
                     const Saved& saved, const OutputTangents& output, Backend& backend) {
  Check(function, input);
  DerivativePlan plan(function, input, tangent, backend);
  plan.PrepareRows(/*is_forward=*/true);
  plan.Forward(saved, output);
  Log("jvp", function, input, plan);
}

void BackwardTangents(const PairFunction& function, const Input& input, const Input& tangent,
                      const Saved& saved, const CotangentTangents& cotangent,
                      const Gradient& gradient, Backend& backend) {
  Check(function, input);
  DerivativePlan plan(function, input, tangent, backend);
  plan.PrepareRows(/*is_forward=*/false);
  plan.Backward(saved, cotangent, gradient);
  Log("backward jvp", function, input, plan);
}

}  // namespace gnomon::cuda
