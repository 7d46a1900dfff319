"""Draws the report of a comparison: ``python -m gnomon.report RUN``.

``RUN`` is the folder that ``gnomon compare`` left. The report is a function of its results.json
(docs/results.md) alone: one self-contained HTML file with the plots inside.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import math
import pathlib
import shlex
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gnomon._files import replacing
from gnomon._output import checked_output
from gnomon._plots import STYLE, colour, line_style, marker

#: Characters of a name, from which on legends stand below the plots.
LONG_NAME = 40
#: Characters that fit beside each other above or below the plots.
ACROSS = 64

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 1040px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; margin-bottom: 0; }}
h2 {{ font-size: 1.2rem; margin-top: 2.2rem; }}
h3 {{ font-size: 1rem; margin: 1.2rem 0 .4rem; }}
p.lead {{ color: #555; margin-top: .3rem; }}
figure {{ margin: 1rem 0; }}
figure svg {{ width: 100%; height: auto; }}
figcaption {{ color: #555; font-size: .9rem; }}
.pictures {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
.picture {{ margin: 0; max-width: 100%; }}
.picture img {{ max-width: 100%; border: 1px solid #ddd; image-rendering: pixelated; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right;
  white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
thead th {{ border-bottom: 2px solid #888; }}
td.best {{ font-weight: 700; }}
p.warning {{ border-left: 4px solid #E69F00; padding-left: .8rem; }}
td .spread {{ color: #777; font-weight: 400; }}
.key {{ display: inline-block; width: .8em; height: .8em; margin-right: .5em; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem;
  font-size: .9rem; }}
dt {{ color: #555; }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
code {{ font-size: .85rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="lead">{lead}</p>
{body}
</body>
</html>
"""


def load(folder: pathlib.Path) -> dict[str, Any]:
    """Reads results.json; ValueError where it is not the record of a comparison."""
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(results, dict) or results.get("format") != 1:
        raise ValueError(f"{path} is not the record of a comparison in format 1")
    needed = {"settings", "summary", "runs", "data", "sessions", "versions"}
    missing = needed - results.keys()
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    if "task" not in results:
        results["task"] = text_task(results)
    return results


def text_task(results: dict[str, Any]) -> dict[str, Any]:
    """What is measured, of records from before they said so: they are of language models."""
    settings = results["settings"]
    kind = settings.get("tokens", "bytes")
    unit = f"nats per {kind.removesuffix('s')}"
    return {
        "name": "text",
        "loss_unit": unit,
        "metrics": [
            _metric("loss", f"loss, {unit}"),
            _metric("last", f"last 32 {kind}"),
            _metric("bits_per_byte", "bits per byte", is_compared=kind != "bytes"),
        ],
        "conditions": {
            "key": "length",
            "title": f"evaluation length, {kind}",
            "values": settings["lengths"],
            "trained": 0,
        },
        "examples": "windows",
    }


def _metric(key: str, title: str, *, is_compared: bool = True) -> dict[str, Any]:
    return {"key": key, "title": title, "higher_is_better": False, "is_compared": is_compared}


def metrics(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that comparisons show."""
    return [metric for metric in results["task"]["metrics"] if metric["is_compared"]]


def labels(results: dict[str, Any]) -> list[str]:
    """One name for each combination; what all have in common is left out.

    Titles, "RoPE + learned HyPE", or specifications where the record has no titles or two of them
    are the same.
    """
    combinations = results["settings"]["combinations"]
    named = ("similarity", "position")
    parts = [part for part in named if len({c[part] for c in combinations}) > 1] or ["position"]
    for suffix in ("_title", ""):
        names = [" · ".join(c.get(part + suffix, "") for part in parts) for c in combinations]
        if len(set(names)) == len(names):
            break
    return names


def in_common(results: dict[str, Any]) -> str:
    """A sentence on what labels() leaves out."""
    combinations = results["settings"]["combinations"]
    if len(combinations) < 2:
        return ""
    return "".join(
        f" The {part} of all is {combinations[0].get(part + '_title', combinations[0][part])}."
        for part in ("similarity", "position")
        if len({c[part] for c in combinations}) == 1
    )


def p_value(differences: list[float]) -> float:
    """Student's t test of paired samples: how probable a mean as far from 0 would be by chance.

    1 of fewer than two differences.
    """
    n = len(differences)
    if n < 2:
        return 1.0
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1)
    if variance == 0:
        return 0.0 if mean else 1.0
    # The distribution function for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4).
    freedom = n - 1
    theta = math.atan(abs(mean) / math.sqrt(variance / n) / math.sqrt(freedom))
    term = math.cos(theta) if freedom % 2 else 1.0
    total = 0.0
    for k in range(1 + freedom % 2, freedom, 2):
        total += term
        term *= math.cos(theta) ** 2 * k / (k + 1)
    inside = math.sin(theta) * total
    if freedom % 2:
        inside = 2 / math.pi * (theta + inside)
    return max(0.0, 1 - inside)


def smooth(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Means of five neighbours, and the step in the middle of each; of few values themselves."""
    width = 5 if len(values) >= 15 else 1
    means = [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]
    return steps[width // 2 : len(steps) - width // 2], means


def _legend(figure: Figure, axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    if not handles:
        return
    place = "outside right upper"
    if max(map(len, names)) > LONG_NAME:
        # Beside long names little would be left of the plots.
        figure.set_figheight(figure.get_figheight() + 0.22 * len(names))
        place = "outside lower left"
    figure.legend(handles, names, loc=place, fontsize=10, handlelength=3.5)


def _figure(height: float = 4.4) -> Figure:
    return Figure(figsize=(9.6, height), layout="constrained")


def draw_training(results: dict[str, Any]) -> Figure:
    """Training loss against the step: the mean over the seeds, lightly smoothed."""
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
        # The first tenth falls from chance level and would flatten the rest.
        settled = losses[len(losses) // 10 :]
        lowest, highest = min(lowest, *settled), max(highest, *settled)
    if lowest < highest:
        margin = 0.04 * (highest - lowest)
        axes.set_ylim(lowest - margin, highest + margin)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, {results['task']['loss_unit']}")
    _legend(figure, axes)
    return figure


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _are_points(values: list[Any]) -> bool:
    """Whether conditions are several numbers, which a line may join."""
    return len(values) > 1 and all(isinstance(value, int | float) for value in values)


def _measured(
    row: dict[str, Any], key: str, places: list[Any]
) -> tuple[list[Any], list[float], list[float]]:
    """Places, means and spreads of an entry of the summary where there is a mean."""
    points = sorted(
        (place, at[key]["mean"], at[key]["spread"] or 0.0)
        for place, at in zip(places, row["losses"], strict=True)
        if at[key]["mean"] is not None
    )
    return [x for x, _, _ in points], [y for _, y, _ in points], [s for _, _, s in points]


def _draw_lines(results: dict[str, Any], key: str, axes: Any) -> None:
    names = labels(results)
    conditions = results["task"]["conditions"]
    values = conditions["values"]
    for row in results["summary"]:
        index = row["combination"]
        x, y, spread = _measured(row, key, values)
        if not x:
            continue
        style = {"marker": marker(index), "markersize": 6, "linewidth": 1.8, **line_style(index)}
        # A single point would be hidden where lines begin.
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


#: Of the width of a condition, what the points of all combinations take.
SPAN = 0.8


def _draw_points(results: dict[str, Any], key: str, axes: Any) -> None:
    """Each condition by itself, and the combinations side by side, so that none hides another."""
    names = labels(results)
    conditions = results["task"]["conditions"]
    values = list(map(str, conditions["values"]))
    count = len(results["summary"])
    for n, row in enumerate(results["summary"]):
        index = row["combination"]
        offset = SPAN * ((n + 0.5) / count - 0.5)
        x, y, spread = _measured(row, key, [place + offset for place in range(len(values))])
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
    if conditions["trained"] is not None and len(values) > 1:
        trained = conditions["trained"]
        axes.axvspan(trained - 0.5, trained + 0.5, color="#f3f3f3", linewidth=0, zorder=-1)


def draw_conditions(results: dict[str, Any]) -> Figure:
    """Each metric against the condition: the loss against the evaluation length, for one.

    Only numbers are joined by lines.
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


def _quartiles(results: dict[str, Any], combination: int) -> tuple[float, float]:
    """The lowest and the highest of the runs' quartiles, or medians where there are none."""
    runs = [r for r in results["runs"] if r["combination"] == combination]
    each = [r.get("ms_quartiles") or [r["ms_per_step"]] * 2 for r in runs]
    return min(low for low, _ in each), max(high for _, high in each)


def draw_cost(results: dict[str, Any]) -> Figure:
    """Time of one training step, as bars with their spread."""
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


#: Where other programs take more than this share of the machine, times tell little.
BUSY = 0.1


def busy(results: dict[str, Any]) -> str:
    """A warning where other programs took a part of the machine, or nothing."""
    shares = [r["others"] for r in results["runs"] if r.get("others") is not None]
    if not shares or max(shares) <= BUSY:
        return ""
    count = sum(share > BUSY for share in shares)
    return (
        f'<p class="warning">The machine was busy: in {count} of {len(results["runs"])} runs other '
        f"programs took more than {BUSY:.0%} of the processors' time, up to {max(shares):.0%}. "
        "Compare times only between runs on a quiet machine.</p>"
    )


PLOTS: dict[str, tuple[str, str, Callable[[dict[str, Any]], Figure]]] = {
    "lengths": (
        "Evaluation",
        "Dashed or shaded is what the models were trained at; a band or a whisker is one standard "
        "deviation over the seeds.",
        draw_conditions,
    ),
    "training": (
        "Training",
        "Mean over the seeds and over five neighbouring points.",
        draw_training,
    ),
    "cost": (
        "Cost",
        "Forward, backward and optimizer, of one step; the whiskers hold the middle half of the "
        "steps of every seed.",
        draw_cost,
    ),
}


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _cell(at: dict[str, Any], is_best: bool) -> str:
    if at["mean"] is None:
        return "<td>–</td>"
    text = f"{at['mean']:.3f}"
    if at["spread"] is not None:
        text += f' <span class="spread">± {at["spread"]:.3f}</span>'
    return f'<td class="best">{text}</td>' if is_best else f"<td>{text}</td>"


#: What the lead of the best may be by chance, at most, and how many pairs it takes to tell.
SIGNIFICANT = 0.05
FEWEST_SEEDS = 3


def best(
    results: dict[str, Any], key: str, condition: int, *, higher_is_better: bool = False
) -> int | None:
    """The combination whose metric is better than that of every other, by more than chance.

    `condition` is an index of the task's conditions. Seeds are paired: runs with the same one began
    alike and saw the same data in the same order.
    """
    sign = -1 if higher_is_better else 1
    by_seed: dict[int, dict[int, float]] = {}
    for run in results["runs"]:
        if run["losses"] and run["losses"][condition][key] is not None:
            value = sign * run["losses"][condition][key]
            by_seed.setdefault(run["combination"], {})[run["seed"]] = value
    if len(by_seed) < 2:
        return None
    first = min(by_seed, key=lambda c: sum(by_seed[c].values()) / len(by_seed[c]))
    for other in by_seed.keys() - {first}:
        seeds = by_seed[first].keys() & by_seed[other].keys()
        leads = [by_seed[other][seed] - by_seed[first][seed] for seed in seeds]
        if len(leads) < FEWEST_SEEDS or p_value(leads) >= SIGNIFICANT or sum(leads) <= 0:
            return None
    return first


def _table(results: dict[str, Any], metric: dict[str, Any], *, shows_cost: bool) -> str:
    names = labels(results)
    conditions = results["task"]["conditions"]
    key = metric["key"]
    winners = [
        best(results, key, n, higher_is_better=metric["higher_is_better"])
        for n in range(len(conditions["values"]))
    ]
    body = []
    for row in results["summary"]:
        index = row["combination"]
        cells = "".join(
            _cell(at[key], index == winner)
            for at, winner in zip(row["losses"], winners, strict=True)
        )
        if shows_cost:
            parameters = "–" if row["parameters"] is None else f"{row['parameters']:,}"
            milliseconds = row["ms_per_step"]["mean"]
            cost = "–" if milliseconds is None else f"{milliseconds:.1f}"
            cells += f"<td>{parameters}</td><td>{cost}</td>"
        note = f" (diverged: {row['diverged']})" if row["diverged"] else ""
        body.append(
            f'<tr><td><span class="key" style="background:{colour(index)}"></span>'
            f'<span title="{html.escape(row["label"])}">{html.escape(names[index])}</span>{note}'
            f"</td>{cells}</tr>"
        )
    head = "".join(f"<th>{html.escape(str(value))}</th>" for value in conditions["values"])
    title = html.escape(f"{_capitalized(metric['title'])}, by {conditions['key']}")
    costs = "<th>parameters</th><th>ms per step</th>" if shows_cost else ""
    return (
        f'<h3>{title}</h3><div class="scroll"><table><thead>'
        f"<tr><th>combination</th>{head}{costs}</tr>"
        f"</thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def table(results: dict[str, Any]) -> str:
    """The summary as HTML: a table for each metric."""
    parts = [
        _table(results, metric, shows_cost=n == 0) for n, metric in enumerate(metrics(results))
    ]
    if len(results["settings"]["seeds"]) >= FEWEST_SEEDS:
        note = (
            "Bold: better than every other of its column in a paired t test over the seeds, "
            f"p &lt; {SIGNIFICANT:g}. Without bold, these seeds cannot tell a column's winner."
        )
    else:
        note = (
            "One or two seeds cannot tell a difference from chance: --seeds 3 may, and then the "
            "best of each column is marked."
        )
    return "".join(parts) + f"<p>{note}</p>"


#: What differs between the runs, and is said elsewhere.
REPLACED = ("similarity", "position", "seed", "max_length")


def _describe(options: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """Options by their names: "batch 16, learning rate 0.002"."""
    parts = []
    for name, value in options.items():
        if name not in without:
            if isinstance(value, list):
                shown = " ".join(map(str, value))
            else:
                shown = f"{value:g}" if isinstance(value, float) else str(value)
            parts.append(f"{name.replace('_', ' ')} {shown}")
    return html.escape(", ".join(parts))


def _describe_data(record: dict[str, Any]) -> str:
    """An object of a record, less what has a row of its own."""
    shown = {
        name: f"{value:,}" if isinstance(value, int) else value
        for name, value in record.items()
        if value is not None and name not in {"sha256", "path"}
    }
    return _describe(shown)


def settings(results: dict[str, Any]) -> str:
    """What is needed to repeat the comparison."""
    options = results["settings"]
    data = results["data"]
    task = results["task"]
    versions = results["versions"]
    others = {
        name: value
        for name, value in options.items()
        if name not in {"combinations", "seeds", "model", "training"}
    }
    rows = []
    for session in results["sessions"]:
        machine = session["machine"]
        rows.append(("command", f"<code>{html.escape(shlex.join(session['command']))}</code>"))
        text = (
            f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
            f"{machine['instruction_set']}, {machine['system']}"
        )
        if (device := machine.get("device", "cpu")) != "cpu":
            text += f"; models on {device}"
        text += f"; started {session['started']}"
        rows.append(("machine", html.escape(text)))
    rows.append(("task", html.escape(task["name"])))
    if data.get("path"):
        rows.append(("data", html.escape(data["path"])))
    rows.append(("contents", _describe_data(data)))
    if data.get("sha256"):
        rows.append(("SHA-256", f"<code>{html.escape(data['sha256'])}</code>"))
    if "tokens" in results:
        rows.append(("tokens", _describe_data(results["tokens"])))
    rows += [
        ("model", _describe(options["model"], REPLACED)),
        (
            "training",
            _describe(options["training"], REPLACED)
            + "; AdamW, its learning rate after a linear warm-up along a cosine",
        ),
        ("seeds", ", ".join(str(seed) for seed in options["seeds"])),
        ("evaluation", _describe(others, REPLACED)),
        ("versions", html.escape(", ".join(f"{k} {v}" for k, v in sorted(versions.items())))),
    ]
    return "<dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in rows) + "</dl>"


def _trained_at(results: dict[str, Any]) -> str:
    conditions = results["task"]["conditions"]
    if conditions["trained"] is None:
        return ""
    return f"at {conditions['key']} {conditions['values'][conditions['trained']]} "


def pictures(results: dict[str, Any], folder: pathlib.Path) -> str:
    """What the task has drawn of each combination's first run; empty where there is nothing."""
    names = labels(results)
    figures = []
    titles: list[str] = []
    for run in results["runs"]:
        picture = run.get("picture")
        # A name, not a path: the record may be of others.
        if picture is None or pathlib.PurePath(picture["file"]).name != picture["file"]:
            continue
        path = folder / picture["file"]
        if not path.is_file():
            continue
        if picture["title"] not in titles:
            titles.append(picture["title"])
        name = html.escape(names[run["combination"]])
        data = base64.b64encode(path.read_bytes()).decode()
        figures.append(
            f'<figure class="picture"><img alt="{name}" src="data:image/png;base64,{data}">'
            f"<figcaption>{name}</figcaption></figure>"
        )
    if not figures:
        return ""
    caption = html.escape(" ".join(titles))
    return f'<h2>Pictures</h2><p>{caption}</p><div class="pictures">{"".join(figures)}</div>'


def render(results: dict[str, Any], folder: pathlib.Path | None = None) -> str:
    """The whole page; folder has the pictures that the record names."""
    options = results["settings"]
    total = len(options["combinations"]) * len(options["seeds"])
    done = len(results["runs"])
    lead = (
        f"{len(options['combinations'])} combinations of similarity and position, "
        f"{len(options['seeds'])} seed{'s' if len(options['seeds']) > 1 else ''}, trained "
        f"{_trained_at(results)}on the same data in the same order.{in_common(results)}"
    )
    if done < total:
        lead += f" {done} of {total} runs are finished."
    body = []
    with matplotlib.rc_context(STYLE):
        for title, caption, draw in PLOTS.values():
            body.append(
                f"<h2>{title}</h2><figure>{_svg(draw(results))}"
                f"<figcaption>{caption}</figcaption></figure>"
            )
    body.insert(1, f"<h2>Table</h2>{table(results)}")
    if folder is not None:
        body.append(pictures(results, folder))
    body.append(busy(results))
    body.append(f"<h2>Settings</h2>{settings(results)}")
    title = html.escape(f"gnomon compare: {results.get('name', '')}")
    return PAGE.format(title=title, lead=html.escape(lead), body="\n".join(body))


def main(arguments: list[str] | None = None) -> int:
    with checked_output(_fail):
        return _main(arguments)


def _fail(message: str) -> NoReturn:
    print(f"gnomon.report: {message}", file=sys.stderr)
    raise SystemExit(2)


def _main(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gnomon.report", description=__doc__)
    parser.add_argument("run", type=pathlib.Path, help="the folder of a comparison")
    parser.add_argument("--png", action="store_true", help="also write each plot as a PNG file")
    options = parser.parse_args(arguments)
    try:
        results = load(options.run)
        page = render(results, options.run)
        with replacing(options.run / "report.html") as part:
            part.write_text(page, encoding="utf-8")
        if options.png:
            with matplotlib.rc_context(STYLE):
                for name, (_, _, draw) in PLOTS.items():
                    with replacing(options.run / f"{name}.png") as part:
                        draw(results).savefig(part, dpi=150, format="png")
    except OSError as error:
        _fail(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
    except (ValueError, KeyError, TypeError) as error:
        _fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
