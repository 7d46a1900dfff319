#include "text/utf8.h"

namespace gnomon::lab {

CodePoint CodePointAt(std::string_view text, size_t at) {
  const auto byte = [&](size_t n) { return static_cast<unsigned char>(text[at + n]); };
  const uint32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  const size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() - at < bytes) return {};
  uint32_t value = first & (0x7f >> bytes);
  for (size_t n = 1; n < bytes; ++n) {
    if ((byte(n) & 0xc0) != 0x80) return {};
    value = value << 6 | (byte(n) & 0x3f);
  }
  const bool is_overlong = value < (bytes == 4 ? 0x10000u : bytes == 3 ? 0x800u : 0x80u);
  const bool is_surrogate = value >= 0xd800 && value <= 0xdfff;
  if (is_overlong || is_surrogate || value > 0x10ffff) return {};
  return {value, bytes};
}

bool IsUtf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = CodePointAt(text, at).bytes;
    if (bytes == 0) return false;
    at += bytes;
  }
  return true;
}

std::string ToUtf8(std::string_view text) {
  constexpr std::string_view kReplacement = "\xef\xbf\xbd";
  std::string whole;
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = CodePointAt(text, at).bytes;
    whole += bytes == 0 ? kReplacement : text.substr(at, bytes);
    at += bytes == 0 ? 1 : bytes;
  }
  return whole;
}

}  // namespace gnomon::lab
