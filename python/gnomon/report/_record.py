"""The record of a comparison, results.json, and what its combinations are called."""

from __future__ import annotations

import json
import pathlib
from typing import Any


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


def measured_at(results: dict[str, Any], key: str) -> list[int]:
    """Places of the conditions that a metric is of.

    Not those where the first metric is known and this one never: some are of one condition alone.
    """
    first = metrics(results)[0]["key"]

    def is_known(key: str, place: int) -> bool:
        return any(row["losses"][place][key]["mean"] is not None for row in results["summary"])

    places = range(len(results["task"]["conditions"]["values"]))
    return [n for n in places if is_known(key, n) or not is_known(first, n)]


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
