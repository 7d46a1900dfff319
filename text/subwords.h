// Subwords of SentencePiece (Kudo and Richardson 2018), merged by byte pairs (Sennrich et al.
// 2016).
#ifndef GNOMON_TEXT_SUBWORDS_H_
#define GNOMON_TEXT_SUBWORDS_H_

#include <cstdint>
#include <string_view>

#include "text/tokens.h"

namespace gnomon::models {

// The 256 bytes, SentencePiece's sign of the unknown, and one character.
inline constexpr int64_t kFewestSubwords = 258;

// Both throw Error where there is no libgnomon_sentencepiece.so, naming what to install.

// Learns `vocabulary` subwords (0: 8000) from a text; throws Error with SentencePiece's own words
// where it cannot.
TokenizerPtr BuildSubwords(int64_t vocabulary, std::string_view text);

// From a SentencePiece model file's content; throws Error where it is none, or not one that keeps
// every byte of a text.
TokenizerPtr ReadSubwords(std::string_view file);

}  // namespace gnomon::models

#endif  // GNOMON_TEXT_SUBWORDS_H_
