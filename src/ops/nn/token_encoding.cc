#include "ops/nn/token_encoding.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <memory>
#include <tuple>
#include <utility>

#include "base/kept.h"
#include "ops/catalogue/registry.h"

namespace gnomon {

std::vector<Component> TokenEncodings(const std::string& position, int64_t max_length) {
  std::vector<Component> encodings;
  for (Component& component : ParseSum(position)) {
    const PositionEntry& entry = FindPosition(component);
    if (entry.role() != PositionEntry::Role::kEmbedding) continue;
    if (entry.catalogue.Find("length") != nullptr) {
      component.SetDefault("length", std::to_string(max_length));
    }
    encodings.push_back(std::move(component));
  }
  return encodings;
}

std::unique_ptr<TokenEncoder> MakeTokenEncoder(const Component& component, int64_t dim,
                                               bool causal) {
  const PositionEntry& entry = FindPosition(component);
  TORCH_CHECK_VALUE(entry.role() == PositionEntry::Role::kEmbedding, "gnomon.nn: position ",
                    component.name(),
                    " acts inside attention; expected a position that is added to the embeddings");
  TORCH_CHECK_VALUE(dim >= 1, "gnomon.nn: ", component.name(), ": dim is ", dim,
                    "; expected at least 1");
  std::unique_ptr<TokenEncoder> encoder = entry.encoder(component, dim, causal);
  TORCH_CHECK_VALUE(encoder != nullptr, "gnomon.nn: ", component.name(),
                    " returned no encoder; return one from its factory");
  return encoder;
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
                   embeddings.scalar_type(), "; expected a floating-point dtype");
  TORCH_CHECK_VALUE(!batch.before || (is_like_embeddings(*batch.before) &&
                                      batch.before->sym_size(0) == embeddings.sym_size(0)),
                    "gnomon.nn: ", name, ": the preceding embeddings have shape ",
                    batch.before ? batch.before->sym_sizes() : embeddings.sym_sizes(),
                    "; expected (B, N, ", dim, ") with B = ", embeddings.sym_size(0));
  const c10::SymInt sequences = embeddings.sym_size(0);
  const c10::SymInt batch_size =
      batch.batch_size ? c10::SymInt(*batch.batch_size) : c10::SymInt(sequences);
  TORCH_CHECK_VALUE(batch.first_sequence >= 0 && sequences <= batch_size - batch.first_sequence,
                    "gnomon.nn: ", name, ": first_sequence is ", batch.first_sequence,
                    " and batch_size is ", batch_size, " for ", sequences,
                    " sequences; expected a first_sequence from 0 to ", batch_size - sequences);
  if (batch.lengths) {
    TORCH_CHECK_TYPE(at::isIntegralType(batch.lengths->scalar_type(), /*includeBool=*/false),
                     "gnomon.nn: ", name, ": lengths have dtype ", batch.lengths->scalar_type(),
                     "; expected integers");
    TORCH_CHECK_VALUE(
        batch.lengths->dim() == 0 ||
            (batch.lengths->dim() == 1 && batch.lengths->sym_size(0) == embeddings.sym_size(0)),
        "gnomon.nn: ", name, ": lengths have shape ", batch.lengths->sym_sizes(),
        "; expected (B,) = (", embeddings.sym_size(0), ",), or () if shared across the batch");
  }
  if (batch.positions) {
    const at::Tensor& positions = *batch.positions;
    TORCH_CHECK_TYPE(at::isIntegralType(positions.scalar_type(), /*includeBool=*/false),
                     "gnomon.nn: ", name, ": positions have dtype ", positions.scalar_type(),
                     "; expected integers");
    const auto sizes = embeddings.sym_sizes().slice(0, 2);
    TORCH_CHECK_VALUE(positions.sym_sizes() == sizes || positions.sym_sizes() == sizes.slice(1),
                      "gnomon.nn: ", name, ": positions have shape ", positions.sym_sizes(),
                      "; expected (B, L) = (", sizes[0], ", ", sizes[1], "), or (L,)");
    TORCH_CHECK_VALUE(batch.offset == 0, "gnomon.nn: ", name, ": positions and the offset ",
                      batch.offset, " are both given; pass only one of them");
  }
  static Kept<std::tuple<std::string, int64_t, bool>, std::shared_ptr<const TokenEncoder>> known;
  const std::shared_ptr<const TokenEncoder> encoder =
      known.Get({component.Text(), dim, causal}, [&]() -> std::shared_ptr<const TokenEncoder> {
        return MakeTokenEncoder(component, dim, causal);
      });
  const at::Tensor encoding = encoder->Encode(tensors, batch);
  TORCH_CHECK_VALUE(
      encoding.defined() && at::is_expandable_to(encoding.sym_sizes(), embeddings.sym_sizes()),
      "gnomon.nn: ", name, " returned an encoding of shape ",
      encoding.defined() ? encoding.sym_sizes() : c10::SymIntArrayRef(),
      "; expected a shape that broadcasts to ", embeddings.sym_sizes());
  return encoding.to(embeddings.options());
}

}  // namespace gnomon
