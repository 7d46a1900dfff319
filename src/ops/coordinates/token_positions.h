// Positions of tokens that are not consecutive.
#ifndef GNOMON_OPS_COORDINATES_TOKEN_POSITIONS_H_
#define GNOMON_OPS_COORDINATES_TOKEN_POSITIONS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace gnomon {

// The caller's positions for the tokens of q or k.
struct TokenPositions {
  at::Tensor of_tokens;  // (B or 1, L), or coordinates (B or 1, L, axes); int64
  // (): the smallest and largest position of q and k together.
  at::Tensor first;
  at::Tensor last;
};

// The value of a tensor with one element. In a traced call, where it is unknown, throws an error
// that names `what`.
int64_t NumberOf(const at::Tensor& tensor, const char* what);

// Throws c10::ValueError unless all positions are in [0, end); does nothing if their values are
// unknown: "<what>: positions are from 3 to 9; expected <expected>".
void CheckPositions(const char* what, const at::Tensor& positions, int64_t end,
                    const std::string& expected);

}  // namespace gnomon

#endif  // GNOMON_OPS_COORDINATES_TOKEN_POSITIONS_H_
