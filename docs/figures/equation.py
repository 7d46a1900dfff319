"""Draws equation.svg, which shows the terms of a score as matrices."""

import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

plt.rcParams |= {"svg.hashsalt": "gnomon", "font.size": 10, "svg.fonttype": "path"}

SIZE = 12
TILE = (4, 2, 4, 4)  # first row, first column, rows, columns
INK = "#333333"
TILE_COLOR = "#d55e00"


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def draw_matrix(ax, values, title, caption, tile=True, cmap="Blues", limits=None, ghost=True):
    """Draws a faint L x L matrix and highlights one tile, the only part that exists at a time."""
    low, high = limits or (np.nanmin(values), np.nanmax(values))
    ax.imshow(values, cmap=cmap, vmin=low, vmax=high, alpha=0.35 if ghost else 1.0)
    if tile:
        i, j, rows, columns = TILE
        part = np.full_like(values, np.nan)
        part[i : i + rows, j : j + columns] = values[i : i + rows, j : j + columns]
        ax.imshow(part, cmap=cmap, vmin=low, vmax=high)
        ax.add_patch(
            Rectangle((j - 0.5, i - 0.5), columns, rows, fill=False, ec=TILE_COLOR, lw=2, zorder=3)
        )
    ax.set_title(title, fontsize=11, color=INK)
    ax.set_xlabel(caption, fontsize=9, color=INK)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set(edgecolor="#999999", linewidth=0.8)


def main() -> None:
    rng = np.random.default_rng(3)
    row, column = np.arange(SIZE)[:, None], np.arange(SIZE)
    q, k = rng.normal(size=(2, SIZE, 4))
    content = q @ k.T / 2
    offsets = np.arange(-(SIZE - 1), SIZE)
    vector = -0.35 * np.abs(offsets)
    bias = vector[column - row + SIZE - 1]
    seen = column <= row
    masked = np.where(seen, content + bias, -np.inf)
    weights = np.where(seen, softmax(masked), np.nan)

    figure = plt.figure(figsize=(10.4, 3.9))
    axes = [figure.add_axes((x, 0.29, 0.19, 0.5)) for x in (0.03, 0.275, 0.52, 0.78)]
    draw_matrix(
        axes[0], content, r"similarity  $c_h\,f(g_{ij})$", "rows: queries i\ncolumns: keys j"
    )
    draw_matrix(
        axes[1],
        bias,
        r"position  $\beta_h(j - i)$",
        "one number along\neach diagonal",
        cmap="Greens",
    )
    draw_matrix(
        axes[2],
        np.where(seen, 1.0, 0.0),
        "mask",
        "one interval of keys\nper row",
        cmap="Greys",
        limits=(0, 2.2),
    )
    draw_matrix(
        axes[3],
        weights,
        r"weights  $p_{ij}$",
        "multiplied by the values,\nthen discarded",
        cmap="Oranges",
        limits=(0, 0.9),
    )
    for x, sign in ((0.2475, "+"), (0.4925, "where")):
        size = 18 if sign == "+" else 10
        figure.text(x, 0.54, sign, ha="center", va="center", fontsize=size, color=INK)
    figure.text(0.745, 0.6, "softmax", ha="center", va="center", fontsize=10, color=INK)
    figure.add_artist(
        FancyArrowPatch((0.718, 0.54), (0.772, 0.54), arrowstyle="->", mutation_scale=14, color=INK)
    )

    # The vector whose entries fill the diagonals of the bias.
    strip = figure.add_axes((0.275, 0.06, 0.19, 0.05))
    strip.imshow(vector[None], cmap="Greens", aspect="auto", vmin=bias.min(), vmax=bias.max())
    strip.set_xticks([0, SIZE - 1, 2 * SIZE - 2], ["1 - Lq", "0", "Lk - 1"], fontsize=8)
    strip.set_yticks([])
    strip.tick_params(length=2, colors=INK)
    for spine in strip.spines.values():
        spine.set(edgecolor="#999999", linewidth=0.8)
    figure.text(
        0.03,
        0.075,
        r"the only storage for $\beta_h$:",
        ha="left",
        va="center",
        fontsize=9,
        color=INK,
    )
    figure.text(
        0.5,
        0.93,
        "Pale: never stored as a whole.  Framed: the tile in cache.",
        ha="center",
        fontsize=10,
        color=TILE_COLOR,
    )
    path = pathlib.Path(__file__).with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
