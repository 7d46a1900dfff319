"""The partial order that umbral and penumbral cones define on points (Tseng et al. 2023).

Points (..., D), with D >= 2, lie in the upper half-space: the last coordinate is the height. Use
these functions for figures and tests.
"""

from __future__ import annotations

from torch import Tensor

from gnomon._checks import check_optional_number, check_string, check_tensors
from gnomon._library import ops

__all__ = ["ancestor", "lowest_common_ancestor"]


def ancestor(u: Tensor, v: Tensor, *, cone: str = "penumbral", r: float | None = None) -> Tensor:
    """Tests whether u is an ancestor of v, that is, whether v lies in the cone of u.

    Args:
        u: (..., D), floating point.
        v: (..., D), in the same dtype; the leading axes broadcast.
        cone: "penumbral": cones below the horosphere of height r, with heights clamped to [0, r];
            "umbral": the shadows of balls of radius r.
        r: the horosphere's height or the balls' radius; by default 1 for penumbral and 0.1 for
            umbral cones.

    Returns:
        A Boolean tensor with the broadcast leading axes (...).

    Raises:
        ValueError: an invalid shape or value.
        TypeError: an invalid dtype or device.

    Example:
        >>> u, v = torch.tensor([[0.0, 0.9], [0.1, 0.2]])  # (x, height)
        >>> gnomon.cones.ancestor(u, v)
        tensor(True)
    """
    r = _check("ancestor", u, v, cone, r)
    ancestors: Tensor = ops.cone_ancestor(u, v, cone, r)
    return ancestors


def lowest_common_ancestor(
    u: Tensor, v: Tensor, *, cone: str = "penumbral", r: float | None = None
) -> Tensor:
    """Returns the lowest point (..., D) whose cone contains both u and v.

    The arguments are those of ancestor(). With penumbral cones, no such point lies below the
    horosphere if u and v are too far apart; the result is then the highest point of the geodesic
    through u and v, which lies above height r.

    Example:
        >>> u, v = torch.tensor([[0.0, 0.2], [0.3, 0.2]])
        >>> top = gnomon.cones.lowest_common_ancestor(u, v)
    """
    r = _check("lowest_common_ancestor", u, v, cone, r)
    point: Tensor = ops.cone_lowest_common_ancestor(u, v, cone, r)
    return point


def _check(name: str, u: object, v: object, cone: object, r: object) -> float | None:
    """Checks the arguments and returns r as a float or None."""
    operator = f"cones.{name}"
    check_tensors(operator, u=u, v=v)
    check_string(operator, "cone", cone)
    return check_optional_number(operator, "r", r)
