#include "text/subwords.h"

#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gnomon/attention.h"
#include "text/sentencepiece/module.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

constexpr int64_t kDefaultVocabulary = 8000;
// SentencePiece's character for a space, U+2581.
constexpr std::string_view kSpace = "\xe2\x96\x81";
constexpr const char* kLineFeed = "<0x0A>";

const SentencePieceModule* LoadModule() {
  int mode = RTLD_NOW | RTLD_LOCAL;
#if defined(RTLD_DEEPBIND) && !defined(__SANITIZE_ADDRESS__)
  mode |= RTLD_DEEPBIND;  // see module.h; AddressSanitizer does not support it
#endif
  // The library is found through the run path of the binary that contains this code.
  void* const library = dlopen("libgnomon_sentencepiece.so", mode);
  if (library == nullptr) {
    throw Error(
        StrCat("subwords need SentencePiece: install libsentencepiece-dev; if gnomon was "
               "built without it, run `touch CMakeLists.txt` and `make build` (",
               dlerror(), ")"));
  }
  return static_cast<const SentencePieceModule*>(dlsym(library, kSentencePieceSymbol));
}

// Loads the module, which is never unloaded. Throws Error if it is missing.
const SentencePieceModule& Module() {
  static const SentencePieceModule* const module = LoadModule();
  return *module;
}

// Calls visit(line, ends) for each line without its line feed; `ends` is true if the line has one.
template <class Visit>
void ForEachLine(std::string_view text, Visit visit) {
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const bool ends = end != std::string_view::npos;
    visit(text.substr(0, end), ends);
    text.remove_prefix(ends ? end + 1 : text.size());
  }
}

std::string TextOf(const Piece& piece) {
  const std::string& name = piece.name;
  if (piece.kind == Piece::Kind::kOther) return "";
  if (piece.kind == Piece::Kind::kByte) {
    return {static_cast<char>(std::stoi(name.substr(3, 2), nullptr, 16))};
  }
  std::string text;
  for (size_t at = 0; at < name.size();) {
    const bool is_space = name.compare(at, kSpace.size(), kSpace) == 0;
    text += is_space ? ' ' : name[at];
    at += is_space ? kSpace.size() : 1;
  }
  return text;
}

// Lines are encoded separately; the line feed between them is a byte token.
class SubwordTokenizer : public Tokenizer {
 public:
  explicit SubwordTokenizer(std::string_view file) : file_(file), model_(Load(file_)) {
    int64_t bytes = 0;
    for (const Piece& piece : model_->Pieces()) {
      if (piece.name == kLineFeed) line_end_ = static_cast<int32_t>(texts_.size());
      texts_.push_back(TextOf(piece));
      bytes += piece.kind == Piece::Kind::kByte ? 1 : 0;
    }
    // A model that was trained with other settings may drop spaces or characters.
    constexpr std::string_view kProbe = " a  b\n";
    std::string back;
    if (bytes == kByteVocabulary) {
      const TokenText probe = Encode(kProbe);
      for (int64_t n = 0; n < probe.size(); ++n) back += Text(probe[n], std::nullopt);
    }
    if (back != kProbe) {
      throw Error(
          "its SentencePiece model does not preserve every byte of a text, unlike the models that "
          "gnomon trains");
    }
  }

  std::string kind() const override { return "subwords"; }
  int64_t size() const override { return static_cast<int64_t>(texts_.size()); }
  std::string vocabulary() const override { return file_; }

  TokenText Encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    std::vector<int64_t> ends;
    int64_t begin = 0;
    ForEachLine(text, [&](std::string_view line, bool ends_here) {
      const std::vector<int> pieces = Pieces(line);
      const int64_t end = begin + static_cast<int64_t>(line.size());
      int64_t at = begin;
      for (const int id : pieces) {
        at = std::min(at + static_cast<int64_t>(texts_[id].size()), end);
        ids.push_back(id);
        ends.push_back(at);
      }
      // The pieces differ in length from the line if it contains U+2581 itself or invalid UTF-8.
      if (!pieces.empty()) ends.back() = end;
      begin = end;
      if (ends_here) {
        ids.push_back(line_end_);
        ends.push_back(++begin);
      }
    });
    return TokenText(std::move(ids), std::move(ends));
  }

  std::string Text(int64_t token, std::optional<int64_t>) const override { return texts_[token]; }

 private:
  static std::unique_ptr<PieceModel> Load(const std::string& file) {
    const SentencePieceModule& module = Module();
    try {
      return module.load(file);
    } catch (const std::runtime_error&) {
      throw Error("its vocabulary is not a SentencePiece model");
    }
  }

  std::vector<int> Pieces(std::string_view line) const {
    try {
      return model_->Encode(line);
    } catch (const std::runtime_error& error) {
      throw Error(StrCat("subwords: cannot encode a line: ", error.what()));
    }
  }

  std::string file_;
  std::unique_ptr<PieceModel> model_;
  std::vector<std::string> texts_;
  int32_t line_end_ = 0;
};

}  // namespace

TokenizerPtr BuildSubwords(int64_t vocabulary, std::string_view text) {
  const SentencePieceModule& module = Module();
  std::string file;
  try {
    file = module.train(vocabulary == 0 ? kDefaultVocabulary : vocabulary, text);
  } catch (const std::runtime_error& error) {
    throw Error(StrCat("subwords: SentencePiece training failed: ", error.what()));
  }
  return std::make_shared<SubwordTokenizer>(file);
}

TokenizerPtr ReadSubwords(std::string_view file) {
  return std::make_shared<SubwordTokenizer>(file);
}

}  // namespace gnomon::lab
