#ifndef GNOMON_OPS_COORDINATES_TOKEN_GRID_H_
#define GNOMON_OPS_COORDINATES_TOKEN_GRID_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/grammar/component.h"

namespace gnomon {

// Tokens on a grid in row-major order, after `prefix` tokens (such as a class token) outside the
// grid.
class TokenGrid {
 public:
  // The grid of "shape=HxW:prefix=N"; nullopt without a shape. Throws c10::ValueError for a prefix
  // without a shape, and for an "axis=N" outside the shape.
  static std::optional<TokenGrid> Find(const Component& component);

  // Throws c10::ValueError unless the lengths are positive, prefix is not negative, and there are
  // at most 2^32 tokens.
  TokenGrid(std::vector<int64_t> shape, int64_t prefix);

  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t axes() const { return static_cast<int64_t>(shape_.size()); }
  int64_t prefix() const { return prefix_; }
  // The prefix plus the product of the shape.
  int64_t tokens() const;
  // The grid as text: "3x4", or "3x4 after 1" with a prefix of 1.
  std::string Text() const;

  // The coordinates along each axis, (L,) int64, of the tokens first, ..., first + count - 1; 0 for
  // the prefix. Throws c10::ValueError, naming `what`, if the grid does not contain these tokens.
  std::vector<at::Tensor> Coordinates(const char* what, const c10::SymInt& first,
                                      const c10::SymInt& count,
                                      const at::TensorOptions& options) const;
  // Returns the coordinates of tokens at the given indices, int64 of any shape. Throws if an index
  // is known to lie outside the grid.
  std::vector<at::Tensor> CoordinatesAt(const char* what, const at::Tensor& positions) const;
  // Whether each of these tokens lies on the grid, (L,).
  at::Tensor IsOnGrid(const c10::SymInt& first, const c10::SymInt& count,
                      const at::TensorOptions& options) const;

  bool operator==(const TokenGrid&) const = default;

 private:
  std::vector<at::Tensor> Split(const at::Tensor& positions) const;

  std::vector<int64_t> shape_;
  int64_t prefix_;
};

// The number of tokens of the smallest grid in a sum of components; nullopt without a grid.
std::optional<int64_t> SmallestGrid(const std::vector<Component>& components);

}  // namespace gnomon

#endif  // GNOMON_OPS_COORDINATES_TOKEN_GRID_H_
