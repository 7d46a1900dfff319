#include "cli/checks.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>

#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::cli {
namespace {

using models::StrCat;

}  // namespace

void CheckTextHolds(const models::TextData& data, const models::TokenData& tokens,
                    int64_t training_needs, int64_t validation_needs) {
  const auto check = [&](const char* part, const models::TokenText& text, int64_t needed) {
    if (text.size() < needed) {
      throw Error(StrCat("the text is too short: the ", part, " part of ", data.path, " has ",
                         text.size(), " ", tokens.tokenizer->kind(), ", the windows need ",
                         needed));
    }
  };
  check("training", tokens.train, training_needs);
  check("validation", tokens.valid, validation_needs);
}

models::LanguageModel BuildModel(const models::LanguageModelOptions& options, int64_t seed,
                                 int64_t memory) {
  const auto name = [&] {
    return StrCat("similarity '", options.similarity, "', position '", options.position, "': ");
  };
  CheckModelFits(options);
  try {
    models::LanguageModel model = models::NewModel(options, seed);
    const std::optional<int64_t> most = model->max_length();
    if (most && *most < options.max_length) {
      throw Error(StrCat("defined up to length ", *most, ", shorter than the training length ",
                         options.max_length));
    }
    models::CheckMemory(model, memory);
    const torch::NoGradGuard no_grad;
    // What ends at a length may be a grid that takes all of its tokens at once.
    const int64_t length = most ? options.max_length : std::min<int64_t>(8, options.max_length);
    const torch::Tensor logits =
        model->forward(torch::arange(length).remainder(options.vocabulary).unsqueeze(0));
    if (!torch::isfinite(logits).all().item<bool>()) {
      throw Error("gives numbers that are not finite");
    }
    return model;
  } catch (const Error& error) {
    throw Error(name() + error.what());
  } catch (const std::exception& error) {
    if (const std::optional<std::string> shortage = DescribeShortage(error)) {
      throw Error(StrCat(name(), "not enough memory at --length ", options.max_length, *shortage));
    }
    const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
    throw Error(name() + (torch_error == nullptr ? StrCat("cannot be built: ", error.what())
                                                 : torch_error->what_without_backtrace()));
  }
}

void CheckLengths(const std::vector<int64_t>& lengths) {
  std::set<int64_t> seen;
  for (const int64_t length : lengths) {
    if (length < 1 || length > models::kMany) {
      throw Error(StrCat("--lengths: ", length, " is not a length of 1 to ", models::kMany));
    }
    if (!seen.insert(length).second) throw Error(StrCat("--lengths: ", length, " comes twice"));
  }
}

}  // namespace gnomon::cli
