#!/usr/bin/env python3
"""Compares gnomon with the eager attention of every model type of the installed transformers.

    .venv/bin/python tests/sweep/sweep.py tests/sweep/outcomes.jsonl --table docs/transformers.md

Outcomes apply to the release of transformers that the interpreter imports. A different environment
appends its outcomes to the same file. The page counts the outcomes for each release, and its lists
show the newest outcome of each type.

Each type runs in a separate process with a time limit, so that a crash or hang affects only that
type. The limit is CPU time, which does not depend on the load of the machine. A process that only
waits is stopped after ten times the limit. The file gets one JSON line per completed type; when
restarted, the sweep continues with the missing types.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import hashlib
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

#: The classes and their descriptions.
MEANINGS = {
    "equal": "gnomon computes all attention, and nothing differs",
    "dense in part": "nothing differs; some layers do not compute softmax(products) times "
    "values, are left unchanged, and cause a warning",
    "refused": "an error says what to do instead; the model is unchanged",
    "dense": "all layers are left unchanged, and a warning says so",
    "no attention": "no softmax over keys",
    "not buildable": "the sweep could not build a small working model of this type",
    "in part": "some layers are left unchanged without a warning",
    "ignored": "accepted but never called",
    "differs": "an output, a gradient or a generated token differs",
    "crashed": "another error",
    "timed out": "did not finish within the time limit; the result is unknown",
}
CLASSES = tuple(MEANINGS)
#: Limit of address space in bytes; if a type needs more, only that type fails.
MEMORY = 12 << 30


def _in_child(model_type: str, descriptor: int) -> None:
    """Runs a comparison in the child process; never returns."""
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


def _is_computing(pid: int) -> bool:
    """Whether a process is running rather than waiting."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"


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
        """The outcome, or None while the process runs."""
        pid, status, used = os.wait4(self._pid, os.WNOHANG)
        limit_s = self.limit_s
        found: dict[str, Any]
        if pid == 0:
            if time.monotonic() - self.start < 10 * limit_s or _is_computing(self._pid):
                return None
            os.kill(self._pid, signal.SIGKILL)
            _, status, used = os.wait4(self._pid, 0)
            found = {"class": "timed out", "why": f"still waiting after {10 * limit_s} s"}
        elif os.waitstatus_to_exitcode(status) == -signal.SIGXCPU:
            found = {"class": "timed out", "why": f"needs more than {limit_s} s of CPU time"}
        else:
            with os.fdopen(self._from_child, "rb", closefd=False) as pipe:
                text = pipe.read()
            why = f"ended with status {os.waitstatus_to_exitcode(status)}"
            found = json.loads(text) if text else {"class": "crashed", "why": why}
        os.close(self._from_child)
        seconds = round(used.ru_utime + used.ru_stime, 1)
        return (
            {"type": self.model_type}
            | found
            | {"seconds": seconds, "code": _code(), "transformers": _installed()}
        )


def read(path: Path, release: str | None = None) -> dict[str, dict[str, Any]]:
    """The last outcome of each type in a file, for `release` or for the type's newest release."""
    outcomes: dict[str, dict[str, Any]] = {}
    for outcome in _lines(path):
        before = outcomes.get(outcome["type"])
        if release is not None and _release_of(outcome) != _numbers(release):
            continue
        if before is None or _release_of(outcome) >= _release_of(before):
            outcomes[outcome["type"]] = outcome
    return outcomes


def _lines(path: Path) -> list[dict[str, Any]]:
    """The outcomes of a file, in the order of the file."""
    outcomes = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            outcomes.append(json.loads(line))
        except json.JSONDecodeError:
            # The sweep was interrupted while writing.
            continue
    return outcomes


def read_releases(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The outcomes of a file by release (the newest first) and by type."""
    releases = {_release_of(outcome) for outcome in _lines(path)}
    names = [".".join(map(str, release)) for release in sorted(releases, reverse=True)]
    return {name: read(path, name) for name in names}


def _rewrite(path: Path, releases: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Removes superseded outcomes and incomplete lines from a file."""
    lines = [
        json.dumps(outcome) + "\n"
        for outcomes in releases.values()
        for _, outcome in sorted(outcomes.items())
    ]
    new = path.with_suffix(".new")
    new.write_text("".join(lines))
    new.replace(path)


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: the release without patches."""
    return tuple(int(part) for part in version.split(".")[:2])


def _release_of(outcome: dict[str, Any]) -> tuple[int, ...]:
    return _numbers(outcome["transformers"])


@functools.cache
def _installed() -> str:
    import transformers

    return str(transformers.__version__)


def sweep(types: list[str], path: Path, jobs: int, limit_s: int) -> None:
    """Appends the outcomes of these types to a file."""
    # Import once for all child processes.
    import compare  # noqa: F401

    _code()
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


@functools.cache
def _code() -> str:
    """The hash of the integration and of the comparison code, without comments and docstrings."""
    here = Path(__file__).resolve().parent
    folder = here.parents[1] / "python" / "gnomon" / "integrations" / "transformers"
    files = [*sorted(folder.glob("_[!_]*.py")), here / "compare.py", here / "tiny_models.py"]
    return hash_of_code([file.read_text() for file in files])


def hash_of_code(sources: list[str]) -> str:
    """The hash of Python sources without comments, docstrings, formatting and message texts."""
    text = "\n".join(repr(_structure(ast.parse(source))) for source in sources)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _structure(node: Any) -> Any:
    """A syntax tree as tuples, without prose and details that depend on Python's release."""
    if isinstance(node, list):
        return [_structure(part) for part in node]
    if not isinstance(node, ast.AST):
        return node
    if _is_prose(node):
        return "prose"
    fields = dict(ast.iter_fields(node))
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        has_docstring = ast.get_docstring(node, clean=False) is not None
        fields["body"] = node.body[has_docstring:]
    return (
        type(node).__name__,
        [(name, _structure(value)) for name, value in fields.items() if value not in (None, [])],
    )


def _is_prose(node: ast.AST) -> bool:
    """Whether a node is a text of several words, which is a message and not a name."""
    if isinstance(node, ast.JoinedStr):
        return any(map(_is_prose, node.values))
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return len(node.value.split()) > 1


def _tested_range() -> tuple[str, str]:
    """The oldest and the newest release that the integration lists as tested."""
    from gnomon.integrations.transformers import _versions

    return _versions.OLDEST_NAME, _versions.NEWEST_NAME


def _versions() -> str:
    import torch
    import transformers

    import gnomon

    return (
        f"gnomon {gnomon.__version__}, transformers {transformers.__version__}, PyTorch "
        f"{torch.__version__}, Python {platform.python_version()}"
    )


def _reason(why: str) -> str:
    """The reason without the parts that depend on the type."""
    why = why.removeprefix("gnomon.integrations.transformers: ")
    return re.sub(r"\[[^\]]*\]|\b\d[\d.e+-]*", "n", why).replace("|", "\\|")


def to_markdown(
    outcomes: dict[str, dict[str, Any]],
    count: int,
    releases: dict[str, dict[str, dict[str, Any]]] | None = None,
) -> str:
    """The documentation page.

    outcomes: the newest outcome of each type. count: the number of model types in the newest
    release. releases: the outcomes by release, as `read_releases` returns them.
    """
    by_class = defaultdict(list)
    for outcome in outcomes.values():
        by_class[outcome["class"]].append(outcome)
    if releases is None:
        releases = defaultdict(dict)
        for name, outcome in outcomes.items():
            releases[".".join(map(str, _release_of(outcome)))][name] = outcome
    oldest, newest = _tested_range()
    lines = [
        "# Model types of transformers",
        "",
        "For each model type, a small model with random weights is run with eager attention and "
        "with gnomon. The comparison covers outputs, gradients, padding on either side, "
        "generation and autocast, as far as the eager model supports them. In float32, outputs "
        "may differ by 1e-4 of the largest output, and gradients by 1e-3 of a parameter's "
        'largest gradient; larger differences must vanish in float64. "With the attention '
        "interface\" means that a module of the model uses transformers' `AttentionInterface`.",
        "",
        f"The tested releases are transformers {oldest} to {newest}. `gnomon.integrations."
        "transformers` warns once when a newer release is installed.",
        "",
        f"Written on {datetime.date.today()} with {_versions()}. `make sweep` installs the oldest "
        "and the newest release, compares the model types without a current result, and writes "
        "this page. `tests/sweep/sweep.py --help` explains how to compare individual model types.",
        "",
        f"| | {' | '.join(releases)} | with the attention interface | |",
        f"|:--|{'--:|' * len(releases)}--:|:--|",
    ]
    for name in CLASSES:
        found = by_class[name]
        with_interface = sum(bool(outcome.get("interface")) for outcome in found)
        counts = [sum(o["class"] == name for o in of.values()) for of in releases.values()]
        if found or any(counts):
            columns = " | ".join(map(str, counts))
            lines.append(f"| {name} | {columns} | {with_interface} | {MEANINGS[name]} |")
    totals = [len(of) for of in releases.values()]
    missing = count - totals[0] if totals else count
    if missing > 0:
        columns = " | ".join([str(missing), *[""] * (len(releases) - 1)])
        lines.append(f"| not compared | {columns} | | the next sweep compares them |")
        totals[:1] = [count]
    lines.append(f"| all | {' | '.join(map(str, totals))} | | |")
    lines += [
        "",
        'The column "with the attention interface" and the lists below use the result of each '
        "model type with the newest release that includes the type.",
        "",
        *_shares(outcomes),
    ]
    if changes := _changes(releases):
        lines += ["", f"Types whose class depends on the release: {'; '.join(changes)}."]
    for name, of in releases.items():
        if older := sum(o.get("code") != _code() for o in of.values()):
            lines += [
                "",
                f"With {name}, {older} model types were compared before the last change of the "
                "integration or the sweep (`--again older`).",
            ]
    lines += ["", *_NOTES]
    for field, note in _FIELDS.items():
        types = sorted(f"`{o['type']}`" for o in outcomes.values() if o.get(field))
        if types:
            lines += ["", f"{note}: {', '.join(types)}."]
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


def _changes(releases: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """The types whose class differs between releases."""
    classes: dict[str, dict[str, str]] = defaultdict(dict)
    for release, outcomes in releases.items():
        for name, outcome in outcomes.items():
            classes[name][release] = outcome["class"]
    return [
        f"`{name}` ({', '.join(f'{release}: {kind}' for release, kind in found.items())})"
        for name, found in sorted(classes.items())
        if len(set(found.values())) > 1
    ]


def _shares(outcomes: dict[str, dict[str, Any]]) -> list[str]:
    """The fraction of equal types among those with the attention interface and a softmax over
    keys."""
    attends = [o for o in outcomes.values() if o.get("interface") and o["class"] != "no attention"]
    if not attends:
        return []
    equal = sum(o["class"] == "equal" for o in attends)
    dense_parts = [o["why"] for o in attends if o["class"] == "dense in part"]
    sampling = sum(_only_samples(why) for why in dense_parts)
    in_part = len(dense_parts) - sampling

    def share(number: int) -> str:
        return f"{100 * number / len(attends):.1f}%"

    line = (
        f"Of {len(attends)} types with the attention interface and a softmax over keys, {equal} "
        f"are equal ({share(equal)})."
    )
    if sampling:
        line += (
            f" In {sampling} more, nothing differs and gnomon computes every softmax over keys; "
            "their deformable attention, which samples an image at learned positions instead of "
            "attending to keys, is left unchanged. With these, the share is "
            f"{share(equal + sampling)}."
        )
    if in_part:
        line += (
            f" In {in_part} more, nothing differs and gnomon computes all attention that uses "
            "the interface; the other layers are left unchanged. With all of these, the share is "
            f"{share(equal + sampling + in_part)}."
        )
    return [line]


def _only_samples(why: str) -> bool:
    """Whether all layers that are left unchanged are deformable attention."""
    layers = re.search(r"with unsupported attention are left unchanged: (.*)", why)
    names = layers[1].split(", ") if layers else []
    return bool(names) and all(name.endswith("DeformableAttention") for name in names)


_NOTES = (
    "What to do about the others:",
    "",
    "- Refused: the error gives the reason. Leave the model unchanged, or pass `use_gnomon` the "
    "submodel that it supports (such as `model.language_model`).",
    "- Dense, fully or in part: the results are the model's own. To turn the warning into an error"
    ', call `warnings.filterwarnings("error", message="gnomon.integrations")`. '
    "`with_cone_attention` raises in this case.",
    "- Not buildable or timed out: the result is unknown. Compare the outputs of your own model "
    "before and after `use_gnomon`.",
)
_FIELDS = {
    "as_sdpa": "Equal to transformers' default, SDPA, but not to eager attention, which adds "
    "Boolean masks to the scores",
    "reads_padding": "The model's own outputs depend on the contents of padding, so only rows "
    "without padding are compared",
}


def main() -> int:
    """Returns 0 if no type differs, crashes or is ignored, and the release is a tested one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="file to which outcomes are appended")
    parser.add_argument("types", nargs="*", help="model types; default: all")
    parser.add_argument(
        "--again",
        nargs="*",
        metavar="CLASS",
        help="classes to compare again; older: types compared before the last change of the code; "
        "all: every type",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help=("number of parallel processes")
    )
    parser.add_argument(
        "--limit", type=int, default=200, metavar="SECONDS", help="CPU time limit per type"
    )
    parser.add_argument("--table", type=Path, metavar="PAGE", help="to write")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import tiny_models

    if unknown := sorted(set(options.types) - set(tiny_models.model_types())):
        parser.error(f"unknown model types in this version of transformers: {', '.join(unknown)}")
    options.file.parent.mkdir(parents=True, exist_ok=True)
    known = read(options.file, _installed())
    again = set(options.again or ())
    types = [
        name
        for name in options.types or tiny_models.model_types()
        if name not in known
        or "all" in again
        or known[name]["class"] in again
        or ("older" in again and known[name].get("code") != _code())
    ]
    sweep(types, options.file, options.jobs, options.limit)
    releases = read_releases(options.file)
    _rewrite(options.file, releases)
    outcomes = read(options.file, _installed())
    counts = {name: sum(o["class"] == name for o in outcomes.values()) for name in CLASSES}
    print(", ".join(f"{count} {name}" for name, count in counts.items() if count))
    if options.table is not None:
        count = len(tiny_models.model_types())
        options.table.write_text(to_markdown(read(options.file), count, releases))
    oldest, newest = _tested_range()
    is_untested = not _numbers(oldest) <= _numbers(_installed()) <= _numbers(newest)
    if is_untested:
        print(
            f"transformers {_installed()} is outside the tested range {oldest} to {newest}: "
            "change it in python/gnomon/integrations/transformers/_versions.py"
        )
    return int(
        is_untested or any(counts[name] for name in ("in part", "ignored", "differs", "crashed"))
    )


if __name__ == "__main__":
    sys.exit(main())
