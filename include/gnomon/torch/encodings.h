// What is added to embeddings, as functions that make the modules.
//
// Written by `make facades` from the catalogue, that is the files of the terms.
#ifndef GNOMON_TORCH_ENCODINGS_H_
#define GNOMON_TORCH_ENCODINGS_H_

#include <gnomon/torch/token_encoding.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gnomon::nn {

struct CAPEOptions {
  // global_shift: bound of the shift of all positions; by default 5, on a grid 0.5.
  TORCH_ARG(std::optional<double>, global_shift);
  // local_shift: bound of the shift of each position, in spacings of the positions; 0.5 by
  //   default.
  TORCH_ARG(std::optional<double>, local_shift);
  // global_scale: bound, with its inverse, of the factor of all positions; by default 1.03, on a
  //   grid 1.4.
  TORCH_ARG(std::optional<double>, global_scale);
  // normalize: whether the mean of the positions is subtracted first; only in a sequence.
  TORCH_ARG(bool, normalize) = false;
  // shape: (height, width) of the grid, the numbers of its rows and of its columns, with tokens
  //   in row-major order: row by row, x running fastest.
  TORCH_ARG(std::vector<int64_t>, shape);
  // prefix: tokens before the grid, such as a class token.
  TORCH_ARG(int64_t, prefix) = 0;
};

// sinusoids of p, added to the embeddings; in training of (p + D + e_p) exp(l), D ~
// U(+-global_shift), e_p ~ U(+-local_shift) spacings, l ~ U(+-ln global_scale); normalize: p -
// mean(p); on a grid waves of (x, y) in [-1, 1]^2, x the column, y the row.
//
// Positions are shifted, jittered and scaled at random in training, anew for each call and each
// sequence, and left as they are in evaluation. E is even.
//
// With a shape, (height, width), tokens lie on a grid, after `prefix` tokens to which nothing is
// added. Columns n and E / 2 + n are then the cosine and the sine of pi 10^(n / (E / 2 - 1)) (x cos
// n + y sin n), x the column of a token and y its row, each from -1, the first, to 1, the last.
//
// Likhomanenko et al. 2021, CAPE: Encoding Relative Positions with Continuous Augmented Positional
// Embeddings.
//
// dim: E, the columns of the embeddings.
TokenEncoding CAPE(int64_t dim, const CAPEOptions& options = {});

// GELU(conv(x)), added to the embeddings x; on the left alone in a causal model.
//
// A grouped convolution over the tokens: token i sees `kernel` tokens from i - floor(kernel / 2) on
// or, causal, the last `kernel` up to itself. The weight is weight_g weight_v / |weight_v|,
// normalised separately at each tap of the kernel.
//
// Parameters `weight_g` (1, 1, kernel), `weight_v` (E, E / groups, kernel), which starts as N(0, 4
// / (kernel E)), and `bias` (E), which starts at 0.
//
// Baevski et al. 2020, wav2vec 2.0.
//
// dim: E, the columns of the embeddings.
// kernel: tokens that the kernel spans.
// groups: groups of columns, a divisor of E.
// causal: whether no token may see a later one.
TokenEncoding Convolutional(int64_t dim, int64_t kernel = 128, int64_t groups = 16,
                            bool causal = false);

// a learned table, added to the embeddings.
//
// Parameter `table` (max_length, E), which starts as N(0, 0.02^2) (Radford et al. 2019).
//
// Gehring et al. 2017, Convolutional Sequence to Sequence Learning.
//
// max_length: rows of the table, one for each position.
// dim: E, the columns of the embeddings.
TokenEncoding LearnedAbsolute(int64_t max_length, int64_t dim);

// sin and cos of p 10000^(-2 i / E), added to the embeddings (E columns); on a grid, E / axes
// columns of each coordinate.
//
// The tables are those of sinusoid and, with a shape, of grid_sinusoid: tokens then lie on a grid,
// after `prefix` tokens to which nothing is added.
//
// Vaswani et al. 2017, Attention Is All You Need.
//
// dim: E, the columns of the embeddings.
// layout: how sines and cosines are laid out over the columns, see sinusoid.
// shape: lengths of the axes of the grid that tokens lie on, in row-major order.
// prefix: tokens before the grid, such as a class token.
TokenEncoding Sinusoidal(int64_t dim, const std::string& layout = "interleaved",
                         const std::vector<int64_t>& shape = {}, int64_t prefix = 0);

}  // namespace gnomon::nn

#endif  // GNOMON_TORCH_ENCODINGS_H_
