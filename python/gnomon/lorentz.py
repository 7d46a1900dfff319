"""Points of the hyperboloid, the model of hyperbolic space of Lorentz and Minkowski.

Points are (..., D) with their time first: (x.x)_L = -x_0^2 + x_1^2 + ... = -c, in a space of
curvature -1 / c. gnomon.similarity.Lorentz compares them, and aggregation="lorentz_centroid" sums
up values that are such points.
"""

from __future__ import annotations

from torch import Tensor

from gnomon._checks import check_number, check_tensors
from gnomon._library import ops

__all__ = ["centroid", "lift"]


def lift(x: Tensor, c: float | Tensor = 1.0) -> Tensor:
    """The points above places x: (sqrt(c + |x|^2), x).

    Args:
        x: (..., D), of a floating-point type.
        c: positive; a tensor broadcasts with (...), (H, 1) with places (B, H, L, D).

    Returns:
        (..., D + 1), of x's type.

    Raises:
        ValueError: a shape or a value.
        TypeError: a dtype.
    """
    check_tensors("lorentz.lift", x=x)
    points: Tensor = ops.lorentz_lift(x, *_curvature("lift", c))
    return points


def centroid(points: Tensor, c: float | Tensor = 1.0) -> Tensor:
    """The point that has the least sum of squared Lorentzian distances from some (Law et al. 2019).

    Args:
        points: (..., n, D), times first.
        c: as for lift().

    Returns:
        (..., D), the time first.

    Raises:
        ValueError: a shape or a value.
        TypeError: a dtype.
    """
    check_tensors("lorentz.centroid", points=points)
    point: Tensor = ops.lorentz_centroid(points, *_curvature("centroid", c))
    return point


def _curvature(name: str, c: object) -> tuple[Tensor | None, float]:
    """As a tensor, or as a number."""
    if isinstance(c, Tensor):
        return c, 1.0
    return None, check_number(f"lorentz.{name}", "c", c, "a number or a tensor")
