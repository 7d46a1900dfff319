"""Comparisons that tune options and end runs on held-out training data."""

from __future__ import annotations

import copy
import json
import math
import pathlib
import signal
import subprocess
import time
from typing import Any

import numpy as np
import pytest
import test_task_diffusion
import test_task_graphs
import test_task_hierarchy
import test_task_images
import test_task_music
import test_task_speech
import test_task_translation
import torch
from safetensors.numpy import load_file, save_file
from test_cli import PROGRAM, SECONDS, TINY, interrupt, refused, succeed
from test_compare import outcome

from gnomon.lab import _tuning
from gnomon.lab.report._decided import edges

pytest.importorskip("optuna")
pytestmark = pytest.mark.cpu("runs the program, which has --device")

SIZES = ["--dim", 16, "--depth", 1, "--heads", 2, "--threads", 1]
TEXT = ["--lengths", "16,32", "--evaluation-bytes", 512, "--threads", 1, *TINY]
COPY = ["compare", "--task", "generated", "--lengths", "4,8", "--evaluation-examples", 8,
        "--position", "none,rope", *SIZES, "--mlp", 32, "--batch", 4]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("tuning")
    text = "".join(f"line {n}: the quick brown fox, {n * n} times\n" for n in range(400))
    (path / "text.txt").write_text(text)
    return path


def record_of(run: pathlib.Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text())


def outcome_of(run: pathlib.Path) -> dict[str, Any]:
    """The record without times."""
    record = outcome(run)
    for trial in (record["settings"]["tuning"] or {"tried": []})["tried"]:
        del trial["seconds"]
    return record


# ---- The values that are tried


def toy(options: list[dict[str, Any]], trials: int | None = None) -> dict[str, Any]:
    """A record of two combinations before its first trial."""
    for option in options:
        option.setdefault("combinations", [0, 1])
        option.setdefault("integer", False)
    return {
        "settings": {
            "tuning": {"options": options, "trials": trials, "tried": []},
            "training": {"steps": 100},
            "combinations": [{"label": "dot/none"}, {"label": "dot/rope"}],
        },
        "held_out": {"metric": "loss"},
        "task": {"metrics": [{"key": "loss", "higher_is_better": False}]},
    }


def run_trials(record: dict[str, Any], folder: pathlib.Path, loss) -> list[dict[str, Any]]:
    """Runs the program's tuning loop with losses from a function; returns the chosen values."""
    tried = record["settings"]["tuning"]["tried"]
    for _ in range(100):
        answer = _tuning.plan(record, folder)
        assert answer == _tuning.plan(copy.deepcopy(record), folder)
        if not answer["next"]:
            return answer["chosen"]
        # Results may be reported in any order.
        for trial in reversed(answer["next"]):
            known = [t for t in tried if (t["combination"], t["number"])
                     == (trial["combination"], trial["number"])]  # fmt: skip
            if not known:
                known = [trial | {"held_out": []}]
                tried += known
            value = loss(trial["combination"], known[0]["values"], trial["steps"])
            known[0]["held_out"].append({"step": trial["steps"], "value": value})
    raise AssertionError("no end")


def bowl(combination: int, values: dict[str, float], steps: int) -> float:
    """A loss whose best rate is 0.003 or 0.03, by combination, and whose best batch is 24."""
    rate = math.log10(values["rate"] / (0.003, 0.03)[combination])
    return rate**2 + ((values.get("batch", 24) - 24) / 16) ** 2 + 10 / steps


def test_a_search_finds_the_best_of_a_quadratic(tmp_path):
    record = toy(
        [{"name": "rate", "range": [1e-5, 1]}, {"name": "batch", "range": [4, 64], "integer": True}]
    )
    best = run_trials(record, tmp_path, bowl)
    tried = record["settings"]["tuning"]["tried"]
    for combination, values in enumerate(best):
        own = [trial for trial in tried if trial["combination"] == combination]
        # The budget is the same for all combinations.
        assert len(own) == _tuning.MOST_TRIALS
        assert sorted(max(at["step"] for at in trial["held_out"]) for trial in own) == sorted(
            3 * [25, 25, 50, 100]
        )
        assert isinstance(values["batch"], int)
        # The result is better than 90% of random points from the ranges.
        draw = np.random.default_rng(0)
        random = [
            bowl(combination, {"rate": 10 ** draw.uniform(-5, 0), "batch": draw.integers(4, 65)},
                 100)
            for _ in range(1000)
        ]  # fmt: skip
        assert bowl(combination, values, 100) < np.quantile(random, 0.1)
    assert (tmp_path / _tuning.JOURNAL).exists()


def test_a_grid_finds_its_best_point(tmp_path):
    record = toy([{"name": "rate", "values": [1e-4, 1e-3, 3e-3, 3e-2, 1e-1]},
                  {"name": "batch", "values": [8, 24], "integer": True}])  # fmt: skip
    best = run_trials(record, tmp_path, bowl)
    assert best == [{"rate": 3e-3, "batch": 24}, {"rate": 3e-2, "batch": 24}]
    tried = record["settings"]["tuning"]["tried"]
    points = {(t["combination"], t["values"]["rate"], t["values"]["batch"]) for t in tried}
    assert len(points) == len(tried) == 20


def test_trials_that_diverge_are_never_chosen(tmp_path):
    def loss(combination: int, values: dict[str, float], steps: int) -> float | None:
        if combination == 1 or values["rate"] > 1e-3:
            return None
        return bowl(combination, values, steps)

    record = toy([{"name": "rate", "values": [1e-4, 1e-3, 3e-3, 3e-2]}])
    assert run_trials(record, tmp_path, loss) == [{"rate": 1e-3}, None]


def test_a_combination_without_the_option_has_no_trials(tmp_path):
    record = toy([{"name": "rate", "values": [1e-3, 3e-3], "combinations": [0]}])
    assert run_trials(record, tmp_path, bowl) == [{"rate": 3e-3}, {}]


def test_edges():
    options = [{"name": "a", "range": [1e-4, 1]}, {"name": "b", "values": [1, 2, 3]},
               {"name": "c", "range": [0, 1]}]  # fmt: skip
    assert edges(options, {"a": 1e-2, "b": 2, "c": 0.5}) == []
    assert edges(options, {"a": 1.2e-4, "b": 3, "c": 0.99}) == ["a", "b", "c"]


# ---- Comparisons


def tuned(out: pathlib.Path) -> list[object]:
    return [*COPY, "--steps", 60, "--tune", "learning-rate=1e-5..1e-1", "--tune-trials", 3,
            "--out", out]  # fmt: skip


@pytest.fixture(scope="module")
def whole(folder) -> pathlib.Path:
    succeed(*tuned(folder / "whole"), cwd=folder)
    return folder / "whole"


def test_runs_have_the_chosen_values(folder, whole, tmp_path):
    record = record_of(whole)
    tuning = record["settings"]["tuning"]
    assert tuning["finished"]
    assert len(tuning["tried"]) == 6
    assert tuning["seed"] not in record["settings"]["seeds"]
    table = (whole / "table.md").read_text()
    page = (whole / "report.html").read_text()
    assert "<h2>Tuning</h2>" in page
    for combination, position in enumerate(("none", "rope")):
        rate = tuning["chosen"][combination]["learning-rate"]
        assert f"dot/{position}: learning-rate" in table
        # Repeat the run on the same data, with the value passed as an option.
        out = tmp_path / position
        words = [str(word) for word in COPY]
        words[words.index("--position") + 1] = position
        succeed(*words, "--steps", 60, "--learning-rate", repr(rate), "--out", out, cwd=folder)
        (given,) = record_of(out)["runs"]
        (run,) = [run for run in record["runs"] if run["combination"] == combination]
        assert run["losses"] == given["losses"]
        assert run["curve"] == given["curve"]
    assert not (whole / "unfinished").exists()


@pytest.mark.long
def test_workers_tune_to_the_same_results(folder, whole, tmp_path):
    out = tmp_path / "workers"
    succeed(*tuned(out), "--workers", 2, cwd=folder)
    assert outcome_of(out) == outcome_of(whole)


def test_tuning_resumes_after_it_was_killed(folder, whole, tmp_path):
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [PROGRAM, *map(str, [*tuned(out), "--checkpoint-every", 5])], cwd=folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + SECONDS

    def measured() -> int:
        try:
            tuning = record_of(out)["settings"]["tuning"]
        except FileNotFoundError:
            return 0
        return sum(len(trial["held_out"]) for trial in tuning["tried"])

    while measured() < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    succeed("compare", "--resume", out, "--threads", 1, cwd=folder)
    assert outcome_of(out) == outcome_of(whole)


def test_parameters_of_terms_and_of_the_model(folder, tmp_path):
    words = ["compare", "--data", "text.txt", "--run", "dot/hype", "--run", "dot/rope", "--steps",
             4, "--tune", "mu=0.001,0.1", "--out", tmp_path / "terms", *TEXT]  # fmt: skip
    succeed(*words, cwd=folder)
    first, second = record_of(tmp_path / "terms")["settings"]["tuning"]["chosen"]
    assert first["mu"] in (0.001, 0.1)
    assert second == {}
    assert "dot/rope: nothing to tune" in (tmp_path / "terms/table.md").read_text()

    out = tmp_path / "model"
    at = [str(word) for word in COPY]
    at[at.index("--position") + 1] = "none"
    succeed(*at, "--steps", 4, "--tune", "mlp=8,64", "--out", out, cwd=folder)
    record = record_of(out)
    (chosen,) = record["settings"]["tuning"]["chosen"]
    assert record["settings"]["model"]["mlp"] == 32
    # The MLP has two matrices of size dim x mlp, and a bias.
    without = {mlp: 33 * mlp for mlp in (8, 64)}
    succeed(*at, "--steps", 1, "--out", tmp_path / "plain", cwd=folder)
    plain = record_of(tmp_path / "plain")["runs"][0]["parameters"] - 33 * 32
    assert record["runs"][0]["parameters"] == plain + without[chosen["mlp"]]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tune", "learning-rat=1,2"], ["'learning-rat'", "did you mean learning-rate?"]),
        (["--tune", "learning-rate"], ["OPTION=LOW..HIGH"]),
        (["--tune", "learning-rate=a,1"], ["--tune learning-rate: 'a' is not a number"]),
        (["--tune", "learning-rate=1..1"], ["range 1..1 is empty"]),
        (["--tune", "learning-rate=1,1"], ["1 is given twice"]),
        (["--tune", "learning-rate=-1,1"], ["'-1' is not a number from 0"]),
        (["--tune", "batch=1.5,2"], ["'1.5' is not an integer"]),
        (["--tune", "steps=1,2"], ["'steps' is not a numeric option"]),
        (["--tune", "heads=2,3"], ["--tune heads: ", "3"]),
        (["--tune", "batch=2,3", "--tune", "batch=1..2"], ["batch is given twice"]),
        (["--tune-trials", "3"], ["--tune-trials needs --tune"]),
        (["--flat-margin", "0.1"], ["--flat-margin needs --until-flat"]),
        (["--until-flat", "--schedule", "cosine"], ["--schedule constant"]),
        (["--schedule", "linear"], ["schedule is 'linear'", "cosine, constant"]),
    ],
)
def test_wrong_input_is_named(folder, flags, told):
    message = refused("compare", "--data", "text.txt", *flags, *TEXT, cwd=folder)
    for part in told:
        assert part in message


def test_a_missing_optuna_is_named_before_anything_runs(folder, tmp_path, monkeypatch):
    (tmp_path / "optuna").mkdir()
    (tmp_path / "optuna/__init__.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out"
    message = refused(*COPY, "--tune", "learning-rate=1,2", "--out", out, cwd=folder)
    assert "pip install optuna" in message
    assert not out.exists()


# ---- Runs that end when they are flat


def test_runs_end_when_they_are_flat(folder, tmp_path):
    words = ["compare", "--data", "text.txt", "--position", "none,rope", "--steps", 200,
             "--until-flat", *TEXT]  # fmt: skip
    # A loss cannot halve within a fifth of the steps.
    succeed(*words, "--flat-margin", 0.5, "--out", tmp_path / "flat", cwd=folder)
    record = record_of(tmp_path / "flat")
    assert record["settings"]["training"]["schedule"] == "constant"
    for run in record["runs"]:
        assert run["flat"]
        last = run["held_out"]["step"][-1]
        assert run["stopped_at"] == last + last // 4 < 200
        assert run["curve"]["step"][-1] == run["stopped_at"]
        best = np.minimum.accumulate(run["held_out"]["value"])
        steps = np.array(run["held_out"]["step"])
        improved = [
            best[n] <= 0.5 * best[steps <= steps[n] - 40][-1] for n in range(len(steps))
            if steps[n] >= 44
        ]  # fmt: skip
        assert not improved[-1]
        assert all(improved[:-1])
    assert [row["not_converged"] for row in record["summary"]] == [0, 0]
    assert "All runs converged" in (tmp_path / "flat/report.html").read_text()

    # With a margin of 0, no run becomes flat, because the best value never becomes worse.
    succeed(*words, "--flat-margin", 0, "--out", tmp_path / "budget", cwd=folder)
    record = record_of(tmp_path / "budget")
    for run in record["runs"]:
        assert not run["flat"]
        assert run["stopped_at"] == 200
        assert run["held_out"]["step"] == list(range(4, 160, 4))
    assert [row["not_converged"] for row in record["summary"]] == [1, 1]
    assert "(not converged: 1)" in (tmp_path / "budget/report.html").read_text()
    table = (tmp_path / "budget/table.md").read_text()
    assert "| dot/none † |" in table
    assert "† not converged" in table


def test_an_interrupted_run_ends_at_the_same_step(folder, tmp_path):
    words = ["compare", "--data", "text.txt", "--position", "rope", "--steps", 600,
             "--until-flat", "--flat-margin", 0.3, *TEXT]  # fmt: skip
    succeed(*words, "--out", tmp_path / "whole", cwd=folder)
    checkpoint = tmp_path / "parts/unfinished/0-0/checkpoint.safetensors"
    code, errors = interrupt(
        [*words, "--out", tmp_path / "parts", "--checkpoint-every", 40], folder, checkpoint.exists
    )
    assert code == 130, errors
    succeed("compare", "--resume", tmp_path / "parts", "--threads", 1, cwd=folder)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
    assert record_of(tmp_path / "whole")["runs"][0]["flat"]


# ---- Held-out data


def held_out_rows(rows: int) -> list[int]:
    """The rows that the program holds out."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(20190710))
    return sorted(order[: min(max(rows // 10, 1), 1000)].tolist())


def text(path: pathlib.Path, changed: bool) -> list[object]:
    # 90% of the file is for training, and the last tenth of that is held out.
    data = bytearray("".join(f"{n * n % 1009} " for n in range(2000)).encode())
    train = len(data) - len(data) // 10
    if changed:
        first = train - train // 10
        data[first:train] = data[first:train][::-1]
    path.write_bytes(data)
    return ["--lengths", "16,32", "--evaluation-bytes", 256, "--mlp", 32]


def arrays(sample: dict[str, np.ndarray], key: str, path: pathlib.Path, changed: bool) -> None:
    sample = {name: value.copy() for name, value in sample.items()}
    if changed:
        rows = held_out_rows(len(sample[key]))
        sample[key][rows] = sample[key][rows][..., ::-1, :]
    save_file(sample, path)


def images(path: pathlib.Path, changed: bool) -> list[object]:
    arrays(test_task_images.sample((8, 8, 3)), "train.images", path, changed)
    return ["--mlp", 32]


def volumes(path: pathlib.Path, changed: bool) -> list[object]:
    arrays(test_task_images.sample((14, 14, 14, 1), name="volumes"), "train.volumes", path, changed)
    return ["--mlp", 32]


def diffusion(path: pathlib.Path, changed: bool) -> list[object]:
    arrays(test_task_diffusion.bars(), "train.images", path, changed)
    return ["--mlp", 32, "--patch", 4]


def speech(path: pathlib.Path, changed: bool) -> list[object]:
    folder = path.parent / f"{path.name}-sounds"
    folder.mkdir()
    test_task_speech.write_words(folder)
    sample = load_file(folder / "words.safetensors")
    lengths = sample["train.audio_lengths"]
    ends = np.cumsum(lengths)
    if changed:
        for row in held_out_rows(len(lengths)):
            sample["train.audio"][ends[row] - lengths[row] : ends[row]] //= 2
    save_file(sample, path)
    return ["--mlp", 32, "--mels", 12, "--utterances", "1,2", "--evaluation-utterances", 4]


def music(path: pathlib.Path, changed: bool) -> list[object]:
    parts = {part: test_task_music.random_pieces(n, 9) for n, part in enumerate(("train", "valid"))}
    if changed:
        for row in held_out_rows(9):
            parts["train"][row] = [[90, 91] for _ in parts["train"][row]]
    test_task_music.write(path.parent, parts, path.name)
    return ["--mlp", 32, "--lengths", "8,16"]


def translation(path: pathlib.Path, changed: bool) -> list[object]:
    path.mkdir()
    for part, count, seed in [("train", 60, 0), ("valid", 6, 1)]:
        source, target = test_task_translation.sentences(count, seed)
        if changed and part == "train":
            for row in held_out_rows(count):
                target[row] = target[row][::-1]
        test_task_translation.write(path, f"{part}.de", source)
        test_task_translation.write(path, f"{part}.en", target)
    return ["--mlp", 32, "--tokens", "bytes", "--source-language", "de"]


def graphs(path: pathlib.Path, changed: bool) -> list[object]:
    sample = test_task_graphs.sample()
    if changed:
        nodes = sample["valid.nodes"]
        sample["graph.labels"][nodes] = (sample["graph.labels"][nodes] + 1) % 3
    save_file(sample, path)
    return ["--selection", "last"]


def hierarchy(path: pathlib.Path, changed: bool) -> list[object]:
    pairs = np.array(test_task_hierarchy.ALL)
    order = np.random.default_rng(0).permutation(len(pairs))
    valid = pairs[order[:10]]
    if changed:
        valid = valid[:5]
    save_file({"train.pairs": pairs[order[20:]], "valid.pairs": valid,
               "test.pairs": pairs[order[10:20]]}, path)  # fmt: skip
    return []


TASKS = [text, images, volumes, diffusion, speech, music, translation, graphs]


@pytest.mark.parametrize("write", TASKS, ids=lambda write: write.__name__)
def test_what_decides_is_neither_trained_on_nor_reported(write, tmp_path):
    """Different held-out examples change the held-out values and no other result."""
    task = write.__name__
    sizes = ["--threads", 1] if task == "graphs" else SIZES
    records = []
    for changed in (False, True):
        flags = write(tmp_path / f"data{changed:d}", changed)
        succeed(
            "compare", "--task", task, "--data", f"data{changed:d}", "--position", "none",
            "--steps", 10, "--warmup", 0, "--batch", 4, "--until-flat", "--flat-margin", 0,
            *sizes, *flags, "--out", f"run{changed:d}", cwd=tmp_path,
            GNOMON_PYTHON="none",
        )  # fmt: skip
        records.append(record_of(tmp_path / f"run{changed:d}"))
    (first,), (second,) = (record["runs"] for record in records)
    assert first["curve"] == second["curve"]
    assert first["losses"] == second["losses"]
    assert first["held_out"]["step"] == second["held_out"]["step"] == list(range(1, 8))
    assert first["held_out"]["value"] != second["held_out"]["value"]
    assert records[0]["held_out"] == records[1]["held_out"]


def test_validation_pairs_decide_in_a_hierarchy(tmp_path):
    values = []
    for changed in (False, True):
        hierarchy(tmp_path / "tree", changed)
        out = tmp_path / f"run{changed:d}"
        succeed("compare", "--task", "hierarchy", "--data", "tree", "--steps", 10, "--batch", 8,
                "--until-flat", "--flat-margin", 0, "--threads", 1, "--out", out,
                cwd=tmp_path, GNOMON_PYTHON="none")  # fmt: skip
        record = record_of(out)
        assert record["settings"]["splits"] == ["test"]
        assert record["held_out"] == {"part": f"{5 if changed else 10} validation pairs",
                                      "metric": "mrr"}  # fmt: skip
        values.append(record["runs"][0]["held_out"]["value"])
    assert values[0] != values[1]
    message = refused("compare", "--task", "hierarchy", "--data", "tree", "--splits", "valid",
                      "--until-flat", cwd=tmp_path)  # fmt: skip
    assert "--splits" in message
    assert "held out" in message
