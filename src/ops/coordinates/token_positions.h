// Where tokens stand, where that is not one after the other.
#ifndef GNOMON_OPS_COORDINATES_TOKEN_POSITIONS_H_
#define GNOMON_OPS_COORDINATES_TOKEN_POSITIONS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace gnomon {

// Positions of the caller's for the tokens of q or of k.
struct TokenPositions {
  at::Tensor of_tokens;  // (B or 1, L), or coordinates (B or 1, L, axes); int64
  // (): the least and the greatest of q and k together.
  at::Tensor first;
  at::Tensor last;
};

// The number of a tensor of one element that is not known in a traced call, which then ends with an
// error that names `what`.
int64_t NumberOf(const at::Tensor& tensor, const char* what);

// Throws c10::ValueError unless all positions are in [0, end), or their numbers cannot be read:
// "<what>: positions are from 3 to 9; expected <expected>".
void CheckPositions(const char* what, const at::Tensor& positions, int64_t end,
                    const std::string& expected);

}  // namespace gnomon

#endif  // GNOMON_OPS_COORDINATES_TOKEN_POSITIONS_H_
