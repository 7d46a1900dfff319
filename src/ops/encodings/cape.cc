#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <array>
#include <cmath>
#include <memory>
#include <numbers>
#include <optional>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/coordinates/token_grid.h"
#include "ops/encodings/tokens.h"

namespace gnomon {
namespace cape {
namespace {

// Likhomanenko et al. 2021: sinusoids of positions that are shifted, jittered and scaled in
// training.
class Encoder : public TokenEncoder {
 public:
  Encoder(const Component& component, int64_t dim, bool causal)
      : dim_(dim),
        grid_(TokenGrid::Find(component)),
        normalize_(component.Flag("normalize")),
        global_shift_(component.FindNumber("global_shift").value_or(grid_ ? 0.5 : 5.0)),
        local_shift_(component.FindNumber("local_shift").value_or(0.5)),
        global_scale_(component.FindNumber("global_scale").value_or(grid_ ? 1.4 : 1.03)) {
    TORCH_CHECK_VALUE(dim_ >= 2 && dim_ % 2 == 0, "gnomon.nn: cape: dim is ", dim_,
                      "; expected a positive even number");
    TORCH_CHECK_VALUE(!grid_ || grid_->axes() == 2, "gnomon.nn: cape: shape is ",
                      grid_ ? SizesText(grid_->shape()) : "", "; expected two axes");
    TORCH_CHECK_VALUE(!normalize_ || !grid_,
                      "gnomon.nn: cape:normalize is set with a shape; leave normalize out, because "
                      "grid coordinates are already centred");
    TORCH_CHECK_VALUE(!normalize_ || !causal,
                      "gnomon.nn: cape:normalize is set in a causal model; leave normalize out, "
                      "because the mean position would reveal the sequence length");
  }

  std::optional<int64_t> max_length() const override {
    return grid_ ? std::optional(grid_->tokens()) : std::nullopt;
  }

  at::Tensor Encode(const std::vector<at::Tensor>&, const TokenBatch& batch) const override {
    return grid_ ? EncodeGrid(batch) : EncodeSequence(batch);
  }

 private:
  // The random augmentation of one call in training.
  class Augmentation {
   public:
    Augmentation(const Encoder& encoder, const TokenBatch& batch)
        : encoder_(encoder), batch_(batch) {}

    // Draws (B, count) from U(-limit, limit).
    at::Tensor Draw(const c10::SymInt& count, double limit) const {
      const c10::SymInt sequences = batch_.embeddings.sym_size(0);
      const std::array<c10::SymInt, 2> shape = {
          batch_.batch_size ? c10::SymInt(*batch_.batch_size) : sequences, count};
      const auto options = batch_.embeddings.options().dtype(at::kDouble);
      // The first operator accepts a generator; only the second supports vmap.
      const at::Tensor unit =
          batch_.generator ? at::empty_symint(shape, options).uniform_(0, 1, batch_.generator)
                           : at::rand_symint(shape, options);
      const at::Tensor own =
          batch_.batch_size ? unit.narrow_symint(0, batch_.first_sequence, sequences) : unit;
      return (2 * own - 1) * limit;
    }

    // Positions (B or 1, L) with the given spacing, shifted and jittered.
    at::Tensor Shift(const at::Tensor& positions, double spacing) const {
      return positions + Draw(1, encoder_.global_shift_) +
             Draw(Length(batch_), encoder_.local_shift_) * spacing;
    }

    // exp(lambda), (B, 1).
    at::Tensor Scale() const { return Draw(1, std::log(encoder_.global_scale_)).exp(); }

   private:
    const Encoder& encoder_;
    const TokenBatch& batch_;
  };

  at::Tensor EncodeSequence(const TokenBatch& batch) const {
    at::Tensor positions = Positions(batch).to(at::kDouble);
    if (positions.dim() == 1) positions = positions.unsqueeze(0);
    if (normalize_ && batch.positions) {
      at::Tensor weight = at::ones_like(positions);
      if (batch.lengths) {
        const at::Tensor columns = at::arange(Length(batch), positions.options());
        weight = (columns.unsqueeze(0) < OverTokens(*batch.lengths)).to(at::kDouble);
      }
      positions = positions - (positions * weight).sum(1, /*keepdim=*/true) /
                                  weight.sum(1, /*keepdim=*/true).clamp_min(1);
    } else if (normalize_) {
      TORCH_CHECK_VALUE(
          batch.offset == 0, "gnomon.nn: cape:normalize is set in a call that begins at position ",
          batch.offset,
          "; pass all tokens in one call, because normalize subtracts their mean position");
      const at::Tensor last =
          batch.lengths ? OverTokens(*batch.lengths - 1).to(at::kDouble) : positions.slice(1, -1);
      positions = positions - last / 2;
    }
    if (batch.training) {
      const Augmentation augmentation(*this, batch);
      positions = augmentation.Shift(positions, 1) * augmentation.Scale();
    }
    return sinusoid(positions, dim_, "interleaved");
  }

  at::Tensor EncodeGrid(const TokenBatch& batch) const {
    const at::TensorOptions options = batch.embeddings.options().dtype(at::kDouble);
    const Augmentation augmentation(*this, batch);
    const at::Tensor positions = Positions(batch);
    const std::vector<at::Tensor> coordinates =
        batch.positions
            ? grid_->CoordinatesAt("gnomon.nn: cape", positions)
            : grid_->Coordinates("gnomon.nn: cape", batch.offset, Length(batch), options);
    std::array<at::Tensor, 2> axes;  // y and x, (B or 1, L), in [-1, 1] before the augmentation
    for (size_t axis = 0; axis < 2; ++axis) {
      const int64_t length = grid_->shape()[axis];
      const double spacing = length == 1 ? 0 : 2.0 / static_cast<double>(length - 1);
      const double first = length == 1 ? 0 : -1;
      axes[axis] = coordinates[axis].to(at::kDouble) * spacing + first;
      if (axes[axis].dim() == 1) axes[axis] = axes[axis].unsqueeze(0);
      if (batch.training) axes[axis] = augmentation.Shift(axes[axis], spacing);
    }
    const at::Tensor scale = batch.training ? augmentation.Scale() : at::ones({1, 1}, options);
    // Waves of growing frequency, each rotated by one more radian.
    const int64_t waves = dim_ / 2;
    const at::Tensor angle = at::arange(waves, options);
    const at::Tensor frequency = at::linspace(0, 1, waves, options).mul(std::log(10.0)).exp();
    const auto over_waves = [&](const at::Tensor& axis) { return (axis * scale).unsqueeze(2); };
    const at::Tensor phase =
        std::numbers::pi * frequency *
        (over_waves(axes[1]) * angle.cos() + over_waves(axes[0]) * angle.sin());
    const at::Tensor on_grid = (positions >= grid_->prefix()).unsqueeze(-1);
    return at::where(on_grid, at::cat({phase.cos(), phase.sin()}, 2), 0.0);
  }

  int64_t dim_;
  std::optional<TokenGrid> grid_;
  bool normalize_;
  double global_shift_;
  double local_shift_;
  double global_scale_;
};

std::unique_ptr<TokenEncoder> Make(const Component& component, int64_t dim, bool causal) {
  return std::make_unique<Encoder>(component, dim, causal);
}

const RegisterPosition cape({
    .catalogue =
        {.name = "cape",
         .title = "CAPE",
         .formula = "adds sinusoids of the position p to the embeddings; in training, p is "
                    "replaced by (p + D + e_p) exp(l) with random D ~ U(+-global_shift), e_p ~ "
                    "U(+-local_shift) in units of the position spacing, and l ~ U(+-ln "
                    "global_scale). With normalize, the mean of p is subtracted first. On a grid, "
                    "the sinusoids are waves over (x, y) in [-1, 1]^2, where x is the column and y "
                    "is the row",
         .latex = R"(\text{sinusoids of}\quad (p + \Delta + \epsilon_p)\, e^{\lambda})",
         .note =
             "p is the position. In training, the other three variables are drawn uniformly: "
             "Delta within +-global_shift, epsilon within +-local_shift (in units of the "
             "position spacing) and lambda within +-ln(global_scale). In evaluation, they are 0",
         .details =
             "In training, positions are shifted, jittered and scaled at random for each call and "
             "each sequence; in evaluation, they do not change. E must be even.\n\nIf the shape "
             "(height, width) is given, the first `prefix` tokens get no encoding, and the "
             "remaining tokens lie on a grid. Dimensions n and E / 2 + n are then the cosine and "
             "the sine of pi 10^(n / (E / 2 - 1)) (x cos n + y sin n), where x is a token's column "
             "and y is its row, each scaled from -1 (first) to 1 (last).",
         .source = "Likhomanenko et al. 2021, CAPE: Encoding Relative Positions with "
                   "Continuous Augmented Positional Embeddings",
         .role = CatalogueEntry::Role::kEmbedding,
         .cost = "0 + 0",
         .class_name = "CAPE"},
    .parameters = OnGrid(
        {Number("global_shift", "")
             .Means("bound of the shift shared by all positions; default 5, or 0.5 on a grid")
             .Otherwise("5 (grid: 0.5)")
             .AtLeast(0),
         Number("local_shift", "")
             .Means("bound of each position's own shift, in units of the position spacing; default "
                    "0.5")
             .Otherwise("0.5")
             .AtLeast(0),
         Number("global_scale", "")
             .Means("upper bound of the scale factor shared by all positions; the lower bound is "
                    "its inverse; default 1.03, or 1.4 on a grid")
             .Otherwise("1.03 (grid: 1.4)")
             .AtLeast(1),
         Flag("normalize", "false")
             .Means("whether the mean of the positions is subtracted first; for sequences only")},
        Shape().Means("(height, width) of the grid, in rows and columns; tokens are in row-major "
                      "order")),
    .encoder = Make,
});

}  // namespace
}  // namespace cape
}  // namespace gnomon
