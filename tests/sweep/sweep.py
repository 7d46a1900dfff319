#!/usr/bin/env python3
"""Compares gnomon with the eager attention of every model type of the installed transformers.

    .venv/bin/python tests/sweep/sweep.py runs/transformers.jsonl --table docs/transformers.md

Each type is a process of its own, with a limit of time, so that one that crashes or hangs costs
none but itself. The limit is of the processor's time, which a busy machine does not change; one
that does not compute either ends after ten times as long. The file gets a line of JSON for each as
it ends; started again, the sweep goes on with what is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

#: The classes, and what they mean to a reader.
MEANINGS = {
    "equal": "all attention is gnomon's, and nothing differs",
    "dense in part": "nothing differs; some layers do what is no softmax of products times values, "
    "stay as they are, and a warning says so",
    "refused": "an error says what to do instead; the model is as it was",
    "dense": "all layers stay as they are, and a warning says so",
    "no attention": "no softmax over keys",
    "not buildable": "the sweep makes no tiny model of it that runs",
    "in part": "some layers stay as they are without a word",
    "ignored": "taken, and never called",
    "differs": "an output, a gradient or a generated token differs",
    "crashed": "another error",
    "timed out": "no end within the limit of time: nothing is known",
}
CLASSES = tuple(MEANINGS)
#: Of address space, in bytes: a type that asks for more ends alone.
MEMORY = 24 << 30


def _in_child(model_type: str, descriptor: int) -> None:
    """Never returns."""
    import torch

    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        torch.set_num_threads(1)
        from compare import compare

        outcome = compare(model_type)
    except BaseException as error:
        outcome = {"class": "crashed", "why": f"{type(error).__name__}: {error}"[:300]}
    os.write(descriptor, json.dumps(outcome).encode())
    os._exit(0)


class _Job:
    """A process that compares one type."""

    def __init__(self, model_type: str, limit_s: int) -> None:
        self.model_type, self.limit_s = model_type, limit_s
        self.start = time.monotonic()
        self._from_child, to_parent = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._from_child)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
            _in_child(model_type, to_parent)
        os.close(to_parent)

    def outcome(self) -> dict[str, Any] | None:
        """What came of it; None while it runs."""
        pid, status, used = os.wait4(self._pid, os.WNOHANG)
        limit_s = self.limit_s
        found: dict[str, Any]
        if pid == 0:
            if time.monotonic() - self.start < 10 * limit_s:
                return None
            os.kill(self._pid, signal.SIGKILL)
            _, status, used = os.wait4(self._pid, 0)
            found = {"class": "timed out", "why": f"no end within {10 * limit_s} s"}
        elif os.waitstatus_to_exitcode(status) == -signal.SIGXCPU:
            found = {"class": "timed out", "why": f"takes more than {limit_s} s of a processor"}
        else:
            with os.fdopen(self._from_child, "rb", closefd=False) as pipe:
                text = pipe.read()
            why = f"ended with status {os.waitstatus_to_exitcode(status)}"
            found = json.loads(text) if text else {"class": "crashed", "why": why}
        os.close(self._from_child)
        seconds = round(used.ru_utime + used.ru_stime, 1)
        return {"type": self.model_type} | found | {"seconds": seconds}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The outcomes of a file by type, the last of each."""
    if not path.exists():
        return {}
    outcomes = {}
    for line in path.read_text().splitlines():
        try:
            outcome = json.loads(line)
        except json.JSONDecodeError:
            # The sweep was stopped while it wrote.
            continue
        outcomes[outcome["type"]] = outcome
    return outcomes


def sweep(types: list[str], path: Path, jobs: int, limit_s: int) -> None:
    """Adds the outcomes of these types to a file."""
    # Once, for all of the processes.
    import compare  # noqa: F401

    waiting, done = list(types), 0
    running: list[_Job] = []
    with path.open("a") as file:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Job(waiting.pop(0), limit_s))
            time.sleep(0.02)
            for job in list(running):
                outcome = job.outcome()
                if outcome is None:
                    continue
                running.remove(job)
                done += 1
                file.write(json.dumps(outcome) + "\n")
                file.flush()
                said = f"{job.model_type}: {outcome['class']} {outcome['why'][:120]}"
                print(f"{done}/{len(types)} {said}", flush=True)


def _versions() -> str:
    import torch
    import transformers

    import gnomon

    return (
        f"gnomon {gnomon.__version__}, transformers {transformers.__version__}, PyTorch "
        f"{torch.__version__}, Python {platform.python_version()}"
    )


def _reason(why: str) -> str:
    """Without what is different from type to type."""
    why = why.removeprefix("gnomon.integrations.transformers: ")
    return re.sub(r"\[[^\]]*\]|\b\d[\d.e+-]*", "n", why).replace("|", "\\|")


def to_markdown(outcomes: dict[str, dict[str, Any]], command: str, count: int) -> str:
    """The page of the documentation; count: of all model types."""
    by_class = defaultdict(list)
    for outcome in outcomes.values():
        by_class[outcome["class"]].append(outcome)
    lines = [
        "# Model types of transformers",
        "",
        "A tiny model with random weights of each type: its eager attention against gnomon, in "
        "outputs, gradients, padding on either side, generation and autocast, as far as the eager "
        "model does them. Errors of float32 count up to 1e-4 of the largest output and 1e-3 of a "
        "parameter's largest gradient; beyond, both must agree in float64. With the attention "
        "interface: a module of the model attends through transformers' `AttentionInterface`.",
        "",
        f"Written by `{command}`; {_versions()}.",
        "",
        "| | model types | with the attention interface | |",
        "|:--|--:|--:|:--|",
    ]
    for name in CLASSES:
        found = by_class[name]
        with_interface = sum(bool(outcome.get("interface")) for outcome in found)
        if found:
            lines.append(f"| {name} | {len(found)} | {with_interface} | {MEANINGS[name]} |")
    missing = count - len(outcomes)
    if missing > 0:
        lines.append(f"| not compared | {missing} | | the sweep goes on with them |")
    lines.append(f"| all | {max(count, len(outcomes))} | | |")
    for name in CLASSES:
        if not by_class[name]:
            continue
        lines += ["", f"## {name.capitalize()}", ""]
        if name in ("equal", "no attention"):
            lines.append(", ".join(sorted(f"`{o['type']}`" for o in by_class[name])))
            continue
        reasons = defaultdict(list)
        for outcome in by_class[name]:
            reasons[_reason(outcome["why"])].append(outcome["type"])
        lines += ["| why | model types |", "|:--|:--|"]
        for reason, types in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
            lines.append(f"| {reason} | {', '.join(f'`{t}`' for t in sorted(types))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """0 where no type differs, crashes or is ignored."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="of outcomes, added to")
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--again", nargs="*", metavar="CLASS", help="of which to compare anew")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument(
        "--limit", type=int, default=100, metavar="SECONDS", help="of a processor, for a type"
    )
    parser.add_argument("--table", type=Path, metavar="PAGE", help="to write")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import tiny_models

    options.file.parent.mkdir(parents=True, exist_ok=True)
    known = read(options.file)
    again = set(options.again or ())
    types = [
        name
        for name in options.types or tiny_models.model_types()
        if name not in known or known[name]["class"] in again
    ]
    sweep(types, options.file, options.jobs, options.limit)
    outcomes = read(options.file)
    counts = {name: sum(o["class"] == name for o in outcomes.values()) for name in CLASSES}
    print(", ".join(f"{count} {name}" for name, count in counts.items() if count))
    if options.table is not None:
        command = " ".join([".venv/bin/python", *sys.argv])
        count = len(tiny_models.model_types())
        options.table.write_text(to_markdown(outcomes, command, count))
    return int(any(counts[name] for name in ("in part", "ignored", "differs", "crashed")))


if __name__ == "__main__":
    sys.exit(main())
