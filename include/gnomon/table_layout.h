// Layouts of tables whose entries apply to pairs of tokens, indexed by offset, by key, or by
// offsets on a grid.
#ifndef GNOMON_TABLE_LAYOUT_H_
#define GNOMON_TABLE_LAYOUT_H_

#include <gnomon/attention.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace gnomon {

// Entry n belongs to the offset p_j - p_i = n - past, for offsets -past ... future. Outside this
// range, a pair reads the nearest entry (kClip) or none (kZero).
class OffsetLayout final : public TableLayout {
 public:
  enum class Far { kClip, kZero };

  OffsetLayout(int64_t past, int64_t future, Far far) : past_(past), future_(future), far_(far) {}

  int64_t past() const { return past_; }
  int64_t future() const { return future_; }
  Far far() const { return far_; }
  int64_t size() const override { return past_ + future_ + 1; }
  void AddRuns(int64_t p, int64_t begin, int64_t end, std::vector<TableRun>* runs) const override;
  TableRange Window(int64_t first, int64_t last, int64_t begin, int64_t end) const override;
  int64_t LargestWindow(int64_t queries, int64_t keys) const override;
  int64_t MostEntries() const override { return 1; }
  std::vector<EntryDifference> Differences() const override;
  std::optional<int64_t> KeyCode(size_t n, int64_t p) const override;
  std::optional<int64_t> QueryCode(size_t n, int64_t p) const override;

 private:
  int64_t past_;
  int64_t future_;
  Far far_;
};

// Entry n belongs to the key at position n, for every query.
class KeyLayout final : public TableLayout {
 public:
  explicit KeyLayout(int64_t keys) : keys_(keys) {}

  int64_t size() const override { return keys_; }
  void AddRuns(int64_t p, int64_t begin, int64_t end, std::vector<TableRun>* runs) const override;
  TableRange Window(int64_t first, int64_t last, int64_t begin, int64_t end) const override;
  int64_t LargestWindow(int64_t queries, int64_t keys) const override;
  int64_t MostEntries() const override { return 1; }
  std::vector<EntryDifference> Differences() const override;
  std::optional<int64_t> KeyCode(size_t n, int64_t p) const override;
  std::optional<int64_t> QueryCode(size_t n, int64_t p) const override;

 private:
  int64_t keys_;
};

// For tokens on a grid in row-major order, preceded by `prefix` tokens that read no entries,
// neither as queries nor as keys. A token's position is its index in this order.
//   kTable: one entry for the offsets along all axes, row-major over (2 n_1 - 1, 2 n_2 - 1, ...)
//     with the index offset + n_a - 1 along axis a;
//   kAxes: the sum of one entry per axis, from consecutive tables of 2 n_a - 1 entries.
class GridLayout final : public TableLayout {
 public:
  enum class Kind { kTable, kAxes };

  // Throws Error unless there is at least one axis, all lengths are positive, prefix is not
  // negative, and there are at most 2^30 tokens.
  GridLayout(std::vector<int64_t> shape, int64_t prefix, Kind kind);

  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t prefix() const { return prefix_; }
  Kind kind() const { return kind_; }
  int64_t tokens() const { return tokens_; }
  // For each axis: the index of its first entry, and the stride between consecutive offsets.
  const std::vector<int64_t>& first() const { return first_; }
  const std::vector<int64_t>& stride() const { return stride_; }
  int64_t size() const override { return size_; }
  void AddRuns(int64_t p, int64_t begin, int64_t end, std::vector<TableRun>* runs) const override;
  int64_t MostEntries() const override {
    return kind_ == Kind::kTable ? 1 : static_cast<int64_t>(shape_.size());
  }
  std::vector<EntryDifference> Differences() const override;
  std::optional<int64_t> KeyCode(size_t n, int64_t p) const override;
  std::optional<int64_t> QueryCode(size_t n, int64_t p) const override;

 private:
  // Returns the coordinate of a position along an axis.
  int64_t Coordinate(size_t axis, int64_t p) const;

  std::vector<int64_t> shape_;
  int64_t prefix_;
  Kind kind_;
  int64_t tokens_;
  int64_t size_;
  std::vector<int64_t> first_;
  std::vector<int64_t> stride_;
};

}  // namespace gnomon

#endif  // GNOMON_TABLE_LAYOUT_H_
