// SentencePiece subword tokenizers (Kudo and Richardson 2018) with byte-pair encoding (Sennrich et
// al. 2016).
#ifndef GNOMON_TEXT_SUBWORDS_H_
#define GNOMON_TEXT_SUBWORDS_H_

#include <cstdint>
#include <string_view>

#include "text/tokens.h"

namespace gnomon::lab {

// The minimum vocabulary: 256 bytes, SentencePiece's unknown token, and one character.
inline constexpr int64_t kFewestSubwords = 258;

// If libgnomon_sentencepiece.so is missing, both functions throw an Error that says what to
// install.

// Learns `vocabulary` subwords (0 means 8000) from a text. If training fails, throws Error with
// SentencePiece's message.
TokenizerPtr BuildSubwords(int64_t vocabulary, std::string_view text);

// Creates a tokenizer from the content of a SentencePiece model file. Throws Error if it is invalid
// or does not preserve every byte of a text.
TokenizerPtr ReadSubwords(std::string_view file);

}  // namespace gnomon::lab

#endif  // GNOMON_TEXT_SUBWORDS_H_
