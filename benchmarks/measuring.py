"""Measures steps that run alternately, and defines table rows and their limits."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "build" / "bin" / "gnomon"
# Steps faster than this are repeated to take about this long.
LEAST_SECONDS = 0.02

Step = Callable[[], object]


class NotMeasuredError(Exception):
    """Raised if a row cannot be measured on this machine; the message gives the reason."""


@dataclass(frozen=True)
class Limit:
    """A requirement: the figure must be at most (or, if `at_least`, at least) `value`."""

    value: float
    at_least: bool = False
    digits: int = 2
    unit: str = ""

    def holds(self, figure: float) -> bool:
        return figure >= self.value if self.at_least else figure <= self.value

    def __str__(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {self.value:.{self.digits}f}{self.unit}"

    def show(self, figure: float) -> str:
        """Formats a figure with one digit more than the limit, so that a near miss is visible."""
        return f"{figure:.{self.digits + 1}f}{self.unit}"


@dataclass(frozen=True)
class Measured:
    figure: float | None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the table. `measure` takes the number of rounds."""

    name: str
    measure: Callable[[int], Measured]
    limit: Limit | None


@dataclass(frozen=True)
class Line:
    """A row and its result, which has no figure if the row could not be measured."""

    row: Row
    measured: Measured

    @property
    def missed(self) -> bool:
        limit, figure = self.row.limit, self.measured.figure
        return limit is not None and figure is not None and not limit.holds(figure)

    def __str__(self) -> str:
        limit, figure, note = self.row.limit, self.measured.figure, self.measured.note
        shown = "–"
        if figure is not None:
            shown = limit.show(figure) if limit else f"{figure:.3f}"
        notes = [text for text in ("**missed**" if self.missed else "", note) if text]
        return f"| {self.row.name} | {shown} | {limit or '–'} | {'; '.join(notes)} |"

    def record(self) -> dict[str, Any]:
        limit = None if self.row.limit is None else str(self.row.limit)
        return {
            "case": self.row.name,
            "asked_for": limit,
            "missed": self.missed,
            **asdict(self.measured),
        }


def interleaved(steps: Sequence[Step], rounds: int) -> list[list[float]]:
    """Returns one list per round, which contains the seconds per call of each step."""

    def seconds(step: Step, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) / repeats

    def repeats_of(step: Step) -> int:
        once = seconds(step, 1)
        if once < LEAST_SECONDS:
            # The first calls may be slow, for example because they allocate memory.
            once = min(once, seconds(step, 8))
        return max(1, round(LEAST_SECONDS / once))

    for step in steps:
        step()
    repeats = [repeats_of(step) for step in steps]
    return [
        [seconds(step, count) for step, count in zip(steps, repeats, strict=True)]
        for _ in range(rounds)
    ]


def ratio(times: list[list[float]], step: int = 0, to: int = 1) -> float:
    return statistics.median(one[step] / one[to] for one in times)


def against(
    make_ours: Callable[[], Step], make_theirs: Callable[[], Step]
) -> Callable[[int], Measured]:
    """Returns a function that measures time(ours) / time(theirs).

    It creates the steps itself, so that they use memory only while they are measured.
    """

    def measure(rounds: int) -> Measured:
        torch.manual_seed(0)
        return Measured(ratio(interleaved([make_ours(), make_theirs()], rounds)))

    return measure


def program(*arguments: object, target: str = "") -> dict[str, Any]:
    """Returns the command's --json output; `target` is the instruction set, by default the best."""
    environment = dict(os.environ)
    if target:
        environment["GNOMON_TARGET"] = target
    command = [str(PROGRAM), *map(str, arguments), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise NotMeasuredError((done.stderr.strip().splitlines() or ["no output"])[-1])
    result: dict[str, Any] = json.loads(done.stdout)
    return result
