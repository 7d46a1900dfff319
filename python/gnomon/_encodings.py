"""Tables and columns that stand on their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon._attention import Integers
from gnomon._checks import (
    by_default,
    check_flag,
    check_integer,
    check_integers,
    check_number,
    check_string,
    check_tensors,
)
from gnomon._library import ops
from gnomon._terms import check_shape


def alibi_slopes(num_heads: int) -> Tensor:
    """The slopes (H,) of ALiBi, in the default dtype.

    2^(-8 (h + 1) / H) for a power of two; else those of the power of two below H, then every second
    one of the next (Press et al. 2022).
    """
    num_heads = check_integer("alibi_slopes", "num_heads", num_heads)
    slopes: Tensor = ops.alibi_slopes(num_heads)
    return by_default(slopes)


def t5_bucket(
    relative_position: Integers,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Tensor:
    """The buckets, int64, of integers p_j - p_i of any shape (Raffel et al. 2020)."""
    relative_position = check_integers("t5_bucket", "relative_position", relative_position)
    bidirectional = check_flag("t5_bucket", "bidirectional", bidirectional)
    num_buckets = check_integer("t5_bucket", "num_buckets", num_buckets)
    max_distance = check_integer("t5_bucket", "max_distance", max_distance)
    bucket: Tensor = ops.t5_bucket(relative_position, bidirectional, num_buckets, max_distance)
    return bucket


def sinusoid(positions: Integers, dim: int, *, layout: str = "interleaved") -> Tensor:
    """Sinusoids (..., dim) of positions (...), a tensor or a list of integers, dim even.

    float64 for float64 positions, else float32. layout "interleaved": (sin, cos) pairs of
    p 10000^(-2 i / dim) (Vaswani et al. 2017); "split": all sines, then all cosines, exponent
    -i / (dim / 2 - 1) (tensor2tensor); "split_xl": the same with -2 i / dim (Dai et al. 2019).
    """
    positions = check_integers("sinusoid", "positions", positions)
    dim = check_integer("sinusoid", "dim", dim)
    check_string("sinusoid", "layout", layout)
    table: Tensor = ops.sinusoid(positions, dim, layout)
    return table


def grid_sinusoid(
    shape: Sequence[int], dim: int, *, layout: str = "interleaved", prefix: int = 0
) -> Tensor:
    """Sinusoids (prefix + the product of shape, dim) of tokens on a grid in row-major order.

    dim is split evenly over the axes, each part the sinusoids of one coordinate; float32, and zero
    for the prefix. See sinusoid for the layouts.
    """
    sizes = check_shape("gnomon.grid_sinusoid: shape", shape)
    dim = check_integer("grid_sinusoid", "dim", dim)
    check_string("grid_sinusoid", "layout", layout)
    prefix = check_integer("grid_sinusoid", "prefix", prefix)
    table: Tensor = ops.grid_sinusoid(sizes, dim, layout, prefix)
    return by_default(table, dtype=table.dtype)


def hype_augment(
    q: Tensor,
    k: Tensor,
    tau: float | Tensor,
    mu: float | Tensor,
    copies: int = 1,
    axes: Sequence[int] | None = None,
    query_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """q and k with 2 * copies more columns, for kernels that take no bias.

    The inner product of the new columns is sqrt(D) times the odd HyPE bias: keep the kernel's
    scale at 1/sqrt(D), D the head size before. tau and mu are numbers or (H,); with a mu (H,), k
    gets the H heads of q. axes is the shape of a grid that the tokens lie on in row-major order:
    the bias is then the sum over its axes, with 2 * copies columns for each (Angelotti 2023).
    """
    check_tensors("hype_augment", q=q, k=k)
    copies = check_integer("hype_augment", "copies", copies)
    query_offset = check_integer("hype_augment", "query_offset", query_offset)
    numbers = {"dtype": torch.float64, "device": q.device}
    tau, mu = (
        value
        if isinstance(value, Tensor)
        else torch.tensor(
            check_number("hype_augment", name, value, "a number or a Tensor"), **numbers
        )
        for name, value in (("tau", tau), ("mu", mu))
    )
    augmented: tuple[Tensor, Tensor] = ops.hype_augment(
        q,
        k,
        tau,
        mu,
        copies,
        [] if axes is None else check_shape("gnomon.hype_augment: axes", axes),
        query_offset,
    )
    return augmented
