"""The record of a comparison, results.json, and the labels of its combinations."""

from __future__ import annotations

import json
import pathlib
from typing import Any


def load(folder: pathlib.Path) -> dict[str, Any]:
    """Reads results.json. Raises ValueError if it is not a comparison record."""
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(results, dict) or results.get("format") != 1:
        raise ValueError(f"{path} is not a comparison record; expected a results.json in format 1")
    needed = {"settings", "summary", "runs", "data", "sessions", "versions"}
    missing = needed - results.keys()
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    if "task" not in results:
        results["task"] = text_task(results)
    return results


def text_task(results: dict[str, Any]) -> dict[str, Any]:
    """Returns a task description for older records, which lack one; all are of language models."""
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
    """Returns the metrics that comparisons show."""
    return [metric for metric in results["task"]["metrics"] if metric["is_compared"]]


def measured_at(results: dict[str, Any], key: str) -> list[int]:
    """Returns the indices of the conditions for which a metric exists.

    This excludes conditions where only the first metric has values, because some metrics exist only
    for a single condition.
    """
    first = metrics(results)[0]["key"]

    def is_known(key: str, place: int) -> bool:
        return any(row["losses"][place][key]["mean"] is not None for row in results["summary"])

    places = range(len(results["task"]["conditions"]["values"]))
    return [n for n in places if is_known(key, n) or not is_known(first, n)]


def labels(results: dict[str, Any]) -> list[str]:
    """Returns one label per combination, without the parts that all combinations share.

    Labels are titles ("RoPE + learned HyPE"), or specifications if the record has no titles or two
    titles are equal.
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
    """Returns a sentence about the parts that labels() omits."""
    combinations = results["settings"]["combinations"]
    if len(combinations) < 2:
        return ""
    return "".join(
        (
            f" The {part} of all runs is "
            f"{combinations[0].get(part + '_title', combinations[0][part])}."
        )
        for part in ("similarity", "position")
        if len({c[part] for c in combinations}) == 1
    )
