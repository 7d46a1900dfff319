"""Functions for ALiBi slopes, T5 buckets, sinusoids, and HyPE as additional coordinates."""

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
    check_layout,
    check_number,
    check_string,
    check_tensors,
)
from gnomon._library import ops
from gnomon._terms import check_shape


def alibi_slopes(num_heads: int) -> Tensor:
    """Returns the ALiBi slopes (H,), in the default dtype.

    If H is a power of two, slope h is 2^(-8 (h + 1) / H). Otherwise, the slopes for the largest
    power of two below H come first, followed by every second slope for the next power of two (Press
    et al. 2022).

    Example:
        >>> gnomon.alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
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
    """Returns the T5 buckets, in int64, for offsets p_j - p_i of any shape (Raffel et al. 2020).

    Example:
        >>> gnomon.t5_bucket(torch.tensor([-20, -1, 0, 1, 20]), bidirectional=True)
        tensor([10,  1,  0, 17, 26])
    """
    relative_position = check_integers("t5_bucket", "relative_position", relative_position)
    bidirectional = check_flag("t5_bucket", "bidirectional", bidirectional)
    num_buckets = check_integer("t5_bucket", "num_buckets", num_buckets)
    max_distance = check_integer("t5_bucket", "max_distance", max_distance)
    bucket: Tensor = ops.t5_bucket(relative_position, bidirectional, num_buckets, max_distance)
    return bucket


def sinusoid(positions: Integers, dim: int, *, layout: str = "interleaved") -> Tensor:
    """Returns sinusoids (..., dim) for positions of shape (...), given as a tensor or a list.

    dim must be even. The dtype is float64 for float64 positions, otherwise float32. With the layout
    "interleaved", coordinates 2 i and 2 i + 1 are the sine and the cosine of p 10000^(-2 i / dim)
    (Vaswani et al. 2017). With "split", all sines come before all cosines, and the exponent is -i /
    (dim / 2 - 1) (tensor2tensor). "split_xl" is "split" with the exponent -2 i / dim (Dai et al.
    2019).

    Example:
        >>> gnomon.sinusoid(range(4), dim=8).shape
        torch.Size([4, 8])
    """
    positions = check_integers("sinusoid", "positions", positions)
    dim = check_integer("sinusoid", "dim", dim)
    check_string("sinusoid", "layout", layout)
    table: Tensor = ops.sinusoid(positions, dim, layout)
    return table


def grid_sinusoid(
    shape: Sequence[int], dim: int, *, layout: str = "interleaved", prefix: int = 0
) -> Tensor:
    """Returns sinusoids (prefix + prod(shape), dim) for tokens on a grid in row-major order.

    dim is divided evenly among the axes: each part contains the sinusoids of one coordinate. The
    result is float32, and the first `prefix` rows are zero. See sinusoid for the layouts.

    Example:
        >>> gnomon.grid_sinusoid((7, 7), dim=64).shape
        torch.Size([49, 64])
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
    """Extends q and k by 2 * copies coordinates that add the HyPE bias to the dot product.

    Use it with attention kernels that do not accept a bias. The inner product of the new
    coordinates is sqrt(D) times the odd HyPE bias, where D is the original head_dim, so pass
    1/sqrt(D) as the kernel's scale. copies repeats the coordinates without changing the bias. tau
    and mu are numbers or tensors of shape (H,). If mu has shape (H,), k is expanded to q's H heads.
    axes is the shape of a grid with tokens in row-major order: the bias is then the sum over the
    axes, with 2 * copies coordinates per axis (Angelotti 2023).

    Example:
        >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind()  # (B, H, L, D)
        >>> wide_q, wide_k = gnomon.hype_augment(q, k, tau=1.0, mu=0.1)
        >>> wide_q.shape
        torch.Size([2, 8, 16, 34])
    """
    check_tensors("hype_augment", q=q, k=k)
    copies = check_integer("hype_augment", "copies", copies)
    query_offset = check_integer("hype_augment", "query_offset", query_offset)
    for name, value in (("tau", tau), ("mu", mu)):
        check_layout("hype_augment", name, value)
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
