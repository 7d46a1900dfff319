"""Biases along grid axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gnomon._catalogue import biases_of_axes
from gnomon._checks import check_integer, kind_of, wrong_type
from gnomon._position import Position, Specified
from gnomon._terms import check_shape, to_spec


@dataclass(frozen=True, eq=False)
class Grid(Position):
    """Bias on a grid: the sum of one offset bias per axis.

    Each entry of axes is an offset bias, such as ALiBi; it depends on the coordinates along its
    axis instead of p_i and p_j. shape is (height, width), or the sizes of any other number of
    axes. Tokens are in row-major order. The `prefix` tokens before them, such as a class token,
    have no bias, neither as queries nor as keys.

    Without query_offset, q and k contain all tokens: Lq = Lk = prefix + prod(shape). With it, query
    i is token query_offset + i and key j is token j. Keys beyond the grid (memory keys) have no
    bias; memory keys before the grid count as `prefix` tokens. positions and key_positions, if
    passed, are token indices.

    Example:
        >>> bias = gnomon.position.ALiBi(gnomon.alibi_slopes(8))
        >>> grid = gnomon.position.Grid((14, 14), [bias, bias], prefix=1)
        >>> k = v = torch.randn(2, 8, 197 + 4, 64)  # a class token, 196 patches, 4 memory keys
        >>> q = torch.randn(2, 8, 1, 64)  # the class token attends alone
        >>> o = gnomon.attention(q, k, v, position=grid, query_offset=0)
    """

    shape: Sequence[int]
    axes: Sequence[Position]
    prefix: int = 0

    _name: ClassVar[str] = "grid"

    def __post_init__(self) -> None:
        shape = check_shape("gnomon.position.Grid: shape", self.shape)
        if not isinstance(self.axes, Sequence):
            raise wrong_type("position.Grid", "axes", self.axes, "a sequence of biases")
        # Make a copy, because the caller may modify a list later.
        self._set("shape", tuple(shape))
        self._set("axes", tuple(self.axes))
        self._set("prefix", check_integer("position.Grid", "prefix", self.prefix))
        if len(shape) != len(self.axes):
            raise ValueError(
                f"gnomon.position.Grid: shape has {len(shape)} axes and axes has "
                f"{len(self.axes)} biases; expected one bias per axis"
            )
        for bias in self.axes:
            if not isinstance(bias, Position):
                raise TypeError(
                    f"gnomon.position.Grid: axes contains {kind_of(bias)}; expected offset biases"
                )
            if not bias._is_bias():
                what = bias.spec if isinstance(bias, Specified) else kind_of(bias)
                raise ValueError(
                    f"gnomon.position.Grid: axes contains {what}; expected offset biases: "
                    f"{', '.join(biases_of_axes())}"
                )
        super().__post_init__()

    def _to_spec(self) -> str:
        spec = ""
        for axis, bias in enumerate(self.axes):
            plus = "+" if axis > 0 else ""
            its_spec, _ = bias._lower()
            spec += plus + to_spec(its_spec, shape=self.shape, axis=axis, prefix=self.prefix)
        return spec

    def _own_tensors(self) -> list[Tensor]:
        return [tensor for bias in self.axes for tensor in bias._own_tensors()]


# Error messages and pickles should name the public module.
Grid.__module__ = "gnomon.position"
