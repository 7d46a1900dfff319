// SentencePiece's C++ library is used where CMake finds one: it trains and encodes in this process
// and is a package of Debian and Ubuntu, so that the program reads subwords without Python. Nothing
// else needs it.
#include "models/subwords.h"

#include "gnomon/attention.h"

#ifdef GNOMON_HAS_SENTENCEPIECE

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "models/strings.h"

namespace gnomon::models {
namespace {

namespace sp = sentencepiece;

constexpr int64_t kDefaultVocabulary = 8000;
// What SentencePiece writes a space as, U+2581.
constexpr std::string_view kSpace = "\xe2\x96\x81";

void Check(const sp::util::Status& status, const char* what) {
  if (!status.ok()) throw Error(StrCat("subwords: ", what, ": ", status.ToString()));
}

// Calls visit(line, ends) for each line, without its line feed; `ends`: it has one.
template <class Visit>
void ForEachLine(std::string_view text, Visit visit) {
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const bool ends = end != std::string_view::npos;
    visit(text.substr(0, end), ends);
    text.remove_prefix(ends ? end + 1 : text.size());
  }
}

// The lines of a text, as SentencePiece asks for them.
class Lines : public sp::SentenceIterator {
 public:
  explicit Lines(std::string_view text) : rest_(text) { Next(); }
  bool done() const override { return done_; }
  void Next() override {
    done_ = rest_.empty();
    const size_t end = rest_.find('\n');
    line_ = rest_.substr(0, end);
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 1);
  }
  const std::string& value() const override { return line_; }
  sp::util::Status status() const override { return {}; }

 private:
  std::string_view rest_;
  std::string line_;
  bool done_ = false;
};

// Lines are encoded one by one, and the line feed between them is its byte's token.
class SubwordTokenizer : public Tokenizer {
 public:
  explicit SubwordTokenizer(std::string_view file) : file_(file) {
    const sp::util::Status status = processor_.LoadFromSerializedProto(file_);
    if (!status.ok()) throw Error("its vocabulary is not a model of SentencePiece");
    int64_t bytes = 0;
    for (int id = 0; id < processor_.GetPieceSize(); ++id) {
      texts_.push_back(TextOf(id));
      bytes += processor_.IsByte(id) ? 1 : 0;
    }
    line_end_ = processor_.PieceToId("<0x0A>");
    // A model of other settings may drop spaces or characters.
    constexpr std::string_view kProbe = " a  b\n";
    std::string back;
    if (bytes == kByteVocabulary) {
      const TokenText probe = Encode(kProbe);
      for (int64_t n = 0; n < probe.size(); ++n) back += Text(probe[n], std::nullopt);
    }
    if (back != kProbe) {
      throw Error(
          "its model of SentencePiece does not keep every byte of a text, as those do that gnomon "
          "trains");
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
      std::vector<int> pieces;
      Check(processor_.Encode(line, &pieces), "cannot encode a line");
      const int64_t end = begin + static_cast<int64_t>(line.size());
      int64_t at = begin;
      for (const int id : pieces) {
        at = std::min(at + static_cast<int64_t>(texts_[id].size()), end);
        ids.push_back(id);
        ends.push_back(at);
      }
      // They differ where the line holds U+2581 itself, or what is not UTF-8.
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
  std::string TextOf(int id) const {
    if (processor_.IsControl(id) || processor_.IsUnknown(id)) return "";
    const std::string& piece = processor_.IdToPiece(id);
    if (processor_.IsByte(id)) {  // <0x41>
      return {static_cast<char>(std::stoi(piece.substr(3, 2), nullptr, 16))};
    }
    std::string text;
    for (size_t at = 0; at < piece.size();) {
      const bool is_space = piece.compare(at, kSpace.size(), kSpace) == 0;
      text += is_space ? ' ' : piece[at];
      at += is_space ? kSpace.size() : 1;
    }
    return text;
  }

  std::string file_;
  sp::SentencePieceProcessor processor_;
  std::vector<std::string> texts_;
  int32_t line_end_ = 0;
};

}  // namespace

TokenizerPtr BuildSubwords(int64_t vocabulary, std::string_view text) {
  const int64_t size = vocabulary == 0 ? kDefaultVocabulary : vocabulary;
  // Every byte of a text is kept: no normalisation, no spaces added or removed, and characters
  // that are not in the vocabulary are spelled in bytes.
  const std::unordered_map<std::string, std::string> options = {
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(size)},
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"bos_id", "-1"},
      {"eos_id", "-1"},
      {"max_sentence_length", "1048576"},
      {"minloglevel", "2"},
  };
  Lines lines(text);
  std::string file;
  Check(sp::SentencePieceTrainer::Train(options, &lines, &file), "SentencePiece cannot learn them");
  return std::make_shared<SubwordTokenizer>(file);
}

TokenizerPtr ReadSubwords(std::string_view file) {
  return std::make_shared<SubwordTokenizer>(file);
}

}  // namespace gnomon::models

#else

namespace gnomon::models {
namespace {

[[noreturn]] void ThrowMissing() {
  throw Error(
      "subwords need SentencePiece, and this program was built without it: install "
      "libsentencepiece-dev, then touch CMakeLists.txt and make build");
}

}  // namespace

TokenizerPtr BuildSubwords(int64_t, std::string_view) { ThrowMissing(); }
TokenizerPtr ReadSubwords(std::string_view) { ThrowMissing(); }

}  // namespace gnomon::models

#endif
