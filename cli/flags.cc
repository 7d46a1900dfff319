#include "cli/flags.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <set>

#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "models/strings.h"

namespace gnomon::cli {

using models::StrCat;

namespace {

// "1 to 4096", for the help; a bound that nobody comes near is left out.
std::string Span(double lowest, double highest) {
  constexpr double kFar = 1e9;
  return highest < kFar ? StrCat(lowest, " to ", highest) : StrCat(lowest, " or more");
}

[[noreturn]] void Refuse(const std::string& name, const std::string& word, const char* kind,
                         const std::string& lowest, const std::string& highest) {
  throw Error(StrCat(name, " is ", word.empty() ? "empty" : word, ", expected ", kind, " from ",
                     lowest, " to ", highest));
}

}  // namespace

CLI::Validator WholeNumber(const std::string& name, int64_t lowest, int64_t highest) {
  const auto check = [=](std::string& word) {
    int64_t number = 0;
    const char* const end = word.data() + word.size();
    // A sign of plus is the one that from_chars does not know.
    const char* const begin = word.data() + (word.starts_with('+') && word.size() > 1 ? 1 : 0);
    const auto [stop, error] = std::from_chars(begin, end, number);
    if (error != std::errc() || stop != end || number < lowest || number > highest) {
      Refuse(name, word, "an integer", std::to_string(lowest), std::to_string(highest));
    }
    // In a form that nothing takes to be octal.
    word = std::to_string(number);
    return std::string();
  };
  return {check, Span(static_cast<double>(lowest), static_cast<double>(highest))};
}

CLI::Option* AddReal(CLI::App* command, const std::string& name, double* value, double lowest,
                     double highest, const std::string& help) {
  const auto check = [=](const std::string& word) {
    double number = 0;
    if (!CLI::detail::lexical_cast(word, number) || !(number >= lowest && number <= highest)) {
      Refuse(name, word, "a number", StrCat(lowest), StrCat(highest));
    }
    return std::string();
  };
  return command->add_option(name, *value, help)
      ->check(CLI::Validator(check, Span(lowest, highest)));
}

void AddModelFlags(CLI::App* command, models::LanguageModelOptions* options) {
  const std::string group = "Model";
  const auto add = [&](const char* name, int64_t* value, const char* help) {
    AddNumber(command, name, value, 1, kMany, help)->capture_default_str()->group(group);
  };
  add("--dim", &options->dim, "Width of the model");
  add("--depth", &options->depth, "Layers");
  add("--heads", &options->heads, "Attention heads per layer; divides --dim");
  add("--mlp", &options->mlp, "Hidden units of each layer's MLP");
  AddReal(command, "--dropout", &options->dropout, 0, 1,
          "Dropout probability on each residual branch")
      ->capture_default_str()
      ->group(group);
}

void AddTrainingFlags(CLI::App* command, models::TrainingOptions* options) {
  const std::string group = "Training";
  AddNumber(command, "--steps", &options->steps, 1, kMany, "Optimizer steps")
      ->capture_default_str()
      ->group(group);
  AddNumber(command, "--batch", &options->batch, 1, kMany, "Windows of text per step")
      ->capture_default_str()
      ->group(group);
  AddReal(command, "--learning-rate", &options->learning_rate, 0, 1e3,
          "Peak learning rate; it decays to a tenth along a cosine")
      ->capture_default_str()
      ->group(group);
  AddNumber(
      command, "--warmup", &options->warmup, 0, kMany,
      "Steps of linear warm-up of the learning rate; default: a tenth of the steps, at most 100")
      ->group(group);
  AddReal(command, "--weight-decay", &options->weight_decay, 0, 1e3,
          "AdamW's weight decay, on weight matrices and embeddings")
      ->capture_default_str()
      ->group(group);
  AddReal(command, "--clip", &options->clip, 1e-12, 1e12,
          "Gradients are scaled down to this norm where they exceed it")
      ->capture_default_str()
      ->group(group);
}

void AddTokenFlags(CLI::App* command, models::TokenOptions* options) {
  command
      ->add_option("--tokens", options->kind,
                   "What the model reads: bytes; words, split at spaces, with <eos> for the end of "
                   "a line and <unk> for a word that the training text does not have; or subwords, "
                   "which SentencePiece learns from the training text")
      ->capture_default_str();
  AddNumber(
      command, "--vocabulary", &options->vocabulary, 1, kMany,
      "Size of the vocabulary: the most frequent words, or subwords; default: all words, 8000 "
      "subwords");
}

void AddMemoryFlag(CLI::App* command, models::TrainingOptions* options) {
  AddNumber(command, "--memory", &options->memory, 0, kMany,
            "Tokens of earlier windows that each layer also sees, without gradient "
            "(Transformer-XL); the windows of a row then follow each other in the text")
      ->capture_default_str();
}

void SetWarmup(const CLI::App& command, models::TrainingOptions* options) {
  if (command.count("--warmup") > 0) return;
  options->warmup = std::clamp<int64_t>(options->steps / 10, 0, 100);
}

void AddThreadsFlag(CLI::App* command, int64_t* threads) {
  AddNumber(command, "--threads", threads, 0, 4096, "Threads; 0: one per core")
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
    if (length < 1 || length > kMany) {
      throw Error(StrCat("--lengths: ", length, " is not a length of 1 to ", kMany));
    }
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
