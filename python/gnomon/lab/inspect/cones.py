"""Draws cones, shadows and lowest common ancestors in the half-plane (Tseng et al. 2023)."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Patch
from torch import Tensor

import gnomon
from gnomon.lab._plots import colour
from gnomon.lab.inspect._pictures import Picture, items, new_figure, unknown

#: Default r: the height of the horosphere that emits the light (penumbral), or the radius of balls
#: that are large enough to be visible (umbral).
RADII = {"penumbral": 1.0, "umbral": 0.5}
PAIRS = {
    "penumbral": ["-1.6,0.5,-1.05,0.35", "-0.15,0.8,0.05,0.45", "1.1,0.55,3.3,0.45"],
    "umbral": ["-1.6,0.5,-1.05,0.35", "-0.15,1.0,0.05,0.45", "1.05,0.55,2.25,0.45"],
}
LIGHT = {
    "penumbral": "light from the horosphere of height",
    "umbral": "light from above on balls of radius",
}
PIXELS = 1600
#: Beyond these limits, a cone degenerates to a line or its coordinates overflow.
LARGEST_R = 100
LARGEST_NUMBER = 1e6
LOWEST_HEIGHT = 1e-6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cone",
        type=items,
        default="penumbral,umbral",
        help="comma-separated kinds of cones (default %(default)s)",
    )
    parser.add_argument(
        "--r",
        type=float,
        help="height of the horosphere, or radius of the balls (default 1, or 0.5 for umbral)",
    )
    parser.add_argument(
        "--pair",
        action="append",
        metavar="X,H,X,H",
        help="two points, each given by a horizontal coordinate and a height; repeatable (default: "
        "a pair with a common ancestor, a pair with one point above the other, and a distant "
        "pair). If the first number is negative, write --pair=-1,0.5,0,0.3",
    )


def points_of(pair: str) -> Tensor:
    """Parses a pair of points into a tensor (2, 2)."""
    try:
        points = torch.tensor([float(part) for part in pair.split(",")], dtype=torch.float64)
    except ValueError:
        points = torch.empty(0)
    right = points.numel() == 4 and bool((points.abs() <= LARGEST_NUMBER).all())
    if not right or not bool((points[1::2] >= LOWEST_HEIGHT).all()):
        raise ValueError(
            f"--pair is '{pair}'; expected four numbers X,H,X,H from {-LARGEST_NUMBER:g} to "
            f"{LARGEST_NUMBER:g}, with heights of at least {LOWEST_HEIGHT:g}"
        )
    return points.reshape(2, 2)


def shadow(point: Tensor, field: Tensor, cone: str, r: float) -> Tensor:
    """Returns whether each point of `field` (..., 2) lies in the cone of a point."""
    return gnomon.cones.ancestor(point, field, cone=cone, r=r)


def draw(options: argparse.Namespace) -> Picture:
    cones = options.cone
    for cone in cones:
        if cone not in RADII:
            raise unknown("cone", cone, RADII)
    if options.r is not None and not 0 < options.r <= LARGEST_R:
        raise ValueError(f"--r is {options.r}; expected a number above 0 and at most {LARGEST_R}")
    figure = new_figure(9.6, 3.4 * len(cones) + 0.9)
    panels = figure.subplots(len(cones), 1, squeeze=False)[:, 0]
    results = [
        _draw_cone(axes, cone, options.r or RADII[cone], options.pair or PAIRS[cone])
        for axes, cone in zip(panels, cones, strict=True)
    ]
    figure.legend(handles=_legend(cones, results), loc="outside lower center", ncols=3, fontsize=9)
    return Picture(figure, {"cones": results})


def _legend(cones: list[str], results: list[dict[str, Any]]) -> list[Any]:
    """Returns legend entries for the markers in use."""
    shared = [pair["has_common_ancestor"] for cone in results for pair in cone["pairs"]]
    line: dict[str, Any] = {"color": "#444444", "linewidth": 1.2}
    handles: list[Any] = [
        Line2D([], [], color="#444444", marker="o", linestyle="", label="a point of the pair"),
        Patch(color="#444444", alpha=0.28, label="its cone: the points below it in the order"),
        Line2D([], [], color="#cccccc", marker="*", markeredgecolor="black", markersize=12,
               linestyle="", label="the pair's lowest common ancestor"),
    ]  # fmt: skip
    if any(shared):
        handles.append(Line2D([], [], linestyle="--", label="its cone", **line))
    if not all(shared):
        handles.append(
            Line2D([], [], linestyle=":", label="no common ancestor: geodesic and its top", **line)
        )
    if "umbral" in cones:
        handles.append(
            Line2D(
                [],
                [],
                color="#444444",
                marker="o",
                markerfacecolor="none",
                markersize=11,
                linestyle="",
                label="the ball that casts the shadow",
            )
        )
    if "penumbral" in cones:
        handles.append(Line2D([], [], color="#E69F00", linewidth=1.6, label="the light"))
    return handles


def _draw_cone(axes: Any, cone: str, r: float, pairs: list[str]) -> dict[str, Any]:
    found = []
    for text in pairs:
        pair = points_of(text)
        if cone == "penumbral" and float(pair[:, 1].max()) > r:
            raise ValueError(
                f"--pair is '{text}'; expected heights of at most r = {r:g} for penumbral cones"
            )
        top = gnomon.cones.lowest_common_ancestor(pair[0], pair[1], cone=cone, r=r)
        found.append((pair, top))
    everything = torch.cat([torch.cat([pair, top[None]]) for pair, top in found])
    low, high = everything[:, 0].min() - 0.9, everything[:, 0].max() + 0.9
    ceiling = 1.12 * max(float(everything[:, 1].max()), r if cone == "penumbral" else 0)
    width = torch.linspace(float(low), float(high), PIXELS, dtype=torch.float64)
    # Limit the number of rows in case the points are far apart vertically.
    rows = min(max(2, math.ceil(PIXELS * ceiling / float(high - low))), PIXELS)
    height = torch.linspace(1e-6, ceiling, rows, dtype=torch.float64)
    field = torch.stack(torch.meshgrid(width, height, indexing="xy"), -1)
    axes.grid(visible=False)
    pairs_found = []
    for index, (pair, top) in enumerate(found):
        below_light = cone == "umbral" or float(top[1]) <= r
        for point in pair:
            inside = shadow(point, field, cone, r).double()
            axes.contourf(width, height, inside, [0.5, 1.5], colors=[colour(index)], alpha=0.28)
            axes.plot(*point, "o", color=colour(index), markersize=6)
            if cone == "umbral":
                _draw_ball(axes, point, r, colour(index))
        if below_light:
            inside = shadow(top, field, cone, r).double()
            axes.contour(width, height, inside, [0.5], colors=[colour(index)], linestyles="--",
                         linewidths=1.2)  # fmt: skip
        else:
            _draw_geodesic(axes, pair, colour(index))
        # If one point is the other's ancestor, it coincides with their common ancestor.
        axes.plot(*top, "*", color=colour(index), markersize=13, markeredgecolor="black",
                  markeredgewidth=0.7)  # fmt: skip
        pairs_found.append(
            {
                "points": pair,
                "lowest_common_ancestor": top,
                "has_common_ancestor": below_light,
                "ancestor": gnomon.cones.ancestor(pair[0], pair[1], cone=cone, r=r),
                "descendant": gnomon.cones.ancestor(pair[1], pair[0], cone=cone, r=r),
            }
        )
    if cone == "penumbral":
        axes.axhline(r, color="#E69F00", linewidth=1.6)
        axes.text(float(low), r, " light", color="#B87500", va="bottom", fontsize=10)
    axes.axhline(0, color="black", linewidth=1.2)
    axes.set_xlim(float(low), float(high))
    axes.set_ylim(-0.02 * ceiling, ceiling)
    axes.set_aspect("equal")
    axes.set_ylabel("height")
    axes.set_title(f"{cone} cones, {LIGHT[cone]} {r:g}", fontsize=11)
    return {"cone": cone, "r": r, "pairs": pairs_found}


def _draw_ball(axes: Any, point: Tensor, r: float, edge: str) -> None:
    """Draws the ball of hyperbolic radius r: a disc about (x, h cosh r) of radius h sinh r."""
    x, height = point.tolist()
    axes.add_patch(
        Circle((x, height * math.cosh(r)), height * math.sinh(r), fill=False, edgecolor=edge, lw=1)
    )


def _draw_geodesic(axes: Any, pair: Tensor, edge: str) -> None:
    """Draws the half-circle through both points, centred on the boundary."""
    (x, u), (y, v) = pair.tolist()
    centre = (x + y) / 2 + (v * v - u * u) / (2 * (y - x))
    axes.add_patch(
        Circle((centre, 0), math.hypot(x - centre, u), fill=False, edgecolor=edge, lw=1.2, ls=":")
    )
