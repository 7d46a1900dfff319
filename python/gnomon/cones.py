"""The order that cones make of points of the upper half-space, for pictures and tests.

Points are (..., D) with D >= 2, their last coordinate the height (Tseng et al. 2023).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gnomon._library import ops

__all__ = ["ancestor", "lowest_common_ancestor"]


def ancestor(u: Tensor, v: Tensor, *, cone: str = "penumbral", r: float | None = None) -> Tensor:
    """Whether u is an ancestor of v: v lies in the cone of u.

    Args:
        u: (..., D), of a floating-point type.
        v: (..., D), of the same type; the leading axes broadcast.
        cone: "penumbral", below the horosphere of height r, heights clamped to [0, r]; "umbral", of
            balls of radius r.
        r: 1 for penumbral and 0.1 for umbral cones by default.

    Returns:
        Booleans (...).

    Raises:
        ValueError: a shape or a value.
        TypeError: a dtype.
    """
    _check("ancestor", u, v)
    ancestors: Tensor = ops.cone_ancestor(u, v, cone, r)
    return ancestors


def lowest_common_ancestor(
    u: Tensor, v: Tensor, *, cone: str = "penumbral", r: float | None = None
) -> Tensor:
    """The lowest point whose cone holds both u and v, (..., D); arguments as of ancestor().

    Penumbral cones of points too far apart have none below the horosphere; the top of the geodesic
    through both then stands for it, higher than r.
    """
    _check("lowest_common_ancestor", u, v)
    point: Tensor = ops.cone_lowest_common_ancestor(u, v, cone, r)
    return point


def _check(name: str, u: Any, v: Any) -> None:
    for argument, value in (("u", u), ("v", v)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"gnomon.cones.{name}: {argument} is a {type(value).__name__}; expected a Tensor"
            )
