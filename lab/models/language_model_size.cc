#include "models/language_model_size.h"

#include <iterator>

#include "training/strings.h"

namespace gnomon::lab {
namespace {

double WeightBytes(const LanguageModelOptions& model) {
  const auto dim = static_cast<double>(model.dim);
  const auto layers = static_cast<double>(model.depth);
  const double embeddings =
      model.adaptive.empty()
          ? static_cast<double>(model.vocabulary) * dim
          : AdaptiveEmbeddingImpl::CountWeights(model.vocabulary, model.dim, model.adaptive);
  return sizeof(float) * (embeddings + layers * LayerWeights(model));
}

}  // namespace

void CheckWeightsFit(const LanguageModelOptions& model) {
  CheckMemoryHolds(ModelFlags(model), WeightBytes(model));
}

void CheckStepFits(const LanguageModelOptions& model, int64_t rows, int64_t length,
                   const std::string& flags) {
  const auto depth = static_cast<double>(model.depth);
  // The number of logits per token; with adaptive embeddings, those of the first softmax.
  const auto vocabulary =
      static_cast<double>(model.adaptive.empty() ? model.vocabulary : model.adaptive[0]);
  // After the last layer, memory also holds the logits, their log-probabilities and a gradient of
  // the same size.
  const double numbers = depth * LayerNumbers(model) + 3 * vocabulary;
  const double tokens = static_cast<double>(rows) * static_cast<double>(length);
  CheckTrainingFits(ModelFlags(model), WeightBytes(model), flags, tokens * numbers);
}

void CheckStoredSizes(const LanguageModelOptions& model, const StoredSizes& file) {
  if (model.adaptive.empty()) {
    file.Expect("embedding.weight", {model.vocabulary, model.dim});
  } else {
    for (int64_t band = 0; band <= std::ssize(model.adaptive); ++band) {
      file.Expect(
          StrCat("embedding.table_", band),
          AdaptiveEmbeddingImpl::TableSizes(model.vocabulary, model.dim, model.adaptive, band));
    }
  }
  file.Expect("blocks.0.mlp_in.weight", {HiddenUnits(model), model.dim});
  file.ExpectLayers(model.depth);
}

}  // namespace gnomon::lab
