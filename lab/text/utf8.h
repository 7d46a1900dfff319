// Decodes UTF-8.
#ifndef GNOMON_TEXT_UTF8_H_
#define GNOMON_TEXT_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace gnomon::lab {

struct CodePoint {
  uint32_t value = 0;
  size_t bytes = 0;  // 0 if invalid
};

// Returns the code point that begins at byte `at`. Overlong forms, surrogates and values above
// U+10FFFF are invalid (RFC 3629).
CodePoint CodePointAt(std::string_view text, size_t at);

// Whether a text is valid UTF-8.
bool IsUtf8(std::string_view text);

// Returns the text with each invalid byte replaced by U+FFFD.
std::string ToUtf8(std::string_view text);

}  // namespace gnomon::lab

#endif  // GNOMON_TEXT_UTF8_H_
