// The interface of libgnomon_sentencepiece.so, which uses only standard library types.
//
// SentencePiece is linked into a separate library, which is loaded on demand with private symbols.
// Both SentencePiece and PyTorch's libc10.so define FLAGS_minloglevel, and in a shared symbol scope
// one would overwrite the other's memory.
#ifndef GNOMON_TEXT_SENTENCEPIECE_MODULE_H_
#define GNOMON_TEXT_SENTENCEPIECE_MODULE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gnomon::lab {

struct Piece {
  enum class Kind { kText, kByte, kOther };
  Kind kind = Kind::kOther;
  std::string name;  // of text: the text, with U+2581 for a space; of a byte: "<0x0A>"
};

class PieceModel {
 public:
  virtual ~PieceModel() = default;
  virtual std::vector<Piece> Pieces() const = 0;
  // Returns the indices of the pieces in a line of text.
  virtual std::vector<int> Encode(std::string_view line) const = 0;
};

// On failure, both functions throw std::runtime_error with SentencePiece's message.
struct SentencePieceModule {
  // Trains a model that preserves every byte of a text, and returns the content of its file.
  std::string (*train)(int64_t vocabulary, std::string_view text);
  std::unique_ptr<PieceModel> (*load)(const std::string& file);
};

// The module's only symbol, a SentencePieceModule.
inline constexpr const char* kSentencePieceSymbol = "gnomon_sentencepiece";

}  // namespace gnomon::lab

#endif  // GNOMON_TEXT_SENTENCEPIECE_MODULE_H_
