#include "cuda/launch_context.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "base/call_log.h"
#include "base/dropout.h"
#include "base/visible_keys.h"

namespace gnomon::cuda {

static_assert(sizeof(Parameters) <= 4096, "some GPUs limit kernel parameters to 4 KiB");

bool DescribeLayout(const TableLayout& layout, LayoutParameters* to) {
  *to = {};
  if (layout.size() > std::numeric_limits<int>::max()) return false;
  to->size = static_cast<int>(layout.size());
  if (const auto* offset = dynamic_cast<const OffsetLayout*>(&layout)) {
    to->kind = LayoutParameters::kByOffset;
    to->past = offset->past();
    to->future = offset->future();
    to->clips = offset->far() == OffsetLayout::Far::kClip ? 1 : 0;
    return true;
  }
  if (dynamic_cast<const KeyLayout*>(&layout) != nullptr) {
    to->kind = LayoutParameters::kByKey;
    return true;
  }
  const auto* grid = dynamic_cast<const GridLayout*>(&layout);
  if (grid == nullptr || grid->shape().size() > LayoutParameters::kMostAxes) return false;
  to->kind = LayoutParameters::kOfGrid;
  to->sums = grid->kind() == GridLayout::Kind::kAxes ? 1 : 0;
  to->axes = static_cast<int>(grid->shape().size());
  to->prefix = static_cast<int>(grid->prefix());
  to->tokens = static_cast<int>(grid->tokens());
  for (int axis = 0; axis < to->axes; ++axis) {
    to->shape[axis] = static_cast<int>(grid->shape()[static_cast<size_t>(axis)]);
    to->first[axis] = static_cast<int>(grid->first()[static_cast<size_t>(axis)]);
    to->step[axis] = static_cast<int>(grid->stride()[static_cast<size_t>(axis)]);
  }
  return true;
}

LaunchContext::LaunchContext(const PairFunction& function, const Input& in, Backend& backend)
    : in_(in), backend_(backend) {
  SetInput(function);
  SetFeatures();
}

bool LaunchContext::Aligned(std::initializer_list<const Array*> arrays) const {
  return std::all_of(arrays.begin(), arrays.end(), [this](const Array* a) {
    const auto multiple = [](int64_t bytes) { return bytes % 16 == 0; };
    return multiple(static_cast<int64_t>(reinterpret_cast<uintptr_t>(a->data))) &&
           multiple(a->stride[0] * BytesOf(Type())) && multiple(a->stride[1] * BytesOf(Type())) &&
           multiple(a->stride[2] * BytesOf(Type()));
  });
}

void LaunchContext::Launch(const char* kind, const Constants& c, int64_t x, int64_t y, int shared,
                           const char* definition) {
  if (x == 0 || y == 0) return;
  const KernelName name{kind, definition, c.List()};
  const LaunchShape shape{{static_cast<uint32_t>(x), static_cast<uint32_t>(y), 1},
                          static_cast<uint32_t>(32 * c.kWarps),
                          static_cast<uint32_t>(shared)};
  backend_.Launch(name, shape, &p_, sizeof(p_));
  // Only the kernels that process tiles are logged.
  if (*definition == '\0' || c.kStep == 0 || !LogsCalls()) return;
  const int64_t rows = 16 * std::max<int64_t>(1, c.kRowTiles) * (c.kWarps - c.kProducers);
  const std::string kernel =
      std::string(kind) + ' ' + std::to_string(rows) + 'x' + std::to_string(c.kStep);
  if (kernels_.find(kernel) != std::string::npos) return;
  kernels_ += (kernels_.empty() ? "" : ", ") + kernel;
}

void LaunchContext::SetInput(const PairFunction& function) {
  const AttentionShape& n = in_.shape;
  // memset also clears padding, which is part of the kernel argument.
  std::memset(static_cast<void*>(&p_), 0, sizeof(p_));
  p_.batch = Int(n.batch);
  p_.heads = Int(n.heads);
  p_.key_heads = Int(n.key_heads);
  p_.group = n.key_heads > 0 ? Int(n.heads / n.key_heads) : 1;
  p_.queries = Int(n.queries);
  p_.keys = Int(n.keys);
  p_.dim = function.input == PairInput::kNone ? 0 : Int(n.dim);
  p_.value_dim = Int(n.value_dim);
  p_.x = ToArray(in_.x);
  p_.y = ToArray(in_.y);
  p_.v = ToArray(in_.v);
  p_.page_table = reinterpret_cast<const Int64*>(in_.pages.table);
  p_.pages = Int(in_.pages.count);
  p_.page_shift = std::countr_zero(static_cast<uint64_t>(in_.pages.size));
  p_.row_scalars = in_.row_scalars;
  p_.column_scalars = in_.column_scalars;
  p_.head_scalars = in_.head_scalars;
  p_.factor = in_.factor;
  p_.bias = in_.bias.table;
  p_.bias_batch_stride = in_.bias.batch_stride;
  p_.bias_size = Int(std::max<int64_t>(0, n.queries + n.keys - 1));
  if (in_.bias.table != nullptr && in_.bias.layout != nullptr) {
    DescribeLayout(*in_.bias.layout, &p_.layout);
    p_.bias_size = p_.layout.size;
  }
  if (in_.relative.layout != nullptr) {
    DescribeLayout(*in_.relative.layout, &p_.relative_layout);
    p_.relative_size = p_.relative_layout.size;
    p_.relative_values = in_.relative.values;
    p_.relative_values_stride = in_.relative.value_heads ? p_.relative_size * n.value_dim : 0;
    p_.relative_key_tables = in_.relative.query_heads ? p_.group : 1;
  }
  p_.key_bias = in_.key_bias;
  p_.key_bias_low = in_.key_bias_low;
  p_.key_bias_base = in_.key_bias_base;
  p_.pair_bias = ToArray(in_.pair_bias);
  p_.pair_mask = ToArray(in_.mask.pairs);
  p_.temperature = in_.temperature;
  p_.softcap = static_cast<float>(in_.softcap * std::numbers::log2e);
  p_.softcap_inverse = 1.0f / p_.softcap;
  p_.query_segments = in_.mask.query_segments;
  p_.key_segments = in_.mask.key_segments;
  p_.left = in_.mask.left;
  p_.right = in_.mask.right;
  p_.chunk_size = in_.mask.chunks.size;
  p_.chunks_before = in_.mask.chunks.before;
  p_.chunks_after = in_.mask.chunks.after;
  p_.query_offset = in_.query_offset;
  // Int64 and int64_t are both 64 bits wide.
  p_.query_offsets = reinterpret_cast<const Int64*>(in_.query_offsets);
  p_.query_positions = reinterpret_cast<const Int64*>(in_.query_positions);
  p_.key_positions = reinterpret_cast<const Int64*>(in_.key_positions);
  p_.key_starts = reinterpret_cast<const Int64*>(in_.mask.key_starts);
  p_.key_lengths = reinterpret_cast<const Int64*>(in_.mask.key_lengths);
  p_.key_rows = reinterpret_cast<const Int64*>(in_.key_rows);
  p_.seed = in_.dropout.seed;
  p_.threshold = DropoutThreshold(in_.dropout);
  p_.kept = static_cast<float>(DropoutScale(in_.dropout));
  p_.log_tolerance = static_cast<float>(std::log2(in_.tolerance));
  p_.interval_heads = 1;
  p_.parts = 1;
  p_.chunks = 1;
  p_.head_step = 1;
}

void LaunchContext::SetFeatures() {
  Constants& c = features_;
  c.kType = Type();
  c.kDim = Padded(p_.dim);
  c.kValueDim = Padded(in_.shape.value_dim);
  c.kRowTiles = 1;
  c.kBias = in_.bias.table == nullptr ? 0 : in_.bias.layout == nullptr ? 1 : 2;
  c.kKeyBias = in_.key_bias == nullptr ? 0 : in_.key_bias_low == nullptr ? 1 : 2;
  c.kPairBias = in_.pair_bias.data != nullptr ? 1 : 0;
  c.kPairMask = in_.mask.pairs.data != nullptr ? 1 : 0;
  c.kSegments = in_.mask.query_segments != nullptr ? 1 : 0;
  c.kPositions = in_.query_positions != nullptr ? 1 : 0;
  c.kPages = in_.pages.table != nullptr ? 1 : 0;
  c.kPacked = in_.packed ? 1 : 0;
  c.kTemperature = in_.temperature != nullptr ? 1 : 0;
  c.kSoftcap = in_.softcap != 0 ? 1 : 0;
  c.kDropout = in_.dropout.rate != 0 ? 1 : 0;
  const bool relative = in_.relative.layout != nullptr;
  c.kRelativeKeys = relative && in_.relative.keys != nullptr ? 1 : 0;
  c.kRelativeValues = relative && in_.relative.values != nullptr ? 1 : 0;
  c.kRelativeQueries = relative && in_.relative.queries != nullptr ? 1 : 0;
  const bool bounded = in_.mask.left < kFar || in_.mask.right < kFar || in_.mask.chunks.size > 0 ||
                       in_.key_rows != nullptr;
  c.kHides = bounded || c.kBias != 0 || c.kKeyBias != 0 || c.kPairBias != 0 || c.kPairMask != 0 ||
                     c.kSegments != 0 || c.kPositions != 0
                 ? 1
                 : 0;
}

}  // namespace gnomon::cuda
