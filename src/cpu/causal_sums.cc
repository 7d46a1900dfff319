// Each task processes a segment of the sequence in chunks of rows. The result of a chunk is the sum
// over its own rows, plus the product of x and the state. The state is the sum of y_j^T z_j over
// all earlier chunks. A first pass sums each segment; the initial state of a segment is the total
// over all earlier segments. Segments depend only on the shape, so results do not depend on the
// number of workers.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/causal_sums.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h:
#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "cpu/causal_sums.h"
#include "cpu/packing-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gnomon {
namespace HWY_NAMESPACE {
namespace {

constexpr int64_t kChunk = 64;
static_assert(kChunk % kLaneCount == 0);
// The number of rows whose products are computed together; products that are masked for all of them
// are skipped.
constexpr int64_t kStep = 24;

HWY_INLINE VF Map(Feature feature, VF a) {
  const VF zero = hn::Zero(DF());
  if (feature == Feature::kRelu) return Select(a < zero, zero, a);
  return Select(a > zero, a + hn::Set(DF(), 1.0f), Exp(Min(zero, a)));
}

struct Scratch {
  explicit Scratch(const CausalSums& n)
      : width(RoundUp(n.value_dim, kLaneCount)),
        x(kChunk * n.dim),
        y(kChunk * n.dim),
        turned(n.dim * kChunk),
        z(kChunk * width),
        products(kChunk * kChunk),
        out(kChunk * width),
        state(n.dim * width),
        sum(n.dim) {}

  int64_t width;  // columns of z, out and the state, rounded up to whole vectors
  Buffer x;
  Buffer y;
  Buffer turned;  // y transposed
  Buffer z;
  Buffer products;
  Buffer out;
  Buffer state;
  Buffer sum;  // sum of y
};

class Pass {
 public:
  Pass(const CausalSums& n, const Executor& executor)
      : n_(n), executor_(executor), chunks_(DivideUp(n.rows, kChunk)) {
    // Creates enough tasks for many workers, with segments long enough to amortise the computation
    // of their initial states.
    constexpr int64_t kTasks = 32;
    constexpr int64_t kLeastChunks = 8;
    const int64_t pairs = n.batch * n.key_heads;
    const int64_t wanted = std::min(DivideUp(kTasks, pairs), chunks_ / kLeastChunks);
    segment_ = DivideUp(chunks_, std::max<int64_t>(wanted, 1));
    segments_ = DivideUp(chunks_, segment_);
    tasks_ = pairs * segments_;
    state_size_ = n.dim * RoundUp(n.value_dim, kLaneCount);
  }

  void Run() {
    const int workers = WorkersFor(executor_, tasks_);
    std::vector<Scratch> scratch;
    scratch.reserve(static_cast<size_t>(workers));
    for (int worker = 0; worker < workers; ++worker) scratch.emplace_back(n_);
    if (segments_ > 1) {
      states_.Reset(tasks_ * state_size_);
      sums_.Reset(tasks_ * n_.dim);
      ParallelTasks(executor_, tasks_, [&](int64_t task, int worker) {
        // No segment follows the last one, so its sum is not needed.
        if (task % segments_ < segments_ - 1) SumSegment(task, scratch[worker]);
      });
    }
    ParallelTasks(executor_, tasks_,
                  [&](int64_t task, int worker) { RunSegment(task, scratch[worker]); });
  }

 private:
  // Rows [begin, begin + rows) of a key head.
  struct Chunk {
    int64_t b;
    int64_t head;
    int64_t begin;
    int64_t rows;
    Strided y;
    const float* z;
    size_t z_stride;
  };

  // Loads the n-th chunk in summation order, which starts at the end of the sequence if `reverse`.
  Chunk Load(int64_t task, int64_t n, const Scratch& scratch) const {
    Chunk chunk;
    chunk.b = task / segments_ / n_.key_heads;
    chunk.head = task / segments_ % n_.key_heads;
    chunk.begin = (n_.reverse ? chunks_ - 1 - n : n) * kChunk;
    chunk.rows = std::min(kChunk, n_.rows - chunk.begin);
    chunk.y = MappedRows(n_.y, chunk, chunk.head, scratch.y.data());
    chunk.z = n_.z.row(chunk.b, chunk.head, chunk.begin);
    chunk.z_stride = Size(n_.z.stride[2]);
    if (scratch.width != n_.value_dim) {
      for (int64_t i = 0; i < chunk.rows; ++i) {
        float* to = scratch.z.data() + i * scratch.width;
        std::copy_n(chunk.z + i * n_.z.stride[2], n_.value_dim, to);
        std::fill(to + n_.value_dim, to + scratch.width, 0.0f);
      }
      chunk.z = scratch.z.data();
      chunk.z_stride = Size(scratch.width);
    }
    return chunk;
  }

  // Returns the chunk's rows of a view: in place if there is no feature map, otherwise mapped and
  // stored in `to`.
  Strided MappedRows(const View<const float>& view, const Chunk& chunk, int64_t head,
                     float* to) const {
    const float* from = view.row(chunk.b, head, chunk.begin);
    if (n_.feature == Feature::kNone) return {from, Size(view.stride[2]), 1};
    const DF d;
    for (int64_t i = 0; i < chunk.rows; ++i, from += view.stride[2]) {
      float* row = to + i * n_.dim;
      int64_t e = 0;
      for (; e + kLaneCount <= n_.dim; e += kLaneCount) {
        hn::StoreU(Map(n_.feature, hn::LoadU(d, from + e)), d, row + e);
      }
      if (e < n_.dim) {
        float part[kLanes] = {};
        std::copy(from + e, from + n_.dim, part);
        hn::StoreU(Map(n_.feature, hn::LoadU(d, part)), d, part);
        std::copy_n(part, n_.dim - e, row + e);
      }
    }
    return {to, Size(n_.dim), 1};
  }

  // Initialises the state with the sum over all earlier segments (zeros for the first segment).
  void Begin(int64_t task, const Scratch& scratch) const {
    std::fill_n(scratch.state.data(), state_size_, 0.0f);
    std::fill_n(scratch.sum.data(), n_.dim, 0.0f);
    for (int64_t before = task - task % segments_; before < task; ++before) {
      Add(states_.data() + before * state_size_, state_size_, scratch.state.data());
      Add(sums_.data() + before * n_.dim, n_.dim, scratch.sum.data());
    }
  }

  static void Add(const float* HWY_RESTRICT from, int64_t count, float* HWY_RESTRICT to) {
    for (int64_t e = 0; e < count; ++e) to[e] += from[e];
  }

  void AddToState(const Chunk& chunk, const Scratch& scratch) const {
    const size_t width = Size(scratch.width);
    MultiplyAdd(Size(n_.dim), width / kLanes, Size(chunk.rows), {chunk.y.data, 1, chunk.y.row},
                chunk.z, chunk.z_stride, scratch.state.data(), width);
    if (n_.denominator == nullptr) return;
    for (int64_t j = 0; j < chunk.rows; ++j) {
      Add(chunk.y.data + Size(j) * chunk.y.row, n_.dim, scratch.sum.data());
    }
  }

  void SumSegment(int64_t task, const Scratch& scratch) const {
    std::fill_n(scratch.state.data(), state_size_, 0.0f);
    std::fill_n(scratch.sum.data(), n_.dim, 0.0f);
    const int64_t begin = task % segments_ * segment_;
    for (int64_t n = begin; n < begin + segment_; ++n) {
      AddToState(Load(task, n, scratch), scratch);
    }
    std::copy_n(scratch.state.data(), state_size_, states_.data() + task * state_size_);
    std::copy_n(scratch.sum.data(), n_.dim, sums_.data() + task * n_.dim);
  }

  void RunSegment(int64_t task, const Scratch& scratch) const {
    Begin(task, scratch);
    const int64_t group = n_.heads / n_.key_heads;
    const int64_t begin = task % segments_ * segment_;
    const int64_t end = std::min(begin + segment_, chunks_);
    for (int64_t n = begin; n < end; ++n) {
      const Chunk chunk = Load(task, n, scratch);
      Turn(chunk, scratch.turned.data());
      for (int64_t g = 0; g < group; ++g) Query(chunk, chunk.head * group + g, scratch);
      if (n + 1 < end) AddToState(chunk, scratch);
    }
  }

  void Turn(const Chunk& chunk, float* HWY_RESTRICT to) const {
    const auto row = [&](int64_t j) {
      return chunk.y.data + j * static_cast<int64_t>(chunk.y.row);
    };
    int64_t j = 0;
    for (; j + 4 <= chunk.rows; j += 4) {
      const float* const rows[4] = {row(j), row(j + 1), row(j + 2), row(j + 3)};
      TransposeFour<kChunk>(rows, n_.dim, to + j);
    }
    for (; j < RoundUp(chunk.rows, kLaneCount); ++j) {
      for (int64_t e = 0; e < n_.dim; ++e) to[e * kChunk + j] = j < chunk.rows ? row(j)[e] : 0.0f;
    }
  }

  void Query(const Chunk& chunk, int64_t head, const Scratch& scratch) const {
    const Strided x = MappedRows(n_.x, chunk, head, scratch.x.data());
    const bool in_place = scratch.width == n_.value_dim;
    float* out = in_place ? n_.out.row(chunk.b, head, chunk.begin) : scratch.out.data();
    const int64_t stride = in_place ? n_.out.stride[2] : scratch.width;
    const size_t vectors = Size(scratch.width) / kLanes;
    for (int64_t begin = 0; begin < chunk.rows; begin += kStep) {
      const int64_t end = std::min(begin + kStep, chunk.rows);
      const int64_t first = n_.reverse ? begin : 0;
      const int64_t last = n_.reverse ? chunk.rows : end;
      const int64_t from = first / kLaneCount * kLaneCount;
      const int64_t to = RoundUp(last, kLaneCount);
      const Strided rows = {x.data + Size(begin) * x.row, x.row, 1};
      float* products = scratch.products.data() + begin * kChunk;
      Multiply(Size(end - begin), Size(to - from) / kLanes, Size(n_.dim), rows,
               scratch.turned.data() + from, kChunk, products + from, kChunk);
      for (int64_t i = begin; i < end; ++i) {
        float* row = products + (i - begin) * kChunk;
        std::fill(row + from, row + (n_.reverse ? i : from), 0.0f);
        std::fill(row + (n_.reverse ? chunk.rows : i + 1), row + to, 0.0f);
      }
      float* sums = out + begin * stride;
      Multiply(Size(end - begin), vectors, Size(last - first), {products + first, kChunk, 1},
               chunk.z + Size(first) * chunk.z_stride, chunk.z_stride, sums, Size(stride));
      MultiplyAdd(Size(end - begin), vectors, Size(n_.dim), rows, scratch.state.data(),
                  Size(scratch.width), sums, Size(stride));
      if (n_.denominator == nullptr) continue;
      for (int64_t i = begin; i < end; ++i) {
        const float* row = products + (i - begin) * kChunk;
        const float* features = x.data + Size(i) * x.row;
        const float* sum = scratch.sum.data();
        const float d = Sum(to - from, [=](int64_t j) { return row[from + j]; }) +
                        Sum(n_.dim, [=](int64_t e) { return features[e] * sum[e]; });
        n_.denominator[(chunk.b * n_.heads + head) * n_.rows + chunk.begin + i] = d;
        float* HWY_RESTRICT divided = out + i * stride;
        for (int64_t e = 0; e < n_.value_dim; ++e) divided[e] = d == 0 ? 0.0f : divided[e] / d;
      }
    }
    if (in_place) return;
    for (int64_t i = 0; i < chunk.rows; ++i) {
      std::copy_n(out + i * stride, n_.value_dim, n_.out.row(chunk.b, head, chunk.begin + i));
    }
  }

  const CausalSums& n_;
  const Executor& executor_;
  int64_t chunks_;
  int64_t segment_;  // chunks per segment, except the last
  int64_t segments_;
  int64_t tasks_;
  int64_t state_size_;
  Buffer states_;
  Buffer sums_;
};

void Sums(const CausalSums& sums, const Executor& executor) { Pass(sums, executor).Run(); }

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace gnomon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gnomon {
namespace {
HWY_EXPORT(Sums);
}  // namespace

void CausalSumsKernel(const CausalSums& sums, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(Sums)(sums, executor);
}

}  // namespace gnomon
#endif
