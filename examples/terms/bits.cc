#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/encodings/tokens.h"

namespace gnomon {
namespace bits {
namespace {

// Column n of an encoding is binary digit n of the position; digit 0 is the lowest.
class Encoder : public TokenEncoder {
 public:
  Encoder(const Component& component, int64_t dim) : dim_(dim), scale_(component.Number("scale")) {}

  at::Tensor Encode(const std::vector<at::Tensor>&, const TokenBatch& batch) const override {
    const at::Tensor positions = Positions(batch).unsqueeze(-1);
    // Positions have at most 63 binary digits.
    const at::Tensor digits = at::arange(dim_, positions.options()).clamp_max(62);
    return positions.bitwise_right_shift(digits).bitwise_and(1).to(at::kDouble) * scale_;
  }

 private:
  int64_t dim_;
  double scale_;
};

std::unique_ptr<TokenEncoder> Make(const Component& component, int64_t dim, bool) {
  return std::make_unique<Encoder>(component, dim);
}

const RegisterPosition bits({
    .catalogue = {.name = "bits",
                  .title = "binary digits",
                  .formula = "scale times the binary digits of p, added to the embeddings",
                  .source = "an example, 2026",
                  .role = CatalogueEntry::Role::kEmbedding,
                  .cost = "0 + 0"},
    .parameters = {Number("scale", "1").Means("value added for each digit that is 1")},
    .encoder = Make,
});

}  // namespace
}  // namespace bits
}  // namespace gnomon
