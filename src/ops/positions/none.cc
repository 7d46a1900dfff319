#include <ATen/ATen.h>

#include "ops/catalogue/registry.h"

namespace gnomon {
namespace none {
namespace {

const RegisterPosition none({
    .catalogue = {.name = "none",
                  .title = "no position",
                  .formula = "no positional term: only a causal mask or a convolution "
                             "distinguishes positions (NoPE)",
                  .source = "Haviv et al. 2022, Transformer Language Models without Positional "
                            "Encodings Still Learn Positional Information",
                  .role = CatalogueEntry::Role::kNone,
                  .cost = "0 + 0"},
});

}  // namespace
}  // namespace none
}  // namespace gnomon
