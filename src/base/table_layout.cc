#include "gnomon/table_layout.h"

#include <algorithm>
#include <string>
#include <utility>

namespace gnomon {
namespace {

// Positions beyond this limit are outside every table; clamping them prevents overflow in sums.
constexpr int64_t kFar = int64_t{1} << 61;

int64_t Near(int64_t p) { return std::clamp(p, -kFar, kFar); }

}  // namespace

void OffsetLayout::AddRuns(int64_t p, int64_t begin, int64_t end,
                           std::vector<TableRun>* runs) const {
  p = Near(p);
  // Keys [begin, low) precede the table, [low, high) are inside it, and [high, end) follow it.
  const int64_t low = std::clamp(p - past_, begin, end);
  const int64_t high = std::clamp(p + future_ + 1, low, end);
  const bool clip = far_ == Far::kClip;
  if (clip && begin < low) runs->push_back({begin, low - begin, 0, 0});
  if (low < high) runs->push_back({low, high - low, low - p + past_, 1});
  if (clip && high < end) runs->push_back({high, end - high, past_ + future_, 0});
}

TableRange OffsetLayout::Window(int64_t first, int64_t last, int64_t begin, int64_t end) const {
  if (last <= first || end <= begin) return {0, 0};
  const auto entry = [this](int64_t offset) { return std::clamp(offset, -past_, future_) + past_; };
  return {entry(begin - Near(last - 1)), entry(end - 1 - Near(first)) + 1};
}

int64_t OffsetLayout::LargestWindow(int64_t queries, int64_t keys) const {
  return std::min(size(), queries + keys);
}

std::vector<EntryDifference> OffsetLayout::Differences() const {
  return {{0, size(), far_ == Far::kClip}};
}
std::optional<int64_t> OffsetLayout::KeyCode(size_t /*n*/, int64_t p) const { return p + past_; }
std::optional<int64_t> OffsetLayout::QueryCode(size_t /*n*/, int64_t p) const { return Near(p); }

void KeyLayout::AddRuns(int64_t /*p*/, int64_t begin, int64_t end,
                        std::vector<TableRun>* runs) const {
  begin = std::max<int64_t>(begin, 0);
  end = std::min(end, keys_);
  if (begin < end) runs->push_back({begin, end - begin, begin, 1});
}

TableRange KeyLayout::Window(int64_t /*first*/, int64_t /*last*/, int64_t begin,
                             int64_t end) const {
  return {std::min(begin, keys_), std::min(end, keys_)};
}

int64_t KeyLayout::LargestWindow(int64_t /*queries*/, int64_t keys) const {
  return std::min(keys_, keys);
}

std::vector<EntryDifference> KeyLayout::Differences() const { return {{0, keys_, false}}; }
std::optional<int64_t> KeyLayout::KeyCode(size_t /*n*/, int64_t p) const {
  if (p < 0 || p >= keys_) return std::nullopt;
  return p;
}
std::optional<int64_t> KeyLayout::QueryCode(size_t /*n*/, int64_t /*p*/) const { return 0; }

GridLayout::GridLayout(std::vector<int64_t> shape, int64_t prefix, Kind kind)
    : shape_(std::move(shape)),
      prefix_(prefix),
      kind_(kind),
      tokens_(prefix),
      size_(kind == Kind::kTable ? 1 : 0),
      first_(shape_.size()),
      stride_(shape_.size()) {
  constexpr int64_t kMost = int64_t{1} << 30;
  int64_t cells = 1;
  for (const int64_t length : shape_) {
    cells = length < 1 || length > kMost / cells ? 0 : cells * length;
    if (cells == 0) break;
  }
  if (shape_.empty() || cells == 0 || prefix < 0 || prefix > kMost) {
    std::string text;
    for (const int64_t length : shape_)
      text.append(text.empty() ? "" : ", ").append(std::to_string(length));
    throw Error("attention: grid has shape (" + text + ") and prefix is " + std::to_string(prefix) +
                "; expected positive axis lengths, a non-negative prefix and at most 2^30 tokens");
  }
  for (size_t axis = shape_.size(); axis-- > 0;) {
    stride_[axis] = kind == Kind::kTable ? size_ : 1;
    if (kind == Kind::kTable) size_ *= 2 * shape_[axis] - 1;
  }
  tokens_ += cells;
  for (size_t axis = 0; kind == Kind::kAxes && axis < shape_.size(); ++axis) {
    first_[axis] = size_;
    size_ += 2 * shape_[axis] - 1;
  }
}

void GridLayout::AddRuns(int64_t p, int64_t begin, int64_t end, std::vector<TableRun>* runs) const {
  if (p < prefix_ || p >= tokens_) return;
  end = std::min(end, tokens_);
  const size_t last = shape_.size() - 1;
  // Entries are contiguous along the last axis.
  for (int64_t j = std::max(begin, prefix_); j < end;) {
    int64_t query = p - prefix_;
    int64_t key = j - prefix_;
    const int64_t count = std::min(shape_[last] - key % shape_[last], end - j);
    int64_t sum = 0;
    for (size_t axis = last + 1; axis-- > 0;) {
      const int64_t offset = key % shape_[axis] - query % shape_[axis] + shape_[axis] - 1;
      const int64_t entry = first_[axis] + offset * stride_[axis];
      if (kind_ == Kind::kAxes) runs->push_back({j, count, entry, axis == last ? 1 : 0});
      sum += entry;
      query /= shape_[axis];
      key /= shape_[axis];
    }
    if (kind_ == Kind::kTable) runs->push_back({j, count, sum, 1});
    j += count;
  }
}

std::vector<EntryDifference> GridLayout::Differences() const {
  if (kind_ == Kind::kTable) return {{0, size_, false}};
  std::vector<EntryDifference> axes;
  axes.reserve(shape_.size());
  for (size_t axis = 0; axis < shape_.size(); ++axis) {
    axes.push_back({first_[axis], first_[axis] + 2 * shape_[axis] - 1, false});
  }
  return axes;
}

int64_t GridLayout::Coordinate(size_t axis, int64_t p) const {
  int64_t rest = p - prefix_;
  for (size_t after = shape_.size() - 1; after > axis; --after) rest /= shape_[after];
  return rest % shape_[axis];
}

std::optional<int64_t> GridLayout::KeyCode(size_t n, int64_t p) const {
  if (p < prefix_ || p >= tokens_) return std::nullopt;
  if (kind_ == Kind::kAxes) return first_[n] + Coordinate(n, p) + shape_[n] - 1;
  int64_t code = 0;
  for (size_t axis = 0; axis < shape_.size(); ++axis) {
    code += (Coordinate(axis, p) + shape_[axis] - 1) * stride_[axis];
  }
  return code;
}

std::optional<int64_t> GridLayout::QueryCode(size_t n, int64_t p) const {
  if (p < prefix_ || p >= tokens_) return std::nullopt;
  if (kind_ == Kind::kAxes) return Coordinate(n, p);
  int64_t code = 0;
  for (size_t axis = 0; axis < shape_.size(); ++axis) {
    code += Coordinate(axis, p) * stride_[axis];
  }
  return code;
}

}  // namespace gnomon
