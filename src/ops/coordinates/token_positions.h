// Positions of tokens that are not consecutive.
#ifndef GNOMON_OPS_COORDINATES_TOKEN_POSITIONS_H_
#define GNOMON_OPS_COORDINATES_TOKEN_POSITIONS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace gnomon {

// The caller's positions for the tokens of q or k.
struct TokenPositions {
  at::Tensor of_tokens;  // (B or 1, L), or coordinates (B or 1, L, axes); int64
  at::Tensor of_others;  // the positions of k if the tokens are q, and vice versa

  // (): the smallest and largest position of q and k together, 0 if there are none.
  at::Tensor First() const;
  at::Tensor Last() const;

  // The position of the first token, if all sequences have the same consecutive positions and these
  // are known; otherwise nullopt.
  std::optional<int64_t> FirstOfConsecutive() const;
};

// The value of a tensor with one element. In a traced call, where it is unknown, throws an error
// that names `what`.
int64_t NumberOf(const at::Tensor& tensor, const char* what);

// Throws c10::ValueError, "<what>: positions range from 3 to 9; expected <expected>", unless all
// positions are in [0, end). Does nothing if their values are unknown.
void CheckPositions(const char* what, const at::Tensor& positions, int64_t end,
                    const std::string& expected);

}  // namespace gnomon

#endif  // GNOMON_OPS_COORDINATES_TOKEN_POSITIONS_H_
