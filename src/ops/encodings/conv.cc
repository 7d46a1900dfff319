#include <ATen/ATen.h>

#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/encodings/tokens.h"

namespace gnomon {
namespace conv {
namespace {

// Mask of the tokens that are not padding, (B or 1, L).
at::Tensor IsToken(const TokenBatch& batch) {
  const at::Tensor columns =
      at::arange(Length(batch), batch.embeddings.options().dtype(at::kLong)).unsqueeze(0);
  return columns < OverTokens(*batch.lengths);
}

// Baevski et al. 2020, section 2: GELU(conv(x)), a grouped convolution with weight normalisation
// (Salimans and Kingma 2016), separately at each kernel tap.
class Encoder : public TokenEncoder {
 public:
  Encoder(const Component& component, int64_t dim, bool causal)
      : dim_(dim),
        kernel_(component.Integer("kernel")),
        groups_(component.Integer("groups")),
        causal_(causal) {
    TORCH_CHECK_VALUE(dim_ % groups_ == 0, "gnomon.nn: conv has groups = ", groups_,
                      "; expected a divisor of the embedding dimension, ", dim_);
  }

  std::vector<ModuleTensor> Tensors() const override {
    const double deviation =
        std::sqrt(4.0 / (static_cast<double>(kernel_) * static_cast<double>(dim_)));
    const at::Tensor direction =
        at::randn({dim_, dim_ / groups_, kernel_}, at::kDouble) * deviation;
    return {{"weight_g", Norm(direction), /*learned=*/true},
            {"weight_v", direction, /*learned=*/true},
            {"bias", at::zeros({dim_}, at::kDouble), /*learned=*/true}};
  }

  int64_t history() const override { return causal_ ? kernel_ - 1 : 0; }

  at::Tensor Encode(const std::vector<at::Tensor>& tensors,
                    const TokenBatch& batch) const override {
    TORCH_CHECK_VALUE(!batch.positions,
                      "gnomon.nn: conv reads neighbouring tokens and does not accept positions; "
                      "pass tokens in sequence order, without positions");
    if (Length(batch) == 0) return batch.embeddings;
    at::Tensor x = batch.embeddings;
    if (batch.lengths) x = at::where(IsToken(batch).unsqueeze(2), x, 0.0);
    c10::SymInt left = kernel_ / 2;
    int64_t right = kernel_ / 2;
    if (causal_) {
      // The number of preceding tokens that the kernel reads.
      const c10::SymInt known = batch.offset.max(0).min(history());
      const c10::SymInt given = batch.before ? batch.before->sym_size(1) : 0;
      TORCH_CHECK_VALUE(given >= known, "gnomon.nn: conv needs the ", known,
                        " tokens before position ", batch.offset, " but has ", given,
                        "; pass the cache that holds the preceding tokens");
      if (known > 0) {
        x = at::cat({batch.before->narrow_symint(1, given - known, known), x}, 1);
      }
      left = history() - known;
      right = 0;
    } else {
      TORCH_CHECK_VALUE(
          batch.offset == 0,
          "gnomon.nn: conv reads tokens on both sides, but the call begins at position ",
          batch.offset, "; pass all tokens in one call, or use a causal model");
    }
    const at::Tensor& direction = Take(tensors, 1, "weight_v of conv");
    const at::Tensor weight = direction * (tensors[0] / Norm(direction));
    const auto like_x = [&](const at::Tensor& tensor) { return tensor.to(x.scalar_type()); };
    at::Tensor y = at::conv1d(
        at::constant_pad_nd_symint(x.transpose(1, 2), {left, c10::SymInt(right)}), like_x(weight),
        like_x(Take(tensors, 2, "bias of conv")), /*stride=*/1, /*padding=*/at::IntArrayRef{0},
        /*dilation=*/1, groups_);
    // An even kernel produces one output too many.
    y = y.narrow_symint(2, 0, Length(batch));
    return at::gelu(y).transpose(1, 2);
  }

 private:
  // The norm over all axes except the kernel axis.
  static at::Tensor Norm(const at::Tensor& weight) {
    return at::linalg_vector_norm(weight, 2, at::IntArrayRef{0, 1}, /*keepdim=*/true);
  }

  int64_t dim_;
  int64_t kernel_;
  int64_t groups_;
  bool causal_;
};

std::unique_ptr<TokenEncoder> Make(const Component& component, int64_t dim, bool causal) {
  return std::make_unique<Encoder>(component, dim, causal);
}

const RegisterPosition conv({
    .catalogue =
        {.name = "conv",
         .title = "convolution",
         .formula = "adds GELU(conv(x)) to the embeddings x; in a causal model, the convolution "
                    "reads no later tokens",
         .latex = R"(\text{GELU}(\text{conv}(x)))",
         .note =
             "x contains the embeddings. In a causal model, the convolution reads no later tokens",
         .details =
             "The encoding is a grouped convolution over the tokens. Token i reads `kernel` tokens "
             "starting at i - floor(kernel / 2), or, in a causal model, the last `kernel` tokens "
             "up to and including token i. The weight is weight_g weight_v / |weight_v|, "
             "normalised separately at "
             "each kernel tap.\n\nParameters: `weight_g` (1, 1, kernel), `weight_v` (E, E / "
             "groups, kernel), initialised from N(0, 4 / (kernel E)), and `bias` (E), initialised "
             "to 0.",
         .source = "Baevski et al. 2020, wav2vec 2.0",
         .role = CatalogueEntry::Role::kEmbedding,
         .cost = "0 + 0",
         .takes_causal = true,
         .class_name = "Convolutional"},
    .parameters =
        {Integer("kernel", "128").Means("number of tokens that the kernel spans").AtLeast(1),
         Integer("groups", "16").Means("number of channel groups; must divide E").AtLeast(1)},
    .encoder = Make,
});

}  // namespace
}  // namespace conv
}  // namespace gnomon
