#include "text/sentencepiece/module.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <stdexcept>
#include <unordered_map>

namespace gnomon::lab {
namespace {

namespace sp = sentencepiece;

void Check(const sp::util::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

// Provides the lines of a text through SentencePiece's interface.
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

std::string Train(int64_t vocabulary, std::string_view text) {
  // These settings preserve every byte of a text: they disable normalisation, neither add nor
  // remove spaces, and encode unknown characters as bytes.
  const std::unordered_map<std::string, std::string> options = {
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(vocabulary)},
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
  Check(sp::SentencePieceTrainer::Train(options, &lines, &file));
  return file;
}

class Model : public PieceModel {
 public:
  explicit Model(const std::string& file) { Check(processor_.LoadFromSerializedProto(file)); }

  std::vector<Piece> Pieces() const override {
    std::vector<Piece> pieces;
    for (int id = 0; id < processor_.GetPieceSize(); ++id) {
      const bool is_other = processor_.IsControl(id) || processor_.IsUnknown(id);
      pieces.push_back({is_other                ? Piece::Kind::kOther
                        : processor_.IsByte(id) ? Piece::Kind::kByte
                                                : Piece::Kind::kText,
                        processor_.IdToPiece(id)});
    }
    return pieces;
  }

  std::vector<int> Encode(std::string_view line) const override {
    std::vector<int> pieces;
    Check(processor_.Encode(line, &pieces));
    return pieces;
  }

 private:
  sp::SentencePieceProcessor processor_;
};

std::unique_ptr<PieceModel> Load(const std::string& file) { return std::make_unique<Model>(file); }

}  // namespace
}  // namespace gnomon::lab

extern "C"
    [[gnu::visibility("default")]] const gnomon::lab::SentencePieceModule gnomon_sentencepiece;
const gnomon::lab::SentencePieceModule gnomon_sentencepiece = {gnomon::lab::Train,
                                                               gnomon::lab::Load};
