"""Comparisons with several workers, seeds added on demand, checkpoints of runs, TensorBoard."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from test_cli import PROGRAM, SECONDS, TINY, gnomon, interrupt, losses, refused, succeed

pytestmark = pytest.mark.cpu("runs the program, which has --device")

# With equal thread counts, results are bitwise equal.
RUN = ["--lengths", "16,32", "--evaluation-bytes", 512, "--threads", 1, *TINY]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("compare")
    text = "".join(f"line {n}: the quick brown fox, {n * n} times\n" for n in range(400))
    (path / "text.txt").write_text(text)
    return path


@pytest.fixture(scope="module")
def whole(folder) -> pathlib.Path:
    """Four runs in one process."""
    succeed(*arguments(folder / "whole"), cwd=folder)
    return folder / "whole"


def arguments(out: pathlib.Path) -> list[object]:
    return ["compare", "--data", "text.txt", "--position", "none,rope", "--seeds", 2,
            "--steps", 300, *RUN, "--out", out]  # fmt: skip


def outcome(run: pathlib.Path) -> dict[str, Any]:
    """The record of a comparison, without times, machine and name."""
    record = json.loads((run / "results.json").read_text())
    for key in ("sessions", "started", "updated", "name"):
        del record[key]
    for entry in record["runs"]:
        for key in ("ms_per_step", "ms_quartiles", "others", "processor_ms_per_step", "seconds"):
            del entry[key]
    for entry in record["summary"]:
        del entry["ms_per_step"]
    return record


def descendants(process: int) -> list[int]:
    """All descendants of a process."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found, level = [], [process]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += level
    return found


def command_of(process: int) -> str:
    try:
        return pathlib.Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.mark.long
@pytest.mark.parametrize(("workers", "kills"), [(2, 2), (4, 4)])
def test_killed_runs_change_nothing(folder, whole, tmp_path, workers, kills):
    out = tmp_path / "workers"
    words = [*arguments(out), "--workers", workers, "--checkpoint-every", 20]
    process = subprocess.Popen(
        [PROGRAM, *map(str, words)], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"GNOMON_PYTHON": sys.executable},
    )  # fmt: skip
    draw = random.Random(5)
    killed = 0
    deadline = time.monotonic() + SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            # Kills a process only once a checkpoint exists, so that some work is lost, but not all.
            if killed >= kills or not list(out.glob("unfinished/*/checkpoint.*")):
                continue
            runs = [pid for pid in descendants(process.pid) if "--only" in command_of(pid)]
            if runs:
                os.kill(draw.choice(runs), signal.SIGKILL)
                killed += 1
                time.sleep(0.5)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert killed == kills
    assert outcome(out) == outcome(whole)
    assert not (out / "unfinished").exists()


@pytest.mark.long
def test_a_killed_comparison_loses_nothing_that_was_done(folder, whole, tmp_path):
    out = tmp_path / "client"
    process = subprocess.Popen(
        [PROGRAM, *map(str, [*arguments(out), "--workers", 2, "--checkpoint-every", 20])],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | {"GNOMON_PYTHON": sys.executable},
    )  # fmt: skip
    deadline = time.monotonic() + SECONDS
    while len(list(out.glob("unfinished/*/checkpoint.*"))) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    below = descendants(process.pid)
    process.kill()
    process.wait()
    # The workers notice that the program has ended, save checkpoints and exit.
    while any(command_of(pid) for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert list(out.glob("unfinished/*/checkpoint.*"))
    succeed("compare", "--resume", out, "--threads", 1, cwd=folder)
    assert outcome(out) == outcome(whole)


def test_a_run_continues_from_its_checkpoint(folder, tmp_path):
    words = ["compare", "--data", "text.txt", "--run", "penumbral/rope+hype:tau=learned",
             "--steps", 600, *RUN]  # fmt: skip
    succeed(*words, "--out", tmp_path / "whole", cwd=folder)
    checkpoint = tmp_path / "parts/unfinished/0-0/checkpoint.safetensors"
    code, errors = interrupt(
        [*words, "--out", tmp_path / "parts", "--checkpoint-every", 50], folder, checkpoint.exists
    )
    assert code == 130, errors
    at = checkpoint.stat().st_mtime
    # A resumed run keeps its settings, except the checkpoint interval.
    succeed("compare", "--resume", tmp_path / "parts", "--threads", 1, "--checkpoint-every", 1000,
            cwd=folder)  # fmt: skip
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert not checkpoint.exists()

    # The message names an unreadable checkpoint.
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"\0" * 100)
    record = tmp_path / "parts/results.json"
    text = json.loads(record.read_text())
    text["runs"], text["summary"] = [], []
    record.write_text(json.dumps(text))
    done = subprocess.run(
        [PROGRAM, "compare", "--resume", tmp_path / "parts"], cwd=folder, capture_output=True,
        text=True, check=False, env=os.environ | {"GNOMON_PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 2
    assert str(checkpoint) in done.stderr.splitlines()[-1]
    assert "remove this file to restart the run" in done.stderr.splitlines()[-1]
    assert at > 0


def test_seeds_are_added_while_a_pair_is_undecided(folder, tmp_path):
    # The first two models are equal except for their names, and the third differs clearly.
    words = ["compare", "--data", "text.txt", "--run", "dot/none", "--run", "dot/alibi:slopes=0",
             "--run", "dot/rope", "--steps", 40, *RUN]  # fmt: skip
    out = tmp_path / "wide"
    text = succeed(*words, "--out", out, "--seeds", "3..5", "--margin", 10, cwd=folder)
    assert "0 of 3 pairs differ, 3 are equivalent" in text
    assert len(outcome(out)["runs"]) == 9

    out = tmp_path / "narrow"
    succeed(*words, "--out", out, "--seeds", "3..4", "--margin", 1e-9, cwd=folder)
    record = outcome(out)
    settings = record["settings"]
    assert settings["seeds"] == [0, 1, 2]
    assert settings["seed_range"] == [3, 4]
    assert settings["margin"] == 1e-9
    assert [entry["seed"] for entry in settings["added_seeds"]] == [3]
    added = [run["combination"] for run in record["runs"] if run["seed"] == 3]
    assert added == settings["added_seeds"][0]["combinations"]
    page = (out / "report.html").read_text()
    assert "Seeds were added, from 3 to at most 4" in page
    assert "over 3 to 4 seeds" in (out / "table.md").read_text()
    # A resumed comparison keeps its seeds.
    (out / "report.html").unlink()
    succeed("compare", "--resume", out, cwd=folder)
    assert outcome(out) == record


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--seeds", "0"], ["--seeds is 0", "FEWEST..MOST"]),
        (["--seeds", "5..3", "--margin", "1"], ["--seeds is 5..3"]),
        (["--seeds", "3..x", "--margin", "1"], ["--seeds is 3..x"]),
        (["--seeds", "2..4", "--margin", "1"], ["--seeds is 2..4", "at least 3"]),
        (["--seeds", "3..4"], ["--seeds 3..4 needs --margin"]),
        (["--margin", "-1"], ["--margin is -1"]),
        (["--workers", "0"], ["--workers is 0"]),
        (
            ["--workers", "2", "--cluster", "tcp://a:1"],
            ["--workers cannot be combined with --cluster"],
        ),
        (["--only", "0,0"], ["--only needs --resume"]),
    ],
)
def test_wrong_input_is_named(folder, flags, told):
    message = refused("compare", "--data", "text.txt", *flags, cwd=folder)
    for part in told:
        assert part in message


def test_missing_packages_are_named_before_anything_runs(folder, tmp_path):
    for package in ("distributed", "tensorboard"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError")
    out = tmp_path / "out"
    words = ["compare", "--data", "text.txt", *RUN, "--out", out]
    for option, package in (
        (["--cluster", "tcp://a:1"], "distributed"),
        (["--tensorboard"], "tensorboard"),
    ):
        done = gnomon(*words, *option, cwd=folder, PYTHONPATH=str(tmp_path))
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert f"pip install {package}" in line
    assert not out.exists()


def test_workers_need_no_package(folder, tmp_path):
    (tmp_path / "distributed.py").write_text("raise ImportError")
    words = ["compare", "--data", "text.txt", "--position", "none,rope", "--steps", 20, *RUN]
    succeed(*words, "--out", tmp_path / "whole", cwd=folder)
    done = gnomon(*words, "--workers", 2, "--out", tmp_path / "workers", cwd=folder,
                  PYTHONPATH=str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert outcome(tmp_path / "workers") == outcome(tmp_path / "whole")
    record = json.loads((tmp_path / "workers/results.json").read_text())
    assert [session["workers"] for session in record["sessions"]] == [2]


@pytest.mark.long
def test_workers_stop_on_ctrl_c(folder, whole, tmp_path):
    out = tmp_path / "out"
    words = [*arguments(out), "--workers", 2, "--checkpoint-every", 20]
    code, errors = interrupt(
        words, folder, lambda: len(list(out.glob("unfinished/*/checkpoint.*"))) == 2
    )
    assert code == 130, errors
    assert json.loads((out / "results.json").read_text())["status"] == "interrupted"
    succeed("compare", "--resume", out, "--workers", 2, "--threads", 1, cwd=folder)
    assert outcome(out) == outcome(whole)


@pytest.mark.parametrize("workers", [[], pytest.param(["--workers", 2], marks=pytest.mark.long)])
def test_tensorboard_shows_the_curves_of_the_record(folder, tmp_path, workers):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    succeed("compare", "--data", "text.txt", "--position", "none,rope", "--steps", 40, *RUN,
            "--until-flat", "--flat-margin", 1, "--tensorboard", *workers, "--out", out,
            cwd=folder)  # fmt: skip
    record = outcome(out)
    for run in record["runs"]:
        (events,) = out.glob(f"tensorboard/{run['combination']}-*-seed-{run['seed']}")
        shown = accumulator.EventAccumulator(str(events)).Reload()
        curve = shown.Scalars("training/loss")
        assert [point.step for point in curve] == run["curve"]["step"]
        assert [point.value for point in curve] == pytest.approx(run["curve"]["loss"], rel=1e-6)
        for at in run["losses"]:
            (point,) = shown.Scalars(f"loss/length {at['length']}")
            assert point.value == pytest.approx(at["loss"], rel=1e-6)
            assert point.step == run["curve"]["step"][-1] < 40


@pytest.mark.long
def test_workers_on_two_hosts(folder, whole, tmp_path):
    """A scheduler on one host and a worker on another, simulated by network namespaces."""
    pytest.importorskip("distributed")
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs ip and root")
    names = [f"gnomon{os.getpid()}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    started = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("-n", names[0], "link", "add", "left", "type", "veth", "peer", "name", "right",
               "netns", names[1])  # fmt: skip
            for name, link, address in zip(
                names, ("left", "right"), ("10.9.8.1", "10.9.8.2"), strict=True
            ):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")

        def start(name: str, *words: str) -> None:
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "distributed.cli.dask_"]
            command[-1] += words[0]
            output = (tmp_path / f"{words[0]}-{name}.log").open("w")
            started.append(
                subprocess.Popen([*command, *words[1:]], stdout=output, stderr=output, cwd="/")
            )

        address = "tcp://10.9.8.1:8786"
        start(names[0], "scheduler", "--host", "10.9.8.1", "--no-dashboard")
        for name in names:
            start(name, "worker", address, "--nthreads", "1", "--no-dashboard")
        out = tmp_path / "hosts"
        subprocess.run(
            ["ip", "netns", "exec", names[0], PROGRAM, *map(str, arguments(out)),
             "--cluster", address],
            cwd=folder, check=True, timeout=SECONDS,
            env=os.environ | {"GNOMON_PYTHON": sys.executable},
        )  # fmt: skip
        assert outcome(out) == outcome(whole)
        logs = [(tmp_path / f"worker-{name}.log").read_text() for name in names]
        assert all("Registered to" in log for log in logs)
    finally:
        for process in started:
            process.terminate()
            process.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
