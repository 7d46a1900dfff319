"""Positions: what the places p_i of a query and p_j of a key do to the scores.

A list of them means their sum: at most one RoPE and any number of biases. Each is learned iff its
tensor requires grad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gnomon._terms import LaterTerm, Term

__all__ = [
    "T5",
    "ALiBi",
    "AbsoluteKeys",
    "Grid",
    "GridBias",
    "HyPE",
    "Kerple",
    "OffsetBias",
    "Position",
    "Relative",
    "Relative2D",
    "RoPE",
    "TransformerXL",
]


class Position(Term):
    """The base of all positions."""


@dataclass(frozen=True, eq=False)
class RoPE(Position):
    """Rotates the first `dims` coordinates of q and k by p base^(-2 i / dims), before the map.

    layout "interleaved": pairs (2 i, 2 i + 1); "half": pairs (i, i + dims / 2). By default dims is
    D, or the largest even number <= D - 1 where the last coordinate is a height (Su et al. 2021).
    """

    base: float = 10000.0
    layout: str = "interleaved"
    dims: int | None = None

    _name: ClassVar[str] = "rope"
    _options: ClassVar[tuple[str, ...]] = ("base", "layout", "dims")


@dataclass(frozen=True, eq=False)
class ALiBi(Position):
    """-slopes_h |p_i - p_j|; slopes (H,), see gnomon.alibi_slopes (Press et al. 2022)."""

    slopes: float | Tensor

    _name: ClassVar[str] = "alibi"
    _tensors: ClassVar[tuple[str, ...]] = ("slopes",)


@dataclass(frozen=True, eq=False)
class HyPE(Position):
    """-tau_h sinh(mu_h (p_i - p_j)); tau and mu numbers or (H,) (Angelotti 2023).

    mode "odd" is that; "abs" takes |p_i - p_j|; "cosh" is tau_h (1 - cosh(mu_h (p_i - p_j))). The
    argument is clamped to +-80; beyond it mu has gradient zero.
    """

    tau: float | Tensor
    mu: float | Tensor
    mode: str = "odd"

    _name: ClassVar[str] = "hype"
    _tensors: ClassVar[tuple[str, ...]] = ("tau", "mu")
    _options: ClassVar[tuple[str, ...]] = ("mode",)


class _TableTerm(Position):
    """A position with a table, which has no number in its place."""

    table: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.table, Tensor):
            raise TypeError(
                f"gnomon.position.{type(self).__name__}: table is a {type(self.table).__name__}; "
                "expected a tensor"
            )


@dataclass(frozen=True, eq=False)
class T5(_TableTerm):
    """table[bucket(p_j - p_i), h], the table (buckets, H) (Raffel et al. 2020); see t5_bucket."""

    table: Tensor
    bidirectional: bool
    max_distance: int = 128

    _name: ClassVar[str] = "t5"
    _tensors: ClassVar[tuple[str, ...]] = ("table",)
    _options: ClassVar[tuple[str, ...]] = ("bidirectional", "max_distance")


@dataclass(frozen=True, eq=False)
class Kerple(Position):
    """-r1_h log(1 + r2_h |p_i - p_j|) ("log") or -r1_h |p_i - p_j|^r2_h ("power").

    r1 and r2 (H,) (Chi et al. 2022).
    """

    r1: float | Tensor
    r2: float | Tensor
    kind: str = "log"

    _name: ClassVar[str] = "kerple"
    _tensors: ClassVar[tuple[str, ...]] = ("r1", "r2")
    _options: ClassVar[tuple[str, ...]] = ("kind",)


@dataclass(frozen=True, eq=False)
class OffsetBias(_TableTerm):
    """table (H, Lq + Lk - 1): entry n belongs to column - row = n - (Lq - 1).

    Whatever query_offset is; -inf masks.
    """

    table: Tensor

    _name: ClassVar[str] = "offset_bias"
    _tensors: ClassVar[tuple[str, ...]] = ("table",)


class Relative(LaterTerm, Position):
    """Content-based relative positions; not in this version."""


class TransformerXL(LaterTerm, Position):
    """Transformer-XL's relative positions; not in this version."""


class Relative2D(LaterTerm, Position):
    """Content-based relative positions on a grid; not in this version."""


class AbsoluteKeys(LaterTerm, Position):
    """A learned key for each position; not in this version."""


class Grid(LaterTerm, Position):
    """One bias for each axis of a grid; not in this version."""


class GridBias(LaterTerm, Position):
    """A table of biases over offsets on a grid; not in this version."""
