"""Helpers for all figures: data files, heat maps, option types and errors for unknown names."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from torch import Tensor

from gnomon._checks import did_you_mean
from gnomon._files import replacing
from gnomon.lab._plots import STYLE

#: Significant digits in a figure's data file.
DIGITS = 7

SIGNED = "RdBu_r"


@dataclass
class Picture:
    """A figure and its data."""

    figure: Figure
    numbers: dict[str, Any]

    def save(self, path: pathlib.Path) -> None:
        """Writes the figure to `path`, and its data to the same path with the suffix .json."""
        text = json.dumps(_plain(self.numbers), indent=1, allow_nan=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(STYLE), replacing(path) as part:
            self.figure.savefig(part, dpi=150, format="png")
        with replacing(path.with_suffix(".json")) as part:
            part.write_text(text + "\n", encoding="utf-8")


def new_figure(width: float, height: float) -> Figure:
    """Returns a new figure; width and height are in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def heat_map(axes: Any, values: Tensor, **options: Any) -> Any:
    """Draws a matrix with its first row at the top, and returns the image for a colour bar."""
    axes.grid(visible=False)
    return axes.imshow(values.detach().numpy(), interpolation="nearest", **options)


def colour_of_head(head: int, heads: int) -> Any:
    """Returns the colour of a head, from dark to light by index."""
    return matplotlib.colormaps["viridis"](head / max(heads - 1, 1) * 0.9)


def shades(values: Tensor) -> dict[str, Any]:
    """Returns heat-map options: a diverging colour map if any value is negative."""
    if bool((values >= 0).all()):
        return {"cmap": "viridis", "vmin": float(values.min()), "vmax": float(values.max())}
    return signed(values)


def signed(values: Tensor) -> dict[str, Any]:
    """Returns heat-map options that show 0 in white."""
    largest = float(values.abs().max()) or 1.0
    return {"cmap": SIGNED, "vmin": -largest, "vmax": largest}


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """Returns the error for an unknown name."""
    known = list(known)
    hint = did_you_mean(name, known)
    told = f"{hint} Known: " if hint else "known: "
    return ValueError(f'unknown {kind} "{name}"; {told}{", ".join(known)}')


def _plain(value: Any) -> Any:
    """Converts a value for JSON: tensors become lists, and non-finite numbers become null."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def symbol(character: str) -> str:
    """Returns a visible symbol for a character, for use as a row or column label."""
    return "␣" if character == " " else character


def integer(lowest: int, highest: int) -> Callable[[str], int]:
    """Returns an option type for an integer within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(
                f"'{text}' is not an integer from {lowest} to {highest}"
            )
        return value

    return parse


def integers(lowest: int, highest: int) -> Callable[[str], list[int]]:
    """Returns an option type for comma-separated integers within bounds."""
    one = integer(lowest, highest)

    def parse(text: str) -> list[int]:
        try:
            return [one(part) for part in text.split(",")]
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(
                f"'{text}' is not a comma-separated list of integers from {lowest} to {highest}"
            ) from error

    return parse


def named(text: str) -> str:
    """Option type for non-empty text."""
    if not text:
        raise argparse.ArgumentTypeError("an empty word")
    return text


def items(text: str) -> list[str]:
    """Option type for comma-separated, non-empty words."""
    words = named(text).split(",")
    if "" in words:
        raise argparse.ArgumentTypeError(
            f"'{text}' has an empty item; expected items separated by single commas"
        )
    return words


def path(text: str) -> pathlib.Path:
    """Option type for the path of a file or folder."""
    return pathlib.Path(named(text))


#: The type of --seed.
seed = integer(0, 2**53)
