"""Studies: comparisons that answer a question, and the page that tells the answer.

A study is a file of this folder that defines ``STUDY``. ``python studies/study.py NAME DATA`` runs
what is missing of its comparisons, or goes on where it was stopped, and writes

- ``studies/NAME/COMPARISON.json``, what ``gnomon compare`` recorded, in short, from which another
  machine can go on;
- ``docs/studies/NAME.md`` and its figures, from these records alone.

DATA is the folder that the paths of the study are in.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs/studies"
RECORDS = ROOT / "studies"
PAGES = ROOT / "docs/studies"
PROGRAM = ROOT / ".venv/bin/gnomon"
#: What a comparison's arguments call the run of its classifier.
CLASSIFIER = "classifier"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A call of ``gnomon compare``."""

    name: str  # of its record
    title: str  # "Shakespeare's plays, bytes"
    data: str  # path in the folder of the data; empty: the task makes its data
    arguments: tuple[str, ...]
    # What makes the data where they are not in that folder, as a command there that writes OUT: of
    # gnomon, or a script of this repository.
    made_by: tuple[str, ...] = ()
    # Where the data come from, unless `gnomon data get` has them.
    data_from: str = ""
    # What else `gnomon train` is told to make the run "classifier" that its arguments name.
    classifier: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Contrast:
    """What is set against what: each a label of a combination, and a condition."""

    left: str
    left_at: Any
    right: str
    right_at: Any
    metric: str | None = None  # the first of the task
    # Names of the comparisons that they are of; empty: of each that has both, in turn.
    left_in: str = ""
    right_in: str = ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a source or a first look says, and is tested here."""

    text: str  # understood without those before it
    contrasts: tuple[Contrast, ...]
    # What their left sides are then: better, worse or not worse.
    left_is: str = "better"
    # What the repository shows of why it comes out so, or that nobody has looked.
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Study:
    title: str
    question: str
    comparisons: tuple[Comparison, ...]
    claims: tuple[Claim, ...]
    limits: str  # what it does not show
    sources: str = ""
    # Shown is the time of a step rather than what was learned, and these are its claims.
    of_time: bool = False
    came_out: str = ""


# ---- What the test of a contrast may say

BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference seen"
FEW_SEEDS, NOT_RUN = "too few seeds", "not run yet"
#: Of Claim.left_is, what agrees with it.
AGREEING = {
    "better": {BETTER},
    "worse": {WORSE},
    "not worse": {BETTER, NO_DIFFERENCE},
}


def verdict(outcomes: list[str], left_is: str) -> str:
    """What the outcomes of its contrasts say of a claim; left_is as in Claim."""
    tested = [outcome for outcome in outcomes if outcome not in {FEW_SEEDS, NOT_RUN}]
    if not tested:
        return FEW_SEEDS if FEW_SEEDS in outcomes else NOT_RUN
    agreeing = sum(outcome in AGREEING[left_is] for outcome in tested)
    if agreeing:
        return "holds" if agreeing == len(tested) else f"holds in {agreeing} of {len(tested)} rows"
    return NO_DIFFERENCE if set(tested) == {NO_DIFFERENCE} else "does not hold"


def load_study(name: str) -> Study:
    path = RECORDS / f"{name}.py"
    if name == "study" or not path.is_file():
        raise ValueError(f"there is no study '{name}', expected one of {', '.join(names())}")
    return runpy.run_path(str(path))["STUDY"]


def names() -> list[str]:
    return sorted(path.stem for path in RECORDS.glob("*.py") if path.stem != "study")


# ---- What makes the files of data sets that several studies read, in the folder of the data.

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
    """What a reader would type in the folder of the data."""
    data = ["--data", comparison.data] if comparison.data else []
    return ["gnomon", "compare", *data, *comparison.arguments]


def classifier_command(comparison: Comparison) -> list[str]:
    """What makes its classifier, as a reader would type it."""
    task = ("--task", "images", "--data", comparison.data)
    return ["gnomon", "train", *task, *comparison.classifier, "--out", CLASSIFIER]


def shorten(results: dict[str, Any], comparison: Comparison) -> dict[str, Any]:
    """A record that says nothing of where it was made but the machine, in few bytes."""
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
    """JSON of a line for each run and each entry of the summary."""
    lines = []
    for key, value in record.items():
        if key in {"runs", "summary"} and value:
            items = ",\n".join("  " + json.dumps(item, separators=(",", ":")) for item in value)
            lines.append(f' "{key}": [\n{items}\n ]')
        else:
            lines.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def publish(name: str, comparison: Comparison) -> None:
    """Takes over what the comparison has recorded so far."""
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
    """Where its data are; makes them where that is possible."""
    path = data / comparison.data
    if path.exists():
        return path
    if not comparison.made_by:
        raise ValueError(f"there is no {comparison.data} in {data}")
    path = RUNS / "data" / comparison.data
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        first, *words = (str(path) if word == "OUT" else word for word in comparison.made_by)
        program = [str(PROGRAM)] if first == "gnomon" else [sys.executable, str(ROOT / first)]
        done = subprocess.run([*program, *words], cwd=data, check=False)
        if done.returncode != 0:
            raise ValueError(f"cannot make {comparison.data} in {data}")
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
    """Lays out a folder that ``gnomon compare --resume`` goes on with."""
    folder = RUNS / name / comparison.name
    path = record_path(name, comparison)
    if (folder / "results.json").is_file() or not path.is_file():
        return
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["sessions"][0]["command"] != command(comparison):
        raise ValueError(
            f"studies/{name}/{path.name} was made by another command than the study now has: "
            "remove it to begin anew"
        )
    if comparison.data:
        record["data"]["path"] = str(data_path(comparison, data))
    if comparison.classifier:
        record["settings"]["classifier"] = str(classifier_path(name, comparison))
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(record), encoding="utf-8")


def run(name: str, comparison: Comparison, data: pathlib.Path, threads: int) -> int:
    """Runs or resumes; the exit status of ``gnomon compare``."""
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


def interval(differences: list[float]) -> float:
    """Half of the 95% confidence interval of their mean, by Student's t."""
    from gnomon.report import p_value

    n = len(differences)
    mean = sum(differences) / n
    deviations = [d - mean for d in differences]
    error = math.sqrt(sum(d * d for d in deviations) / (n - 1) / n)
    if error == 0:
        return 0.0
    # The mean whose p value, with this spread, is 0.05.
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        if p_value([d + middle * error for d in deviations]) > 0.05:
            low = middle
        else:
            high = middle
    return high * error


def labels_of(results: dict[str, Any]) -> list[str]:
    """What the combinations are called, grids as they were asked for: of the data's shape."""
    shape = re.compile(r"\bshape=\d+(x\d+)*")
    return [
        re.sub(r":prefix=\d+", "", shape.sub("shape=grid", combination["label"]))
        for combination in results["settings"]["combinations"]
    ]


def by_seed(results: dict[str, Any], label: str, at: Any, metric: str) -> dict[int, float]:
    """What the runs of a combination measured at a condition."""
    labels = labels_of(results)
    if label not in labels:
        raise ValueError(f"no combination is called '{label}'; there are {', '.join(labels)}")
    combination = labels.index(label)
    condition = results["task"]["conditions"]["values"].index(at)
    return {
        r["seed"]: r["losses"][condition][metric]
        for r in results["runs"]
        if r["combination"] == combination
        and r["losses"]
        and r["losses"][condition][metric] is not None
    }


def contrast_row(
    results: dict[str, Any], contrast: Contrast, of_right: dict[str, Any] | None = None
) -> list[str]:
    """Difference, interval, p, seeds and verdict; the right side is of its own results if any."""
    from gnomon.report import p_value

    metric = results["task"]["metrics"][0]
    if contrast.metric is not None:
        metric = next(m for m in results["task"]["metrics"] if m["key"] == contrast.metric)
    left = by_seed(results, contrast.left, contrast.left_at, metric["key"])
    right = by_seed(of_right or results, contrast.right, contrast.right_at, metric["key"])
    differences = [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]
    if not differences:
        return ["–", "–", "–", "0", NOT_RUN]
    mean = sum(differences) / len(differences)
    if len(differences) < 3:
        return [f"{mean:+.3f}", "–", "–", str(len(differences)), FEW_SEEDS]
    p = p_value(differences)
    outcome = NO_DIFFERENCE
    if p < 0.05:
        outcome = BETTER if (mean > 0) == metric["higher_is_better"] else WORSE
    shown = "< 0.001" if p < 0.001 else f"{p:.3f}"
    if shown == "0.050":
        shown = "< 0.05" if p < 0.05 else "> 0.05"
    return [
        f"{mean:+.3f}",
        f"± {interval(differences):.3f}",
        shown,
        str(len(differences)),
        outcome,
    ]


Found = list[tuple[Comparison, dict[str, Any]]]


def has(results: dict[str, Any], label: str, at: Any) -> bool:
    """Whether the results have a combination, and a condition."""
    return label in labels_of(results) and at in results["task"]["conditions"]["values"]


def contrast_rows(claim: Claim, found: Found) -> list[list[str]]:
    """A row for each contrast of the claim, and for each comparison that has it."""
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
            first, *others = results["task"]["metrics"]
            titles = {metric["key"]: f", {metric['title']}" for metric in others}
            measure = titles.get(contrast.metric or first["key"], "")
            right = f"`{contrast.right}` at {contrast.right_at}"
            if beside is not comparison:
                right = f"{beside.title}, {right}"
            elif contrast.right == contrast.left:
                right = f"itself at {contrast.right_at}"
            left = f"`{contrast.left}` at {contrast.left_at}"
            what = f"{comparison.title}{measure}: {left} against {right}"
            rows.append([what, *contrast_row(results, contrast, of_right)])
    return rows


def describe_claim(claim: Claim, found: Found) -> list[str]:
    """The claim, its verdict, the rows that it is of, and why."""
    rows = contrast_rows(claim, found)
    outcomes = [row[-1] for row in rows]
    said = verdict(outcomes, claim.left_is)
    counts = ", ".join(f"{n} {outcome}" for outcome, n in Counter(outcomes).items())
    of = f" ({counts})" if len(set(outcomes)) > 1 else ""
    parts = [f"Claim: {claim.text}", f"Verdict: **{said}**{of}."]
    if rows:
        parts.append(markdown_table(["", "difference", "95%", "p", "seeds", "the left is"], rows))
    if claim.why and said != NOT_RUN:
        parts.append(claim.why)
    return parts


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, [":--"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summary_table(results: dict[str, Any], metric: dict[str, Any], *, shows_cost: bool) -> str:
    from gnomon import report

    conditions = results["task"]["conditions"]
    places = report.measured_at(results, metric["key"])
    winners = [
        report.best(results, metric["key"], n, higher_is_better=metric["higher_is_better"])
        for n in places
    ]
    rows = []
    for row in results["summary"]:
        name = report.labels(results)[row["combination"]]
        # Where titles do not tell them apart, names are parts of labels.
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
        cells.append(str(row["runs"]))
        if shows_cost:
            cells.append("–" if row["parameters"] is None else f"{row['parameters']:,}")
        rows.append(cells)
    head = ["", *(str(conditions["values"][n]) for n in places), "seeds"]
    if shows_cost:
        head.append("parameters")
    return markdown_table(head, rows)


def time_table(results: dict[str, Any]) -> str:
    """Processor time of a training step, and its ratio to that of the first combination."""
    from gnomon import report

    times: list[dict[int, float]] = [{} for _ in results["settings"]["combinations"]]
    for run in results["runs"]:
        times[run["combination"]][run["seed"]] = run["processor_ms_per_step"]
    rows = []
    for row, name, own in zip(results["summary"], report.labels(results), times, strict=True):
        label = f"`{row['label']}`" if name in row["label"] else f"{name} `{row['label']}`"
        ratios = sorted(own[seed] / times[0][seed] for seed in own.keys() & times[0].keys())
        if not ratios:
            rows.append([label, "–", "–", "–", str(len(own))])
            continue
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        middle = statistics.median(ratios)
        typical = statistics.median(own.values())
        rows.append([label, f"{typical:.3g}", f"**{middle:.2f}**", spread, str(len(own))])
    return markdown_table(["", "ms per step", "ratio", "of the seeds", "seeds"], rows)


def describe(results: dict[str, Any], comparison: Comparison) -> str:
    total = len(results["settings"]["combinations"]) * len(results["settings"]["seeds"])
    done = len(results["runs"])
    # A study may go on another machine.
    machines = [session["machine"] for session in results["sessions"]]
    names = dict.fromkeys(f"{m['cpu']} ({m['instruction_set']})" for m in machines)
    threads = sorted({m["threads"] for m in machines})
    counts = " or ".join(map(str, threads))
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
        f"{state} {total} runs are done, on {', '.join(names)}, "
        f"{counts} thread{'' if threads == [1] else 's'}.",
        f"\n```console\n$ {shown}\n```",
    ]
    if digest:
        source = f", {comparison.data_from}" if comparison.data_from else ""
        lines.append(f"\nSHA-256 of the data{source}: `{digest}`.")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: pathlib.Path) -> None:
    import matplotlib

    from gnomon import report
    from gnomon._plots import STYLE

    with matplotlib.rc_context(STYLE):
        figure = report.draw_conditions(results)
        figure.savefig(path, format="svg", metadata={"Date": None})


def write_page(name: str, study: Study) -> None:
    PAGES.mkdir(parents=True, exist_ok=True)
    parts = [f"# {study.title}", study.question]
    found: Found = []
    for comparison in study.comparisons:
        path = record_path(name, comparison)
        if path.is_file():
            found.append((comparison, json.loads(path.read_text(encoding="utf-8"))))
    missing = [c.title for c in study.comparisons if not record_path(name, c).is_file()]
    if study.claims:
        parts.append("## Claims, and what came out")
        parts.append(
            "A claim is what was tested; whether it holds, its verdict says, by the rows below it. "
            "A difference is left minus right, the mean over the seeds; beside it are half of its "
            "95% confidence interval and p of a paired t test. *Better* and *worse* say how the "
            "left does, where p < 0.05; there is no correction for the number of tests. A row is "
            "of the first measure among the results unless it names another. A claim that "
            "something is no worse holds where no row is worse, which is no proof: few seeds show "
            "large differences alone."
        )
        if found and missing:
            begun = "; ".join(comparison.title for comparison, _ in found)
            parts.append(f"These verdicts are of what has begun: {begun}.")
    for claim in study.claims:
        parts += describe_claim(claim, found)
    if study.came_out:
        parts.append("## What came out\n\n" + study.came_out)
    parts.append("## What it does not show\n\n" + study.limits)
    parts.append("## Results")
    if missing:
        parts.append("Not begun: " + "; ".join(missing) + ".")
    for comparison, results in found:
        parts.append(f"### {comparison.title}")
        parts.append(describe(results, comparison))
        if study.of_time:
            parts.append(time_table(results))
            continue
        figure = f"{name}-{comparison.name}.svg"
        draw(results, PAGES / figure)
        parts.append(f"![{comparison.title}]({figure})")
        shown = [m for m in results["task"]["metrics"] if m["is_compared"]]
        for n, metric in enumerate(shown):
            key = results["task"]["conditions"]["key"]
            title = f"{metric['title'][:1].upper()}{metric['title'][1:]}, by {key}:"
            parts.append(title + "\n\n" + summary_table(results, metric, shows_cost=n == 0))
    legend = (
        "Mean ± standard deviation over the seeds; bold: better than every other of its column, "
        "p < 0.05 in a paired t test. Bands and whiskers of the figures are that deviation, too; "
        "dashed or shaded is what the models were trained at."
    )
    if study.of_time:
        legend = (
            "Processor time, the median of the steps, and of it the mean over the seeds; the ratio "
            "is to the first row's with the same seed, its median, and its range over the seeds. "
            "Other programs on the machine change processor time less than time, but they do."
        )
    parts.append(
        f"{legend} Tables and plots are of the records in `studies/{name}`; "
        f"`make study NAME={name} DATA=FOLDER` makes what is missing of them, where FOLDER has the "
        "data by the names in the commands above, each set of `gnomon data get` in a folder of its "
        "name. To begin anew, remove a record. What the text says of other trials names its "
        "command."
    )
    if study.sources:
        parts.append("## Sources\n\n" + study.sources)
    (PAGES / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"one of {', '.join(names())}")
    parser.add_argument("data", nargs="?", default="", help="the folder that its data are in")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="one of its comparisons")
    parser.add_argument(
        "--page", action="store_true", help="run nothing; write the page of what there is"
    )
    options = parser.parse_args()
    try:
        study = load_study(options.name)
        chosen = [c for c in study.comparisons if options.only in {"", c.name}]
        if not chosen:
            known = ", ".join(c.name for c in study.comparisons)
            raise ValueError(f"--only is '{options.only}', expected one of {known}")
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
