#include "models/evaluation.h"

#include <algorithm>
#include <numbers>
#include <utility>

#include "gnomon/attention.h"
#include "models/windows.h"
#include "training/strings.h"

namespace gnomon::models {
namespace {

// Evaluation batches hold about this many tokens, whatever their length, and at most this many
// logits.
constexpr int64_t kEvaluationBatch = 8192;
constexpr int64_t kEvaluationLogits = int64_t{1} << 25;
// And what they remember, in numbers, is at most this much, unless one row alone has more.
constexpr int64_t kEvaluationMemory = int64_t{1} << 28;

// Sums over the windows of one length.
class WindowSums {
 public:
  WindowSums(const TokenText& text, int64_t length)
      : text_(text), length_(length), tail_(std::min(length, kLastTokens)) {}

  int64_t length() const { return length_; }

  void Read(LanguageModel& model, const int64_t* starts, int64_t count,
            LanguageModelMemory* memory) {
    const torch::Tensor losses =
        Losses(model, Windows(text_, starts, count, length_), memory).to(torch::kDouble);
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

// Windows on their own. False: `proceed` said no.
bool AddWindows(LanguageModel& model, const std::vector<int64_t>& starts, int64_t batch,
                const std::function<bool()>& proceed, WindowSums* sums) {
  const auto windows = static_cast<int64_t>(starts.size());
  for (int64_t at = 0; at < windows; at += batch) {
    if (proceed != nullptr && !proceed()) return false;
    sums->Read(model, &starts[at], std::min(batch, windows - at), nullptr);
  }
  return true;
}

// The memory of rows one after the other.
LanguageModelMemory Joined(std::vector<LanguageModelMemory> parts) {
  LanguageModelMemory whole = parts[0];
  if (parts.size() == 1) return whole;
  const auto join = [&](const auto& of) {
    std::vector<torch::Tensor> tensors;
    for (const LanguageModelMemory& part : parts) tensors.push_back(of(part));
    return torch::cat(tensors);
  };
  for (size_t layer = 0; layer < whole.layers.size(); ++layer) {
    whole.layers[layer] = join([&](const LanguageModelMemory& part) { return part.layers[layer]; });
    // There is no room for all layers twice.
    for (LanguageModelMemory& part : parts) part.layers[layer].reset();
  }
  if (whole.tokens.embeddings.defined()) {
    whole.tokens.embeddings =
        join([](const LanguageModelMemory& part) { return part.tokens.embeddings; });
  }
  return whole;
}

// Reads the `tokens` tokens before each of `starts` into `memory`, as many windows of `length` at
// once as there is room for. False: `proceed` said no.
bool ReadBefore(LanguageModel& model, const TokenText& text, const std::vector<int64_t>& starts,
                int64_t tokens, int64_t length, const std::function<bool()>& proceed,
                LanguageModelMemory* memory) {
  const auto count = static_cast<int64_t>(starts.size());
  const int64_t most = std::max<int64_t>(kEvaluationBatch / length / count, 1) * length;
  for (int64_t left = tokens; left > 0;) {
    if (proceed != nullptr && !proceed()) return false;
    const int64_t read = std::min(most, left);
    std::vector<int64_t> from = starts;
    for (int64_t& start : from) start -= left;
    model->read(Windows(text, from.data(), count, read).narrow(1, 0, read), memory);
    left -= read;
  }
  return true;
}

// The memory that `tokens` tokens before each of `stretches` leave: windows of `length`, of which
// all but the last fit into it, so that each token sees all before it. None: `proceed` said no.
std::optional<LanguageModelMemory> FillMemory(LanguageModel& model, const TokenText& text,
                                              const std::vector<int64_t>& stretches, int64_t tokens,
                                              int64_t length, int64_t memory,
                                              const std::function<bool()>& proceed) {
  const auto total = static_cast<int64_t>(stretches.size());
  const int64_t rows =
      std::clamp<int64_t>(kEvaluationBatch / std::max<int64_t>(tokens, 1), 1, total);
  std::vector<LanguageModelMemory> parts;
  for (int64_t at = 0; at < total; at += rows) {
    LanguageModelMemory& part = parts.emplace_back();
    part.max_length = memory;
    const std::vector<int64_t> starts(stretches.begin() + at,
                                      stretches.begin() + std::min(at + rows, total));
    if (!ReadBefore(model, text, starts, tokens, length, proceed, &part)) return std::nullopt;
  }
  return Joined(std::move(parts));
}

// Windows one after the other in each stretch, with a memory of those before. False: `proceed` said
// no.
bool AddStretches(LanguageModel& model, const TokenText& text,
                  const std::vector<int64_t>& stretches, int64_t stretch, int64_t batch,
                  int64_t memory, const std::function<bool()>& proceed, WindowSums* sums) {
  const int64_t length = sums->length();
  const LanguageModelOptions& options = model->options();
  batch = std::clamp<int64_t>(kEvaluationMemory / options.dim / options.depth / memory, 1, batch);
  // Tokens before a stretch, in whole windows, that fill the memory, as far as the text goes back.
  const auto before = [&](int64_t start) {
    return std::min((memory + length - 1) / length, start / length) * length;
  };
  const auto total = static_cast<int64_t>(stretches.size());
  const int64_t counted = stretch / length * length;
  // Whether reading on from the stretch before costs less than filling the memory anew: attention
  // is what a long memory costs. Where filling it takes fewer tokens than the stretch has, reading
  // many stretches at once is worth more.
  const auto reads_on = [&] {
    if (total == 1) return false;
    const int64_t gap = (stretches.back() - stretches[0]) / (total - 1) - counted;
    const int64_t filling = before(stretches.back());
    const auto cost = [](int64_t tokens, int64_t remembered) {
      return static_cast<double>(tokens) * static_cast<double>(2 * remembered + tokens);
    };
    const int64_t remembered = before(stretches.back() - gap);
    return filling > counted && cost(gap, remembered) <= cost(filling, 0);
  }();
  std::optional<LanguageModelMemory> remembered;
  for (int64_t at = 0, count = 0; at < total; at += count) {
    std::vector<int64_t> starts = {stretches[at]};
    if (reads_on && at > 0) {
      const int64_t skipped = stretches[at] - stretches[at - 1] - counted;
      if (!ReadBefore(model, text, starts, skipped, length, proceed, &*remembered)) return false;
    } else {
      const int64_t filling = before(stretches[at]);
      for (int64_t n = at + 1; !reads_on && n < std::min(at + batch, total); ++n) {
        if (before(stretches[n]) != filling) break;
        starts.push_back(stretches[n]);
      }
      remembered = FillMemory(model, text, starts, filling, length, memory, proceed);
      if (!remembered) return false;
    }
    count = static_cast<int64_t>(starts.size());
    for (int64_t window = 0; window < stretch / length; ++window) {
      if (proceed != nullptr && !proceed()) return false;
      sums->Read(model, starts.data(), count, &*remembered);
      for (int64_t& start : starts) start += length;
    }
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
    throw Error(StrCat("evaluation: the text has ", tokens, " tokens, windows of ", longest,
                       " need ", longest + 1));
  }
  // There is no more to remember than the text.
  memory = std::min(memory, tokens);
  const int64_t batch_tokens =
      std::min(kEvaluationBatch, kEvaluationLogits / model->options().vocabulary);
  std::vector<LengthLoss> results;
  for (const int64_t length : lengths) {
    LengthLoss result;
    result.length = length;
    results.push_back(result);
    if (model->max_length() && *model->max_length() < length) continue;
    WindowSums sums(text, length);
    const int64_t batch = std::max<int64_t>(batch_tokens / length, 1);
    const bool whole =
        memory == 0 ? AddWindows(model, EvaluationStarts(tokens, length, longest, budget), batch,
                                 proceed, &sums)
                    : AddStretches(model, text, EvaluationStarts(tokens, longest, longest, budget),
                                   longest, batch, memory, proceed, &sums);
    if (!whole) return {};
    results.back() = sums.Means();
  }
  return results;
}

}  // namespace gnomon::models
