"""Runs the comparisons of a study and writes its page.

A study is a file in this folder that defines ``STUDY``. ``python lab/studies/study.py NAME DATA``
runs or resumes its unfinished comparisons, and writes

- ``lab/studies/NAME/COMPARISON.json``, a compact copy of the record of ``gnomon compare``, from
  which another machine can resume;
- ``docs/studies/NAME.md`` and its figures, which are generated from these records only.

DATA is the folder to which the study's paths are relative.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Any

from gnomon.lab import report
from gnomon.lab.report import confidence_interval, verdicts
from gnomon.lab.report._decided import describe_search
from gnomon.lab.report._plots import SHADES, verdict_handles
from gnomon.lab.report._statistics import (
    BETTER,
    EQUIVALENT,
    FEW_SEEDS,
    FEWEST_SEEDS,
    UNDECIDED,
    WORSE,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNS = ROOT / "runs/studies"
RECORDS = ROOT / "lab/studies"
PAGES = ROOT / "docs/studies"
PROGRAM = ROOT / ".venv/bin/gnomon"
#: The name of the classifier's run in a comparison's arguments.
CLASSIFIER = "classifier"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An invocation of ``gnomon compare``."""

    name: str  # the name of its record
    title: str  # "Shakespeare's plays, bytes"
    data: str  # path in the data folder; empty if the task generates its data
    arguments: tuple[str, ...]
    # Command that creates the data as OUT, a gnomon command or a Python module. It runs in the data
    # folder if the data does not exist.
    made_by: tuple[str, ...] = ()
    # Sentences on the origin of the data, unless `gnomon data get` downloads it.
    data_from: str = ""
    # Additional `gnomon train` arguments for the run "classifier".
    classifier: tuple[str, ...] = ()
    # The scores of a predictor without a model: its title, a metric, and a score per condition.
    baseline: tuple[str, str, dict[Any, float]] | None = None


@dataclasses.dataclass(frozen=True)
class Contrast:
    """Compares two sides, each given by the label of a combination and a condition."""

    left: str
    left_at: Any
    right: str
    right_at: Any
    metric: str | None = None  # default: the task's first metric
    # Names of the comparisons of the two sides; if empty, every comparison that has both sides.
    left_in: str = ""
    right_in: str = ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim from a paper or a pilot run that is tested here."""

    text: str  # understandable without the previous claims
    contrasts: tuple[Contrast, ...]
    # The claimed outcome of the left sides: better, worse or not worse.
    left_is: str = "better"
    # An explanation, with evidence from the records.
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Study:
    title: str
    question: str
    answer: str  # three sentences
    comparisons: tuple[Comparison, ...]
    claims: tuple[Claim, ...]
    limits: str
    sources: str = ""
    # Equivalence margins by metric; other metrics use MARGINS.
    margins: dict[str, float] = dataclasses.field(default_factory=dict)
    # If True, the study compares the time of training steps instead of metrics, and has no claims.
    of_time: bool = False


# ---- Verdicts

#: Equivalence margins, in the unit of the metric.
MARGINS = {
    "loss": 0.01,
    "last": 0.02,
    "step_loss": 0.02,
    "accuracy": 0.01,
    "exact": 0.01,
    "exact_match": 0.01,
    "error": 1.0,
    "mrr": 0.02,
    "hits": 0.02,
    "average_precision": 0.02,
    "bleu": 0.5,
    "frechet": 1.0,
}
NOT_RUN = "not run yet"
#: For each value of Claim.left_is, the outcomes that agree with it.
AGREEING = {
    "better": {BETTER},
    "worse": {WORSE},
    "not worse": {BETTER, EQUIVALENT},
}


def verdict(outcomes: list[str], left_is: str) -> str:
    """Returns the verdict on a claim from the outcomes of its contrasts and `Claim.left_is`."""
    tested = [outcome for outcome in outcomes if outcome not in {FEW_SEEDS, NOT_RUN}]
    if not tested:
        return FEW_SEEDS if FEW_SEEDS in outcomes else NOT_RUN
    agreeing = sum(outcome in AGREEING[left_is] for outcome in tested)
    if agreeing:
        return "holds" if agreeing == len(tested) else f"holds in {agreeing} of {len(tested)} rows"
    against = sum(outcome != UNDECIDED for outcome in tested)
    if not against:
        return "undecided"
    if against == len(tested):
        return "does not hold"
    return f"contradicted in {against} of {len(tested)} rows"


def load_study(name: str) -> Study:
    path = RECORDS / f"{name}.py"
    if name == "study" or not path.is_file():
        raise ValueError(f"there is no study '{name}'; expected one of {', '.join(names())}")
    return runpy.run_path(str(path))["STUDY"]


def names() -> list[str]:
    return sorted(path.stem for path in RECORDS.glob("*.py") if path.stem != "study")


# ---- Commands that create data sets for several studies, in the data folder.

MNIST = (
    *("gnomon", "data", "OUT"),
    "train.images=mnist/train-images-idx3-ubyte.gz",
    "train.labels=mnist/train-labels-idx1-ubyte.gz",
    "valid.images=mnist/t10k-images-idx3-ubyte.gz",
    "valid.labels=mnist/t10k-labels-idx1-ubyte.gz",
)
FSDD = (
    *("gnomon", "data", "OUT"),
    r"train.audio=fsdd/fsdd.tar.gz:(?:.*/)?(?P<labels>\d)_(?P<speakers>[a-z]+)_(\d\d|[5-9])\.wav",
    r"valid.audio=fsdd/fsdd.tar.gz:(?:.*/)?(?P<labels>\d)_(?P<speakers>[a-z]+)_[0-4]\.wav",
)
CORA = (
    *("gnomon", "data", "OUT"),
    *("graph.edges=cora/edges.txt", "graph.words=cora/features.txt"),
    *("graph.labels=cora/labels.txt", "train.nodes=cora/train.index"),
    *("valid.nodes=cora/val.index", "test.nodes=cora/test.index"),
)
ADRENAL = (
    *("gnomon", "data", "OUT"),
    "train.volumes=adrenalmnist3d/adrenalmnist3d.npz:train_images",
    "train.labels=adrenalmnist3d/adrenalmnist3d.npz:train_labels",
    "valid.volumes=adrenalmnist3d/adrenalmnist3d.npz:test_images",
    "valid.labels=adrenalmnist3d/adrenalmnist3d.npz:test_labels",
)
CHORALES = (
    *("gnomon", "data", "OUT"),
    "train.pieces=jsb-chorales/jsb-chorales-16th.json:train",
    "valid.pieces=jsb-chorales/jsb-chorales-16th.json:valid",
    "test.pieces=jsb-chorales/jsb-chorales-16th.json:test",
)
MAMMALS = ("gnomon", "data", "OUT", "train.pairs=wordnet-mammals/mammal_closure.csv:id1,id2")


# ---- Records


def record_path(name: str, comparison: Comparison) -> pathlib.Path:
    return RECORDS / name / f"{comparison.name}.json"


def command(comparison: Comparison) -> list[str]:
    """Returns the command that a reader would run in the data folder."""
    data = ["--data", comparison.data] if comparison.data else []
    return ["gnomon", "compare", *data, *comparison.arguments]


def classifier_command(comparison: Comparison) -> list[str]:
    """Returns the command with which a reader would train the comparison's classifier."""
    task = ("--task", "images", "--data", comparison.data)
    return ["gnomon", "train", *task, *comparison.classifier, "--out", CLASSIFIER]


def shorten(results: dict[str, Any], comparison: Comparison) -> dict[str, Any]:
    """Returns a compact record with the paths and commands that a reader would use."""
    record = json.loads(json.dumps(results))
    record["name"] = comparison.name
    if record["data"].get("path"):
        record["data"]["path"] = comparison.data
    if comparison.classifier:
        record["settings"]["classifier"] = CLASSIFIER
    for session in record["sessions"]:
        session["command"] = command(comparison)
    for run in record["runs"]:
        run["curve"]["loss"] = [float(f"{loss:.4g}") for loss in run["curve"]["loss"]]
    return record


def dump(record: dict[str, Any]) -> str:
    """Returns JSON with one line per run and per entry of the summary."""
    lines = []
    for key, value in record.items():
        if key in {"runs", "summary"} and value:
            items = ",\n".join("  " + json.dumps(item, separators=(",", ":")) for item in value)
            lines.append(f' "{key}": [\n{items}\n ]')
        else:
            lines.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def publish(name: str, comparison: Comparison) -> None:
    """Copies the comparison's record, which may be incomplete, to ``lab/studies/NAME``."""
    source = RUNS / name / comparison.name / "results.json"
    if not source.is_file():
        return
    record = shorten(json.loads(source.read_text(encoding="utf-8")), comparison)
    path = record_path(name, comparison)
    if not record["runs"]:
        return
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if len(before["runs"]) >= len(record["runs"]):
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(record), encoding="utf-8")


def data_path(comparison: Comparison, data: pathlib.Path) -> pathlib.Path:
    """Returns the path of the comparison's data; creates missing data if possible."""
    path = data / comparison.data
    if path.exists():
        return path
    if not comparison.made_by:
        raise ValueError(f"there is no {comparison.data} in {data}")
    path = RUNS / "data" / comparison.data
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        first, *words = (str(path) if word == "OUT" else word for word in comparison.made_by)
        program = [str(PROGRAM)] if first == "gnomon" else [sys.executable, first]
        done = subprocess.run([*program, *words], cwd=data, check=False)
        if done.returncode != 0:
            raise ValueError(f"cannot create {comparison.data} from the files in {data}")
    return path


def classifier_path(name: str, comparison: Comparison) -> pathlib.Path:
    return RUNS / name / f"{comparison.name}-{CLASSIFIER}"


def train_classifier(name: str, comparison: Comparison, data: pathlib.Path, threads: int) -> None:
    path = classifier_path(name, comparison)
    if path.exists():
        return
    unfinished = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    places = {
        "gnomon": str(PROGRAM),
        comparison.data: str(data_path(comparison, data)),
        CLASSIFIER: str(unfinished),
    }
    words = [places.get(word, word) for word in classifier_command(comparison)]
    if subprocess.run([*words, "--threads", str(threads)], check=False).returncode != 0:
        raise ValueError(f"cannot train the classifier of {comparison.name}")
    unfinished.rename(path)


def restore(name: str, comparison: Comparison, data: pathlib.Path) -> None:
    """Prepares a folder for ``gnomon compare --resume``."""
    folder = RUNS / name / comparison.name
    path = record_path(name, comparison)
    if (folder / "results.json").is_file() or not path.is_file():
        return
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["sessions"][0]["command"] != command(comparison):
        raise ValueError(
            f"lab/studies/{name}/{path.name} was recorded with a different command than the "
            "study's current one; remove it to start again"
        )
    if comparison.data:
        record["data"]["path"] = str(data_path(comparison, data))
    if comparison.classifier:
        record["settings"]["classifier"] = str(classifier_path(name, comparison))
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(record), encoding="utf-8")


def run(name: str, comparison: Comparison, data: pathlib.Path, threads: int) -> int:
    """Runs or resumes a comparison; returns the exit status of ``gnomon compare``."""
    restore(name, comparison, data)
    folder = RUNS / name / comparison.name
    record = folder / "results.json"
    words = [str(PROGRAM), "compare", "--threads", str(threads)]
    if record.is_file():
        if json.loads(record.read_text(encoding="utf-8"))["status"] == "finished":
            return 0
        words += ["--resume", str(folder)]
    else:
        judge = {CLASSIFIER: str(classifier_path(name, comparison))}
        words += ["--out", str(folder), *(judge.get(w, w) for w in comparison.arguments)]
        if comparison.data:
            words += ["--data", str(data_path(comparison, data))]
    if comparison.classifier:
        train_classifier(name, comparison, data, threads)
    try:
        return subprocess.run(words, check=False).returncode
    finally:
        publish(name, comparison)


# ---- The page


def labels_of(results: dict[str, Any]) -> list[str]:
    """Returns the labels of the combinations, with ``shape=grid`` instead of the data's shape."""
    shape = re.compile(r"\bshape=\d+(x\d+)*")
    return [
        re.sub(r":prefix=\d+", "", shape.sub("shape=grid", combination["label"]))
        for combination in results["settings"]["combinations"]
    ]


def by_seed(results: dict[str, Any], label: str, at: Any, metric: str) -> dict[int, float]:
    """Returns the measured values of a combination at a condition, by seed."""
    labels = labels_of(results)
    if label not in labels:
        raise ValueError(f"no combination is named '{label}'; expected one of {', '.join(labels)}")
    combination = labels.index(label)
    condition = results["task"]["conditions"]["values"].index(at)
    return {
        r["seed"]: r["losses"][condition][metric]
        for r in results["runs"]
        if r["combination"] == combination
        and r["losses"]
        and r["losses"][condition][metric] is not None
    }


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a claim's table: one contrast in one comparison."""

    title: str
    metric: dict[str, Any]
    differences: list[float]  # left minus right, one per seed
    margin: float
    outcome: str = NOT_RUN
    p: float = 1.0  # adjusted for the number of tests on the page

    @property
    def mean(self) -> float:
        return sum(self.differences) / len(self.differences)

    def cells(self) -> list[str]:
        n = len(self.differences)
        if n < FEWEST_SEEDS:
            mean = f"{self.mean:+.3f}" if n else "–"
            return [self.title, mean, "–", "–", str(n), self.outcome]
        shown = "< 0.001" if self.p < 0.001 else f"{self.p:.3f}"
        if shown == "0.050":
            shown = "< 0.05" if self.p < 0.05 else "> 0.05"
        half = confidence_interval(self.differences)
        return [
            self.title, f"{self.mean:+.3f}", f"± {half:.3f}", shown, str(n), self.outcome
        ]  # fmt: skip


def metric_of(results: dict[str, Any], contrast: Contrast) -> dict[str, Any]:
    metrics = results["task"]["metrics"]
    if contrast.metric is None:
        return metrics[0]
    return next(m for m in metrics if m["key"] == contrast.metric)


def differences_of(
    results: dict[str, Any], contrast: Contrast, of_right: dict[str, Any] | None = None
) -> list[float]:
    """Returns left minus right per common seed; ``of_right`` defaults to ``results``."""
    key = metric_of(results, contrast)["key"]
    left = by_seed(results, contrast.left, contrast.left_at, key)
    right = by_seed(of_right or results, contrast.right, contrast.right_at, key)
    return [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]


Found = list[tuple[Comparison, dict[str, Any]]]


def has(results: dict[str, Any], label: str, at: Any) -> bool:
    """Returns whether the results contain a combination and a condition."""
    return label in labels_of(results) and at in results["task"]["conditions"]["values"]


#: The key of a condition, a word in its title, and the format of the condition in row titles.
PLACES = (
    ("timesteps", "", "timesteps {}"),
    ("split", "", "{} split"),
    ("size", "", "{} pixels"),
    ("length", "bytes", "{} bytes"),
    ("length", "events", "{} events"),
    ("length", "symbols", "{} symbols"),
    # In the studies, utterances are spoken digits.
    ("length", "utterances", "{} digits"),
)
SPLITS = {"train": "training", "valid": "validation"}


def place_of(results: dict[str, Any], value: Any) -> str:
    """Returns a condition in words: "128 bytes", "test split"."""
    conditions = results["task"]["conditions"]
    for key, word, text in PLACES:
        if conditions["key"] == key and word in conditions["title"]:
            return text.format(SPLITS.get(value, value))
    return f"{conditions['key']} {value}"


def row_title(
    comparison: Comparison, contrast: Contrast, results: dict[str, Any], measure: str
) -> str:
    """Returns the title of a contrast: "Novels (128 bytes): `dot/rope` vs. `dot/none`"."""
    left_at, right_at = (place_of(results, at) for at in (contrast.left_at, contrast.right_at))
    is_same = contrast.left_at == contrast.right_at
    where = ", ".join(filter(None, [measure, left_at if is_same else ""]))
    title = comparison.title + (f" ({where})" if where else "")
    if is_same:
        return f"{title}: `{contrast.left}` vs. `{contrast.right}`"
    right = "" if contrast.right == contrast.left else f"`{contrast.right}` at "
    return f"{title}: `{contrast.left}` at {left_at} vs. {right}{right_at}"


def contrast_rows(claim: Claim, found: Found, margins: dict[str, float]) -> list[Row]:
    """Returns a row without an outcome for each contrast in each comparison that contains it."""
    rows = []
    by_name = {comparison.name: (comparison, results) for comparison, results in found}
    for comparison, results in found:
        for contrast in claim.contrasts:
            right_in = contrast.right_in or comparison.name
            if contrast.left_in not in {"", comparison.name} or right_in not in by_name:
                continue
            beside, of_right = by_name[right_in]
            if not has(results, contrast.left, contrast.left_at):
                continue
            if not has(of_right, contrast.right, contrast.right_at):
                continue
            metric = metric_of(results, contrast)
            is_first = metric is results["task"]["metrics"][0]
            title = row_title(
                comparison, contrast, results, "" if is_first else name_and_unit(metric["title"])[0]
            )
            if beside is not comparison:
                title += f" ({inside_sentence(beside.title)})"
            margin = (MARGINS | margins).get(metric["key"])
            if margin is None:
                raise ValueError(f"no margin for '{metric['key']}'; add it to MARGINS")
            differences = differences_of(results, contrast, of_right)
            rows.append(Row(title, metric, differences, margin))
    return rows


def tested_rows(study: Study, found: Found) -> list[list[Row]]:
    """Returns the rows of each claim; p-values are adjusted for the total number of rows."""
    claims = [contrast_rows(claim, found, study.margins) for claim in study.claims]
    rows = [row for claim in claims for row in claim]
    outcomes = iter(
        verdicts(
            [row.differences for row in rows],
            [row.margin for row in rows],
            [row.metric["higher_is_better"] for row in rows],
        )
    )

    def with_outcome(row: Row) -> Row:
        outcome, p = next(outcomes)
        return dataclasses.replace(row, outcome=outcome if row.differences else NOT_RUN, p=p)

    return [[with_outcome(row) for row in claim] for claim in claims]


def describe_claim(claim: Claim, rows: list[Row]) -> list[str]:
    """Returns the Markdown blocks of a claim: its text, verdict, table of rows and explanation."""
    outcomes = [row.outcome for row in rows]
    said = verdict(outcomes, claim.left_is)
    counts = ", ".join(f"{n} {outcome}" for outcome, n in Counter(outcomes).items())
    of = f" ({counts})" if len(set(outcomes)) > 1 else ""
    parts = [f"Claim: {claim.text}", f"Verdict: **{said}**{of}."]
    if rows:
        head = [
            *("", "difference", "95% CI", "p (Holm-adjusted)", "seeds"),
            "outcome for the first combination",
        ]
        parts.append(markdown_table(head, [row.cells() for row in rows]))
    if claim.why and said != NOT_RUN:
        parts.append(claim.why)
    return parts


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, [":--"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tuned_options(results: dict[str, Any]) -> list[dict[str, Any]]:
    tuning = results["settings"].get("tuning")
    return tuning["options"] if tuning else []


def chosen_values(results: dict[str, Any], combination: int) -> list[str]:
    """Returns a cell for each tuned option, with the value that was chosen for the combination."""
    options = tuned_options(results)
    if not options:
        return []
    # None if all trials diverged.
    chosen = results["settings"]["tuning"]["chosen"][combination] or {}
    return [f"{chosen[o['name']]:g}" if o["name"] in chosen else "–" for o in options]


def summary_table(
    results: dict[str, Any],
    metric: dict[str, Any],
    baseline: tuple[str, str, dict[Any, float]] | None = None,
    *,
    shows_cost: bool,
) -> str:
    conditions = results["task"]["conditions"]
    places = report.measured_at(results, metric["key"])
    winners = [
        report.best(results, metric["key"], n, higher_is_better=metric["higher_is_better"])
        for n in places
    ]
    rows = []
    for row in results["summary"]:
        name = report.labels(results)[row["combination"]]
        # If titles are ambiguous, report.labels() returns parts of labels.
        cells = [f"`{row['label']}`" if name in row["label"] else f"{name} `{row['label']}`"]
        for n, winner in zip(places, winners, strict=True):
            value = row["losses"][n][metric["key"]]
            if value["mean"] is None:
                cells.append("–")
                continue
            text = f"{value['mean']:.3f}"
            if row["combination"] == winner:
                text = f"**{text}**"
            if value["spread"] is not None:
                text += f" ± {value['spread']:.3f}"
            cells.append(text)
        if row["diverged"]:
            cells[0] += f" (diverged: {row['diverged']})"
        if row.get("not_converged"):
            cells[0] += f" (not converged: {row['not_converged']})"
        cells.append(str(row["runs"]))
        if shows_cost:
            cells.append("–" if row["parameters"] is None else f"{row['parameters']:,}")
            cells += chosen_values(results, row["combination"])
        rows.append(cells)
    if baseline is not None and baseline[1] == metric["key"]:
        scores = [baseline[2].get(conditions["values"][n]) for n in places]
        shown = ["–" if score is None else f"{score:.3f}" for score in scores]
        rows.append([baseline[0], *shown, "–", *(["–"] if shows_cost else [])])
    head = ["", *(str(conditions["values"][n]) for n in places), "seeds"]
    if shows_cost:
        head += ["parameters", *(f"chosen {o['name']}" for o in tuned_options(results))]
    return markdown_table(head, rows)


def time_ratios(results: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """Returns each combination's label and sorted ratios of step times to the first combination."""
    times: list[dict[int, float]] = [{} for _ in results["settings"]["combinations"]]
    for run in results["runs"]:
        times[run["combination"]][run["seed"]] = run["processor_ms_per_step"]
    found = []
    for row, own in zip(results["summary"], times, strict=True):
        ratios = sorted(own[seed] / times[0][seed] for seed in own.keys() & times[0].keys())
        if ratios:
            found.append((row["label"], ratios))
    return found


def time_table(results: dict[str, Any]) -> str:
    """Returns a table of CPU times per training step, and their ratios to the first combination."""
    ratios_of = dict(time_ratios(results))
    rows = []
    for row, name in zip(results["summary"], report.labels(results), strict=True):
        own = [
            run["processor_ms_per_step"]
            for run in results["runs"]
            if run["combination"] == row["combination"]
        ]
        label = f"`{row['label']}`" if name in row["label"] else f"{name} `{row['label']}`"
        ratios = ratios_of.get(row["label"])
        if not ratios:
            rows.append([label, "–", "–", "–", str(len(own))])
            continue
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        middle = statistics.median(ratios)
        rows.append(
            [label, f"{statistics.median(own):.3g}", f"**{middle:.2f}**", spread, str(len(own))]
        )
    return markdown_table(["", "ms per step", "ratio", "range over seeds", "seeds"], rows)


def enumerate_words(words: Iterable[str], conjunction: str = "and") -> str:
    """Returns the words as a phrase: "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def cpu(machine: dict[str, Any]) -> str:
    """Returns a CPU and its instruction set: "an AMD EPYC CPU (AVX-512)"."""
    name = machine["cpu"].replace("(R)", "").removesuffix(" Processor")
    article = "an" if name[0] in "AEIOU" else "a"
    # AVX3 and its variants, such as AVX3_ZEN4, are Highway's names for AVX-512.
    instructions = re.sub(r"^AVX3.*", "AVX-512", machine["instruction_set"])
    return f"{article} {name} CPU ({instructions})"


#: The title of a condition in the records, and its name in table captions.
CONDITIONS = {
    "evaluation length, bytes": "evaluation length (bytes)",
    "events per window": "window length (events)",
    "input length in symbols": "input length (symbols)",
    "part of the data": "split",
    "nodes": "split",
    "pairs": "split",
    "timesteps": "range of timesteps",
    # In the studies, utterances are spoken digits.
    "utterances per sequence": "number of spoken digits",
}


def name_and_unit(metric_title: str) -> tuple[str, str]:
    """Returns a metric's name, and its unit if the title names it."""
    title = metric_title.replace("Frechet", "Fréchet")
    title = re.sub(r"^last (\d+) bytes$", r"loss on the last \1 bytes, nats per byte", title)
    name, _, unit = title.partition(", ")
    return name, unit


def caption(results: dict[str, Any], metric: dict[str, Any]) -> str:
    """Returns the caption of a table: "Loss (nats per byte) by evaluation length (bytes)"."""
    name, unit = name_and_unit(metric["title"])
    measured = f"{name} ({unit})" if unit else name
    title = results["task"]["conditions"]["title"]
    return f"{measured[:1].upper()}{measured[1:]} by {CONDITIONS.get(title, title)}"


def describe(results: dict[str, Any], comparison: Comparison) -> str:
    total = len(results["settings"]["combinations"]) * len(results["settings"]["seeds"])
    done = len(results["runs"])
    # A study may resume on another machine.
    machines = [session["machine"] for session in results["sessions"]]
    names = dict.fromkeys(map(cpu, machines))
    threads = sorted({m["threads"] for m in machines})
    counts = "one" if threads == [1] else " or ".join(map(str, threads))
    state = "All" if done == total else f"{done} of"
    shown = shlex.join(command(comparison))
    if comparison.classifier:
        shown = f"{shlex.join(classifier_command(comparison))}\n$ {shown}"
    if comparison.made_by:
        made = [comparison.data if word == "OUT" else word for word in comparison.made_by]
        if made[0] != "gnomon":
            made.insert(0, "python")
        shown = f"{shlex.join(made)}\n$ {shown}"
    digest = results["data"].get("sha256")
    lines = [
        f"{state} {total} runs are complete. Each run used {counts} "
        f"thread{'' if threads == [1] else 's'} of {enumerate_words(names, 'or')}.",
        f"\n```console\n$ {shown}\n```",
    ]
    if digest:
        source = f" {comparison.data_from}" if comparison.data_from else ""
        lines.append(f"\nSHA-256 of the data: `{digest}`.{source}")
    return "\n".join(lines)


def save(figure: Any, path: pathlib.Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})


def draw_effects(study: Study, claims: list[list[Row]]) -> Any:
    """Draws differences and their 95% intervals, divided by the margins; right means better."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    shown = [
        (claim, [row for row in rows if row.outcome in SHADES])
        for claim, rows in zip(study.claims, claims, strict=True)
    ]
    shown = [(claim, rows) for claim, rows in shown if rows]
    heights = [max(1.5 + len(textwrap.wrap(c.text, 44)), 0.55 * len(r) + 1) for c, r in shown]
    figure = Figure(figsize=(9.6, 1.3 + 0.2 * sum(heights)), layout="constrained")
    axes = figure.add_subplot()
    top, ticks, names, ends = 0.0, [], [], [2.0]
    for (claim, rows), height in zip(shown, heights, strict=True):
        for n, row in enumerate(rows):
            sign = 1 if row.metric["higher_is_better"] else -1
            mean = sign * row.mean / row.margin
            half = confidence_interval(row.differences) / row.margin
            place = -(top + height * (n + 0.5) / len(rows))
            axes.errorbar(
                mean, place, xerr=half, fmt="o", markersize=4, capsize=2, linewidth=1.2,
                color=SHADES[row.outcome],
            )  # fmt: skip
            ends.append(abs(mean) + half)
        ticks.append(-(top + height / 2))
        names.append("\n".join(textwrap.wrap(claim.text.rstrip("."), 44)))
        top += height
        axes.axhline(-top, color="#e4e4e4", linewidth=0.8)
    axes.axvspan(-1, 1, color="#f0f0f0", linewidth=0, zorder=-1)
    axes.axvline(0, color="#888888", linewidth=0.8, zorder=0)
    axes.set_xscale("symlog", linthresh=1, linscale=0.6)
    end = 1.15 * max(ends)
    axes.set_xlim(-end, end)
    steps = [0.0] + [sign * x for x in (1, 3, 10, 30, 100, 300) if x < end for sign in (-1, 1)]
    axes.xaxis.set_major_locator(FixedLocator(sorted(steps)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_ylim(-top, 0)
    axes.set_yticks(ticks, names, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("difference / margin (positive: the first combination is better)")
    used = {row.outcome for _, rows in shown for row in rows}
    figure.legend(handles=verdict_handles(used), loc="outside upper right", ncols=4, fontsize=10)
    return figure


def draw_times(found: Found) -> Any:
    """Draws the step time relative to the first combination, with one point per comparison."""
    from matplotlib.figure import Figure

    from gnomon.lab._plots import colour, marker

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    axes = figure.add_subplot()
    names: list[str] = []
    for n, (comparison, results) in enumerate(found):
        points = []
        for label, ratios in time_ratios(results):
            label = label.partition("/")[0]
            if label not in names:
                names.append(label)
            points.append((names.index(label), statistics.median(ratios), ratios))
        offset = 0.7 * ((n + 0.5) / len(found) - 0.5)
        x = [middle for _, middle, _ in points]
        y = [-place - offset for place, _, _ in points]
        spread = [
            [middle - ratios[0] for _, middle, ratios in points],
            [ratios[-1] - middle for _, middle, ratios in points],
        ]
        axes.errorbar(
            x, y, xerr=spread, fmt=marker(n), color=colour(n), markersize=4, linewidth=1,
            label=comparison.title,
        )  # fmt: skip
    axes.axvline(1, color="#888888", linewidth=0.8, zorder=0)
    axes.set_yticks([-n for n in range(len(names))], names, fontsize=9)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("training step time relative to the dot product")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


#: Proper names with which titles start.
PROPER_NAMES = {"Cora", "Python's", "Shakespeare's"}

#: Names of data in titles, and different names for them in sentences.
SENTENCE_NAMES = {"Python's sources": "Python source code"}

#: Descriptions of more runs than this refer to the appendix instead of listing the titles.
LONGEST_LIST = 8


def inside_sentence(title: str) -> str:
    """Returns a comparison's title as part of a sentence, in lower case unless it is a name."""
    first = title.split()[0].rstrip(",")
    rest = first[1:]
    is_name = first in PROPER_NAMES or not (rest.isalpha() and rest.islower())
    return title if is_name else title[0].lower() + title[1:]


def shared_title(titles: list[str]) -> str:
    """Joins titles that differ only in a number: "MNIST with qk_dim 4, 16 and 64"; else ""."""
    numbers = [re.findall(r"\d+\b", title)[-1:] for title in titles]
    patterns = {
        re.sub(rf"\b{number[0]}\b", "{}", title) if number else title
        for number, title in zip(numbers, titles, strict=True)
    }
    if len(patterns) > 1:
        return ""
    pattern = inside_sentence(patterns.pop())
    return pattern.format(enumerate_words(number[0] for number in numbers))


def enumerate_titles(titles: list[str]) -> str:
    """Returns titles as part of a sentence."""
    if len(titles) == 1:
        return inside_sentence(titles[0])
    return shared_title(titles) or enumerate_words(map(inside_sentence, titles))


def describe_runs(titles: list[str], combinations: int, runs: str) -> str:
    """Describes runs of the same kind: "8 combinations each on novels and plays (3 seeds)"."""
    trained = f"{combinations} combinations on"
    if len(titles) == 1:
        name, _, rest = inside_sentence(titles[0]).partition(", ")
        return f"{trained} {name} ({f'{rest}; ' if rest else ''}{runs})"
    if shared := shared_title(titles):
        return f"{combinations} combinations each on {shared} ({runs})"
    if len(titles) > LONGEST_LIST:
        return f"{trained} each of the {len(titles)} workloads in the appendix ({runs})"
    parts = [inside_sentence(title).partition(", ") for title in titles]
    parts = [(SENTENCE_NAMES.get(name, name), comma, rest) for name, comma, rest in parts]
    rests = {rest for _, _, rest in parts}
    if len(rests) == 1:
        # Titles that differ only in the name: "novels and plays (long windows; 3 seeds)".
        runs = "; ".join([*filter(None, rests), runs])
        shown = [name for name, _, _ in parts]
    else:
        shown = [f"{name} ({rest})" if rest else name for name, _, rest in parts]
    return f"{combinations} combinations each on {enumerate_words(shown)} ({runs})"


def describe_margins(margins: dict[str, float]) -> str:
    """Describes margins in their metrics' units: "a margin of 0.01 nats per byte"."""
    names_of: dict[str, list[str]] = {}
    for title, margin in margins.items():
        name, unit = name_and_unit(title)
        amount = f"{margin:g}"
        if unit == "%":
            amount += f" percentage point{'' if margin == 1 else 's'}"
        elif unit.startswith("nats"):
            amount += f" {unit}"
        names_of.setdefault(amount, []).append(name)
    if len(margins) == 1:
        [(amount, names)] = names_of.items()
        return f"a margin of {amount}" + ("" if " " in amount else f" ({names[0]})")
    shown = [f"{amount} ({enumerate_words(names)})" for amount, names in names_of.items()]
    return f"{'margins' if len(shown) > 1 else 'a margin'} of {enumerate_words(shown)}"


def describe_method(study: Study, found: Found, margins: dict[str, float]) -> str:
    """Describes the runs (as a list if there are several kinds) and the margins of the tests."""
    groups: dict[tuple[int, int, int, bool], list[str]] = {}
    for comparison, results in found:
        settings = results["settings"]
        key = (
            len(settings["combinations"]),
            len(settings["seeds"]),
            settings["training"]["steps"],
            bool(settings.get("until_flat")),
        )
        groups.setdefault(key, []).append(comparison.title)
    runs = [
        describe_runs(
            titles,
            combinations,
            f"{seeds} seed{'' if seeds == 1 else 's'}, {'up to ' * is_flat}{steps:,} steps each",
        )
        for (combinations, seeds, steps, is_flat), titles in groups.items()
    ]
    text = "".join(f"`gnomon compare` trained {group}. " for group in runs)
    if len(runs) > 1:
        text = "`gnomon compare` trained:\n\n" + "".join(f"- {group}\n" for group in runs) + "\n"
    if study.of_time:
        return text + (
            "The step time of a run is the median CPU time of its training steps. It is divided by "
            "the step time of the first row for the same seed. The tables show the median time "
            "over the seeds, and the median and range of these ratios."
        )
    of_margins = f" with {describe_margins(margins)}" if margins else ""
    return text + (
        "All combinations in a comparison use the same data order, learning rate and number of "
        f"steps{describe_exceptions(found)}; runs with the same seed are paired. Differences are "
        "tested by paired t tests and equivalence tests "
        f"([details](index.md#how-verdicts-are-made)){of_margins}. The p-values are adjusted for "
        "all comparisons on this page (Holm); the 95% intervals are not adjusted."
        f"{describe_tuning(found)}"
    )


def describe_exceptions(found: Found) -> str:
    """Returns the exceptions to the shared settings, in parentheses, or ""."""
    exceptions = []
    if any(tuned_options(results) for _, results in found):
        exceptions.append("options that were tuned")
    if any(results["settings"].get("until_flat") for _, results in found):
        exceptions.append("the length of runs that ended once they had converged")
    return f" (except for {enumerate_words(exceptions)})" if exceptions else ""


def describe_tuning(found: Found) -> str:
    """Returns sentences on how options were tuned and when runs ended, or ""."""
    titles_of: dict[str, list[str]] = {}
    for comparison, results in found:
        settings = results["settings"]
        if not settings.get("tuning") and not settings.get("until_flat"):
            continue
        held_out = results["held_out"]
        title = next(
            (m["title"] for m in results["task"]["metrics"] if m["key"] == held_out["metric"]),
            held_out["metric"],
        )
        metric = inside_sentence(name_and_unit(title)[0])
        parts = []
        if options := tuned_options(results):
            searched = "; ".join(map(describe_search, options))
            parts.append(
                f"options were tuned for each combination ({searched}), with a seed that no "
                "reported run uses"
            )
        if settings.get("until_flat"):
            parts.append(f"each run ended once its {metric} was flat (if not, it is marked)")
        how = f"{', and '.join(parts)}. The {metric} was measured on held-out data: "
        how += held_out["part"]
        titles_of.setdefault(how, []).append(comparison.title)
    return "".join(f" For {enumerate_titles(titles)}, {how}." for how, titles in titles_of.items())


def write_page(name: str, study: Study) -> None:
    import matplotlib

    from gnomon.lab._plots import STYLE

    PAGES.mkdir(parents=True, exist_ok=True)
    found: Found = []
    for comparison in study.comparisons:
        path = record_path(name, comparison)
        if path.is_file():
            found.append((comparison, json.loads(path.read_text(encoding="utf-8"))))
    missing = [c.title for c in study.comparisons if not record_path(name, c).is_file()]
    claims = tested_rows(study, found)
    margins = {
        row.metric["title"]: row.margin for rows in claims for row in rows if row.differences
    }
    parts = [f"# {study.title}", study.question, study.answer]
    has_effects = any(row.outcome in SHADES for rows in claims for row in rows)
    with matplotlib.rc_context(STYLE):
        if study.of_time and found:
            save(draw_times(found), PAGES / f"{name}-times.svg")
            parts.append(f"![Training step times]({name}-times.svg)")
        elif has_effects:
            save(draw_effects(study, claims), PAGES / f"{name}-effects.svg")
            parts.append(f"![Differences with 95% confidence intervals]({name}-effects.svg)")
            parts.append(
                "Each point is one row of the tables below: the difference divided by the metric's "
                "margin, with its 95% confidence interval. Differences within the margin (shaded) "
                "are treated as negligible."
            )
    parts += ["## Method", describe_method(study, found, margins)]
    parts += ["## Limits", study.limits]
    if study.sources:
        parts += ["## Sources", study.sources]
    if study.claims:
        parts.append("## Appendix: claims")
        if found and missing:
            begun = "; ".join(comparison.title for comparison, _ in found)
            parts.append(f"Only these comparisons have results so far: {begun}.")
    for claim, rows in zip(study.claims, claims, strict=True):
        parts += describe_claim(claim, rows)
    parts.append("## Appendix: results")
    if missing:
        parts.append("These comparisons have not started: " + "; ".join(missing) + ".")
    for comparison, results in found:
        parts.append(f"### {comparison.title}")
        parts.append(describe(results, comparison))
        if study.of_time:
            parts.append(time_table(results))
            continue
        figure = f"{name}-{comparison.name}.svg"
        with matplotlib.rc_context(STYLE):
            save(report.draw_conditions(results), PAGES / figure)
        parts.append(f"![{comparison.title}]({figure})")
        shown = [m for m in results["task"]["metrics"] if m["is_compared"]]
        for n, metric in enumerate(shown):
            table = summary_table(results, metric, comparison.baseline, shows_cost=n == 0)
            parts.append(f"{caption(results, metric)}:\n\n{table}")
    if not study.of_time:
        parts.append(
            "The tables show the mean ± standard deviation over the seeds. A bold value is "
            "significantly better than all others in its column (paired t tests with Holm's "
            "correction). In the figures, bands and whiskers are standard deviations, and a dashed "
            "line or shaded area marks the training condition."
        )
    parts.append(
        f"The records are in `lab/studies/{name}`; `make study NAME={name} DATA=FOLDER` completes "
        "the missing runs and rewrites this page."
    )
    (PAGES / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"one of {', '.join(names())}")
    parser.add_argument("data", nargs="?", default="", help="the folder with the study's data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="run only this comparison")
    parser.add_argument(
        "--page", action="store_true", help="run nothing; write the page from the existing records"
    )
    options = parser.parse_args()
    try:
        study = load_study(options.name)
        chosen = [c for c in study.comparisons if options.only in {"", c.name}]
        if not chosen:
            known = ", ".join(c.name for c in study.comparisons)
            raise ValueError(f"--only is '{options.only}'; expected one of {known}")
        data = pathlib.Path(options.data or os.curdir).absolute()
        status = 0
        for comparison in chosen:
            if options.page:
                publish(options.name, comparison)
                continue
            status = run(options.name, comparison, data, options.threads)
            if status != 0:
                break
        write_page(options.name, study)
    except (ValueError, OSError) as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
