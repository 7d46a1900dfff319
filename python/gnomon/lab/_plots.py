"""The colours and the style of all figures.

This module imports matplotlib, so only modules that draw figures may import it.
"""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")

# Okabe and Ito's colour-blind-safe palette, without yellow, which is too pale on white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#888888"]
DASHES: list[Any] = ["-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))]
MARKERS = "osD^vPX*"

STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "axes.labelcolor": "#333333",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
    "svg.hashsalt": "gnomon",
}


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def line_style(index: int) -> dict[str, Any]:
    """Returns a colour and a dash pattern, which together distinguish 32 series."""
    return {"color": colour(index), "linestyle": DASHES[index // len(COLOURS) % len(DASHES)]}


def marker(index: int) -> str:
    """Returns a marker; together with the colour, it distinguishes 64 series without lines."""
    return MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
