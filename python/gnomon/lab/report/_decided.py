"""Describes decisions made on held-out training data: tuned values, and when runs end."""

from __future__ import annotations

import html
import math
from typing import Any

from gnomon.lab.report._record import labels


def _value(number: float) -> str:
    return f"{number:.4g}"


def _values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in values.items())


def describe_search(option: dict[str, Any]) -> str:
    """Describes which values of a tuned option were tried."""
    if "values" in option:
        return f"{option['name']} in {', '.join(map(_value, option['values']))}"
    low, high = option["range"]
    return f"{option['name']} from {_value(low)} to {_value(high)}"


def _cost(trials: list[dict[str, Any]]) -> tuple[int, float]:
    """Returns the total number of steps and seconds of the given trials."""
    steps = sum(trial["held_out"][-1]["step"] for trial in trials if trial["held_out"])
    return steps, sum(trial["seconds"] for trial in trials)


#: A value is at the edge if its distance from an end is at most this fraction of the range.
EDGE = 0.05


def edges(options: list[dict[str, Any]], values: dict[str, Any]) -> list[str]:
    """Returns the options whose value is at the edge of the search range."""
    found = []
    for option in options:
        value = values.get(option["name"])
        if value is None:
            continue
        if "values" in option:
            ends = (min(option["values"]), max(option["values"]))
            if len(set(ends)) == 2 and value in ends:
                found.append(option["name"])
            continue
        low, high = option["range"]
        # The search uses a logarithmic scale if the whole range is positive.
        part = (
            math.log(value / low) / math.log(high / low)
            if low > 0
            else (value - low) / (high - low)
        )
        if part <= EDGE or part >= 1 - EDGE:
            found.append(option["name"])
    return found


def tuning_section(results: dict[str, Any]) -> str:
    """Returns HTML with the trials, their cost and the chosen values; empty if not tuned."""
    tuning = results["settings"].get("tuning")
    if not tuning:
        return ""
    metric = results["held_out"]["metric"]
    names = labels(results)
    rows = []
    on_edge = set()
    for combination, name in enumerate(names):
        trials = [trial for trial in tuning["tried"] if trial["combination"] == combination]
        steps, seconds = _cost(trials)
        values = tuning["chosen"][combination] if tuning["finished"] else {}
        text = "all trials diverged" if values is None else _values(values) or "–"
        for option in edges(tuning["options"], values or {}):
            on_edge.add(option)
            text += f" ({option}: edge)"
        rows.append(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td>"
            f"<td>{len(trials)}</td><td>{steps:,}</td><td>{seconds:.0f}</td></tr>"
        )
    steps, seconds = _cost(tuning["tried"])
    lead = (
        f"Tried: {'; '.join(map(describe_search, tuning['options']))}. Trials are compared by the "
        f"{metric} on held-out data ({results['held_out']['part']}), on which no run is trained. "
        f"Their seed, {tuning['seed']}, is not used by any reported run. All trials together took "
        f"{steps:,} steps and {seconds:.0f} seconds."
    )
    if on_edge:
        lead += (
            f" For some combinations, the chosen {' and '.join(sorted(on_edge))} is at the edge of "
            "the search range: a wider search may find better values."
        )
    tried = "".join(
        f"<tr><td>{html.escape(names[trial['combination']])}</td>"
        f"<td>{html.escape(_values(trial['values']))}</td>"
        + "<td>"
        + ", ".join(
            f"{'diverged' if at['value'] is None else _value(at['value'])} at {at['step']}"
            for at in trial["held_out"]
        )
        + "</td></tr>"
        for trial in tuning["tried"]
    )
    return (
        f"<h2>Tuning</h2><p>{html.escape(lead)}</p>"
        '<div class="scroll"><table><thead><tr><th>combination</th><th>chosen</th><th>trials</th>'
        f"<th>steps</th><th>seconds</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        '<details><summary>Every trial</summary><div class="scroll"><table><thead><tr>'
        f"<th>combination</th><th>values</th><th>held-out {html.escape(metric)}, by step</th>"
        f"</tr></thead><tbody>{tried}</tbody></table></div></details>"
    )


def ends(results: dict[str, Any]) -> str:
    """Returns HTML with the rule by which runs ended, and a warning if some did not converge."""
    how = results["settings"].get("until_flat")
    runs = [run for run in results["runs"] if run.get("stopped_at") is not None]
    if not how or not runs:
        return ""
    budget = results["settings"]["training"]["steps"]
    rule = (
        f"A run may take up to {budget:,} steps. Once its best held-out "
        f"{results['held_out']['metric']} improves by less than {how['margin']:.2%} over "
        f"{how['share']:.0%} of these steps, its learning rate decays and the run ends. The "
        f"held-out data are {results['held_out']['part']}; no run is trained on them."
    )
    late = [run for run in runs if not run["flat"] and run["status"] == "done"]
    if not late:
        return f"<p>All runs converged before the step limit. {html.escape(rule)}</p>"
    return (
        f'<p class="warning">{len(late)} of {len(runs)} runs had not converged by the '
        f"limit of {budget:,} steps. They are marked in the table; more steps may change their "
        f"ranking. {html.escape(rule)}</p>"
    )
