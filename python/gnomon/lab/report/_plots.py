"""The plots of a comparison."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gnomon.lab._plots import colour, line_style, marker
from gnomon.lab.report._record import labels, measured_at, metrics
from gnomon.lab.report._statistics import (
    BETTER,
    EQUIVALENT,
    FEW_SEEDS,
    UNDECIDED,
    WORSE,
    confidence_interval,
    pairs,
)

#: If a name has more characters than this, the legend is placed below the plots.
LONG_NAME = 40
#: Number of characters that fit in a row above or below the plots.
ACROSS = 64


def smooth(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Returns means of five neighbouring values and their steps; short series stay unchanged."""
    width = 5 if len(values) >= 15 else 1
    means = [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]
    return steps[width // 2 : len(steps) - width // 2], means


def _legend(figure: Figure, axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    if not handles:
        return
    place = "outside right upper"
    if max(map(len, names)) > LONG_NAME:
        # Long names would leave little room for the plots.
        figure.set_figheight(figure.get_figheight() + 0.22 * len(names))
        place = "outside lower left"
    figure.legend(handles, names, loc=place, fontsize=10, handlelength=3.5)


def _figure(height: float = 4.4) -> Figure:
    return Figure(figsize=(9.6, height), layout="constrained")


def draw_training(results: dict[str, Any]) -> Figure:
    """Draws the training loss by step: the mean over the seeds, lightly smoothed."""
    figure = _figure()
    axes = figure.add_subplot()
    names = labels(results)
    lowest, highest = math.inf, -math.inf
    for index, name in enumerate(names):
        runs = [r for r in results["runs"] if r["combination"] == index]
        shortest = min((len(r["curve"]["step"]) for r in runs), default=0)
        if shortest == 0:
            continue
        steps = runs[0]["curve"]["step"][:shortest]
        mean = [sum(r["curve"]["loss"][i] for r in runs) / len(runs) for i in range(shortest)]
        steps, losses = smooth(steps, mean)
        axes.plot(steps, losses, label=name, linewidth=1.6, **line_style(index))
        # Exclude the first tenth from the axis range: the loss falls from chance level there, which
        # would flatten the rest of the curve.
        settled = losses[len(losses) // 10 :]
        lowest, highest = min(lowest, *settled), max(highest, *settled)
    if lowest < highest:
        margin = 0.04 * (highest - lowest)
        axes.set_ylim(lowest - margin, highest + margin)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, {results['task']['loss_unit']}")
    _legend(figure, axes)
    return figure


def _are_points(values: list[Any]) -> bool:
    """Returns whether lines can join the conditions: there are several, and all are numbers."""
    return len(values) > 1 and all(isinstance(value, int | float) for value in values)


def _measured(
    losses: list[dict[str, Any]], key: str, places: list[Any]
) -> tuple[list[Any], list[float], list[float]]:
    """Returns positions, means and spreads of the conditions that have a mean."""
    points = sorted(
        (place, at[key]["mean"], at[key]["spread"] or 0.0)
        for place, at in zip(places, losses, strict=True)
        if at[key]["mean"] is not None
    )
    return [x for x, _, _ in points], [y for _, y, _ in points], [s for _, _, s in points]


def _draw_lines(results: dict[str, Any], key: str, axes: Any) -> None:
    names = labels(results)
    conditions = results["task"]["conditions"]
    values = conditions["values"]
    for row in results["summary"]:
        index = row["combination"]
        x, y, spread = _measured(row["losses"], key, values)
        if not x:
            continue
        style = {"marker": marker(index), "markersize": 6, "linewidth": 1.8, **line_style(index)}
        # Draw a single point in front of the lines, which could hide it.
        axes.plot(x, y, label=names[index], zorder=3 if len(x) == 1 else 2, **style)
        if len(x) == 1:
            axes.errorbar(x, y, spread, color=colour(index), capsize=3)
        elif any(spread):
            low = [a - b for a, b in zip(y, spread, strict=True)]
            high = [a + b for a, b in zip(y, spread, strict=True)]
            axes.fill_between(x, low, high, color=colour(index), alpha=0.15, linewidth=0)
    if min(values) > 0:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if conditions["trained"] is not None:
        trained = values[conditions["trained"]]
        axes.axvline(trained, color="#999999", linewidth=1, linestyle=(0, (3, 3)), zorder=0)


#: Fraction of a condition's width that the points of all combinations occupy.
SPAN = 0.8


def _draw_points(results: dict[str, Any], key: str, axes: Any) -> None:
    """Draws the conditions separately, with combinations side by side so that none is hidden."""
    names = labels(results)
    conditions = results["task"]["conditions"]
    shown = measured_at(results, key)
    values = [str(conditions["values"][n]) for n in shown]
    count = len(results["summary"])
    for n, row in enumerate(results["summary"]):
        index = row["combination"]
        offset = SPAN * ((n + 0.5) / count - 0.5)
        losses = [row["losses"][place] for place in shown]
        x, y, spread = _measured(losses, key, [place + offset for place in range(len(values))])
        if not x:
            continue
        style = {"marker": marker(index), "markersize": 6, "color": colour(index), "capsize": 3}
        axes.errorbar(x, y, spread, label=names[index], linestyle="none", **style)
    axes.set_xlim(-0.5, len(values) - 0.5)
    are_long = sum(len(value) + 2 for value in values) * len(axes.figure.axes) > ACROSS
    turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if are_long else {}
    axes.set_xticks(range(len(values)), values, **turned)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x", visible=False)
    for place in range(1, len(values)):
        axes.axvline(place - 0.5, color="#e4e4e4", linewidth=0.8, zorder=0)
    if conditions["trained"] in shown and len(values) > 1:
        trained = shown.index(conditions["trained"])
        axes.axvspan(trained - 0.5, trained + 0.5, color="#f3f3f3", linewidth=0, zorder=-1)


def draw_conditions(results: dict[str, Any]) -> Figure:
    """Plots each metric by condition, for example the loss by evaluation length.

    Lines join only numeric conditions.
    """
    figure = _figure(4.8)
    shown = metrics(results)
    drawn = _draw_lines if _are_points(results["task"]["conditions"]["values"]) else _draw_points
    plots = figure.subplots(1, len(shown), squeeze=False, gridspec_kw={"wspace": 0.08})[0]
    for metric, axes in zip(shown, plots, strict=True):
        drawn(results, metric["key"], axes)
        axes.set_xlabel(results["task"]["conditions"]["title"])
        axes.set_title(textwrap.fill(metric["title"], ACROSS // len(shown)), fontsize=11)
    _legend(figure, plots[0])
    return figure


#: Colours of the verdicts.
SHADES = {BETTER: "#0072B2", WORSE: "#D55E00", EQUIVALENT: "#009E73", UNDECIDED: "#888888"}


def has_verdicts(results: dict[str, Any]) -> bool:
    """Returns whether any pair of combinations has enough seeds for a verdict."""
    places = measured_at(results, metrics(results)[0]["key"])
    return any(pair.verdict != FEW_SEEDS for place in places for pair in pairs(results, place))


def verdict_handles(used: set[str]) -> list[Line2D]:
    """Returns legend entries for the verdicts in `used`, in the order of SHADES."""
    return [
        Line2D([], [], marker="o", linestyle="none", color=shade, label=verdict)
        for verdict, shade in SHADES.items()
        if verdict in used
    ]


def draw_effects(results: dict[str, Any]) -> Figure:
    """Draws differences from the first combination, with 95% confidence intervals."""
    names = labels(results)
    conditions = results["task"]["conditions"]
    metric = metrics(results)[0]
    # At most four panels are legible; draw the training condition and the last ones.
    places = measured_at(results, metric["key"])
    if len(places) > 4:
        first = conditions["trained"] if conditions["trained"] in places else places[0]
        places = [first, *[place for place in places if place != first][-3:]]
    figure = _figure(1.7 + 0.34 * len(names))
    panels: list[Any] = list(figure.subplots(1, len(places), squeeze=False, sharey=True)[0])
    used = set()
    for place, axes in zip(places, panels, strict=True):
        for pair in pairs(results, place):
            if pair.left != 0 or pair.verdict not in SHADES:
                continue
            # Differences are left minus right, but the figure shows right minus left.
            verdict = {BETTER: WORSE, WORSE: BETTER}.get(pair.verdict, pair.verdict)
            used.add(verdict)
            axes.errorbar(
                -pair.mean, pair.right, xerr=confidence_interval(pair.differences),
                fmt="o", markersize=5, capsize=3, color=SHADES[verdict],
            )  # fmt: skip
        margin = results["settings"].get("margin")
        if margin:
            axes.axvspan(-margin, margin, color="#f0f0f0", linewidth=0, zorder=-1)
        axes.axvline(0, color="#888888", linewidth=0.8, zorder=0)
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_title(f"{conditions['key']} {conditions['values'][place]}", fontsize=11)
    panels[0].set_yticks(range(1, len(names)), names[1:])
    panels[0].set_ylim(len(names) - 0.5, 0.5)
    figure.supxlabel(f"{metric['title']}, minus that of {names[0]}", fontsize=11)
    figure.legend(handles=verdict_handles(used), loc="outside upper right", ncols=4, fontsize=10)
    return figure


def _quartiles(results: dict[str, Any], combination: int) -> tuple[float, float]:
    """Returns the lowest first and highest third quartile of the runs; medians if missing."""
    runs = [r for r in results["runs"] if r["combination"] == combination]
    each = [r.get("ms_quartiles") or [r["ms_per_step"]] * 2 for r in runs]
    return min(low for low, _ in each), max(high for _, high in each)


def draw_cost(results: dict[str, Any]) -> Figure:
    """Draws the time of one training step, as bars with their spread."""
    names = labels(results)
    rows = [r for r in results["summary"] if r["ms_per_step"]["mean"] is not None]
    figure = _figure(0.9 + 0.34 * max(len(rows), 1))
    axes = figure.add_subplot()
    values = [r["ms_per_step"]["mean"] for r in rows]
    ends = [_quartiles(results, r["combination"]) for r in rows]
    axes.barh(
        range(len(rows)),
        values,
        xerr=[
            [max(v - low, 0) for v, (low, _) in zip(values, ends, strict=True)],
            [max(high - v, 0) for v, (_, high) in zip(values, ends, strict=True)],
        ],
        error_kw={"ecolor": "#555555", "elinewidth": 1.2, "capsize": 3},
        color=[colour(r["combination"]) for r in rows],
        height=0.65,
    )
    for row, (value, (_, high)) in enumerate(zip(values, ends, strict=True)):
        text = f"{value:.0f}" if value >= 10 else f"{value:.1f}"
        axes.annotate(
            text, (max(value, high), row), xytext=(5, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(rows)), [names[r["combination"]] for r in rows])
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds per training step (median)")
    return figure


#: Title, caption and function of each plot of every comparison.
PLOTS: dict[str, tuple[str, str, Callable[[dict[str, Any]], Figure]]] = {
    "lengths": (
        "Evaluation",
        "Dashed lines or shading mark the training condition; bands and whiskers are one "
        "standard deviation over the seeds.",
        draw_conditions,
    ),
    "training": (
        "Training",
        "Mean over the seeds, smoothed over five neighbouring points.",
        draw_training,
    ),
    "cost": (
        "Cost",
        "Time of one training step: forward, backward and optimizer. Whiskers span the "
        "interquartile range over all seeds.",
        draw_cost,
    ),
}
