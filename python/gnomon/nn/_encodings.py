"""The classes of what is added to embeddings."""

# Written by `make facades` from the catalogue, that is the files of the terms.

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from gnomon._checks import Device, check_integer
from gnomon._terms import to_spec
from gnomon.nn._token_encodings import TokenEncoding

__all__ = [
    "CAPE",
    "Convolutional",
    "LearnedAbsolute",
    "Sinusoidal",
]


class CAPE(TokenEncoding):
    """sinusoids of p, added to the embeddings; in training of (p + D + e_p) exp(l), D ~
    U(+-global_shift), e_p ~ U(+-local_shift) spacings, l ~ U(+-ln global_scale); normalize: p -
    mean(p); on a grid waves of (x, y) in [-1, 1]^2, x the column, y the row.

    Positions are shifted, jittered and scaled at random in training, anew for each call and each
    sequence, and left as they are in evaluation. E is even.

    With a shape, (height, width), tokens lie on a grid, after `prefix` tokens to which nothing
    is added. Columns n and E / 2 + n are then the cosine and the sine of pi 10^(n / (E / 2 - 1))
    (x cos n + y sin n), x the column of a token and y its row, each from -1, the first, to 1,
    the last.

    Likhomanenko et al. 2021, CAPE: Encoding Relative Positions with Continuous Augmented
    Positional Embeddings.

    Args:
        dim: E, the columns of the embeddings.
        global_shift: bound of the shift of all positions; by default 5, on a grid 0.5.
        local_shift: bound of the shift of each position, in spacings of the positions; 0.5 by
            default.
        global_scale: bound, with its inverse, of the factor of all positions; by default 1.03, on a
            grid 1.4.
        normalize: whether the mean of the positions is subtracted first; only in a sequence.
        shape: (height, width) of the grid, the numbers of its rows and of its columns, with tokens
            in row-major order: row by row, x running fastest.
        prefix: tokens before the grid, such as a class token.
        device: where parameters are, the default device if None.
        dtype: theirs, a floating-point one; the default dtype if None.
    """

    def __init__(
        self,
        dim: int,
        global_shift: float | None = None,
        local_shift: float | None = None,
        global_scale: float | None = None,
        normalize: bool = False,
        shape: Sequence[int] | None = None,
        prefix: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        prefix = check_integer("nn.CAPE", "prefix", prefix)
        super().__init__(
            to_spec(
                "cape",
                global_shift=global_shift,
                local_shift=local_shift,
                global_scale=global_scale,
                normalize=normalize,
                shape=shape,
                prefix=prefix,
            ),
            dim,
            False,
            device,
            dtype,
        )


class Convolutional(TokenEncoding):
    """GELU(conv(x)), added to the embeddings x; on the left alone in a causal model.

    A grouped convolution over the tokens: token i sees `kernel` tokens from i - floor(kernel /
    2) on or, causal, the last `kernel` up to itself. The weight is weight_g weight_v /
    |weight_v|, normalised separately at each tap of the kernel.

    Parameters `weight_g` (1, 1, kernel), `weight_v` (E, E / groups, kernel), which starts as
    N(0, 4 / (kernel E)), and `bias` (E), which starts at 0.

    Baevski et al. 2020, wav2vec 2.0.

    Args:
        dim: E, the columns of the embeddings.
        kernel: tokens that the kernel spans.
        groups: groups of columns, a divisor of E.
        causal: whether no token may see a later one.
        device: where parameters are, the default device if None.
        dtype: theirs, a floating-point one; the default dtype if None.
    """

    def __init__(
        self,
        dim: int,
        kernel: int = 128,
        groups: int = 16,
        causal: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kernel = check_integer("nn.Convolutional", "kernel", kernel)
        groups = check_integer("nn.Convolutional", "groups", groups)
        super().__init__(to_spec("conv", kernel=kernel, groups=groups), dim, causal, device, dtype)


class LearnedAbsolute(TokenEncoding):
    """a learned table, added to the embeddings.

    Parameter `table` (max_length, E), which starts as N(0, 0.02^2) (Radford et al. 2019).

    Gehring et al. 2017, Convolutional Sequence to Sequence Learning.

    Args:
        max_length: rows of the table, one for each position.
        dim: E, the columns of the embeddings.
        device: where parameters are, the default device if None.
        dtype: theirs, a floating-point one; the default dtype if None.
    """

    def __init__(
        self, max_length: int, dim: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        max_length = check_integer("nn.LearnedAbsolute", "max_length", max_length)
        super().__init__(to_spec("learned", length=max_length), dim, False, device, dtype)


class Sinusoidal(TokenEncoding):
    """sin and cos of p 10000^(-2 i / E), added to the embeddings (E columns); on a grid, E / axes
    columns of each coordinate.

    The tables are those of sinusoid and, with a shape, of grid_sinusoid: tokens then lie on a
    grid, after `prefix` tokens to which nothing is added.

    Vaswani et al. 2017, Attention Is All You Need.

    Args:
        dim: E, the columns of the embeddings.
        layout: how sines and cosines are laid out over the columns, see sinusoid.
        shape: lengths of the axes of the grid that tokens lie on, in row-major order.
        prefix: tokens before the grid, such as a class token.
        device: where parameters are, the default device if None.
        dtype: theirs, a floating-point one; the default dtype if None.
    """

    def __init__(
        self,
        dim: int,
        layout: Literal["interleaved", "split", "split_xl"] = "interleaved",
        shape: Sequence[int] | None = None,
        prefix: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        prefix = check_integer("nn.Sinusoidal", "prefix", prefix)
        super().__init__(
            to_spec("sinusoidal", layout=layout, shape=shape, prefix=prefix),
            dim,
            False,
            device,
            dtype,
        )
