#include "base/call_log.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>

#include "gnomon/derivatives.h"

namespace gnomon {
namespace {

const char* TypeName(TokenType type) {
  switch (type) {
    case TokenType::kBFloat16:
      return "bfloat16";
    case TokenType::kFloat16:
      return "float16";
    default:
      return "float32";
  }
}

}  // namespace

bool LogsCalls() {
  static const bool logs = [] {
    const char* const value = std::getenv("GNOMON_LOG");
    if (value == nullptr || *value == '\0') return false;
    if (std::string_view(value) == "calls") return true;
    std::fprintf(stderr, "gnomon: GNOMON_LOG is '%s'; expected calls or an empty value\n", value);
    return false;
  }();
  return logs;
}

void LogCall(const std::string& kind, const std::string& sizes) {
  static std::mutex mutex;
  static std::set<std::string> known;
  const std::scoped_lock lock(mutex);
  if (!known.insert(kind).second) return;
  std::fprintf(stderr, "gnomon: %s; first call: %s\n", kind.c_str(), sizes.c_str());
}

template <class Number>
std::string DescribeCall(const PairFunction& function, const AttentionInput<Number>& in) {
  std::string text = function.name;
  if constexpr (std::is_same_v<Number, float>) {
    text += std::string(", ") + TypeName(in.x.type);
  } else {
    text += ", float64";
  }
  text += ", head_dim " + std::to_string(in.shape.dim);
  if (in.shape.value_dim != in.shape.dim) {
    text += ", value_dim " + std::to_string(in.shape.value_dim);
  }
  const auto add = [&](bool has, const char* part) {
    if (has) text += std::string(", ") + part;
  };
  const Mask& mask = in.mask;
  const bool is_causal = mask.right == 0 && mask.left == kUnbounded;
  add(is_causal, "causal");
  add(!is_causal && (mask.left != kUnbounded || mask.right != kUnbounded), "window");
  add(mask.chunks.size > 0, "chunks");
  add(mask.key_starts != nullptr || mask.key_lengths != nullptr, "lengths");
  add(mask.query_segments != nullptr, "segments");
  add(mask.pairs.data != nullptr, "mask");
  add(in.query_positions != nullptr, "positions");
  add(in.bias.table != nullptr, "bias");
  add(in.key_bias != nullptr, in.key_bias_base == nullptr ? "key bias" : "key bias in two parts");
  add(in.pair_bias.data != nullptr, "pair bias");
  add(in.relative.keys != nullptr, "relative keys");
  add(in.relative.queries != nullptr, "relative queries");
  add(in.relative.values != nullptr, "relative values");
  add(in.temperature != nullptr, "temperature");
  add(in.softcap > 0, "soft cap");
  add(in.dropout.rate > 0, "dropout");
  return text;
}

template std::string DescribeCall(const PairFunction&, const AttentionInput<float>&);
template std::string DescribeCall(const PairFunction&, const AttentionInput<double>&);
template std::string DescribeCall(const PairFunction&, const AttentionInput<Dual>&);

std::string DescribeSizes(const AttentionShape& shape) {
  const auto part = [](const char* name, int64_t size) { return name + std::to_string(size); };
  return part("batch ", shape.batch) + part(", heads ", shape.heads) +
         part(", key heads ", shape.key_heads) + part(", queries ", shape.queries) +
         part(", keys ", shape.keys);
}

}  // namespace gnomon
