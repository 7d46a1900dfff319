"""Careless use of the command line: invalid numbers, empty words, a full disk, two runs in one
folder, changed text, not enough memory.

Each mistake gives one clear line and a non-zero exit code, for every command and option to which it
applies.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_cli import (
    COMPARE,
    PROGRAM,
    SECONDS,
    TINY,
    TRAIN,
    config_of,
    copy_with_steps,
    gnomon,
    refused,
    succeed,
)

from gnomon.__main__ import main
from gnomon.lab.inspect.__main__ import PICTURES
from gnomon.lab.inspect.__main__ import main as inspect

pytestmark = pytest.mark.cpu("runs the program, which has --device")

FILE = "checkpoint.safetensors"
COMMANDS = ("train", "eval", "generate", "compare", "list", "bench")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("careless")
    text = "".join(f"line {n}: the quick brown fox, {n * n} times\n" for n in range(400))
    (path / "text.txt").write_text(text)
    (path / "other.txt").write_text(text.replace("quick", "slow"))
    return path


@pytest.fixture(scope="module")
def model(folder) -> pathlib.Path:
    succeed(*TRAIN, "--out", "model", "--steps", 3, "--length", 16, *TINY, cwd=folder)
    return folder / "model"


def options_of(command: list[str], cwd: pathlib.Path) -> dict[str, str]:
    """The help text of each option that takes a value."""
    text = succeed(*command, "--help", cwd=cwd)
    # An option and the text up to the next option.
    found = re.findall(r"^  +(?:-\w, ?)?(--[\w-]+) (.*(?:\n {4,}[^-\s].*)*)", text, re.M)
    return {name: words for name, words in found if re.match(r"[A-Z][A-Z,_]*\b", words)}


@pytest.fixture
def refuse(folder, model, capfd, monkeypatch):
    """Runs the program in this process (for speed) and returns its one-line error."""
    monkeypatch.chdir(folder)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGPIPE)}

    def run(*words: object) -> str:
        capfd.readouterr()
        assert main([*map(str, words)]) == 2, words
        out, errors = capfd.readouterr()
        (line,) = errors.splitlines()
        assert out == ""
        assert line.startswith("gnomon: ")
        return line

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


NUMBERS = re.compile(r"(INT|FLOAT|UINT)\b")


def test_every_numeric_option_rejects_other_words(folder, refuse):
    swept = 0
    for command in COMMANDS:
        for option, words in options_of([command], folder).items():
            kind = NUMBERS.match(words)
            if kind is None:
                continue
            swept += 1
            given = [command, "--model", "model"] if command in ("eval", "generate") else [command]
            if command in ("train", "compare"):
                given += ["--data", "text.txt"]
            if option in ("--depth", "--mlp") and command == "bench":
                given += ["--model", "dot/none"]
            for word in ("nan", "inf", "-inf", "-1", "1e300", "9" * 30, "x", "1x", "0x"):
                line = refuse(*given, f"{option}={word}")
                # The message contains the word as typed, not its conversion to a 64-bit number.
                assert option in line, (command, option, word, line)
                assert f" {word};" in line, (command, option, word, line)
            if kind[1] == "INT":
                assert option in refuse(*given, f"{option}=1.5")
    assert swept > 45


def test_every_list_refuses_an_empty_item(folder, refuse):
    swept = set()
    text = options_of(["train"], folder)["--task"].replace("\n", " ")
    tasks = re.findall(r"(?:Tasks:|\),) (\w+) \(", text)
    assert {"text", "images", "translation"} <= set(tasks)
    for command in ("train", "compare", "bench"):
        for task in ["text"] if command == "bench" else tasks:
            given = [command] if command == "bench" else [command, "--task", task]
            for option, words in options_of(given, folder).items():
                if "comma-separated" not in " ".join(words.lower().split()):
                    continue
                if (command, option) == ("train", "--position"):
                    continue  # A layer pattern, which is parsed after the data.
                swept.add(option)
                for items in ("1,,2", ",1", "1,", ","):
                    line = refuse(*given, f"{option}={items}")
                    assert f"{option} has an empty item in '{items}'" in line
    for items in ("16,,32", "16,"):
        assert "--lengths has an empty item" in refuse(
            "eval", "--model", "model", "--lengths", items
        )
    assert {"--lengths", "--position", "--similarity", "--adaptive", "--cases", "--model"} <= swept


def test_a_number_in_a_list_is_named_as_it_was_typed(folder, refuse):
    for word in ("99999999999999999999", "1e3", "0x10", "-4", "0", "x", "16.0"):
        for given in (["eval", "--model", "model"], ["compare", "--data", "text.txt"]):
            line = refuse(*given, f"--lengths=16,{word}")
            assert f"--lengths contains {word}; expected integers from 1 to" in line
    # Numbers are decimal, even with a leading zero.
    out = succeed("eval", "--model", "model", "--json", "--lengths", "010,+16", "--bytes", 64,
                  cwd=folder)  # fmt: skip
    assert [at["length"] for at in json.loads(out)["losses"]] == [10, 16]


def test_every_option_refuses_an_empty_word(folder, refuse):
    swept = 0
    before = sorted(p.name for p in folder.iterdir())
    for command in COMMANDS:
        for option in options_of([command], folder):
            swept += 1
            given = [command]
            if command in ("eval", "generate") and option != "--model":
                given += ["--model", "model"]
            if command in ("train", "compare") and option not in ("--data", "--resume"):
                given += ["--data", "text.txt"]
            if command == "bench" and option in ("--depth", "--mlp"):
                given += ["--model", "dot/none"]
            # If EMPTY is unset, a shell expands --option=$EMPTY to the second form. The next word
            # is then not the option's value.
            for words in ([option, ""], [f"{option}=", "--help"]):
                line = refuse(*given, *words)
                assert f"{option} is empty" in line, (command, words, line)
    assert swept > 60
    assert sorted(p.name for p in folder.iterdir()) == before


@pytest.mark.parametrize("picture", PICTURES)
def test_every_picture_option_rejects_invalid_values(folder, model, picture, capsys, monkeypatch):
    monkeypatch.chdir(folder)

    def refuse(*words: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            inspect([*words])
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    numbers = ("--length", "--dim", "--distance", "--heads", "--head-dim", "--r", "--shift",
               "--seed", "--dims", "--branching", "--depth", "--steps", "--restarts", "--layer",
               "--head")  # fmt: skip
    given = [picture]
    if picture in ("tables", "attention"):
        given += ["--model", "model"]
    for option in options_of(["inspect", picture], folder):
        assert option in refuse(*given, f"{option}=")
        if option in numbers:
            for word in ("nan", "inf", "x", "1" + 30 * "0"):
                assert option in refuse(*given, f"{option}={word}")
            if option not in ("--shift", "--layer", "--head"):
                assert option in refuse(*given, f"{option}=-1")
    assert not list(folder.glob("*.png"))


@pytest.mark.parametrize(
    "words",
    ["decay --position", "encoding --position", "cones --cone", "rank --similarity", "rank --dims"],
)
def test_pictures_refuse_an_empty_item(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture, option = words.split()
    for items in ("2,,4", ",2", "2,", ","):
        with pytest.raises(SystemExit) as stopped:
            inspect([picture, f"{option}={items}"])
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert option in line
        expects = (
            " is not a comma-separated list of"
            if option == "--dims"
            else " has an empty item; expected"
        )
        assert f"'{items}'{expects}" in line
    assert not list(tmp_path.iterdir())


def test_distances_that_no_picture_shows(folder, tmp_path):
    line = refused("inspect", "decay", "--distance", 100_000_000, cwd=folder)
    assert "--distance: '100000000' is not an integer from 1 to 100000" in line
    succeed("inspect", "decay", "--position", "rope,alibi", "--distance", 100_000, "--heads", 2,
            "--head-dim", 4, "--out", tmp_path / "far.png", cwd=folder)  # fmt: skip


@pytest.mark.parametrize("pair", ["0,1000,0.1,900", "0,1e300,1,1", "0,1e-300,1,1", "1e9,1,0,1"])
def test_cones_far_above_each_other(folder, tmp_path, pair):
    done = gnomon("inspect", "cones", "--cone", "umbral", f"--pair={pair}", "--out",
                  tmp_path / "a.png", cwd=folder)  # fmt: skip
    assert (done.returncode, "--pair" in done.stderr) in ((0, False), (2, True)), done.stderr
    assert len(done.stderr.splitlines()) == done.returncode // 2


def run_into(output: int, arguments: list[object], cwd: pathlib.Path):
    return subprocess.run(
        [PROGRAM, *map(str, arguments)],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        timeout=SECONDS,
    )


PRINTING = {
    "help": ["--help"],
    "version": ["--version"],
    **{f"{command} --help": [command, "--help"] for command in (*COMMANDS, "inspect")},
    "list": ["list"],
    "list --json": ["list", "--json"],
    "list --markdown": ["list", "--markdown"],
    "train": [*TRAIN, "--out", "full", "--steps", 1, "--length", 16, *TINY],
    "compare": [*COMPARE, "--out", "full", "--steps", 1, "--lengths", 16, "--position", "none",
                *TINY],
    "eval": ["eval", "--model", "model"],
    "eval --json": ["eval", "--model", "model", "--json"],
    # The program must end at the first byte that cannot be written, not at the last.
    "generate": ["generate", "--model", "model", "--tokens", 10**9],
    "bench": ["bench", "--length", 16, "--repeats", 1, "--cases", "dot"],
    "bench --json": ["bench", "--length", 16, "--repeats", 1, "--cases", "dot", "--json"],
    "bench --model": ["bench", "--model", "dot/none", "--length", 16, "--repeats", 1],
    "inspect": ["inspect", "rotation", "--out", "full/rotation.png"],
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * n.endswith(" --help")) for n in PRINTING],
)
def test_a_full_disk_behind_the_standard_output(folder, model, tmp_path, name):
    for path in ("text.txt", "model"):
        (tmp_path / path).symlink_to(folder / path)
    with open("/dev/full", "w") as full:
        done = run_into(full.fileno(), PRINTING[name], tmp_path)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == "gnomon: cannot write to standard output: No space left on device"
    if name in ("train", "compare"):
        # The files on disk are not lost.
        assert (tmp_path / "full" / (FILE if name == "train" else "table.md")).exists()


@pytest.mark.parametrize("picture", ["decay", "rotation"])
def test_a_full_disk_behind_a_picture(tmp_path, capsys, picture):
    out = tmp_path / "a picture.png"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most, name in ((1000, out), (1, out)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with pytest.raises(SystemExit) as stopped:
                inspect([picture, "--out", str(out)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert stopped.value.code == 2
        assert capsys.readouterr().err == f"gnomon: {name}: File too large\n"
        assert not list(tmp_path.iterdir())


def test_numbers_beside_a_picture_on_a_full_disk(tmp_path, capsys, monkeypatch):
    def save(figure, path, **options):
        path.write_bytes(b"a small picture")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(SystemExit):
            inspect(["decay", "--out", str(tmp_path / "a.png")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == f"gnomon: {tmp_path / 'a.json'}: File too large\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


WITHOUT_FOLDER = {
    "--help": 0,
    "list": 0,
    "train --help": 0,
    "inspect --help": 0,
    "inspect decay --help": 0,
    "data --help": 0,
    "data get --list": 0,
    "train --data {data}": 2,
    "compare --data {data}": 2,
    "eval --model {model}": 2,
    "generate --model {model}": 2,
    "bench --length 16 --repeats 1": 2,
    "inspect decay": 2,
    "data out.safetensors train.x=x.npy": 2,
    "data get cora": 2,
}


@pytest.mark.parametrize("words", WITHOUT_FOLDER)
def test_a_working_folder_that_was_deleted(folder, model, tmp_path, words):
    arguments = words.format(data=folder / "text.txt", model=model)
    done = subprocess.run(
        f"cd '{tmp_path}' && rmdir '{tmp_path}' && exec '{PROGRAM}' {arguments}", shell=True,
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == WITHOUT_FOLDER[words], done.stderr
    if done.returncode == 0:
        assert done.stdout
        assert not done.stderr
    else:
        (line,) = done.stderr.splitlines()
        assert line.startswith("gnomon: ")
        assert "the working directory was deleted; change to an existing one" in line
        assert not done.stdout


def test_a_closed_standard_output(folder, model):
    for arguments in (["list"], ["eval", "--model", "model"], ["inspect", "--help"]):
        words = [f"'{word}'" for word in [PROGRAM, *arguments]]
        done = subprocess.run(
            f"exec {' '.join(words)} >&-", shell=True, capture_output=True, text=True, cwd=folder,
            timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 2, arguments
        assert done.stderr.startswith("gnomon: cannot write to standard output: ")


def test_reports_on_a_full_disk():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gnomon.report", "--help"], stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=SECONDS,
        )  # fmt: skip
    assert done.returncode == 2
    assert "cannot write to standard output" in done.stderr


def start(arguments: list[object], cwd: pathlib.Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PROGRAM, *map(str, arguments)], cwd=cwd, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def wait_for(path: pathlib.Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_one_run_at_a_time_works_in_a_folder(folder, tmp_path, command):
    begin = {
        "train": [*TRAIN, "--length", 16],
        "compare": [*COMPARE, "--lengths", 16, "--position", "none"],
    }[command]
    run = tmp_path / "run"
    begin = [*begin, "--steps", 100_000_000, *TINY, "--out", run]
    record = run / (FILE if command == "train" else "results.json")
    process = start(begin, folder)
    try:
        wait_for(record, process)
        for arguments in (begin, [command, "--resume", run]):
            line = refused(*arguments, cwd=folder)
            assert f"another process is using the folder {run}" in line
        # The folder contains neither a lock file nor a partial file. After a minute, a run has a
        # checkpoint.
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        left = {p.name.split(".")[0] for p in run.iterdir()}
        assert left <= {"checkpoint", "results", "table", "unfinished"}
    finally:
        process.kill()
        process.wait()
    # A lock ends with its process, even if the process is killed.
    leftover = run / f"{record.name}.0123456789abcdef.part"
    leftover.write_text("half written")
    process = start([command, "--resume", run], folder)
    try:
        deadline = time.monotonic() + SECONDS
        while leftover.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()


def test_processes_that_begin_in_the_same_folder_at_once(folder, tmp_path):
    run = tmp_path / "run"
    arguments = [*TRAIN, "--steps", 300, "--length", 16, *TINY, "--out", run]
    processes = [start(arguments, folder) for _ in range(4)]
    codes = sorted(process.wait(SECONDS) for process in processes)
    assert codes == [0, 2, 2, 2]
    assert [p.name for p in run.iterdir()] == [FILE]
    assert config_of(run / FILE)["step"] == 300


def test_resume_reports_the_same_results(folder, tmp_path):
    settings = ["--evaluation-bytes", 100, "--checkpoint-every", 3]
    begin = [*TRAIN, "--steps", 8, "--length", 16, *TINY]
    whole = succeed(*begin, *settings, "--out", tmp_path / "whole", cwd=folder)
    assert whole != succeed(*begin, "--out", tmp_path / "default", cwd=folder)
    succeed(*begin[:3], "--steps", 5, "--warmup", 0, *begin[5:], *settings, "--out",
            tmp_path / "part", cwd=folder)  # fmt: skip
    file = tmp_path / "part" / FILE
    assert config_of(file)["run"] == {"checkpoint_every": 3, "evaluation_bytes": 100}
    # Resuming a finished run uses its weights, so the loss is the same.
    again = succeed("train", "--resume", tmp_path / "whole", cwd=folder)
    assert again == whole
    # New settings are stored, and apply from then on.
    other = succeed("train", "--resume", tmp_path / "whole", "--evaluation-bytes", 1000, cwd=folder)
    assert other != whole
    assert config_of(tmp_path / "whole" / FILE)["run"] == {
        "checkpoint_every": 3,
        "evaluation_bytes": 1000,
    }
    assert succeed("train", "--resume", tmp_path / "whole", cwd=folder) == other
    # A run that continues from this checkpoint keeps the setting.
    (tmp_path / "more").mkdir()
    copy_with_steps(file, tmp_path / "more" / FILE, 7)
    succeed("train", "--resume", tmp_path / "more", cwd=folder)
    assert config_of(tmp_path / "more" / FILE)["run"]["evaluation_bytes"] == 100


def test_checkpoints_from_before_have_the_defaults(folder, model, tmp_path):
    config = config_of(model / FILE)
    del config["run"]
    tensors = load_file(model / FILE)
    save_file(tensors, tmp_path / FILE, metadata={"gnomon": json.dumps(config)})
    succeed("train", "--resume", tmp_path, cwd=folder)
    assert config_of(tmp_path / FILE)["run"] == {
        "checkpoint_every": 500,
        "evaluation_bytes": 131072,
    }


def test_eval_says_that_the_text_is_another(folder, model, tmp_path):
    same = gnomon("eval", "--model", "model", "--data", "text.txt", cwd=folder)
    assert same.returncode == 0
    assert same.stderr == ""
    other = gnomon("eval", "--model", "model", "--data", "other.txt", cwd=folder)
    assert other.returncode == 0
    (line,) = other.stderr.splitlines()
    assert line.startswith(
        "gnomon: note: the text at other.txt differs from the model's training data"
    )
    assert str(folder / "text.txt") in line
    # A copy of the text is recognised as the same text.
    (tmp_path / "copy.txt").write_bytes((folder / "text.txt").read_bytes())
    copy = gnomon("eval", "--model", "model", "--data", tmp_path / "copy.txt", cwd=folder)
    assert copy.stderr == ""
    # The text of a run changes in place.
    run = tmp_path / "run"
    succeed("train", "--data", "copy.txt", "--out", run, "--steps", 1, "--length", 16, *TINY,
            cwd=tmp_path)  # fmt: skip
    (tmp_path / "copy.txt").write_bytes((folder / "other.txt").read_bytes())
    changed = gnomon("eval", "--model", run, cwd=tmp_path)
    assert changed.returncode == 0
    assert "copy.txt has changed since the model was trained" in changed.stderr


def test_eval_json_reports_whether_the_text_differs(folder, model, tmp_path):
    def told(*arguments: object) -> object:
        return json.loads(succeed("eval", *arguments, "--json", cwd=folder))["trained_on_this_text"]

    assert told("--model", "model") is True
    assert told("--model", "model", "--data", "other.txt") is False
    # A file that contains only a model has no record of the text.
    config = {name: config_of(model / FILE)[name] for name in ("format", "model", "tokens")}
    tensors = {n: t for n, t in load_file(model / FILE).items() if n.startswith("model.")}
    save_file(tensors, tmp_path / FILE, metadata={"gnomon": json.dumps(config)})
    assert told("--model", tmp_path, "--data", "text.txt") is None


HUGE = {
    "train": ([*TRAIN, "--batch", 100_000_000], "--batch 100000000"),
    "compare": ([*COMPARE, "--batch", 100_000_000], "--batch 100000000"),
    "bench": (["bench", "--batch", 100_000_000], "--batch 100000000"),
    "bench, beyond 64 bits": (
        ["bench", "--batch", 10**12, "--dim", 10**12], "--dim 1000000000000"
    ),
    "bench --model": (["bench", "--model", "dot/none", "--batch", 10**8], "--batch 100000000"),
    "table": ([*TRAIN, "--position", "learned", "--length", 10**12], "--length 1000000000000"),
    "many layers": ([*TRAIN, "--depth", 10**12], "--depth 1000000000000"),
    "wide": ([*TRAIN, "--dim", 10**12], "--dim 1000000000000"),
    "layers of bench": (["bench", "--model", "dot/none", "--depth", 10**9], "--depth 1000000000"),
}  # fmt: skip


@pytest.mark.parametrize("name", HUGE)
def test_more_memory_than_there_is(folder, name):
    arguments, part = HUGE[name]
    line = refused(*arguments, cwd=folder)
    assert "not enough memory " in line
    assert part in line


@pytest.mark.parametrize("command", ["train", "compare"])
def test_memory_that_the_system_refuses(folder, tmp_path, command):
    """A memory limit below the machine's memory is detected when memory is used."""
    begin = {
        "train": [*TRAIN, "--length", 64, "--out", tmp_path / "run"],
        "compare": [*COMPARE, "--lengths", 64, "--position", "none", "--out", tmp_path / "run"],
    }[command]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    done = subprocess.run(
        [PROGRAM, *map(str, begin), "--steps", "1", "--batch", "20000", "--dim", "64", "--depth",
         "1", "--mlp", "64", "--threads", "1"],
        capture_output=True, text=True, cwd=folder, timeout=SECONDS, preexec_fn=limit,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("gnomon: not enough memory for --batch 20000 and --length"), last


def test_an_excessive_learning_rate(folder, tmp_path):
    done = gnomon(
        "train", "--data", folder / "text.txt", "--out", tmp_path / "run", *TINY, "--length", 16,
        "--steps", 200, "--learning-rate", 1000, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert re.match(
        r"gnomon: training diverged: the loss is (inf|nan|-nan) at step",
        done.stderr.splitlines()[-1],
    )


def test_numbers_are_decimal(folder, tmp_path):
    succeed(*TRAIN, "--out", tmp_path / "run", "--steps", "010", "--length", "+16", *TINY,
            cwd=folder)  # fmt: skip
    training = config_of(tmp_path / "run" / FILE)["training"]
    assert (training["steps"], training["length"]) == (10, 16)


def test_memory_beyond_the_text_is_the_text(folder, tmp_path):
    run = tmp_path / "run"
    succeed(*TRAIN, "--steps", 2, "--length", 8, "--out", run, *TINY, cwd=folder)
    losses = [
        json.loads(
            succeed("eval", "--model", run, "--bytes", 200, "--memory", memory, "--json",
                    cwd=folder)
        )["losses"]
        for memory in (100_000, 10**12)
    ]  # fmt: skip
    assert losses[0] == losses[1]
    assert np.isfinite([at["loss"] for at in losses[0]]).all()
