"""Geometry of the cones, for pictures and tests; not in this version."""

from typing import NoReturn

from torch import Tensor

__all__ = ["ancestor", "lowest_common_ancestor"]


def ancestor(u: Tensor, v: Tensor) -> NoReturn:
    """Whether u is an ancestor of v; not in this version."""
    raise NotImplementedError("gnomon.cones.ancestor is not implemented in this version")


def lowest_common_ancestor(u: Tensor, v: Tensor) -> NoReturn:
    """The lowest common ancestor of u and v; not in this version."""
    raise NotImplementedError(
        "gnomon.cones.lowest_common_ancestor is not implemented in this version"
    )
