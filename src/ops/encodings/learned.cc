#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/catalogue/registry.h"
#include "ops/encodings/tokens.h"

namespace gnomon {
namespace learned {
namespace {

// Gehring et al. 2017; initialised as in Radford et al. 2019.
class Encoder : public TokenEncoder {
 public:
  Encoder(const Component& component, int64_t dim)
      : dim_(dim), length_(component.FindInteger("length").value_or(0)) {
    TORCH_CHECK_VALUE(length_ >= 1, "gnomon.nn: length of learned is ", length_,
                      "; expected at least 1");
  }

  std::vector<ModuleTensor> Tensors() const override {
    return {{"table", at::randn({length_, dim_}, at::kDouble) * 0.02, /*learned=*/true}};
  }

  std::optional<int64_t> max_length() const override { return length_; }

  at::Tensor Encode(const std::vector<at::Tensor>& tensors,
                    const TokenBatch& batch) const override {
    const at::Tensor& table = Take(tensors, 0, "table of learned");
    if (batch.positions) {
      const at::Tensor positions = Positions(batch);
      CheckPositions("gnomon.nn: learned", positions, length_,
                     "rows of the table, 0 to " + std::to_string(length_ - 1));
      return at::embedding(table, positions);
    }
    TORCH_CHECK_VALUE(batch.offset >= 0 && batch.offset + Length(batch) <= length_,
                      "gnomon.nn: learned: positions range from ", batch.offset, " to ",
                      batch.offset + Length(batch) - 1, "; expected 0 to ", length_ - 1,
                      ", because the table has ", length_, " rows");
    return table.narrow_symint(0, batch.offset, Length(batch));
  }

 private:
  int64_t dim_;
  int64_t length_;
};

std::unique_ptr<TokenEncoder> Make(const Component& component, int64_t dim, bool) {
  return std::make_unique<Encoder>(component, dim);
}

const RegisterPosition learned({
    .catalogue = {.name = "learned",
                  .title = "learned positions",
                  .formula = "adds the rows of a learned table to the embeddings",
                  .details = "Parameter: `table` (max_length, E), initialised from N(0, 0.02^2) "
                             "(Radford et al. 2019).",
                  .source = "Gehring et al. 2017, Convolutional Sequence to Sequence Learning",
                  .role = CatalogueEntry::Role::kEmbedding,
                  .cost = "0 + 0",
                  .class_name = "LearnedAbsolute"},
    .parameters =
        {Length().Required().Called("max_length").Means("number of positions (table rows)")},
    .encoder = Make,
});

}  // namespace
}  // namespace learned
}  // namespace gnomon
