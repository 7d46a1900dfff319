// A speech recognition model for CTC (Graves et al. 2006): log-mel features, two convolutions that
// reduce four frames to one token, and a Transformer encoder with any similarity and any position.
#ifndef GNOMON_MODELS_SPEECH_MODEL_H_
#define GNOMON_MODELS_SPEECH_MODEL_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "models/transformer.h"
#include "training/options.h"
#include "training/terms.h"

namespace gnomon::lab {

// The lowest and highest sampling rate, in samples per second.
inline constexpr int64_t kLowestRate = 1000;
inline constexpr int64_t kHighestRate = 1'000'000;

#define GNOMON_SPEECH_MODEL_OPTIONS(OPTION)                                                        \
  /* The samples per second and the number of labels of the data; 0 before they are read. */       \
  OPTION(int64_t, rate, 0, .highest = kHighestRate, .has_flag = false)                             \
  OPTION(int64_t, symbols, 0, .has_flag = false)                                                   \
  OPTION(int64_t, mels, 40, .help = "Number of mel filters", .lowest = 1, .highest = 1024)         \
  OPTION(int64_t, window, 25, .help = "Window length of a feature frame, in milliseconds",         \
         .lowest = 1, .highest = 1000)                                                             \
  OPTION(int64_t, hop, 10,                                                                         \
         .help = "Hop length between feature frames, in milliseconds; a token covers four frames", \
         .lowest = 1, .highest = 1000)                                                             \
  GNOMON_TRANSFORMER_SIZES(OPTION, 128, 4, 4, 512)                                                 \
  /* The number of rows in a table of learned absolute positions: the tokens of the longest        \
     training sequence. */                                                                         \
  OPTION(int64_t, max_length, 1, .lowest = 1, .has_flag = false)

struct SpeechModelOptions {
  GNOMON_OPTIONS(GNOMON_SPEECH_MODEL_OPTIONS)
};

// The number of frames for a number of samples, and the number of tokens for a number of frames.
int64_t CountFrames(const SpeechModelOptions& options, int64_t samples);
int64_t CountTokens(int64_t frames);
// The distance in samples between successive tokens.
int64_t SamplesPerToken(const SpeechModelOptions& options);

// Computes log-mel features. The short-time Fourier transform uses a Hann window every `hop`
// milliseconds, starting with one centred on the first sample, and zeros beyond the ends. The
// filters are triangular and evenly spaced on the mel scale 2595 log10(1 + f / 700) (O'Shaughnessy
// 1987). Each filter's output is normalised to mean 0 and variance 1 over the sound.
class LogMel {
 public:
  // Throws Error if a filter is too narrow for the frequency resolution of a window.
  explicit LogMel(const SpeechModelOptions& options);
  // `samples` has shape (S,) with S >= 1; the result has shape (frames, mels).
  torch::Tensor operator()(const torch::Tensor& samples) const;

 private:
  int64_t hop_ = 0;       // in samples
  torch::Tensor window_;  // (samples per window,)
  torch::Tensor bank_;    // (frequencies, mels)
};

struct SpeechOutput {
  // (B, tokens, 1 + symbols). Index 0 is the blank; index 1 + n is label n.
  torch::Tensor log_probabilities;
  torch::Tensor lengths;  // (B,): number of tokens; the rest of a row is padding
};

class SpeechModelImpl : public torch::nn::Module {
 public:
  // Throws gnomon::Error or c10::Error if an option or a term is invalid.
  SpeechModelImpl(const SpeechModelOptions& options, const Terms& terms);

  // `sounds` are tensors (S,) of any lengths. They are padded to `frames` frames, or to the longest
  // sound if it is longer. Padding does not affect the output.
  SpeechOutput forward(const std::vector<torch::Tensor>& sounds, int64_t frames = 0,
                       const std::optional<BatchRows>& rows = std::nullopt);

  const SpeechModelOptions& options() const { return options_; }
  // The maximum number of tokens for which the position is defined; none if unlimited.
  std::optional<int64_t> max_length() const { return encoder_->max_length(); }

 private:
  SpeechModelOptions options_;
  LogMel features_;
  torch::nn::Conv1d front_in_{nullptr};
  torch::nn::Conv1d front_out_{nullptr};
  torch::nn::LayerNorm front_norm_{nullptr};
  Encoder encoder_{nullptr};
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(SpeechModel);

// Returns the labels of each row by best path decoding (Graves et al. 2006, section 3.2): takes the
// most likely class of each token, merges repetitions and removes blanks.
std::vector<std::vector<int64_t>> DecodeGreedily(const SpeechOutput& output);

// The Levenshtein distance: the minimum number of insertions, deletions and substitutions that turn
// one sequence into the other.
int64_t EditDistance(const std::vector<int64_t>& from, const std::vector<int64_t>& to);

}  // namespace gnomon::lab

#endif  // GNOMON_MODELS_SPEECH_MODEL_H_
