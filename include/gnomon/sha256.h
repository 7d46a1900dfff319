// SHA-256 (FIPS 180-4), with digests in the format of `sha256sum`.
#ifndef GNOMON_SHA256_H_
#define GNOMON_SHA256_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace gnomon {

class Sha256 {
 public:
  void Update(std::string_view bytes);
  // Returns the digest in lower-case hexadecimal. The object cannot be used afterwards.
  std::string Hex();

 private:
  void Block(const unsigned char* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> buffer_ = {};
  uint64_t length_ = 0;
};

}  // namespace gnomon

#endif  // GNOMON_SHA256_H_
