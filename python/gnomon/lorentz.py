"""Functions for points on the hyperboloid (the Lorentz model of hyperbolic space).

Points (..., D) have their time coordinate first and satisfy (x.x)_L = -x_0^2 + x_1^2 + ... = -c.
The space has curvature -1 / c. gnomon.similarity.Lorentz compares such points, and
aggregation="lorentz_centroid" averages values on the hyperboloid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon._checks import check_layout, check_number, check_tensors
from gnomon._library import ops

__all__ = ["centroid", "lift"]


def lift(x: Tensor, c: float | Tensor = 1.0) -> Tensor:
    """Lifts x to the hyperboloid: (sqrt(c + |x|^2), x).

    Args:
        x: (..., D), floating point.
        c: a positive number, or a tensor that broadcasts to x.shape[:-1], for example of shape
            (H, 1) if x is (B, H, L, D).

    Returns:
        (..., D + 1), in x's dtype.

    Raises:
        ValueError: an invalid shape or value.
        TypeError: an invalid dtype.

    Example:
        >>> points = gnomon.lorentz.lift(torch.randn(2, 8, 16, 32))
        >>> points.shape
        torch.Size([2, 8, 16, 33])
    """
    check_tensors("lorentz.lift", x=x)
    points: Tensor = ops.lorentz_lift(x, *_curvature("lift", c, x, x.shape[:-1]))
    return points


def centroid(points: Tensor, c: float | Tensor = 1.0) -> Tensor:
    """Returns the point with the smallest sum of squared Lorentzian distances to the given points.

    This is the closed-form centroid of Law et al. 2019.

    Args:
        points: (..., n, D), time coordinate first.
        c: a positive number, or a tensor that broadcasts to points.shape[:-2].

    Returns:
        (..., D), time coordinate first.

    Raises:
        ValueError: an invalid shape or value.
        TypeError: an invalid dtype.

    Example:
        >>> points = gnomon.lorentz.lift(torch.randn(2, 10, 3))
        >>> gnomon.lorentz.centroid(points).shape
        torch.Size([2, 4])
    """
    check_tensors("lorentz.centroid", points=points)
    point: Tensor = ops.lorentz_centroid(
        points, *_curvature("centroid", c, points, points.shape[:-2])
    )
    return point


def _curvature(
    name: str, c: object, like: Tensor, shape: torch.Size
) -> tuple[Tensor | None, float]:
    """Checks c and returns it as (tensor, 1.0) or (None, number), as the operators expect."""
    if isinstance(c, Tensor):
        check_layout(f"lorentz.{name}", "c", c)
        if c.device != like.device:
            raise TypeError(
                f"gnomon.lorentz.{name}: c is on {c.device}; expected {like.device}, the device "
                "of the points"
            )
        # Broadcasting aligns the last axes.
        sizes = zip(reversed(c.shape), reversed(shape), strict=False)
        if c.dim() > len(shape) or not all(own in (1, size) for own, size in sizes):
            raise ValueError(
                f"gnomon.lorentz.{name}: c has shape {list(c.shape)}; expected a shape that "
                f"broadcasts to {list(shape)}"
            )
        return c, 1.0
    return None, check_number(f"lorentz.{name}", "c", c, "a number or a tensor")
