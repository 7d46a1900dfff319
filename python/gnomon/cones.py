"""The order that cones make of points of the upper half-space, for pictures and tests.

Points are (..., D) with D >= 2, their last coordinate the height (Tseng et al. 2023).
"""

from __future__ import annotations

from torch import Tensor

from gnomon._checks import check_optional_number, check_string, check_tensors
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
        TypeError: a dtype or a device.
    """
    r = _check("ancestor", u, v, cone, r)
    ancestors: Tensor = ops.cone_ancestor(u, v, cone, r)
    return ancestors


def lowest_common_ancestor(
    u: Tensor, v: Tensor, *, cone: str = "penumbral", r: float | None = None
) -> Tensor:
    """The lowest point whose cone holds both u and v, (..., D); arguments as for ancestor().

    Penumbral cones of points too far apart have none below the horosphere; the top of the geodesic
    through both then stands for it, higher than r.
    """
    r = _check("lowest_common_ancestor", u, v, cone, r)
    point: Tensor = ops.cone_lowest_common_ancestor(u, v, cone, r)
    return point


def _check(name: str, u: object, v: object, cone: object, r: object) -> float | None:
    """Of them r, as the operators take it."""
    operator = f"cones.{name}"
    check_tensors(operator, u=u, v=v)
    check_string(operator, "cone", cone)
    return check_optional_number(operator, "r", r)
