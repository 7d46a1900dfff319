#include "cli/flags.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include "gnomon/attention.h"
#include "models/strings.h"

namespace gnomon::cli {

using models::StrCat;

void AddModelFlags(CLI::App* command, models::LanguageModelOptions* options) {
  const std::string group = "Model";
  command->add_option("--dim", options->dim, "Width of the model")
      ->capture_default_str()
      ->group(group);
  command->add_option("--depth", options->depth, "Layers")->capture_default_str()->group(group);
  command->add_option("--heads", options->heads, "Attention heads a layer; divides --dim")
      ->capture_default_str()
      ->group(group);
  command->add_option("--mlp", options->mlp, "Hidden units of each layer's MLP")
      ->capture_default_str()
      ->group(group);
  command->add_option("--dropout", options->dropout, "Of each residual branch, 0 to 1")
      ->capture_default_str()
      ->group(group);
}

void AddTrainingFlags(CLI::App* command, models::TrainingOptions* options) {
  const std::string group = "Training";
  command->add_option("--steps", options->steps, "Steps of the optimizer")
      ->capture_default_str()
      ->group(group);
  command->add_option("--batch", options->batch, "Windows of text a step")
      ->capture_default_str()
      ->group(group);
  command
      ->add_option("--learning-rate", options->learning_rate,
                   "The highest; it falls to a tenth along a cosine")
      ->capture_default_str()
      ->group(group);
  command
      ->add_option("--warmup", options->warmup,
                   "Steps of linear growth of the learning rate; default a tenth of the steps, at "
                   "most 100")
      ->group(group);
  command
      ->add_option("--weight-decay", options->weight_decay,
                   "AdamW's decoupled decay of weight matrices and embeddings")
      ->capture_default_str()
      ->group(group);
  command->add_option("--clip", options->clip, "Largest norm of the gradient")
      ->capture_default_str()
      ->group(group);
}

void AddTokenFlags(CLI::App* command, models::TokenOptions* options) {
  command
      ->add_option("--tokens", options->kind,
                   "What the model reads: bytes; words, split at spaces, with <eos> for the end of "
                   "a line and <unk> for a word that the training text has not; or subwords, which "
                   "SentencePiece learns from the training text")
      ->capture_default_str();
  command->add_option("--vocabulary", options->vocabulary,
                      "How many words, the most frequent, or subwords; default all words, 8000 "
                      "subwords");
}

void AddMemoryFlag(CLI::App* command, models::TrainingOptions* options) {
  command
      ->add_option("--memory", options->memory,
                   "Tokens of the windows before that each layer sees too, without gradient "
                   "(Transformer-XL); the windows of a row then follow each other in the text")
      ->capture_default_str();
}

void SetWarmup(const CLI::App& command, models::TrainingOptions* options) {
  if (command.count("--warmup") > 0) return;
  options->warmup = std::clamp<int64_t>(options->steps / 10, 0, 100);
}

void AddThreadsFlag(CLI::App* command, int64_t* threads) {
  command->add_option("--threads", *threads, "Threads; 0: one for each core")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

void CheckStandsAlone(const CLI::App& command, const std::string& chosen,
                      const std::vector<std::string>& allowed) {
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_name();
    if (option->count() > 0 && name != chosen &&
        std::find(allowed.begin(), allowed.end(), name) == allowed.end()) {
      throw Error(StrCat(chosen, " takes its settings from the run and excludes ", name));
    }
  }
}

models::LanguageModel BuildModel(const models::LanguageModelOptions& options, int64_t seed,
                                 int64_t memory) {
  const auto name = [&] {
    return StrCat("similarity '", options.similarity, "', position '", options.position, "': ");
  };
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
  } catch (const c10::Error& error) {
    throw Error(name() + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw Error(name() + "cannot be built: " + error.what());
  }
}

std::filesystem::path CheckpointFile(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    throw Error(StrCat("no such checkpoint file or run folder: ", path));
  }
  if (!std::filesystem::is_directory(path, error)) return path;
  const std::filesystem::path file = std::filesystem::path(path) / kCheckpointName;
  if (!std::filesystem::exists(file, error)) {
    throw Error(StrCat("the folder ", path, " holds no ", kCheckpointName));
  }
  return file;
}

void CheckLengths(const std::vector<int64_t>& lengths) {
  std::set<int64_t> seen;
  for (const int64_t length : lengths) {
    if (length < 1) throw Error(StrCat("--lengths: ", length, " is not a length of at least 1"));
    if (!seen.insert(length).second) throw Error(StrCat("--lengths: ", length, " comes twice"));
  }
}

std::string FormatLoss(const std::optional<double>& loss) {
  if (!loss) return "–";
  char text[32];
  std::snprintf(text, sizeof(text), "%.3f", *loss);
  return text;
}

}  // namespace gnomon::cli
