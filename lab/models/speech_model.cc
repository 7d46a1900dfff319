#include "models/speech_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

// Kernel width of the two convolutions, which have stride 2.
constexpr int64_t kKernel = 3;
constexpr int64_t kStride = 2;
// Lower bound on the power, so that its logarithm is finite.
constexpr double kLeastPower = 1e-10;

void CheckOptions(SpeechModelOptions options) {
  CheckRanges(options.Options(), "speech model");
  CheckTransformer("speech model", options.dim, options.heads, options.dropout);
  if (options.rate < kLowestRate) {
    throw Error(StrCat("speech model: rate is ", options.rate, "; expected ", kLowestRate, " to ",
                       kHighestRate));
  }
}

int64_t SamplesOf(const SpeechModelOptions& options, int64_t milliseconds) {
  return options.rate * milliseconds / 1000;
}

double MelOf(double hertz) { return 2595 * std::log10(1 + hertz / 700); }
double HertzOf(double mel) { return 700 * (std::pow(10, mel / 2595) - 1); }

// Returns the filters (frequencies, mels). Filter m increases from 0 at corner m to 1 at corner
// m + 1 and decreases to 0 at corner m + 2. The corners are evenly spaced on the mel scale from 0
// to half the sampling rate.
torch::Tensor MelBank(int64_t mels, int64_t rate, int64_t fourier) {
  const int64_t frequencies = fourier / 2 + 1;
  const double highest = static_cast<double>(rate) / 2;
  std::vector<double> corners;
  for (int64_t n = 0; n < mels + 2; ++n) {
    corners.push_back(
        HertzOf(MelOf(highest) * static_cast<double>(n) / static_cast<double>(mels + 1)));
  }
  torch::Tensor bank = torch::zeros({frequencies, mels});
  auto entries = bank.accessor<float, 2>();
  for (int64_t m = 0; m < mels; ++m) {
    bool is_heard = false;
    for (int64_t n = 0; n < frequencies; ++n) {
      const double hertz = highest * static_cast<double>(n) / static_cast<double>(frequencies - 1);
      const double rise = (hertz - corners[m]) / (corners[m + 1] - corners[m]);
      const double fall = (corners[m + 2] - hertz) / (corners[m + 2] - corners[m + 1]);
      const double weight = std::max(0.0, std::min(rise, fall));
      entries[n][m] = static_cast<float>(weight);
      is_heard = is_heard || weight > 0;
    }
    if (!is_heard) {
      throw Error(StrCat("speech model: mels is ", mels, ", which is too many for the ",
                         frequencies, " frequencies of a window: filter ", m,
                         " contains no frequency; use fewer filters or a longer window"));
    }
  }
  return bank;
}

// Returns a mask (B, 1, length) that is false in the padding of each row.
torch::Tensor IsInside(const torch::Tensor& lengths, int64_t length) {
  return (torch::arange(length, lengths.options()) < lengths.unsqueeze(1)).unsqueeze(1);
}

torch::nn::Conv1d Convolution(int64_t in, int64_t out) {
  return torch::nn::Conv1d(
      torch::nn::Conv1dOptions(in, out, kKernel).stride(kStride).padding(kKernel / 2));
}

TransformerOptions EncoderOptions(const SpeechModelOptions& options, const Terms& terms) {
  return ToTransformer(options, terms.similarity, terms.position, options.max_length);
}

}  // namespace

int64_t CountFrames(const SpeechModelOptions& options, int64_t samples) {
  return 1 + samples / SamplesOf(options, options.hop);
}

int64_t CountTokens(int64_t frames) {
  const auto half = [](int64_t length) { return (length + kStride - 1) / kStride; };
  return half(half(frames));
}

int64_t SamplesPerToken(const SpeechModelOptions& options) {
  return kStride * kStride * SamplesOf(options, options.hop);
}

LogMel::LogMel(const SpeechModelOptions& options) {
  CheckOptions(options);
  hop_ = SamplesOf(options, options.hop);
  const int64_t samples = SamplesOf(options, options.window);
  window_ = torch::hann_window(samples, /*periodic=*/true);
  const auto fourier = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(samples)));
  // The filters apply to the power spectrum of a zero-padded window.
  bank_ = MelBank(options.mels, options.rate, std::max<int64_t>(fourier, 2));
}

torch::Tensor LogMel::operator()(const torch::Tensor& samples) const {
  const int64_t fourier = 2 * (bank_.size(0) - 1);
  const torch::Tensor spectrum =
      torch::stft(samples, fourier, hop_, window_.numel(), window_, /*center=*/true,
                  /*pad_mode=*/"constant", /*normalized=*/false, /*onesided=*/true,
                  /*return_complex=*/true);
  const torch::Tensor power = torch::view_as_real(spectrum).square().sum(-1);  // (frequencies, F)
  const torch::Tensor mels = power.t().matmul(bank_).clamp_min(kLeastPower).log();
  const torch::Tensor centred = mels - mels.mean(0, /*keepdim=*/true);
  const torch::Tensor deviation = centred.square().mean(0, /*keepdim=*/true).sqrt();
  return centred / (deviation + 1e-5);
}

SpeechModelImpl::SpeechModelImpl(const SpeechModelOptions& options, const Terms& terms)
    : options_(options), features_(options) {
  front_in_ = register_module("front_in", Convolution(options_.mels, options_.dim));
  front_out_ = register_module("front_out", Convolution(options_.dim, options_.dim));
  front_norm_ = register_module("front_norm",
                                torch::nn::LayerNorm(torch::nn::LayerNormOptions({options_.dim})));
  head_ = register_module("head", torch::nn::Linear(options_.dim, options_.symbols + 1));
  InitializeLinear(head_, 1);
  // The encoder is created last, so that its terms do not affect the other initial weights.
  encoder_ = register_module("encoder", Encoder(EncoderOptions(options_, terms)));
}

SpeechOutput SpeechModelImpl::forward(const std::vector<torch::Tensor>& sounds, int64_t frames,
                                      const std::optional<BatchRows>& rows) {
  std::vector<torch::Tensor> features;
  std::vector<int64_t> counts;
  for (const torch::Tensor& sound : sounds) {
    features.push_back(features_(sound));
    counts.push_back(features.back().size(0));
    frames = std::max(frames, counts.back());
  }
  const auto batch = static_cast<int64_t>(sounds.size());
  torch::Tensor x = torch::zeros({batch, frames, options_.mels});
  for (int64_t row = 0; row < batch; ++row) {
    x[row].narrow(0, 0, counts[row]).copy_(features[row]);
  }
  const torch::Device device = front_norm_->weight.device();
  x = x.to(device);
  const torch::Tensor lengths = torch::tensor(counts, torch::kLong).to(device);
  const auto halve = [](const torch::Tensor& of) {
    return (of + (kStride - 1)).floor_divide(kStride);
  };
  // Padding must be zero before each convolution, like the values beyond the ends of a sequence.
  x = torch::gelu(front_in_->forward(x.transpose(1, 2)));
  x = x * IsInside(halve(lengths), x.size(2));
  x = torch::gelu(front_out_->forward(x)).transpose(1, 2);
  const torch::Tensor tokens = halve(halve(lengths));
  x = encoder_->forward(front_norm_->forward(x), tokens, rows);
  return {torch::log_softmax(head_->forward(x), -1), tokens};
}

std::vector<std::vector<int64_t>> DecodeGreedily(const SpeechOutput& output) {
  const torch::Tensor classes = output.log_probabilities.argmax(-1).cpu();
  const torch::Tensor counts = output.lengths.cpu();
  std::vector<std::vector<int64_t>> labels(classes.size(0));
  const auto entries = classes.accessor<int64_t, 2>();
  const auto lengths = counts.accessor<int64_t, 1>();
  for (int64_t row = 0; row < classes.size(0); ++row) {
    int64_t last = 0;
    for (int64_t token = 0; token < lengths[row]; ++token) {
      const int64_t now = entries[row][token];
      if (now != 0 && now != last) labels[row].push_back(now - 1);
      last = now;
    }
  }
  return labels;
}

int64_t EditDistance(const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  // distances[j] is the distance from a prefix of `from` to the first j elements of `to`.
  std::vector<int64_t> distances(to.size() + 1);
  std::iota(distances.begin(), distances.end(), 0);
  for (size_t i = 0; i < from.size(); ++i) {
    int64_t diagonal = distances[0];
    distances[0] = static_cast<int64_t>(i) + 1;
    for (size_t j = 0; j < to.size(); ++j) {
      const int64_t substituted = diagonal + (from[i] == to[j] ? 0 : 1);
      diagonal = distances[j + 1];
      distances[j + 1] = std::min({substituted, diagonal + 1, distances[j] + 1});
    }
  }
  return distances[to.size()];
}

}  // namespace gnomon::lab
