// Splits the edges of a graph into chunks of about equal work, and transposes graphs.
#ifndef GNOMON_SRC_BASE_EDGE_CHUNKS_H_
#define GNOMON_SRC_BASE_EDGE_CHUNKS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnomon {

// Row i of the graph occupies one position per edge and one extra position: indptr[i] + i to
// indptr[i + 1] + i. A chunk is an interval of positions (Merrill and Garland 2016, Merge-Based
// Parallel Sparse Matrix-Vector Multiplication). Chunks are therefore balanced both if rows have
// many edges and if many rows are empty. Chunks depend only on the graph. A row that crosses chunk
// borders is summed in parts, one per chunk; each part has its own memory slot.
class EdgeChunks {
 public:
  EdgeChunks(const int64_t* indptr, int64_t rows, int64_t size)
      : indptr_(indptr), rows_(rows), size_(size) {}

  int64_t count() const { return (Start(rows_) + size_ - 1) / size_; }
  int64_t slots() const { return 2 * count(); }
  // The maximum number of edges per chunk.
  int64_t size() const { return size_; }

  // The first edge of a chunk; the number of edges for chunk count().
  int64_t FirstEdge(int64_t chunk) const {
    if (chunk == count()) return indptr_[rows_];
    const int64_t row = RowAt(chunk * size_);
    return std::max(indptr_[row], chunk * size_ - row);
  }

  // Edges [begin, end) of a row. `slot` is negative if these are all edges of the row.
  struct Part {
    int64_t row;
    int64_t begin;
    int64_t end;
    int64_t slot;
  };

  // Calls body(part) for each row of a chunk, in order.
  template <class Body>
  void ForRows(int64_t chunk, const Body& body) const {
    const int64_t first = chunk * size_;
    const int64_t last = std::min(first + size_, Start(rows_));
    for (int64_t i = RowAt(first); i < rows_ && Start(i) < last; ++i) {
      const bool begins = Start(i) >= first;
      const bool whole = begins && Start(i + 1) <= last;
      body(Part{i, std::max(indptr_[i], first - i), std::min(indptr_[i + 1], last - i),
                whole ? -1 : 2 * chunk + (begins ? 1 : 0)});
    }
  }

  // If a row starts in this chunk and ends in a later one, calls body(row, slots) with the slots of
  // its parts.
  template <class Body>
  void ForCutRow(int64_t chunk, const Body& body) const {
    const int64_t border = (chunk + 1) * size_;
    if (border >= Start(rows_)) return;
    const int64_t row = RowAt(border - 1);
    if (Start(row + 1) <= border || Start(row) < chunk * size_) return;
    std::vector<int64_t> slots = {2 * chunk + 1};
    const int64_t last = (Start(row + 1) - 1) / size_;
    for (int64_t c = chunk + 1; c <= last; ++c) slots.push_back(2 * c);
    body(row, slots);
  }

 private:
  int64_t Start(int64_t row) const { return indptr_[row] + row; }

  // The row that contains a position.
  int64_t RowAt(int64_t position) const {
    int64_t low = 0;
    int64_t high = rows_;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (Start(middle + 1) > position) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  const int64_t* indptr_;
  int64_t rows_;
  int64_t size_;
};

// The edges sorted by key; edges with the same key keep their order.
struct TransposedGraph {
  TransposedGraph(const int64_t* from_indptr, const int64_t* from_indices, int64_t queries,
                  int64_t keys)
      : indptr(static_cast<size_t>(keys + 1), 0),
        rows(static_cast<size_t>(from_indptr[queries])),
        edges(rows.size()) {
    for (size_t e = 0; e < edges.size(); ++e) ++indptr[static_cast<size_t>(from_indices[e]) + 1];
    for (size_t j = 0; j < static_cast<size_t>(keys); ++j) indptr[j + 1] += indptr[j];
    std::vector<int64_t> next(indptr.begin(), indptr.end() - 1);
    for (int64_t i = 0; i < queries; ++i) {
      for (int64_t e = from_indptr[i]; e < from_indptr[i + 1]; ++e) {
        const auto to = static_cast<size_t>(next[static_cast<size_t>(from_indices[e])]++);
        rows[to] = i;
        edges[to] = e;
      }
    }
  }

  std::vector<int64_t> indptr;  // (Nk + 1)
  std::vector<int64_t> rows;    // (E): query of each edge
  std::vector<int64_t> edges;   // (E): index of each edge
};

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_EDGE_CHUNKS_H_
