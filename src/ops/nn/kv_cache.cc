#include <gnomon/torch/nn.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

namespace gnomon::nn {
namespace {

// Whether new tokens can be appended to the cached ones.
bool HaveOneForm(const std::vector<torch::Tensor*>& kept, const std::vector<torch::Tensor>& fresh) {
  for (size_t n = 0; n < kept.size(); ++n) {
    const torch::Tensor& before = *kept[n];
    const torch::Tensor& after = fresh[n];
    std::vector<int64_t> sizes = after.sizes().vec();
    if (before.dim() != after.dim() || before.numel() == 0 ||
        before.scalar_type() != after.scalar_type() || before.device() != after.device()) {
      return false;
    }
    sizes[2] = before.size(2);
    if (before.sizes() != sizes || after.size(2) != fresh[0].size(2) ||
        before.size(2) != kept[0]->size(2)) {
      return false;
    }
  }
  return true;
}

}  // namespace

// Tensors (B, H, capacity, ...) whose leading slots are in use.
struct KVCache::Room {
  // Allocates 1.5 times the slots needed for `kept` and `more` new tokens, and copies `kept`.
  Room(const std::vector<torch::Tensor*>& kept, int64_t more) {
    const int64_t count = kept[0]->size(2);
    for (torch::Tensor* tensor : kept) {
      std::vector<int64_t> sizes = tensor->sizes().vec();
      sizes[2] = (count + more) + (count + more) / 2;
      const torch::Tensor whole = torch::empty(sizes, tensor->options());
      whole.narrow(2, 0, count).copy_(*tensor);
      *tensor = whole.narrow(2, 0, count);
      tensors.push_back(whole);
    }
    taken = count;
  }

  // Reserves `more` slots after those of `kept` and returns the index of the first. Returns nullopt
  // if `kept` is not stored here, if the slots are reserved already, or if there are too few.
  std::optional<int64_t> Take(const std::vector<torch::Tensor*>& kept, int64_t more) {
    int64_t end = taken;
    if (kept.size() != tensors.size() || end + more > tensors[0].size(2)) return std::nullopt;
    for (size_t n = 0; n < kept.size(); ++n) {
      const torch::Tensor& whole = tensors[n];
      const int64_t first = end - kept[n]->size(2);
      const bool is_here =
          first >= 0 && kept[n]->is_alias_of(whole) &&
          whole.is_inference() == at::InferenceMode::is_enabled() &&
          kept[n]->strides() == whole.strides() &&
          kept[n]->storage_offset() == whole.storage_offset() + first * whole.stride(2);
      if (!is_here) return std::nullopt;
    }
    if (!taken.compare_exchange_strong(end, end + more)) return std::nullopt;
    return end;
  }

  std::vector<torch::Tensor> tensors;
  std::atomic<int64_t> taken;
};

// Appends `fresh` to `kept`, in place if there is capacity and no gradient is recorded.
void KVCache::Extend(const std::vector<torch::Tensor*>& kept,
                     const std::vector<torch::Tensor>& fresh, std::shared_ptr<Room>* room) {
  // Tensors saved for a backward pass must not change.
  const bool in_place =
      !at::GradMode::is_enabled() &&
      std::all_of(kept.begin(), kept.end(),
                  [](const torch::Tensor* tensor) { return tensor->has_storage(); }) &&
      HaveOneForm(kept, fresh);
  if (!in_place) {
    for (size_t n = 0; n < kept.size(); ++n) *kept[n] = torch::cat({*kept[n], fresh[n]}, 2);
    room->reset();
    return;
  }
  const int64_t more = fresh[0].size(2);
  std::optional<int64_t> end = *room == nullptr ? std::nullopt : (*room)->Take(kept, more);
  if (!end) {
    *room = std::make_shared<Room>(kept, more);
    end = (*room)->Take(kept, more);
  }
  for (size_t n = 0; n < kept.size(); ++n) {
    const torch::Tensor& whole = (*room)->tensors[n];
    whole.narrow(2, *end, more).copy_(fresh[n]);
    const int64_t count = kept[n]->size(2) + more;
    *kept[n] = whole.narrow(2, *end + more - count, count);
  }
}

void KVCache::append(const torch::Tensor& new_k, const torch::Tensor& new_v,
                     const std::vector<torch::Tensor>& new_projections,
                     const torch::Tensor& new_positions) {
  if (!k.defined()) {
    k = new_k;
    v = new_v;
    projections = new_projections;
    positions = new_positions;
    return;
  }
  const bool has_turned = HasTurned();
  TORCH_CHECK_VALUE(
      !positions.defined() || new_positions.defined(),
      "gnomon.nn.KVCache: the cache contains positions, but the new tokens have none; "
      "pass the positions of the new tokens");
  TORCH_CHECK_VALUE(projections.size() == new_projections.size(),
                    "gnomon.nn.KVCache: the cache contains ", projections.size(),
                    " projections, but the call has ", new_projections.size(),
                    "; expected the same number");
  if (new_positions.defined()) {
    torch::Tensor known =
        positions.defined() ? positions : torch::arange(length(), new_positions.options());
    torch::Tensor fresh = new_positions;
    if (fresh.dim() == 3) {
      // Coordinates that the batch shares are expanded to match per-sequence ones.
      TORCH_CHECK_VALUE(known.dim() == 3 && known.size(2) == fresh.size(2),
                        "gnomon.nn.KVCache: the new positions and the cached ones have different "
                        "numbers of axes; expected the same number");
      if (known.size(0) != fresh.size(0)) {
        known = known.expand({new_k.size(0), -1, -1});
        fresh = fresh.expand({new_k.size(0), -1, -1});
      }
      positions = torch::cat({known, fresh}, 1);
    } else {
      TORCH_CHECK_VALUE(
          known.dim() < 3,
          "gnomon.nn.KVCache: the cached positions have several axes, but the new ones do not; "
          "expected the same number of axes");
      // Positions that the batch shares are expanded to match per-sequence ones.
      for (torch::Tensor* one : {&known, &fresh}) {
        if (one->dim() < std::max(known.dim(), fresh.dim())) {
          *one = one->expand({new_k.size(0), one->size(-1)});
        }
      }
      positions = torch::cat({known, fresh}, -1);
    }
  }
  std::vector<torch::Tensor*> kept = {&k, &v};
  std::vector<torch::Tensor> fresh = {new_k, new_v};
  for (torch::Tensor& projection : projections) kept.push_back(&projection);
  fresh.insert(fresh.end(), new_projections.begin(), new_projections.end());
  Extend(kept, fresh, &room_);
  turned_of_ = has_turned ? k : torch::Tensor();
  turned_at_ = positions;
}

bool KVCache::HasTurned() const {
  return turned_of_.defined() && turned_of_.is_same(k) && turned_at_.is_same(positions);
}

torch::Tensor KVCache::turned(
    const std::function<torch::Tensor(const torch::Tensor& keys, int64_t first)>& turn,
    const std::string& rotation) {
  if (!HasTurned() || rotation_ != rotation) {
    turned_ = turn(k, 0);
    turned_room_.reset();
  } else if (const int64_t known = turned_.size(2); known < k.size(2)) {
    Extend({&turned_}, {turn(k.narrow(2, known, k.size(2) - known), known)}, &turned_room_);
  }
  turned_of_ = k;
  turned_at_ = positions;
  rotation_ = rotation;
  return turned_;
}

void KVCache::keep_last(int64_t length) {
  const int64_t forgotten = this->length() - length;
  if (forgotten <= 0) return;
  const auto keep = [&](torch::Tensor* tensor, int64_t axis) {
    *tensor = tensor->narrow(axis, forgotten, length);
  };
  keep(&k, 2);
  keep(&v, 2);
  for (torch::Tensor& projection : projections) keep(&projection, 2);
  if (positions.defined()) keep(&positions, positions.dim() == 3 ? 1 : positions.dim() - 1);
}

void KVCache::reset() {
  room_.reset();
  turned_room_.reset();
  turned_ = turned_of_ = turned_at_ = torch::Tensor();
  k = torch::Tensor();
  v = torch::Tensor();
  projections.clear();
  positions = torch::Tensor();
}

}  // namespace gnomon::nn
