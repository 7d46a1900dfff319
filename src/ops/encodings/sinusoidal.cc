#include <ATen/ATen.h>
#include <gnomon/torch/attention.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/coordinates/sinusoid.h"
#include "ops/coordinates/token_grid.h"
#include "ops/encodings/tokens.h"

namespace gnomon {
namespace sinusoidal {
namespace {

// Vaswani et al. 2017, section 3.5; over a grid as in He et al. 2022, Masked Autoencoders.
class Encoder : public TokenEncoder {
 public:
  Encoder(const Component& component, int64_t dim)
      : dim_(dim), layout_(component.Choice("layout")), grid_(TokenGrid::Find(component)) {
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
    const auto table = [&] {
      return grid_sinusoid(grid_->shape(), dim_, layout_, grid_->prefix())
          .to(batch.embeddings.device());
    };
    if (batch.positions) {
      const at::Tensor positions = Positions(batch);
      grid_->CoordinatesAt("gnomon.nn: sinusoidal", positions);  // checks them
      return at::embedding(table(), positions);
    }
    TORCH_CHECK_VALUE(batch.offset >= 0 && batch.offset + Length(batch) <= grid_->tokens(),
                      "gnomon.nn: sinusoidal: positions range from ", batch.offset, " to ",
                      batch.offset + Length(batch) - 1, "; expected 0 to ", grid_->tokens() - 1,
                      ", because the grid ", grid_->Text(), " has ", grid_->tokens(), " tokens");
    return table().narrow_symint(0, batch.offset, Length(batch));
  }

 private:
  int64_t dim_;
  std::string layout_;
  std::optional<TokenGrid> grid_;
};

std::unique_ptr<TokenEncoder> Make(const Component& component, int64_t dim, bool) {
  return std::make_unique<Encoder>(component, dim);
}

const RegisterPosition sinusoidal({
    .catalogue =
        {.name = "sinusoidal",
         .title = "sinusoids",
         .formula = "adds sin and cos of p 10000^(-2 i / E) to embeddings of dimension E; on a "
                    "grid, each axis has E / axes dimensions",
         .latex = R"(\sin\left(p\, 10000^{-2i/E}\right), \quad \cos\left(p\, 10000^{-2i/E}\right))",
         .note = "p is the position, and E is the embedding dimension. On a grid, each axis has E "
                 "/ axes dimensions",
         .details =
             "The function sinusoid returns the table. If a shape is given, the function "
             "grid_sinusoid returns it. The first `prefix` tokens then get no encoding, and the "
             "remaining tokens lie on the grid.",
         .source = "Vaswani et al. 2017, Attention Is All You Need",
         .role = CatalogueEntry::Role::kEmbedding,
         .cost = "0 + 0",
         .class_name = "Sinusoidal"},
    .parameters = OnGrid({Choice("layout", SinusoidLayouts())
                              .Means("order of sines and cosines in an embedding; see sinusoid")}),
    .encoder = Make,
});

}  // namespace
}  // namespace sinusoidal
}  // namespace gnomon
