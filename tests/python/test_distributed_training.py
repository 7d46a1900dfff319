"""Training with several processes from the command line, compared with one process."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_cli import PROGRAM, SECONDS, copy_with_steps, step_of, succeed

pytestmark = pytest.mark.cpu("starts its own processes")

FILE = "checkpoint.safetensors"
# Of the five windows of a batch, two processes get two and three. The random numbers of a window,
# for dropout and CAPE's shifts, are the same as with one process. Memories, and the embeddings
# cached by a convolution, are gathered for a checkpoint.
TRAIN = [
    "train", "--data", "text.txt", "--dim", 16, "--depth", 2, "--heads", 2, "--mlp", 32,
    "--length", 16, "--batch", 5, "--similarity", "penumbral", "--position",
    "rope+alibi:slopes=learned+conv:kernel=3:groups=2+cape", "--memory", 24, "--dropout", 0.2,
    "--tokens", "words",
]  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]


def start(arguments: list[object], cwd: pathlib.Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(argument) for argument in arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code, the standard output and the standard error."""
    try:
        output, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, output, errors


def run_one(arguments: list[object], cwd: pathlib.Path) -> str:
    return succeed(*arguments, cwd=cwd, OMP_NUM_THREADS="1")


def start_two(
    arguments: list[object], cwd: pathlib.Path, second: list[object] | None = None
) -> list[subprocess.Popen[str]]:
    """Starts two processes like torchrun does; process 1 may have its own arguments."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        start(
            [os.environ["GNOMON_PYTHON"], "-m", "gnomon", *words],
            cwd,
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        for rank, words in enumerate([arguments, second or arguments])
    ]


def run_two(arguments: list[object], cwd: pathlib.Path) -> None:
    for code, _, errors in [finish(process) for process in start_two(arguments, cwd)]:
        assert code == 0, errors


def refused_by_two(
    arguments: list[object], cwd: pathlib.Path, second: list[object] | None = None
) -> str:
    """The only error line that both processes together print."""
    ends = [finish(process) for process in start_two(arguments, cwd, second)]
    assert [code for code, _, _ in ends] == [2, 2], ends
    lines = [line for _, _, errors in ends for line in errors.splitlines() if "gnomon: " in line]
    assert len(lines) == 1, ends
    return lines[0]


def assert_same(got: pathlib.Path, expected: pathlib.Path) -> None:
    """Compares checkpoints that are equal up to the order of summation."""
    assert step_of(got / FILE) == step_of(expected / FILE)
    got_tensors, expected_tensors = load_file(got / FILE), load_file(expected / FILE)
    assert got_tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        np.testing.assert_allclose(got_tensors[name], tensor, atol=2e-5, rtol=0, err_msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("training")
    text = "".join(f"line {n % 19}: the quick brown fox, {n % 7} times\n" for n in range(400))
    (path / "text.txt").write_text(text)
    return path


def test_torchrun_matches_one_process_and_either_resumes(folder):
    arguments = [*TRAIN, "--steps", 6]
    alone = run_one([*arguments, "--out", "one"], folder)
    code, output, errors = finish(
        start([sys.executable, *TORCHRUN, "-m", "gnomon", *arguments, "--out", "two"], folder)
    )
    assert code == 0, errors
    # The output is printed only once.
    assert output == alone
    assert errors.count(" of training data; steps 0 to 6") == 1
    assert [file.name for file in (folder / "two").iterdir()] == [FILE]
    assert_same(folder / "two", folder / "one")

    for run, name in [("one", "one-one"), ("two", "two-one"), ("one", "one-two")]:
        (folder / name).mkdir()
        copy_with_steps(folder / run / FILE, folder / name / FILE, steps=12)
    run_one(["train", "--resume", "one-one"], folder)
    run_one(["train", "--resume", "two-one"], folder)
    run_two(["train", "--resume", "one-two"], folder)
    assert load_file(folder / "one-one" / FILE)["memory.layers.1"].shape == (5, 24, 16)
    assert_same(folder / "two-one", folder / "one-one")
    assert_same(folder / "one-two", folder / "one-one")


def test_interrupting_one_process_stops_all_with_a_checkpoint(folder):
    arguments = [*TRAIN, "--steps", 100000, "--checkpoint-every", 20, "--out", "stopped"]
    file = folder / "stopped" / FILE
    processes = start_two(arguments, folder)
    deadline = time.monotonic() + SECONDS
    while not (file.exists() and step_of(file) >= 20):
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGINT)
    ends = [finish(process) for process in processes]
    assert [code for code, _, _ in ends] == [130, 130], ends
    stopped_at = step_of(file)
    assert stopped_at >= 20
    assert f"stopped after step {stopped_at} of 100000" in ends[0][2]
    assert "stopped" not in ends[1][2]


def test_an_error_in_one_process_ends_all(folder):
    wrong = ["train", "--data", "absent.txt", *TRAIN[3:], "--out", "none"]
    assert "absent.txt" in refused_by_two([*TRAIN, "--out", "none"], folder, wrong)
    assert not (folder / "none").exists()


@pytest.mark.long
def test_commands_for_one_process_are_refused_once(folder):
    message = refused_by_two(["compare", "--data", "text.txt"], folder)
    assert "compare runs in one process, but 2 were started" in message


@pytest.mark.long
def test_the_module_is_the_program(folder):
    arguments = ["train", "--data", "absent.txt"]
    by_module = finish(start([os.environ["GNOMON_PYTHON"], "-m", "gnomon", *arguments], folder))
    assert by_module == finish(start([PROGRAM, *arguments], folder))
    assert by_module[0] == 2
