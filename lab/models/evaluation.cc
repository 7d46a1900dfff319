#include "models/evaluation.h"

#include <algorithm>
#include <numbers>
#include <utility>

#include "gnomon/attention.h"
#include "models/windows.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

// Approximate number of tokens in an evaluation batch, regardless of the window length, and its
// maximum number of logits.
constexpr int64_t kEvaluationBatch = 8192;
constexpr int64_t kEvaluationLogits = int64_t{1} << 25;
// Maximum number of elements in a batch's cached keys and values; a single row may have more.
constexpr int64_t kEvaluationMemory = int64_t{1} << 29;

// Sums of losses over the windows of one length.
class WindowSums {
 public:
  WindowSums(const TokenText& text, int64_t length)
      : text_(text), length_(length), tail_(std::min(length, kLastTokens)) {}

  int64_t length() const { return length_; }

  void Read(LanguageModel& model, const int64_t* starts, int64_t count, LanguageModelCache* cache) {
    Add(Losses(model, Windows(text_, starts, count, length_), cache).to(torch::kDouble), starts);
  }

  // Adds the losses of the whole windows in a stretch, given the losses of its tokens.
  void AddStretch(const torch::Tensor& stretch, int64_t start) {
    const int64_t count = stretch.size(0) / length_;
    std::vector<int64_t> starts;
    for (int64_t n = 0; n < count; ++n) starts.push_back(start + n * length_);
    Add(stretch.narrow(0, 0, count * length_).view({count, length_}), starts.data());
  }

  // Adds the losses (count, length) of the windows that begin at `starts`.
  void Add(const torch::Tensor& losses, const int64_t* starts) {
    const int64_t count = losses.size(0);
    loss_ += losses.sum().item<double>();
    last_ += losses.narrow(1, length_ - tail_, tail_).sum().item<double>();
    windows_ += count;
    for (int64_t n = 0; n < count; ++n) {
      bytes_ += text_.CountBytes(starts[n] + 1, starts[n] + 1 + length_);
    }
  }

  LengthLoss Means() const {
    LengthLoss means;
    means.length = length_;
    means.windows = windows_;
    means.loss = loss_ / static_cast<double>(windows_ * length_);
    means.last = last_ / static_cast<double>(windows_ * tail_);
    means.bits_per_byte = loss_ / (std::numbers::ln2 * static_cast<double>(bytes_));
    return means;
  }

 private:
  const TokenText& text_;
  int64_t length_;
  int64_t tail_;
  int64_t windows_ = 0;
  int64_t bytes_ = 0;
  double loss_ = 0;
  double last_ = 0;
};

// Processes `windows` (B, L + 1) as the continuation of the cached tokens. Returns the losses (B,
// count) of the last `count` tokens, in nats.
torch::Tensor Read(LanguageModel& model, const torch::Tensor& windows, int64_t count,
                   LanguageModelCache* cache) {
  const int64_t length = windows.size(1) - 1;
  return model->losses(windows.narrow(1, 0, length), windows.narrow(1, length + 1 - count, count),
                       cache);
}

// Evaluates independent windows. Returns false if `proceed` returned false.
bool AddWindows(LanguageModel& model, const std::vector<int64_t>& starts, int64_t batch,
                const std::function<bool()>& proceed, WindowSums* sums) {
  const auto windows = static_cast<int64_t>(starts.size());
  for (int64_t at = 0; at < windows; at += batch) {
    if (proceed != nullptr && !proceed()) return false;
    sums->Read(model, &starts[at], std::min(batch, windows - at), nullptr);
  }
  return true;
}

// Concatenates the caches along the rows.
LanguageModelCache Joined(std::vector<LanguageModelCache> parts) {
  LanguageModelCache whole = parts[0];
  if (parts.size() == 1) return whole;
  const auto join = [&](const auto& of) {
    std::vector<torch::Tensor> tensors;
    for (const LanguageModelCache& part : parts) tensors.push_back(of(part));
    return torch::cat(tensors);
  };
  for (size_t layer = 0; layer < whole.layers.size(); ++layer) {
    nn::KVCache joined;
    if (whole.layers[layer].length() > 0) {
      joined.k = join([&](const LanguageModelCache& part) { return part.layers[layer].k; });
      joined.v = join([&](const LanguageModelCache& part) { return part.layers[layer].v; });
      for (size_t n = 0; n < whole.layers[layer].projections.size(); ++n) {
        joined.projections.push_back(join(
            [&](const LanguageModelCache& part) { return part.layers[layer].projections[n]; }));
      }
    }
    whole.layers[layer] = std::move(joined);
    // Free the parts of each layer as soon as they are concatenated, because memory may not suffice
    // for two copies of all layers.
    for (LanguageModelCache& part : parts) part.layers[layer].reset();
  }
  if (whole.tokens.embeddings.defined()) {
    whole.tokens.embeddings =
        join([](const LanguageModelCache& part) { return part.tokens.embeddings; });
  }
  return whole;
}

// Reads the `tokens` tokens before each of `starts` into `cache`, in windows of `length`, as many
// at once as a batch may contain. Returns false if `proceed` returned false.
bool ReadBefore(LanguageModel& model, const TokenText& text, const std::vector<int64_t>& starts,
                int64_t tokens, int64_t length, const std::function<bool()>& proceed,
                LanguageModelCache* cache) {
  const auto count = static_cast<int64_t>(starts.size());
  const int64_t most = std::max<int64_t>(kEvaluationBatch / length / count, 1) * length;
  for (int64_t left = tokens; left > 0;) {
    if (proceed != nullptr && !proceed()) return false;
    const int64_t read = std::min(most, left);
    std::vector<int64_t> from = starts;
    for (int64_t& start : from) start -= left;
    Read(model, Windows(text, from.data(), count, read), /*count=*/0, cache);
    left -= read;
  }
  return true;
}

// Returns a cache with the `tokens` tokens before each of `stretches`, read in windows of `length`.
// `memory` covers all windows except the last, so each token attends to all those before it. The
// result is empty if `proceed` returned false.
std::optional<LanguageModelCache> FillCache(LanguageModel& model, const TokenText& text,
                                            const std::vector<int64_t>& stretches, int64_t tokens,
                                            int64_t length, int64_t memory,
                                            const std::function<bool()>& proceed) {
  const auto total = static_cast<int64_t>(stretches.size());
  const int64_t rows =
      std::clamp<int64_t>(kEvaluationBatch / std::max<int64_t>(tokens, 1), 1, total);
  std::vector<LanguageModelCache> parts;
  for (int64_t at = 0; at < total; at += rows) {
    LanguageModelCache& part = parts.emplace_back(model->options().depth, memory);
    const std::vector<int64_t> starts(stretches.begin() + at,
                                      stretches.begin() + std::min(at + rows, total));
    if (!ReadBefore(model, text, starts, tokens, length, proceed, &part)) return std::nullopt;
  }
  return Joined(std::move(parts));
}

// Stretches of a text. The windows of a stretch are consecutive and use a memory of the preceding
// tokens.
struct Stretches {
  std::vector<int64_t> starts;
  int64_t length;  // tokens in each stretch
  int64_t memory;

  int64_t count() const { return static_cast<int64_t>(starts.size()); }
  // The number of tokens in each stretch that belong to whole windows of `window` tokens.
  int64_t Counted(int64_t window) const { return length / window * window; }
  // Number of tokens to read before `start` to fill the memory: a multiple of `window`, limited by
  // the start of the text.
  int64_t Before(int64_t start, int64_t window) const {
    return std::min((memory + window - 1) / window, start / window) * window;
  }
  // Whether it is faster to continue from the previous stretch than to refill the memory. For a
  // long memory, attention dominates the cost. If refilling reads fewer tokens than the stretch
  // has, it is faster to refill and read many stretches at once.
  bool ReadsOn(int64_t window) const {
    if (count() == 1) return false;
    const int64_t gap = (starts.back() - starts[0]) / (count() - 1) - Counted(window);
    const int64_t filling = Before(starts.back(), window);
    const auto cost = [](int64_t tokens, int64_t remembered) {
      return static_cast<double>(tokens) * static_cast<double>(2 * remembered + tokens);
    };
    const int64_t remembered = Before(starts.back() - gap, window);
    return filling > Counted(window) && cost(gap, remembered) <= cost(filling, 0);
  }
};

// Evaluates the consecutive windows of each stretch. Returns false if `proceed` returned false.
bool AddStretches(LanguageModel& model, const TokenText& text, const Stretches& stretches,
                  int64_t batch, const std::function<bool()>& proceed, WindowSums* sums) {
  const int64_t length = sums->length();
  const LanguageModelOptions& options = model->options();
  batch = std::clamp<int64_t>(
      kEvaluationMemory / 2 / options.dim / options.depth / stretches.memory, 1, batch);
  const int64_t total = stretches.count();
  const bool reads_on = stretches.ReadsOn(length);
  std::optional<LanguageModelCache> cache;
  for (int64_t at = 0, count = 0; at < total; at += count) {
    const int64_t start = stretches.starts[at];
    std::vector<int64_t> starts = {start};
    if (reads_on && at > 0) {
      const int64_t skipped = start - stretches.starts[at - 1] - stretches.Counted(length);
      if (!ReadBefore(model, text, starts, skipped, length, proceed, &*cache)) return false;
    } else {
      const int64_t filling = stretches.Before(start, length);
      for (int64_t n = at + 1; !reads_on && n < std::min(at + batch, total); ++n) {
        if (stretches.Before(stretches.starts[n], length) != filling) break;
        starts.push_back(stretches.starts[n]);
      }
      cache = FillCache(model, text, starts, filling, length, stretches.memory, proceed);
      if (!cache) return false;
    }
    count = static_cast<int64_t>(starts.size());
    for (int64_t window = 0; window < stretches.length / length; ++window) {
      if (proceed != nullptr && !proceed()) return false;
      sums->Read(model, starts.data(), count, &*cache);
      for (int64_t& from : starts) from += length;
    }
  }
  return true;
}

// Like AddStretches(), but for a memory that holds the entire text. Each token then attends to all
// previous tokens, regardless of the windows, so one pass over the text covers all lengths.
bool AddInOnePass(LanguageModel& model, const TokenText& text, const Stretches& stretches,
                  int64_t most_losses, const std::function<bool()>& proceed,
                  std::vector<WindowSums>* sums) {
  LanguageModelCache cache(model->options().depth);
  int64_t at = 0;
  for (const int64_t start : stretches.starts) {
    const int64_t end = start + stretches.length;
    std::vector<torch::Tensor> losses;
    while (at < end) {
      if (proceed != nullptr && !proceed()) return false;
      int64_t next = std::min(at + kEvaluationBatch, end);
      next = std::min(next, std::max(at, start) + most_losses);
      const int64_t counted = std::max<int64_t>(next - std::max(at, start), 0);
      const torch::Tensor some =
          Read(model, Windows(text, &at, 1, next - at), counted, &cache).squeeze(0);
      losses.push_back(some.to(torch::kDouble));
      at = next;
    }
    const torch::Tensor stretch = torch::cat(losses);
    for (WindowSums& of_length : *sums) of_length.AddStretch(stretch, start);
  }
  return true;
}

}  // namespace

std::vector<LengthLoss> Evaluate(LanguageModel& model, const TokenText& text,
                                 const std::vector<int64_t>& lengths, int64_t budget,
                                 int64_t memory, const std::function<bool()>& proceed) {
  const torch::NoGradGuard no_grad;
  model->eval();
  CheckMemory(model, memory);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const int64_t tokens = text.size();
  if (tokens <= longest) {
    throw Error(StrCat("evaluation: the text has ", tokens, " tokens, but windows of ", longest,
                       " tokens need at least ", longest + 1,
                       "; use a longer text or shorter windows"));
  }
  // A memory larger than the text has no effect.
  memory = std::min(memory, tokens);
  const int64_t batch_tokens =
      std::min(kEvaluationBatch, kEvaluationLogits / model->options().vocabulary);
  std::vector<LengthLoss> results;
  std::vector<WindowSums> sums;
  for (const int64_t length : lengths) {
    results.emplace_back().length = length;
    if (!model->max_length() || length <= *model->max_length()) sums.emplace_back(text, length);
  }
  const Stretches stretches = {EvaluationStarts(tokens, longest, longest, budget), longest, memory};
  const bool in_one_pass =
      memory == tokens && (stretches.count() == 1 ||
                           std::all_of(lengths.begin(), lengths.end(),
                                       [&](int64_t length) { return stretches.ReadsOn(length); }));
  bool whole = true;
  if (in_one_pass) {
    whole = AddInOnePass(model, text, stretches, batch_tokens, proceed, &sums);
  } else {
    for (WindowSums& of_length : sums) {
      const int64_t length = of_length.length();
      const int64_t batch = std::max<int64_t>(batch_tokens / length, 1);
      whole = whole &&
              (memory == 0 ? AddWindows(model, EvaluationStarts(tokens, length, longest, budget),
                                        batch, proceed, &of_length)
                           : AddStretches(model, text, stretches, batch, proceed, &of_length));
    }
  }
  if (!whole) return {};
  for (LengthLoss& result : results) {
    for (const WindowSums& of_length : sums) {
      if (of_length.length() == result.length) result = of_length.Means();
    }
  }
  return results;
}

}  // namespace gnomon::lab
