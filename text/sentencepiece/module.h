// What libgnomon_sentencepiece.so offers, in types of the standard library alone.
//
// SentencePiece is a library of its own that is loaded when subwords are asked for, with its
// symbols kept to itself: it defines FLAGS_minloglevel, as PyTorch's libc10.so does, and where the
// two meet in one scope, the one writes into the other's memory.
#ifndef GNOMON_TEXT_SENTENCEPIECE_MODULE_H_
#define GNOMON_TEXT_SENTENCEPIECE_MODULE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gnomon::models {

struct Piece {
  enum class Kind { kText, kByte, kOther };
  Kind kind = Kind::kOther;
  std::string name;  // of text: itself, with U+2581 for a space; of a byte: "<0x0A>"
};

class PieceModel {
 public:
  virtual ~PieceModel() = default;
  virtual std::vector<Piece> Pieces() const = 0;
  // The pieces of a line of text, by number.
  virtual std::vector<int> Encode(std::string_view line) const = 0;
};

// Both throw std::runtime_error with SentencePiece's own words where it cannot.
struct SentencePieceModule {
  // The file of a model that keeps every byte of a text.
  std::string (*train)(int64_t vocabulary, std::string_view text);
  std::unique_ptr<PieceModel> (*load)(const std::string& file);
};

// The module's only symbol, of this type.
inline constexpr const char* kSentencePieceSymbol = "gnomon_sentencepiece";

}  // namespace gnomon::models

#endif  // GNOMON_TEXT_SENTENCEPIECE_MODULE_H_
