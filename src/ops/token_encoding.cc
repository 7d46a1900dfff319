#include "ops/token_encoding.h"

#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <utility>

#include "ops/registry.h"
#include "ops/token_grid.h"

namespace gnomon {
namespace {

const at::TensorOptions kFloat64 = at::TensorOptions().dtype(at::kDouble);

c10::SymInt Length(const TokenBatch& batch) { return batch.embeddings.sym_size(1); }

at::Tensor Positions(const TokenBatch& batch) {
  return at::arange(batch.offset, batch.offset + Length(batch),
                    batch.embeddings.options().dtype(at::kLong));
}

// Lengths (B,), or one for all, as (B or 1, 1).
at::Tensor OverTokens(const at::Tensor& lengths) { return lengths.reshape({-1, 1}); }

// Which tokens are none of the padding, (B or 1, L).
at::Tensor IsToken(const TokenBatch& batch) {
  const at::Tensor columns =
      at::arange(Length(batch), batch.embeddings.options().dtype(at::kLong)).unsqueeze(0);
  return columns < OverTokens(*batch.lengths);
}

const at::Tensor& Take(const std::vector<at::Tensor>& tensors, size_t n, const char* name) {
  TORCH_CHECK_VALUE(n < tensors.size(), "gnomon.nn: ", name, " is missing");
  return tensors[n];
}

// Vaswani et al. 2017, section 3.5; over a grid as in He et al. 2022, Masked Autoencoders.
class SinusoidalEncoder : public TokenEncoder {
 public:
  SinusoidalEncoder(const Component& component, int64_t dim)
      : dim_(dim),
        layout_(component.Choice("layout", {"interleaved", "split", "split_xl"})),
        grid_(TokenGrid::Find(component)) {
    if (grid_) {
      grid_sinusoid(std::vector<int64_t>(grid_->axes(), 1), dim_, layout_);
    } else {
      sinusoid(at::zeros({0}), dim_, layout_);
    }
  }

  std::optional<int64_t> max_length() const override {
    return grid_ ? std::optional(grid_->tokens()) : std::nullopt;
  }

  at::Tensor Encode(const std::vector<at::Tensor>&, const TokenBatch& batch) const override {
    if (!grid_) return sinusoid(Positions(batch), dim_, layout_);
    TORCH_CHECK_VALUE(batch.offset >= 0 && batch.offset + Length(batch) <= grid_->tokens(),
                      "gnomon.nn: sinusoidal: positions ", batch.offset, " to ",
                      batch.offset + Length(batch) - 1, "; the grid ", grid_->Text(), " has ",
                      grid_->tokens(), " tokens");
    return grid_sinusoid(grid_->shape(), dim_, layout_, grid_->prefix())
        .narrow_symint(0, batch.offset, Length(batch));
  }

 private:
  int64_t dim_;
  std::string layout_;
  std::optional<TokenGrid> grid_;
};

// Gehring et al. 2017; the start is that of Radford et al. 2019.
class LearnedEncoder : public TokenEncoder {
 public:
  LearnedEncoder(const Component& component, int64_t dim)
      : dim_(dim), length_(component.Integer("length", 0)) {
    TORCH_CHECK_VALUE(length_ >= 1, "gnomon.nn: learned has length ", length_,
                      "; expected at least 1");
  }

  std::vector<ModuleTensor> Tensors() const override {
    return {{"table", at::randn({length_, dim_}, kFloat64) * 0.02, /*learned=*/true}};
  }

  std::optional<int64_t> max_length() const override { return length_; }

  at::Tensor Encode(const std::vector<at::Tensor>& tensors,
                    const TokenBatch& batch) const override {
    TORCH_CHECK_VALUE(batch.offset >= 0 && batch.offset + Length(batch) <= length_,
                      "gnomon.nn: learned: positions ", batch.offset, " to ",
                      batch.offset + Length(batch) - 1, "; the table has ", length_, " rows");
    return Take(tensors, 0, "table of learned").narrow_symint(0, batch.offset, Length(batch));
  }

 private:
  int64_t dim_;
  int64_t length_;
};

// Baevski et al. 2020, section 2: GELU(conv(x)), a grouped convolution with weight normalisation
// over the kernel's axis (Salimans and Kingma 2016).
class ConvolutionalEncoder : public TokenEncoder {
 public:
  ConvolutionalEncoder(const Component& component, int64_t dim, bool causal)
      : dim_(dim),
        kernel_(component.Integer("kernel", 128)),
        groups_(component.Integer("groups", 16)),
        causal_(causal) {
    TORCH_CHECK_VALUE(kernel_ >= 1, "gnomon.nn: conv has kernel = ", kernel_,
                      "; expected at least 1");
    TORCH_CHECK_VALUE(groups_ >= 1 && dim_ % groups_ == 0, "gnomon.nn: conv has groups = ", groups_,
                      "; expected a divisor of the embeddings' ", dim_, " columns");
  }

  std::vector<ModuleTensor> Tensors() const override {
    const double deviation =
        std::sqrt(4.0 / (static_cast<double>(kernel_) * static_cast<double>(dim_)));
    const at::Tensor direction = at::randn({dim_, dim_ / groups_, kernel_}, kFloat64) * deviation;
    return {{"weight_g", Norm(direction), /*learned=*/true},
            {"weight_v", direction, /*learned=*/true},
            {"bias", at::zeros({dim_}, kFloat64), /*learned=*/true}};
  }

  int64_t history() const override { return causal_ ? kernel_ - 1 : 0; }

  at::Tensor Encode(const std::vector<at::Tensor>& tensors,
                    const TokenBatch& batch) const override {
    if (Length(batch) == 0) return batch.embeddings;
    at::Tensor x = batch.embeddings;
    if (batch.lengths) x = at::where(IsToken(batch).unsqueeze(2), x, 0.0);
    c10::SymInt left = kernel_ / 2;
    int64_t right = kernel_ / 2;
    if (causal_) {
      // As many as there are, of those that the kernel reaches.
      const c10::SymInt known = batch.offset.max(0).min(history());
      const c10::SymInt given = batch.before ? batch.before->sym_size(1) : 0;
      TORCH_CHECK_VALUE(given >= known, "gnomon.nn: conv at position ", batch.offset, " reads the ",
                        known, " tokens before it and has ", given,
                        "; give the cache that the tokens before went through");
      if (known > 0) {
        x = at::cat({batch.before->narrow_symint(1, given - known, known), x}, 1);
      }
      left = history() - known;
      right = 0;
    } else {
      TORCH_CHECK_VALUE(batch.offset == 0, "gnomon.nn: conv at position ", batch.offset,
                        " sees the tokens on both sides; expected all tokens in one call, or a ",
                        "causal one");
    }
    const at::Tensor& direction = Take(tensors, 1, "weight_v of conv");
    const at::Tensor weight = direction * (tensors[0] / Norm(direction));
    const auto like_x = [&](const at::Tensor& tensor) { return tensor.to(x.scalar_type()); };
    at::Tensor y = at::conv1d(
        at::constant_pad_nd_symint(x.transpose(1, 2), {left, c10::SymInt(right)}), like_x(weight),
        like_x(Take(tensors, 2, "bias of conv")), /*stride=*/1, /*padding=*/at::IntArrayRef{0},
        /*dilation=*/1, groups_);
    // Of an even kernel the last frame is one too many.
    y = y.narrow_symint(2, 0, Length(batch));
    return at::gelu(y).transpose(1, 2);
  }

 private:
  // Over all axes but the kernel's.
  static at::Tensor Norm(const at::Tensor& weight) {
    return at::linalg_vector_norm(weight, 2, at::IntArrayRef{0, 1}, /*keepdim=*/true);
  }

  int64_t dim_;
  int64_t kernel_;
  int64_t groups_;
  bool causal_;
};

// Likhomanenko et al. 2021. Sinusoids of positions that training shifts, jitters and scales.
class CapeEncoder : public TokenEncoder {
 public:
  CapeEncoder(const Component& component, int64_t dim, bool causal)
      : dim_(dim),
        grid_(TokenGrid::Find(component)),
        normalize_(component.FindFlag("normalize").value_or(false)),
        global_shift_(component.Number("global_shift", grid_ ? 0.5 : 5.0)),
        local_shift_(component.Number("local_shift", 0.5)),
        global_scale_(component.Number("global_scale", grid_ ? 1.4 : 1.03)) {
    TORCH_CHECK_VALUE(dim_ >= 2 && dim_ % 2 == 0, "gnomon.nn: cape: dim is ", dim_,
                      "; expected a positive even number");
    TORCH_CHECK_VALUE(!grid_ || grid_->axes() == 2,
                      "gnomon.nn: cape has shape = ", grid_ ? SizesText(grid_->shape()) : "",
                      "; expected two axes");
    TORCH_CHECK_VALUE(global_shift_ >= 0 && local_shift_ >= 0,
                      "gnomon.nn: cape has global_shift = ", global_shift_,
                      " and local_shift = ", local_shift_, "; expected at least 0");
    TORCH_CHECK_VALUE(global_scale_ >= 1, "gnomon.nn: cape has global_scale = ", global_scale_,
                      "; expected at least 1");
    TORCH_CHECK_VALUE(!normalize_ || !grid_, "gnomon.nn: cape:normalize with a shape; the ",
                      "coordinates of a grid are centred already");
    TORCH_CHECK_VALUE(!normalize_ || !causal, "gnomon.nn: cape:normalize in a causal model; the ",
                      "mean of the positions tells the length of what comes");
  }

  std::optional<int64_t> max_length() const override {
    return grid_ ? std::optional(grid_->tokens()) : std::nullopt;
  }

  at::Tensor Encode(const std::vector<at::Tensor>&, const TokenBatch& batch) const override {
    return grid_ ? EncodeGrid(batch) : EncodeSequence(batch);
  }

 private:
  // What training draws for one call.
  class Augmentation {
   public:
    Augmentation(const CapeEncoder& encoder, const TokenBatch& batch)
        : encoder_(encoder), batch_(batch) {}

    // U(-limit, limit), (B, count).
    at::Tensor Draw(const c10::SymInt& count, double limit) const {
      const c10::SymInt sequences = batch_.embeddings.sym_size(0);
      const std::array<c10::SymInt, 2> shape = {
          batch_.rows ? c10::SymInt(batch_.rows->total) : sequences, count};
      const auto options = batch_.embeddings.options().dtype(at::kDouble);
      // Without a generator of its own, by what vmap has a rule for.
      const at::Tensor unit =
          batch_.generator ? at::empty_symint(shape, options).uniform_(0, 1, batch_.generator)
                           : at::rand_symint(shape, options);
      const at::Tensor own =
          batch_.rows ? unit.narrow_symint(0, batch_.rows->first, sequences) : unit;
      return (2 * own - 1) * limit;
    }

    // Positions (B or 1, L) that lie `spacing` apart, shifted and jittered.
    at::Tensor Shift(const at::Tensor& positions, double spacing) const {
      return positions + Draw(1, encoder_.global_shift_) +
             Draw(Length(batch_), encoder_.local_shift_) * spacing;
    }

    // exp(lambda), (B, 1).
    at::Tensor Scale() const { return Draw(1, std::log(encoder_.global_scale_)).exp(); }

   private:
    const CapeEncoder& encoder_;
    const TokenBatch& batch_;
  };

  at::Tensor EncodeSequence(const TokenBatch& batch) const {
    at::Tensor positions = Positions(batch).to(at::kDouble).unsqueeze(0);
    if (normalize_) {
      TORCH_CHECK_VALUE(batch.offset == 0, "gnomon.nn: cape:normalize at position ", batch.offset,
                        "; the mean of the positions needs all tokens in one call");
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
    const std::vector<at::Tensor> coordinates =
        grid_->Coordinates("gnomon.nn: cape", batch.offset, Length(batch), options);
    std::array<at::Tensor, 2> axes;  // y and x, (B or 1, L), in [-1, 1] before the augmentation
    for (size_t axis = 0; axis < 2; ++axis) {
      const int64_t length = grid_->shape()[axis];
      const double spacing = length == 1 ? 0 : 2.0 / static_cast<double>(length - 1);
      const double first = length == 1 ? 0 : -1;
      axes[axis] = (coordinates[axis].to(at::kDouble) * spacing + first).unsqueeze(0);
      if (batch.training) axes[axis] = augmentation.Shift(axes[axis], spacing);
    }
    const at::Tensor scale = batch.training ? augmentation.Scale() : at::ones({1, 1}, options);
    // Waves of growing frequency in directions that turn by one radian.
    const int64_t waves = dim_ / 2;
    const at::Tensor angle = at::arange(waves, options);
    const at::Tensor frequency = at::linspace(0, 1, waves, options).mul(std::log(10.0)).exp();
    const auto over_waves = [&](const at::Tensor& axis) { return (axis * scale).unsqueeze(2); };
    const at::Tensor phase =
        std::numbers::pi * frequency *
        (over_waves(axes[1]) * angle.cos() + over_waves(axes[0]) * angle.sin());
    const at::Tensor placed = grid_->IsPlaced(batch.offset, Length(batch), options).unsqueeze(1);
    return at::where(placed, at::cat({phase.cos(), phase.sin()}, 2), 0.0);
  }

  int64_t dim_;
  std::optional<TokenGrid> grid_;
  bool normalize_;
  double global_shift_;
  double local_shift_;
  double global_scale_;
};

}  // namespace

std::unique_ptr<TokenEncoder> MakeSinusoidal(const Component& component, int64_t dim, bool) {
  return std::make_unique<SinusoidalEncoder>(component, dim);
}

std::unique_ptr<TokenEncoder> MakeLearned(const Component& component, int64_t dim, bool) {
  return std::make_unique<LearnedEncoder>(component, dim);
}

std::unique_ptr<TokenEncoder> MakeConvolutional(const Component& component, int64_t dim,
                                                bool causal) {
  return std::make_unique<ConvolutionalEncoder>(component, dim, causal);
}

std::unique_ptr<TokenEncoder> MakeCape(const Component& component, int64_t dim, bool causal) {
  return std::make_unique<CapeEncoder>(component, dim, causal);
}

std::vector<Component> TokenEncodings(const std::string& position, int64_t max_length) {
  std::vector<Component> encodings;
  for (Component& component : ParseSum(position)) {
    const PositionEntry& entry = FindPosition(component);
    if (entry.role != PositionEntry::Role::kEmbedding) continue;
    for (const CatalogueParameter& parameter : entry.catalogue.parameters) {
      if (parameter.name == "length") component.SetDefault("length", std::to_string(max_length));
    }
    encodings.push_back(std::move(component));
  }
  return encodings;
}

std::unique_ptr<TokenEncoder> MakeTokenEncoder(const Component& component, int64_t dim,
                                               bool causal) {
  const PositionEntry& entry = FindPosition(component);
  TORCH_CHECK_VALUE(entry.role == PositionEntry::Role::kEmbedding, "gnomon.nn: position ",
                    component.name(), " is not added to the embeddings");
  TORCH_CHECK_VALUE(dim >= 1, "gnomon.nn: ", component.name(), ": dim is ", dim,
                    "; expected at least 1");
  return entry.encoder(component, dim, causal);
}

at::Tensor EncodeTokens(const Component& component, int64_t dim, bool causal,
                        const std::vector<at::Tensor>& tensors, const TokenBatch& batch) {
  const std::string& name = component.name();
  const at::Tensor& embeddings = batch.embeddings;
  const auto is_like_embeddings = [&](const at::Tensor& tokens) {
    return tokens.dim() == 3 && tokens.sym_size(2) == dim;
  };
  TORCH_CHECK_VALUE(is_like_embeddings(embeddings), "gnomon.nn: ", name, ": embeddings have shape ",
                    embeddings.sym_sizes(), "; expected (B, L, ", dim, ")");
  TORCH_CHECK_TYPE(embeddings.is_floating_point(), "gnomon.nn: ", name, ": embeddings have dtype ",
                   embeddings.scalar_type(), "; expected a floating-point one");
  TORCH_CHECK_VALUE(!batch.before || (is_like_embeddings(*batch.before) &&
                                      batch.before->sym_size(0) == embeddings.sym_size(0)),
                    "gnomon.nn: ", name, ": the embeddings before have shape ",
                    batch.before ? batch.before->sym_sizes() : embeddings.sym_sizes(),
                    "; expected (B, N, ", dim, ") with B = ", embeddings.sym_size(0));
  TORCH_CHECK_VALUE(
      !batch.rows || (batch.rows->first >= 0 &&
                      embeddings.sym_size(0) <= batch.rows->total - batch.rows->first),
      "gnomon.nn: ", name, ": the rows from ", batch.rows ? batch.rows->first : 0,
      " on of a batch of ", batch.rows ? batch.rows->total : 0, " are ", embeddings.sym_size(0),
      "; expected no more");
  if (batch.lengths) {
    TORCH_CHECK_TYPE(at::isIntegralType(batch.lengths->scalar_type(), /*includeBool=*/false),
                     "gnomon.nn: ", name, ": lengths have dtype ", batch.lengths->scalar_type(),
                     "; expected integers");
    TORCH_CHECK_VALUE(
        batch.lengths->dim() == 0 ||
            (batch.lengths->dim() == 1 && batch.lengths->sym_size(0) == embeddings.sym_size(0)),
        "gnomon.nn: ", name, ": lengths have shape ", batch.lengths->sym_sizes(),
        "; expected (B,) = (", embeddings.sym_size(0), ",), or () for all");
  }
  const std::unique_ptr<TokenEncoder> encoder = MakeTokenEncoder(component, dim, causal);
  return encoder->Encode(tensors, batch).to(embeddings.options());
}

}  // namespace gnomon
