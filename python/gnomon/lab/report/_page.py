"""The HTML page of a comparison."""

from __future__ import annotations

import base64
import html
import io
import pathlib
import shlex
from collections import Counter
from collections.abc import Iterator
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from gnomon.lab._plots import STYLE, colour
from gnomon.lab.report._decided import ends, tuning_section
from gnomon.lab.report._plots import PLOTS, SHADES, draw_effects, has_verdicts
from gnomon.lab.report._record import in_common, labels, measured_at, metrics
from gnomon.lab.report._statistics import (
    BETTER,
    EQUIVALENT,
    FEW_SEEDS,
    FEWEST_SEEDS,
    SIGNIFICANT,
    UNDECIDED,
    WORSE,
    Pair,
    best,
    confidence_interval,
    pairs,
)

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{refresh}<title>{title}</title>
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


#: Seconds after which the page of a running comparison reloads itself.
REFRESH_S = 30
#: Timings are unreliable if other programs use more than this fraction of the CPU time.
BUSY = 0.1


def busy(results: dict[str, Any]) -> str:
    """Returns a warning if other programs used a lot of CPU time, otherwise an empty string."""
    shares = [r["others"] for r in results["runs"] if r.get("others") is not None]
    if not shares or max(shares) <= BUSY:
        return ""
    count = sum(share > BUSY for share in shares)
    return (
        f'<p class="warning">The machine was busy: in {count} of {len(results["runs"])} runs, '
        f"other programs used more than {BUSY:.0%} of the CPU time, up to {max(shares):.0%}. "
        "Compare times only between runs on an idle machine.</p>"
    )


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _with_unit(title: str) -> str:
    """Returns a title with its unit in parentheses: "loss, nats" becomes "loss (nats)"."""
    name, _, unit = title.partition(", ")
    return f"{name} ({unit})" if unit else name


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cell(at: dict[str, Any], is_best: bool) -> str:
    if at["mean"] is None:
        return "<td>–</td>"
    text = f"{at['mean']:.3f}"
    if at["spread"] is not None:
        text += f' <span class="spread">± {at["spread"]:.3f}</span>'
    return f'<td class="best">{text}</td>' if is_best else f"<td>{text}</td>"


def _table(results: dict[str, Any], metric: dict[str, Any], *, shows_cost: bool) -> str:
    names = labels(results)
    conditions = results["task"]["conditions"]
    key = metric["key"]
    places = measured_at(results, key)
    winners = [best(results, key, n, higher_is_better=metric["higher_is_better"]) for n in places]
    body = []
    for row in results["summary"]:
        index = row["combination"]
        cells = "".join(
            _cell(row["losses"][n][key], index == winner)
            for n, winner in zip(places, winners, strict=True)
        )
        if shows_cost:
            parameters = "–" if row["parameters"] is None else f"{row['parameters']:,}"
            milliseconds = row["ms_per_step"]["mean"]
            cost = "–" if milliseconds is None else f"{milliseconds:.1f}"
            cells += f"<td>{parameters}</td><td>{cost}</td>"
        note = f" (diverged: {row['diverged']})" if row["diverged"] else ""
        if row.get("not_converged"):
            note += f" (not converged: {row['not_converged']})"
        body.append(
            f'<tr><td><span class="key" style="background:{colour(index)}"></span>'
            f'<span title="{html.escape(row["label"])}">{html.escape(names[index])}</span>{note}'
            f"</td>{cells}</tr>"
        )
    head = "".join(f"<th>{html.escape(str(conditions['values'][n]))}</th>" for n in places)
    by = "split" if conditions["key"] == "split" else _with_unit(conditions["title"])
    title = html.escape(f"{_capitalized(_with_unit(metric['title']))} by {by}")
    costs = "<th>parameters</th><th>ms per step</th>" if shows_cost else ""
    return (
        f'<h3>{title}</h3><div class="scroll"><table><thead>'
        f"<tr><th>combination</th>{head}{costs}</tr>"
        f"</thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def table(results: dict[str, Any]) -> str:
    """Returns the summary as HTML: a table for each metric."""
    parts = [
        _table(results, metric, shows_cost=n == 0) for n, metric in enumerate(metrics(results))
    ]
    if len(results["settings"]["seeds"]) >= FEWEST_SEEDS:
        note = (
            "Bold: significantly better than every other combination in its column (paired t-tests "
            f"over the seeds, p &lt; {SIGNIFICANT:g} after Holm's correction). If a column has no "
            "bold value, no combination is significantly better than all others."
        )
    else:
        note = (
            "With one or two seeds, differences cannot be tested; use --seeds 3 or more to mark "
            "the best value in each column."
        )
    return "".join(parts) + f"<p>{note}</p>"


def _verdict_cell(pair: Pair, sign: int) -> str:
    """Returns a table cell with the verdict on the row's combination.

    sign is negative if the row's combination is the right one of the pair.
    """
    verdict = pair.verdict
    if sign < 0:
        verdict = {BETTER: WORSE, WORSE: BETTER}.get(verdict, verdict)
    if len(pair.differences) < 2:
        return f"<td>{sign * pair.mean:+.3f}</td>"
    half = confidence_interval(pair.differences)
    tip = f"{len(pair.differences)} seeds, p = {pair.p:.2g} after correction"
    shade = SHADES.get(verdict, "#777")
    return (
        f'<td title="{tip}"><span style="color:{shade}">{verdict}</span><br>'
        f'{sign * pair.mean:+.3f} <span class="spread">± {half:.3f}</span></td>'
    )


def _verdict_table(results: dict[str, Any], place: int) -> str:
    names = [html.escape(name) for name in labels(results)]
    found = {(pair.left, pair.right): pair for pair in pairs(results, place)}
    rows = []
    for row, name in enumerate(names):
        cells = []
        for column in range(len(names)):
            pair = found.get((min(row, column), max(row, column)))
            cells.append(
                "<td></td>" if pair is None else _verdict_cell(pair, 1 if column > row else -1)
            )
        rows.append(f"<tr><td>{name}</td>{''.join(cells)}</tr>")
    conditions = results["task"]["conditions"]
    at = html.escape(f"{conditions['key']} {conditions['values'][place]}")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f'<details><summary>Every pair at {at}</summary><div class="scroll"><table><thead>'
        f"<tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def counts(results: dict[str, Any]) -> list[str]:
    """Returns one sentence per condition, with the number of pairs for each verdict."""
    conditions = results["task"]["conditions"]
    lines = []
    for place in measured_at(results, metrics(results)[0]["key"]):
        of = Counter(pair.verdict for pair in pairs(results, place))
        differ = of[BETTER] + of[WORSE]
        parts = [f"{differ} of {sum(of.values())} pairs differ"]
        parts += [
            f"{of[verdict]} {'is' if of[verdict] == 1 else 'are'} {verdict}"
            for verdict in (EQUIVALENT, UNDECIDED)
            if of[verdict]
        ]
        if of[FEW_SEEDS]:
            parts.append(f"{of[FEW_SEEDS]} have too few seeds")
        lines.append(f"At {conditions['key']} {conditions['values'][place]}, {', '.join(parts)}.")
    return lines


def verdict_section(results: dict[str, Any]) -> str:
    """Returns the effect-size plot, the number of pairs per verdict, and tables of all pairs."""
    settings = results["settings"]
    margin = settings.get("margin")
    first = metrics(results)[0]["title"]
    caption = (
        f"Differences in the {first} between each combination and {labels(results)[0]}, with 95% "
        "confidence intervals over the paired seeds."
    )
    if margin:
        caption += f" Differences within the shaded margin of {margin:g} are considered negligible."
    method = (
        "Each verdict describes the combination at the left of its row. Better or worse: a paired "
        f"t-test is significant at the level {SIGNIFICANT:g}"
    )
    method += f", and the difference is at least {margin:g}. " if margin else ". "
    if margin:
        method += "Equivalent: two one-sided tests show that the difference is within the margin. "
    method += "P-values are corrected for the number of pairs in a condition (Holm)"
    if settings.get("seed_range"):
        fewest, most = settings["seed_range"]
        method += f", and for repeated tests after each seed from {fewest} to {most} (Bonferroni)"
    tables = "".join(
        _verdict_table(results, place) for place in measured_at(results, metrics(results)[0]["key"])
    )
    return (
        f"<h2>Verdicts</h2><figure>{_svg(draw_effects(results))}"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        f"<p>{html.escape(' '.join(counts(results)))}</p>{tables}<p>{html.escape(method)}.</p>"
    )


#: Options that differ between runs and are shown elsewhere.
REPLACED = ("similarity", "position", "seed", "max_length", "schedule")
SCHEDULES = {
    "cosine": "cosine decay",
    "constant": "a constant learning rate that decays linearly over the last fifth of the steps",
}


def _describe(options: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """Returns options with their names, such as "batch 16, learning rate 0.002"."""
    return html.escape(", ".join(_parts(options, without)))


def _parts(options: dict[str, Any], without: tuple[str, ...]) -> Iterator[str]:
    """Describes each option; unset options are omitted, and nested objects are flattened."""
    for name, value in options.items():
        if name in without or value is None or value in ("", []):
            continue
        if isinstance(value, dict):
            yield from _parts(value, without)
            continue
        if isinstance(value, list):
            shown = " ".join(map(str, value))
        else:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
        yield f"{name.replace('_', ' ')} {shown}"


def _describe_data(record: dict[str, Any]) -> str:
    """Formats part of a record as text, without the fields that have their own rows."""
    shown = {
        name: f"{value:,}" if isinstance(value, int) else value
        for name, value in record.items()
        if name not in {"sha256", "path"}
    }
    return _describe(shown)


def settings(results: dict[str, Any]) -> str:
    """Returns HTML with the settings needed to reproduce the comparison."""
    options = results["settings"]
    data = results["data"]
    task = results["task"]
    versions = results["versions"]
    others = {
        name: value
        for name, value in options.items()
        if name
        not in {
            *("combinations", "seeds", "seed_range", "added_seeds", "margin", "model"),
            *("training", "tuning", "until_flat"),
        }
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
            text += f"; models run on {device}"
        if (workers := session.get("workers", 1)) > 1:
            text += f"; {workers} runs at once"
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
            + "; AdamW with a linear warm-up, followed by "
            + SCHEDULES[options["training"].get("schedule", "cosine")],
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
    """Returns HTML with the pictures from each combination's first run; empty without pictures."""
    names = labels(results)
    figures = []
    titles: list[str] = []
    for run in results["runs"]:
        picture = run.get("picture")
        # Accept only a file name, not a path: the record may be untrusted.
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
    """Returns the whole page; folder contains the pictures named in the record."""
    options = results["settings"]
    total = len(options["combinations"]) * len(options["seeds"])
    done = len(results["runs"])
    is_running = results.get("status") == "running"
    lead = (
        f"{len(options['combinations'])} combinations of similarity and position, "
        f"{len(options['seeds'])} seed{'s' if len(options['seeds']) > 1 else ''}, trained "
        f"{_trained_at(results)}on the same data in the same order.{in_common(results)}"
    )
    if options.get("seed_range"):
        fewest, most = options["seed_range"]
        lead += f" Seeds were added, from {fewest} to at most {most}, while any pair was undecided."
    elif done < total:
        lead += f" {done} of {total} runs are finished."
    if is_running:
        lead += " The comparison is running; this page reloads itself."
    body = []
    with matplotlib.rc_context(STYLE):
        for title, caption, draw in PLOTS.values():
            body.append(
                f"<h2>{title}</h2><figure>{_svg(draw(results))}"
                f"<figcaption>{caption}</figcaption></figure>"
            )
        body.insert(1, f"<h2>Table</h2>{table(results)}{ends(results)}")
        if has_verdicts(results):
            body.insert(0, verdict_section(results))
    if folder is not None:
        body.append(pictures(results, folder))
    body.append(tuning_section(results))
    body.append(busy(results))
    body.append(f"<h2>Settings</h2>{settings(results)}")
    title = html.escape(f"gnomon compare: {results.get('name', '')}")
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">\n' if is_running else ""
    return PAGE.format(title=title, lead=html.escape(lead), body="\n".join(body), refresh=refresh)
