"""Draws the report of a comparison: ``python -m gnomon.report RUN``.

``RUN`` is the folder that ``gnomon compare`` left. The report is a function of its results.json
(docs/results.md) alone: one self-contained HTML file with the plots inside.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import math
import pathlib
import shlex
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gnomon._output import checked_output
from gnomon._plots import STYLE, colour, line_style

MARKERS = "osD^vPX*"

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
p.lead {{ color: #555; margin-top: .3rem; }}
figure {{ margin: 1rem 0; }}
figure svg {{ width: 100%; height: auto; }}
figcaption {{ color: #555; font-size: .9rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right;
  white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
thead th {{ border-bottom: 2px solid #888; }}
td.best {{ font-weight: 700; }}
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
    needed = {"settings", "summary", "runs", "data", "tokens", "sessions", "versions"}
    missing = needed - results.keys()
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    return results


def labels(results: dict[str, Any]) -> list[str]:
    """One name for each combination; the similarity is left out where all have the same."""
    combinations = results["settings"]["combinations"]
    if len({c["similarity"] for c in combinations}) == 1:
        return [c["position"] for c in combinations]
    return [f"{c['similarity']} · {c['position']}" for c in combinations]


def tokens(results: dict[str, Any]) -> str:
    """What the models read: bytes, words or subwords."""
    return results["settings"]["tokens"]


def unit(results: dict[str, Any]) -> str:
    """One of the tokens."""
    return tokens(results).removesuffix("s")


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def smooth(values: list[float], width: int) -> list[float]:
    """Means over a centred window, shorter at both ends."""
    means = []
    for i in range(len(values)):
        half = min(width // 2, i, len(values) - 1 - i)
        part = values[i - half : i + half + 1]
        means.append(sum(part) / len(part))
    return means


def _legend(figure: Figure, axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside right upper", fontsize=10)


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
        losses = smooth(mean, 5)
        axes.plot(steps, losses, label=name, linewidth=1.6, **line_style(index))
        # The first tenth falls from chance level and would flatten the rest.
        settled = losses[len(losses) // 10 :]
        lowest, highest = min(lowest, *settled), max(highest, *settled)
    if lowest < highest:
        margin = 0.04 * (highest - lowest)
        axes.set_ylim(lowest - margin, highest + margin)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, nats per {unit(results)}")
    _legend(figure, axes)
    return figure


def _draw_lengths(results: dict[str, Any], kind: str, axes: Any) -> None:
    names = labels(results)
    lengths = results["settings"]["lengths"]
    for row in results["summary"]:
        index = row["combination"]
        points = [(at["length"], at[kind]) for at in row["losses"]]
        points = sorted((n, at) for n, at in points if at["mean"] is not None)
        if not points:
            continue
        x = [n for n, _ in points]
        y = [at["mean"] for _, at in points]
        axes.plot(
            x,
            y,
            label=names[index],
            marker=marker(index),
            markersize=6,
            linewidth=1.8,
            **line_style(index),
        )
        spread = [at["spread"] or 0 for _, at in points]
        if any(spread):
            low = [a - b for a, b in zip(y, spread, strict=True)]
            high = [a + b for a, b in zip(y, spread, strict=True)]
            axes.fill_between(x, low, high, color=colour(index), alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.axvline(lengths[0], color="#999999", linewidth=1, linestyle=(0, (3, 3)), zorder=0)
    axes.set_xlabel(f"evaluation length, {tokens(results)}")


def draw_lengths(results: dict[str, Any]) -> Figure:
    """Loss against evaluation length, over all tokens and over the last 32 of each window."""
    figure = _figure(4.8)
    left, right = figure.subplots(1, 2, sharey=True, gridspec_kw={"wspace": 0.08})
    _draw_lengths(results, "loss", left)
    _draw_lengths(results, "last", right)
    left.set_title(f"all {tokens(results)}", fontsize=11)
    right.set_title(f"last 32 {tokens(results)} of each window", fontsize=11)
    left.set_ylabel(f"validation loss, nats per {unit(results)}")
    _legend(figure, left)
    return figure


def draw_cost(results: dict[str, Any]) -> Figure:
    """Time of one training step, as bars."""
    names = labels(results)
    rows = [r for r in results["summary"] if r["ms_per_step"]["mean"] is not None]
    figure = _figure(0.9 + 0.34 * max(len(rows), 1))
    axes = figure.add_subplot()
    values = [r["ms_per_step"]["mean"] for r in rows]
    bars = axes.barh(
        range(len(rows)),
        values,
        color=[colour(r["combination"]) for r in rows],
        height=0.65,
    )
    axes.bar_label(bars, labels=[f"{v:.0f}" if v >= 10 else f"{v:.1f}" for v in values], padding=4)
    axes.set_yticks(range(len(rows)), [names[r["combination"]] for r in rows])
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds a training step (median)")
    return figure


PLOTS: dict[str, tuple[str, str, Callable[[dict[str, Any]], Figure]]] = {
    "lengths": (
        "Loss against evaluation length",
        "The dashed line is the training length; a band is one standard deviation over the seeds.",
        draw_lengths,
    ),
    "training": (
        "Training",
        "Mean over the seeds, smoothed over five points.",
        draw_training,
    ),
    "cost": ("Cost", "Forward, backward and optimizer, of one step.", draw_cost),
}


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _cell(at: dict[str, Any], best: float | None) -> str:
    if at["mean"] is None:
        return "<td>–</td>"
    text = f"{at['mean']:.3f}"
    if at["spread"] is not None:
        text += f' <span class="spread">± {at["spread"]:.3f}</span>'
    # Equal to three decimals is equally good.
    mark = best is not None and round(at["mean"], 3) == round(best, 3)
    return f'<td class="best">{text}</td>' if mark else f"<td>{text}</td>"


def table(results: dict[str, Any]) -> str:
    """The summary as an HTML table, the best of each column in bold."""
    names = labels(results)
    lengths = results["settings"]["lengths"]
    summary = results["summary"]
    read = tokens(results)
    titles = {"loss": f"loss, all {read}", "last": f"loss, last 32 {read}"}
    if read != "bytes":  # of bytes it is the loss in another unit
        titles["bits_per_byte"] = "bits per byte"
    columns = [(kind, n) for kind in titles for n in range(len(lengths))]
    best: list[float | None] = []
    for kind, n in columns:
        means = [row["losses"][n][kind]["mean"] for row in summary]
        best.append(min((m for m in means if m is not None), default=None))
    head = "".join(f"<th>{length}</th>" for _ in titles for length in lengths)
    body = []
    for row in summary:
        index = row["combination"]
        cells = "".join(
            _cell(row["losses"][n][kind], b) for (kind, n), b in zip(columns, best, strict=True)
        )
        parameters = "–" if row["parameters"] is None else f"{row['parameters']:,}"
        milliseconds = row["ms_per_step"]["mean"]
        cost = "–" if milliseconds is None else f"{milliseconds:.1f}"
        note = f" (diverged: {row['diverged']})" if row["diverged"] else ""
        body.append(
            f'<tr><td><span class="key" style="background:{colour(index)}"></span>'
            f"{html.escape(names[index])}{note}</td><td>{parameters}</td><td>{cost}</td>{cells}</tr>"
        )
    groups = "".join(f'<th colspan="{len(lengths)}">{title}</th>' for title in titles.values())
    return (
        '<div class="scroll"><table><thead>'
        f"<tr><th></th><th></th><th></th>{groups}</tr>"
        f"<tr><th>combination</th><th>parameters</th><th>ms per step</th>{head}</tr>"
        f"</thead><tbody>{''.join(body)}</tbody></table></div>"
        f"<p>Nats per {unit(results)}, by evaluation length. Bold: the best of its column.</p>"
    )


def _describe_memory(length: int) -> str:
    return f", with a memory of {length:,}" if length > 0 else ""


def _describe_tokens(read: dict[str, Any]) -> str:
    kind = read["kind"]
    text = f"{kind}: {read['train_tokens']:,} to train on, {read['valid_tokens']:,} to validate on"
    if kind != "bytes":
        text += f", a vocabulary of {read['size']:,}"
    if read["valid_unknown"]:
        text += f"; {read['valid_unknown']:,} of the latter are <unk>"
    return text


def settings(results: dict[str, Any]) -> str:
    """What is needed to repeat the comparison."""
    options = results["settings"]
    data = results["data"]
    model = options["model"]
    training = options["training"]
    versions = results["versions"]
    rows = []
    for session in results["sessions"]:
        machine = session["machine"]
        rows.append(("command", f"<code>{html.escape(shlex.join(session['command']))}</code>"))
        text = (
            f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
            f"{machine['instruction_set']}, {machine['system']}; started {session['started']}"
        )
        rows.append(("machine", html.escape(text)))
    rows += [
        (
            "data",
            html.escape(
                f"{data['path']}: {data['train_bytes']:,} bytes to train on, "
                f"{data['valid_bytes']:,} to validate on, {data['files']} files"
            ),
        ),
        ("tokens", html.escape(_describe_tokens(results["tokens"]))),
        ("SHA-256", f"<code>{html.escape(data['sha256'])}</code>"),
        (
            "model",
            f"width {model['dim']}, {model['depth']} layers, {model['heads']} heads, "
            f"MLP {model['mlp']}, dropout {model['dropout']:g}",
        ),
        (
            "training",
            f"{training['steps']} steps of {training['batch']} windows of {options['lengths'][0]} "
            f"{tokens(results)}{_describe_memory(training['memory'])}; AdamW, learning rate "
            f"{training['learning_rate']:g} after {training['warmup']} steps, then a cosine to "
            f"{training['final_fraction']:g} of it; "
            f"weight decay {training['weight_decay']:g}; gradient norm at most "
            f"{training['clip']:g}",
        ),
        ("seeds", ", ".join(str(seed) for seed in options["seeds"])),
        (
            "evaluation",
            f"{options['evaluation_bytes']:,} bytes at each length"
            f"{_describe_memory(options['evaluation_memory'])}",
        ),
        ("versions", html.escape(", ".join(f"{k} {v}" for k, v in sorted(versions.items())))),
    ]
    return "<dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in rows) + "</dl>"


def render(results: dict[str, Any]) -> str:
    """The whole page."""
    options = results["settings"]
    total = len(options["combinations"]) * len(options["seeds"])
    done = len(results["runs"])
    lead = (
        f"{len(options['combinations'])} combinations of similarity and position, "
        f"{len(options['seeds'])} seed{'s' if len(options['seeds']) > 1 else ''}, trained at "
        f"length {options['lengths'][0]} on the same {tokens(results)} in the same order."
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
        page = render(results)
        (options.run / "report.html").write_text(page, encoding="utf-8")
        if options.png:
            with matplotlib.rc_context(STYLE):
                for name, (_, _, draw) in PLOTS.items():
                    draw(results).savefig(options.run / f"{name}.png", dpi=150)
    except (ValueError, OSError, KeyError, TypeError) as error:
        _fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
