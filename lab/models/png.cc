#include "models/png.h"

#include <cstdint>
#include <string_view>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

std::string BigEndian(uint32_t number) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) {
    bytes += static_cast<char>((number >> shift) & 0xff);
  }
  return bytes;
}

// The CRC of ISO 3309. Computing it bit by bit is fast enough for small pictures.
uint32_t Crc(std::string_view bytes) {
  uint32_t crc = 0xffffffff;
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320 : 0);
  }
  return ~crc;
}

// The Adler-32 checksum of RFC 1950, section 8.2.
uint32_t Adler(std::string_view bytes) {
  uint32_t a = 1;
  uint32_t b = 0;
  for (const char byte : bytes) {
    a = (a + static_cast<uint8_t>(byte)) % 65521;
    b = (b + a) % 65521;
  }
  return (b << 16) | a;
}

// Returns a zlib stream (RFC 1950) that contains the bytes in uncompressed blocks (RFC 1951,
// section 3.2.4).
std::string Zlib(std::string_view bytes) {
  constexpr size_t kBlock = 65535;
  std::string packed = "\x78\x01";
  for (size_t at = 0; at < bytes.size(); at += kBlock) {
    const std::string_view block = bytes.substr(at, kBlock);
    const auto size = static_cast<uint16_t>(block.size());
    const auto complement = static_cast<uint16_t>(~size);
    packed += static_cast<char>(at + kBlock >= bytes.size());
    for (const uint16_t number : {size, complement}) {
      packed += static_cast<char>(number & 0xff);
      packed += static_cast<char>(number >> 8);
    }
    packed += block;
  }
  return packed + BigEndian(Adler(bytes));
}

std::string Chunk(const std::string& type, const std::string& data) {
  const std::string named = type + data;
  return BigEndian(static_cast<uint32_t>(data.size())) + named + BigEndian(Crc(named));
}

}  // namespace

std::string EncodePng(const torch::Tensor& pixels) {
  const int64_t channels = pixels.dim() == 3 ? pixels.size(2) : 0;
  if (pixels.scalar_type() != torch::kByte || (channels != 1 && channels != 3) ||
      pixels.numel() == 0) {
    throw Error(StrCat("an image has dtype ", pixels.scalar_type(), " and shape ", pixels.sizes(),
                       "; expected bytes of shape (height, width, 1 or 3)"));
  }
  const torch::Tensor rows = pixels.contiguous();
  const auto* bytes = reinterpret_cast<const char*>(rows.const_data_ptr<uint8_t>());
  const auto width = static_cast<size_t>(pixels.size(1) * channels);
  std::string lines;
  for (int64_t row = 0; row < pixels.size(0); ++row) {
    lines += '\0';  // no filter
    lines.append(bytes + static_cast<size_t>(row) * width, width);
  }
  std::string header = BigEndian(static_cast<uint32_t>(pixels.size(1))) +
                       BigEndian(static_cast<uint32_t>(pixels.size(0)));
  header += '\x08';  // bits per sample
  header += channels == 1 ? '\x00' : '\x02';
  header += std::string(3, '\0');  // deflate, standard filters, not interlaced
  return "\x89PNG\r\n\x1a\n" + Chunk("IHDR", header) + Chunk("IDAT", Zlib(lines)) +
         Chunk("IEND", "");
}

torch::Tensor Enlarged(const torch::Tensor& pixels, int64_t times) {
  return pixels.repeat_interleave(times, 0).repeat_interleave(times, 1);
}

}  // namespace gnomon::lab
