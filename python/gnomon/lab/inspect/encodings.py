"""Draws similarities between an encoding's positions, and two identities from survey papers."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

import gnomon
from gnomon._catalogue import components_of, entry_of
from gnomon.lab._plots import colour
from gnomon.lab.inspect._pictures import (
    SIGNED,
    Picture,
    heat_map,
    integer,
    items,
    named,
    new_figure,
    seed,
    shades,
    signed,
    symbol,
)
from gnomon.nn import TokenPosition

#: Limited because each pair of positions is stored and plotted.
MOST_POSITIONS = 4096
MOST_COLUMNS = 65536


def encode(spec: str, length: int, dim: int) -> tuple[Tensor, list[int] | None]:
    """Returns the table (L, dim) that a position adds to embeddings, and its grid shape, if any."""
    module = TokenPosition(spec, dim, length).double().eval()
    encodings = list(module.children())
    if not encodings:
        raise ValueError(
            f'position "{spec}" is not added to embeddings; `gnomon inspect decay` draws positions '
            "that act in attention"
        )
    if list(module.parameters()):
        raise ValueError(
            f'position "{spec}" is learned; `gnomon inspect tables` draws the tables of a '
            "checkpoint"
        )
    tokens = length if module.max_length is None else module.max_length
    encoding = module(torch.zeros(1, tokens, dim, dtype=torch.float64))[0]
    return encoding, _grid_of(spec)


def _grid_of(spec: str) -> list[int] | None:
    """Returns the shape of the grid that contains all positions, if any."""
    for component in components_of(spec):
        if component.grid and component.grid[0] == 0:
            return list(component.grid[1:])
    return None


def add_encoding_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--position",
        type=items,
        default="sinusoidal,sinusoidal:layout=split,sinusoidal:shape=16x16",
        help="comma-separated specifications (default %(default)s)",
    )
    parser.add_argument(
        "--length",
        type=integer(1, MOST_POSITIONS),
        default=128,
        help="number of positions (default %(default)s)",
    )
    parser.add_argument(
        "--dim",
        type=integer(2, MOST_COLUMNS),
        default=128,
        help="dimension of the encoding (default %(default)s)",
    )


def draw_encoding(options: argparse.Namespace) -> Picture:
    specs = options.position
    figure = new_figure(8.4, 3.5 * len(specs))
    panels = figure.subplots(len(specs), 2, squeeze=False)
    results = []
    for spec, (left, right) in zip(specs, panels, strict=True):
        table, shape = encode(spec, options.length, options.dim)
        products = table @ table.T
        image = heat_map(left, products, **shades(products))
        figure.colorbar(image, ax=left, shrink=0.85)
        left.set_title(spec, fontsize=11)
        left.set_xlabel("position j")
        left.set_ylabel("position i")
        middle = len(table) // 2
        if shape is not None and len(shape) == 2:
            middle = shape[0] // 2 * shape[1] + shape[1] // 2
            of_middle = products[middle].reshape(shape)
            image = heat_map(right, of_middle, **shades(products))
            figure.colorbar(image, ax=right, shrink=0.85)
            right.set_title(f"with the cell ({shape[0] // 2}, {shape[1] // 2})", fontsize=11)
            right.set_xlabel("x")
            right.set_ylabel("y")
        else:
            right.plot(torch.arange(len(table)) - middle, products[middle])
            right.set_title(f"with position {middle}", fontsize=11)
            right.set_xlabel("offset")
        results.append({"position": spec, "products": products})
    figure.suptitle("Inner products of positions, $P P^T$", fontsize=12)
    return Picture(figure, {"dim": options.dim, "encodings": results})


def shift_matrix(shift: int, dim: int, layout: str) -> tuple[Tensor, float]:
    """Returns the matrix T_k with P(p + k) = T_k P(p) for all p, and the maximum error.

    The matrix is a least-squares solution computed from the sinusoids.
    """
    # Include distant positions, where the lowest frequencies have also changed noticeably.
    p = torch.arange(0, 40000, 13, dtype=torch.float64)
    before, after = (gnomon.sinusoid(p + k, dim, layout=layout) for k in (0, shift))
    matrix = torch.linalg.lstsq(before, after).solution.T
    return matrix, float((before @ matrix.T - after).abs().max())


def add_rotation_arguments(parser: argparse.ArgumentParser) -> None:
    entry = entry_of("sinusoidal")
    assert entry is not None
    layout = next(p for p in entry["parameters"] if p["name"] == "layout")
    parser.add_argument(
        "--shift",
        type=integer(-(10**9), 10**9),
        default=3,
        help="the shift k in tokens (default %(default)s)",
    )
    parser.add_argument(
        "--dim",
        type=integer(2, 128),
        default=16,
        help="dimension of the encoding, an even number (default %(default)s)",
    )
    parser.add_argument(
        "--layout",
        type=named,
        default=layout["default"],
        help=f"{', '.join(layout['choices'])} (default %(default)s)",
    )


def draw_rotation(options: argparse.Namespace) -> Picture:
    matrix, error = shift_matrix(options.shift, options.dim, options.layout)
    figure = new_figure(9.4, 4.3)
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    image = heat_map(left, matrix, cmap=SIGNED, vmin=-1, vmax=1)
    figure.colorbar(image, ax=left, shrink=0.85)
    left.set_title(f"$T_k$ for k = {options.shift}, {options.layout}", fontsize=11)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlabel("column of P(p)")
    left.set_ylabel("column of P(p + k)")
    table = gnomon.sinusoid(
        torch.arange(24, dtype=torch.float64), options.dim, layout=options.layout
    )
    pairs = sinusoid_pairs(table)
    # The angle by which T_k rotates the sine and cosine of each frequency.
    angles = [float(torch.atan2(matrix[a, b], matrix[a, a])) for a, b in pairs]
    for ring, (a, b) in enumerate(pairs[:5]):
        radius = 1 - 0.17 * ring
        right.plot(*(radius * table[:, [b, a]]).T, ".", color=colour(ring), markersize=4, alpha=0.5)
        turn = torch.linspace(0, angles[ring], 100, dtype=torch.float64)
        arc = radius * torch.stack([turn.cos(), turn.sin()])
        label = f"pair {ring}: {math.degrees(angles[ring]):.4g}°"
        right.plot(*arc, color=colour(ring), linewidth=2, label=label)
        right.plot(*arc[:, 0], "o", color=colour(ring), markersize=5)
        heading = math.degrees(angles[ring]) + (0 if angles[ring] >= 0 else 180)
        right.plot(*arc[:, -1], marker=(3, 0, heading), color=colour(ring), markersize=9)
    right.set_aspect("equal")
    right.axis("off")
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="from 0 to k", fontsize=10)
    right.set_title("(cos, sin) of p = 0 ... 23", fontsize=11)
    figure.suptitle(
        f"$P(p + k) = T_k P(p)$: a rotation of each pair, the same for all p (largest error "
        f"{error:.0e})",
        fontsize=12,
    )
    numbers = {
        "shift": options.shift,
        "layout": options.layout,
        "matrix": matrix,
        "angles": angles,
        "largest_error": error,
    }
    return Picture(figure, numbers)


def sinusoid_pairs(table: Tensor) -> list[tuple[int, int]]:
    """Finds the columns (sine, cosine) of each frequency in a table, highest frequency first."""
    sines = [column for column in range(table.shape[1]) if table[0, column] == 0]
    cosines = [column for column in range(table.shape[1]) if table[0, column] == 1]
    return list(zip(sines, cosines, strict=True))


def add_terms_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        default="to be or not to be",
        help="text with one token per character (default %(default)r)",
    )
    parser.add_argument(
        "--position",
        type=named,
        default="sinusoidal",
        help="position that is added to the tokens (default %(default)s)",
    )
    parser.add_argument(
        "--dim",
        type=integer(2, MOST_COLUMNS),
        default=128,
        help="dimension of the encoding (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="random seed of the tokens (default %(default)s)"
    )


def draw_terms(options: argparse.Namespace) -> Picture:
    if len(options.text) < 2 or len(options.text) > 256:
        raise ValueError(f"--text has {len(options.text)} characters; expected 2 to 256")
    length = len(options.text)
    generator = torch.Generator().manual_seed(options.seed)
    kinds = sorted(set(options.text))
    vectors = torch.randn(len(kinds), options.dim, generator=generator, dtype=torch.float64)
    x = vectors[[kinds.index(character) for character in options.text]]
    p, _ = encode(options.position, length, options.dim)
    if len(p) != length:
        raise ValueError(
            f'position "{options.position}" has {len(p)} positions, but the text '
            f"has {length} characters"
        )
    # Scale to unit variance, like the tokens.
    p = p * math.sqrt(options.dim) / p.norm(dim=1).mean()
    scale = options.dim**-0.5
    terms = {
        "content to content, $q_i k_j$": x @ x.T * scale,
        "content to position, $q_i p_j$": x @ p.T * scale,
        "position to content, $p_i k_j$": p @ x.T * scale,
        "position to position, $p_i p_j$": p @ p.T * scale,
    }
    total = (x + p) @ (x + p).T * scale
    limits = signed(torch.stack([total, *terms.values()]))
    figure = new_figure(12.4, 6.2)
    grid = figure.add_gridspec(2, 4)
    panels = [figure.add_subplot(grid[row, column]) for row in (0, 1) for column in (0, 1)]
    whole = figure.add_subplot(grid[:, 2:])
    image: Any = None
    for axes, (name, values) in zip(
        [*panels, whole], [*terms.items(), ("their sum, $(q_i + p_i)(k_j + p_j)$", total)],
        strict=True,
    ):  # fmt: skip
        image = heat_map(axes, values, **limits)
        axes.set_title(name, fontsize=11)
        axes.set_xticks([])
        axes.set_yticks([])
    if length <= 48:
        for ticks in (whole.set_xticks, whole.set_yticks):
            ticks(range(length), [symbol(character) for character in options.text], fontsize=10)
    figure.colorbar(image, ax=whole, shrink=0.85)
    figure.suptitle(
        f'Four terms of the score: "{options.text}" with {options.position}', fontsize=12
    )
    names = ("content_content", "content_position", "position_content", "position_position")
    numbers = {
        "text": options.text,
        "position": options.position,
        **dict(zip(names, terms.values(), strict=True)),
        "sum": total,
    }
    return Picture(figure, numbers)
