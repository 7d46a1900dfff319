"""The command line, end to end on tiny models: every command, every kind of invalid input,
Ctrl-C."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import warm_python
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from gnomon.lab.report.__main__ import main as report_main

pytestmark = pytest.mark.cpu("runs the program, which has --device")

ROOT = pathlib.Path(__file__).resolve().parents[2]
BESIDE = pathlib.Path(sys.executable).parent / "gnomon"
PROGRAM = os.environ.get("GNOMON_PROGRAM", BESIDE if BESIDE.exists() else ROOT / "build/bin/gnomon")

TINY = ["--dim", "16", "--depth", "1", "--heads", "2", "--mlp", "32", "--batch", "4"]
SECONDS = 300


def gnomon(*arguments: object, cwd: pathlib.Path, **environment: str):
    chosen = "GNOMON_PROGRAM" in os.environ
    forks = not chosen and not any(name.startswith(warm_python.EARLY) for name in environment)
    start = [os.environ["GNOMON_PYTHON"], "-m", "gnomon"] if forks else [PROGRAM]
    return subprocess.run(
        [*start, *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",  # a byte model may generate invalid text
        timeout=SECONDS,
        cwd=cwd,
        env=os.environ | environment,
    )


def succeed(*arguments: object, cwd: pathlib.Path, **environment: str) -> str:
    done = gnomon(*arguments, cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*arguments: object, cwd: pathlib.Path) -> str:
    """The one-line error for invalid input."""
    done = gnomon(*arguments, cwd=cwd)
    assert done.returncode == 2, (done.returncode, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("gnomon: ")
    assert done.stdout == ""
    return lines[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("cli")
    text = "".join(f"line {n}: the quick brown fox, {n * n} times\n" for n in range(400))
    (path / "text.txt").write_text(text)
    (path / "empty.txt").write_text("")
    (path / "short.txt").write_text("only a few bytes\n" * 20)
    return path


@pytest.fixture(scope="module")
def model(folder) -> pathlib.Path:
    out = folder / "model"
    succeed(
        "train", "--data", "text.txt", "--out", out, "--steps", 30, "--length", 32,
        "--position", "rope+hype:tau=learned", "--similarity", "penumbral", *TINY, cwd=folder,
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def comparison(folder) -> pathlib.Path:
    out = folder / "comparison"
    succeed(
        "compare", "--data", "text.txt", "--out", out, "--steps", 12, "--lengths", "16,32,64",
        "--position", "learned,rope", "--run", "umbral/alibi", "--seeds", 2,
        "--evaluation-bytes", 512, *TINY, cwd=folder,
    )  # fmt: skip
    return out


def test_help_names_every_command_and_option(folder):
    text = succeed("--help", cwd=folder)
    for command in ("train", "eval", "generate", "compare", "data", "list", "inspect", "bench"):
        assert command in text
        assert "--help" in succeed(command, "--help", cwd=folder)
    assert "--learning-rate" in succeed("compare", "--help", cwd=folder)
    assert succeed("--version", cwd=folder).strip().count(".") == 2


def test_list_is_the_catalogue(folder):
    text = succeed("list", cwd=folder)
    catalogue = json.loads(succeed("list", "--json", cwd=folder))
    names = [e["name"] for e in catalogue["similarities"] + catalogue["positions"]]
    assert {"dot", "umbral", "penumbral", "none", "rope", "alibi", "t5", "hype"} <= set(names)
    for name in names:
        assert f"\n  {name}\n" in text
    assert all(e["formula"] for e in catalogue["similarities"])
    for entry in catalogue["similarities"] + catalogue["positions"]:
        assert f"cost: {entry['cost']}" in text
        assert f"used in: {entry['use']}" in text


def test_train_leaves_a_checkpoint_that_others_can_read(model):
    file = model / "checkpoint.safetensors"
    tensors = load_file(file)
    assert tensors["model.embedding.weight"].shape == (256, 16)
    assert tensors["optimizer.exp_avg.embedding.weight"].shape == (256, 16)
    config = config_of(file)
    assert config["step"] == 30
    assert config["model"]["position"] == "rope+hype:tau=learned"
    assert list(model.iterdir()) == [file]


def test_checkpoint_rewritten_by_others_is_read(model, tmp_path):
    file = model / "checkpoint.safetensors"
    with safe_open(file, "numpy") as content:
        save_file(load_file(file), tmp_path / "copy", metadata=content.metadata())
    arguments = ["--json", "--lengths", "32"]
    assert succeed("eval", "--model", tmp_path / "copy", *arguments, cwd=tmp_path) == succeed(
        "eval", "--model", model, *arguments, cwd=tmp_path
    )


def test_eval(model, folder):
    table = succeed("eval", "--model", model, "--lengths", "16,64", cwd=folder)
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["16", "64"]
    result = json.loads(
        succeed("eval", "--model", model, "--json", "--data", "short.txt", "--lengths", 16,
                cwd=folder)
    )  # fmt: skip
    (at,) = result["losses"]
    assert at["length"] == 16
    assert 0 < at["loss"] < 9
    assert result["data"]["valid_bytes"] == 34


def test_generate(model, folder):
    arguments = ["--model", model, "--prompt", "line 1", "--tokens", 20]
    first = succeed("generate", *arguments, "--seed", 3, "--top-k", 5, cwd=folder)
    assert first.startswith("line 1")
    assert succeed("generate", *arguments, "--seed", 3, "--top-k", 5, cwd=folder) == first
    greedy = succeed("generate", *arguments, "--temperature", 0, cwd=folder)
    assert len(greedy.encode()) >= len("line 1") + 20
    assert succeed("generate", *arguments, "--temperature", 0, "--no-cache", cwd=folder) == greedy


def test_compare_leaves_everything(comparison):
    assert {p.name for p in comparison.iterdir()} == {"results.json", "table.md", "report.html"}
    results = json.loads((comparison / "results.json").read_text())
    assert results["status"] == "finished"
    assert [c["label"] for c in results["settings"]["combinations"]] == [
        "dot/learned", "dot/rope", "umbral/alibi",
    ]  # fmt: skip
    assert [(r["seed"], r["combination"]) for r in results["runs"]] == [
        (seed, combination) for seed in (0, 1) for combination in (0, 1, 2)
    ]
    for run in results["runs"]:
        assert run["status"] == "done"
        assert run["curve"]["step"][-1] == 12
        low, high = run["ms_quartiles"]
        assert 0 < low <= run["ms_per_step"] <= high
        assert 0 <= run["others"] <= 1
        assert run["processor_ms_per_step"] > 0
    learned, rope, _ = results["summary"]
    assert [at["loss"]["mean"] is None for at in learned["losses"]] == [False, True, True]
    values = [r["losses"][1]["loss"] for r in results["runs"] if r["combination"] == 1]
    assert rope["losses"][1]["loss"]["mean"] == pytest.approx(np.mean(values))
    assert rope["losses"][1]["loss"]["spread"] == pytest.approx(np.std(values, ddof=1))
    assert results["sessions"][0]["command"][1] == "compare"
    assert results["sessions"][0]["machine"]["threads"] >= 1
    table = (comparison / "table.md").read_text()
    assert "| dot/learned |" in table
    assert "| – |" in table


def test_report_is_self_contained_and_a_function_of_the_results(comparison, tmp_path):
    html = (comparison / "report.html").read_text()
    assert html.count("<svg") == 3
    assert "umbral cones · ALiBi" in html
    for outside in ("<script", "<link", "src=", "@import"):
        assert outside not in html
    (tmp_path / "results.json").write_bytes((comparison / "results.json").read_bytes())
    subprocess.run(
        [os.environ["GNOMON_PYTHON"], "-m", "gnomon.report", tmp_path, "--png"],
        check=True,
        timeout=SECONDS,
    )
    assert (tmp_path / "report.html").read_text() == html
    for name in ("lengths.png", "training.png", "cost.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "part"),
    [(None, "cannot read"), ("{", "not JSON"), ("{}", "format 1"), ('{"format": 1}', "lacks")],
)
def test_report_rejects_invalid_records(tmp_path, capsys, content, part):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        report_main([str(tmp_path)])
    message = capsys.readouterr().err
    assert part in message
    assert len(message.splitlines()) == 1


def test_compare_without_python_keeps_results_and_says_so(folder, tmp_path):
    done = gnomon(
        "compare", "--data", folder / "text.txt", "--out", tmp_path / "run", "--run", "dot/none",
        "--steps", 2, "--lengths", 16, "--evaluation-bytes", 64, *TINY, cwd=tmp_path,
        GNOMON_PYTHON="/no/such/python",
    )  # fmt: skip
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if "report.html" in line]
    assert lines == ["no report.html: cannot run /no/such/python"]
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"results.json", "table.md"}


def test_compare_whose_report_cannot_be_written_fails(folder, tmp_path):
    arguments = ["compare", "--data", folder / "text.txt", "--run", "dot/none", "--steps", 2,
                 "--lengths", 16, "--evaluation-bytes", 64, *TINY]  # fmt: skip
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nmkdir -p run/report.html/x\nexec "{sys.executable}" "$@"\n', encoding="utf-8"
    )
    python.chmod(0o755)
    done = gnomon(*arguments, "--out", "run", cwd=tmp_path, GNOMON_PYTHON=str(python))
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "report.html" in line]
    assert line.startswith("no report.html: ")
    assert "run/report.html: Is a directory" in line
    # Completed work is kept and printed.
    assert (tmp_path / "run" / "results.json").exists()
    assert done.stdout.rstrip().endswith("run/table.md")


def test_compare_of_encodings_and_grids(folder, tmp_path):
    """A grid limits the number of tokens; a bias on the grid needs all tokens at once."""
    ends = ["rope:shape=4x8", "alibi:shape=4x4:slopes=learned", "grid_bias:shape=4x4"]
    succeed(
        "compare", "--data", folder / "text.txt", "--out", tmp_path / "run",
        "--position", ",".join(["conv:kernel=5:groups=4", "cape", *ends]), "--similarity", "dot",
        "--steps", 2, "--lengths", "16,32,40", "--evaluation-bytes", 512, *TINY, cwd=tmp_path,
    )  # fmt: skip
    rows = (tmp_path / "run" / "table.md").read_text().splitlines()
    dashes = {row.split("|")[1].strip(): row.count(" – ") for row in rows if "dot/" in row}
    # There are two columns per length: the loss, and the loss of the last bytes.
    assert dashes == {
        "dot/conv:kernel=5:groups=4": 0,
        "dot/cape": 0,
        "dot/rope:shape=4x8": 2,
        "dot/alibi:shape=4x4:slopes=learned": 4,
        "dot/grid_bias:shape=4x4": 4,
    }


def test_compare_takes_the_whole_catalogue(folder, tmp_path):
    catalogue = json.loads(succeed("list", "--json", cwd=folder))
    on_grid = {
        "grid_bias": ":shape=4x4",
        "relative2d": ":shape=4x4",
        "offset_bias": ":shape=4x4:axis=1",
    }
    runs = [f"{entry['name']}/none" for entry in catalogue["similarities"]]
    for entry in catalogue["positions"]:
        if entry["use"] == "attention()":
            continue  # their tensors belong to a call
        runs.append(f"penumbral/{entry['name']}{on_grid.get(entry['name'], '')}")
    # The terms of this position require the dot product.
    runs = [run.replace("penumbral/transformer_xl", "dot/transformer_xl") for run in runs]
    flags = [flag for run in dict.fromkeys(runs) for flag in ("--run", run)]
    succeed(
        "compare", "--data", folder / "text.txt", "--out", tmp_path / "run", *flags,
        "--steps", 2, "--lengths", "16", "--evaluation-bytes", 64, *TINY, cwd=tmp_path,
    )  # fmt: skip
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(results["runs"]) == len(flags) // 2
    assert all(run["losses"][0]["loss"] < 10 for run in results["runs"])


WORDS = ["--tokens", "words", "--length", "8", "--memory", "12", *TINY]


def test_words_and_memory_from_training_to_text(folder, tmp_path):
    run = tmp_path / "run"
    printed = succeed("train", "--data", "text.txt", "--out", run, "--steps", 30,
                      "--position", "alibi", *WORDS, cwd=folder)  # fmt: skip
    assert "nats per word" in printed
    assert "bits per byte" in printed
    file = run / "checkpoint.safetensors"
    words = load_file(file)["tokens.vocabulary"].tobytes().decode().splitlines()
    assert words[:2] == ["<unk>", "<eos>"]
    assert {"quick", "brown", "fox,"} <= set(words)
    assert load_file(file)["model.embedding.weight"].shape == (len(words), 16)

    text = succeed("generate", "--model", run, "--prompt", "the quick", "--tokens", 12, cwd=folder)
    assert text.startswith("the quick ")
    assert set(text.split()) <= set(words)
    arguments = ["eval", "--model", run, "--lengths", "8,16", "--bytes", 600]
    as_trained = json.loads(succeed(*arguments, "--json", cwd=folder))
    assert as_trained["memory"] == 12
    assert as_trained["tokens"]["kind"] == "words"
    assert as_trained["tokens"]["size"] == len(words)
    assert as_trained["tokens"]["valid_unknown"] > 0
    assert as_trained["data"]["valid_bytes"] > 4 * as_trained["tokens"]["valid_tokens"]
    for at in as_trained["losses"]:
        # A word of this text represents 4 to 6 bytes.
        assert 4 < at["loss"] / np.log(2) / at["bits_per_byte"] < 6
    longer = json.loads(succeed(*arguments, "--json", "--memory", 64, cwd=folder))
    assert [at["windows"] for at in longer["losses"]] == [
        at["windows"] for at in as_trained["losses"]
    ]
    assert longer["losses"][0]["loss"] != as_trained["losses"][0]["loss"]
    table = succeed(*arguments, cwd=folder)
    assert "| loss, nats per word | last 32 words | bits per byte |" in table


@pytest.mark.parametrize(
    ("name", "words", "most"),
    [("tinyshakespeare", [], 256), ("wikitext-2", ["--tokens", "words"], 33278)],
)
@pytest.mark.long
def test_real_texts(tmp_path, name, words, most):
    data = ROOT.parent / "shared/data" / name
    if not data.is_dir():
        pytest.skip(f"there is no ../shared/data/{name}")
    steps = ["--steps", 2, "--length", 32, "--position", "rope", *TINY, *words]
    succeed("train", "--data", data, "--out", "run", *steps, cwd=tmp_path)
    evaluation = ["eval", "--model", "run", "--lengths", "16,64", "--bytes", 4096, "--json"]
    for at in json.loads(succeed(*evaluation, cwd=tmp_path))["losses"]:
        # After hardly any training, the loss is about that of uniform predictions.
        assert 0.7 * np.log(most) < at["loss"] < 1.2 * np.log(most)


def test_interrupted_training_with_memory_resumes_to_the_same_weights(folder, tmp_path):
    arguments = [*TRAIN, "--steps", 300, "--position", "alibi", *WORDS]
    with Interrupted(arguments, folder, tmp_path, every=20):
        pass


def test_compare_of_words_with_memory(folder, tmp_path):
    run = tmp_path / "run"
    arguments = ["compare", "--data", "text.txt", "--out", run, "--tokens", "words", "--memory", 8,
                 "--vocabulary", 100, "--evaluation-memory", 24, "--steps", 3, "--lengths", "8,16",
                 "--position", "rope,alibi", "--evaluation-bytes", 600, *TINY]  # fmt: skip
    table = succeed(*arguments, cwd=folder)
    for part in ("bits per byte at 8", "Nats per word", "memory of 8", "memory of 24", "32 words"):
        assert part in table
    results = json.loads((run / "results.json").read_text())
    assert results["tokens"]["size"] == 100
    assert results["settings"]["tokens"] == "words"
    assert results["settings"]["training"]["memory"] == 8
    assert results["settings"]["evaluation_memory"] == 24
    assert results["summary"][0]["losses"][0]["bits_per_byte"]["mean"] > 0
    words = (run / "vocabulary.txt").read_text().splitlines()
    assert len(words) == 100
    html = (run / "report.html").read_text()
    for part in ("nats per word", "Bits per byte", "size 100", "valid unknown", "memory 24"):
        assert part in html

    # The run must continue with its original vocabulary.
    succeed("compare", "--resume", run, cwd=folder)
    (run / "vocabulary.txt").write_text("\n".join(words[:-1]) + "\n")
    assert "vocabulary.txt has changed since this run started" in refused(
        "compare", "--resume", run, cwd=folder
    )
    (run / "vocabulary.txt").unlink()
    assert "cannot read its vocabulary" in refused("compare", "--resume", run, cwd=folder)


def test_subwords_from_training_to_text(folder, tmp_path):
    run = tmp_path / "run"
    arguments = ["train", "--data", "text.txt", "--out", run, "--steps", 20, "--length", 16,
                 "--tokens", "subwords", "--vocabulary", 300, *TINY]  # fmt: skip
    done = gnomon(*arguments, cwd=folder)
    if "libsentencepiece-dev" in done.stderr:
        assert done.returncode == 2
        pytest.skip("built without SentencePiece")
    assert done.returncode == 0, done.stderr
    assert "nats per subword" in done.stdout
    text = succeed("generate", "--model", run, "--prompt", "line 1: the", "--tokens", 9, cwd=folder)
    assert text.startswith("line 1: the")
    result = json.loads(succeed("eval", "--model", run, "--json", "--lengths", 16, cwd=folder))
    assert result["tokens"]["size"] == 300
    assert result["tokens"]["valid_unknown"] is None
    many = ["--out", tmp_path / "other", "--tokens", "subwords", "--vocabulary", 90000]
    assert "training failed" in refused("train", "--data", "text.txt", *many, cwd=folder)


def test_the_libraries_of_subwords_and_of_torch_keep_apart(folder, tmp_path):
    """Two libraries define FLAGS_minloglevel; if they share it, one overwrites memory after it."""
    arguments = ["train", "--data", folder / "text.txt", "--out", tmp_path / "run", "--steps", 1,
                 "--length", 16, "--tokens", "subwords", "--vocabulary", 300, *TINY]  # fmt: skip
    # The script is a file, because TorchScript reads its source.
    script = tmp_path / "script.py"
    script.write_text(f"""
import ctypes, pathlib
import torch
from gnomon.__main__ import main
c10 = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libc10.so"))
flag = ctypes.c_int32.in_dll(c10, "FLAGS_minloglevel")
before = flag.value
code = main({[*map(str, arguments)]!r})
assert flag.value == before, (flag.value, before)

@torch.jit.script
def twice(x):
    return 2 * x

assert twice(torch.ones(3)).tolist() == [2.0] * 3
raise SystemExit(code)
""")
    done = subprocess.run(
        [os.environ["GNOMON_PYTHON"], script], capture_output=True, text=True, timeout=SECONDS
    )
    if "libsentencepiece-dev" in done.stderr:
        pytest.skip("built without SentencePiece")
    assert done.returncode == 0, done.stderr


def test_default_output_folder(folder, tmp_path):
    succeed("compare", "--data", folder / "text.txt", "--run", "dot/none", "--steps", 1,
            "--lengths", 16, "--evaluation-bytes", 64, *TINY, cwd=tmp_path)  # fmt: skip
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("-text")
    assert (run / "report.html").exists()


TRAIN = ["train", "--data", "text.txt"]
COMPARE = ["compare", "--data", "text.txt"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["no command"]),
        (["trian"], ["trian"]),
        (["train"], ["--data is required"]),
        (["train", "--data", "absent.txt"], ["no such data file or folder: absent.txt"]),
        (["train", "--data", "empty.txt"], ["empty.txt is empty"]),
        ([*TRAIN, "--position", "ropee"], ["ropee", "rope"]),
        ([*TRAIN, "--similarity", "umbra"], ["umbra", "umbral"]),
        ([*TRAIN, "--position", "rope:bas=3"], ["bas", "base"]),
        ([*TRAIN, "--position", "rope+rope"], ["two rotations"]),
        ([*TRAIN, "--position", "t5:buckets=-5"], ["t5:buckets=-5"]),
        ([*TRAIN, "--position", "alibi:slopes=1e300"], ["alibi:slopes=1e300"]),
        ([*TRAIN, "--position", "learned:length=3"], ["defined only up to length 3"]),
        ([*TRAIN, "--similarity", "laplacian:gamma=inf"], ["laplacian:gamma=inf"]),
        (["train", "--data", "/dev/zero"], ["/dev/zero is a device"]),
        ([*TRAIN, "--heads", "3"], ["dim is 128; expected a multiple of heads, 3"]),
        ([*TRAIN, "--mlp", "1000000000000"], ["not enough memory", "--mlp 1000000000000"]),
        ([*TRAIN, "--steps", "0"], ["steps is 0"]),
        ([*TRAIN, "--steps", "10", "--warmup", "11"], ["warmup is 11", "steps"]),
        ([*TRAIN, "--steps", "many"], ["--steps", "many"]),
        ([*TRAIN, "--learning-rate", "nan"], ["--learning-rate is nan"]),
        ([*TRAIN, "--length", "100000"], ["too short", "100001"]),
        ([*TRAIN, "--out", "/proc/gnomon"], ["/proc/gnomon"]),
        ([*TRAIN, "--out", "text.txt"], ["text.txt is a file; choose another --out"]),
        ([*TRAIN, "--out", "."], ["is not empty; choose another --out"]),
        ([*TRAIN, "--frobnicate", "1"], ["--frobnicate"]),
        ([*TRAIN, "--tokens", "letters"], ["letters", "bytes, words, subwords"]),
        ([*TRAIN, "--vocabulary", "100"], ["--vocabulary is 100", "only to --tokens words"]),
        ([*TRAIN, "--tokens", "words", "--vocabulary", "2"], ["--vocabulary is 2", "3 to"]),
        ([*TRAIN, "--tokens", "words", "--length", "9000"], ["too short", "words", "9001"]),
        ([*TRAIN, "--memory", "-1"], ["memory is -1"]),
        ([*TRAIN, "--memory", "8", "--position", "learned"], ["learned", "memory is 8"]),
        ([*TRAIN, "--memory", "8", "--batch", "2000"], ["too short", "512256"]),
        ([*COMPARE, "--memory", "8", "--position", "rope,learned"], ["learned", "memory is 8"]),
        ([*COMPARE, "--evaluation-memory", "8", "--position", "learned"], ["memory is 8"]),
        (
            ["train", "--resume", "model", "--steps", "9"],
            ["--resume", "cannot be combined with --steps"],
        ),
        (["train", "--resume", "absent"], ["absent"]),
        (["compare"], ["--data is required"]),
        (["compare", "--data", "empty.txt"], ["empty.txt is empty"]),
        ([*COMPARE, "--position", "none,alibbi"], ["alibbi", "alibi"]),
        ([*COMPARE, "--position", "rope,learned:length=3"], ["defined only up to length 3"]),
        ([*COMPARE, "--run", "dot"], ["SIMILARITY/POSITION"]),
        ([*COMPARE, "--run", "dot/nothing"], ["nothing"]),
        ([*COMPARE, "--lengths", "16,16"], ["16 is given twice"]),
        ([*COMPARE, "--position", "rope,none,rope"], ["--position: rope is given twice"]),
        ([*COMPARE, "--similarity", "dot,dot"], ["--similarity: dot is given twice"]),
        ([*COMPARE, "--run", "dot/rope", "--run", "dot/rope"], ["--run: dot/rope is given twice"]),
        (
            [*COMPARE, "--position", "rope", "--run", "dot/rope"],
            ["--run: dot/rope is given twice"],
        ),
        ([*COMPARE, "--lengths", "0,16"], ["--lengths contains 0;"]),
        ([*COMPARE, "--lengths", "16,100000"], ["too short", "validation", "100001"]),
        ([*COMPARE, "--seeds", "0"], ["--seeds"]),
        ([*COMPARE, "--out", "/proc/gnomon"], ["/proc/gnomon"]),
        (
            ["compare", "--resume", "comparison", "--steps", "9"],
            ["cannot be combined with --steps"],
        ),
        (["compare", "--resume", "absent"], ["absent/results.json"]),
        (["eval"], ["--model is required"]),
        (["eval", "--mdel", "model"], ["not expected: --mdel model; did you mean --model?"]),
        (["eval", "--beam", "4"], ["--model is required"]),
        (["eval", "--model", "absent"], ["no such checkpoint file or run folder: absent"]),
        (["eval", "--model", "absent", "--beam", "4"], ["no such checkpoint file or run folder"]),
        (["generate", "--model", "text.txt", "--beam", "4"], ["text.txt does not state its task"]),
        (["train", "--resume", "absent", "--beam", "4"], ["no such checkpoint file or run folder"]),
        (
            [*COMPARE, "--positon", "rope"],
            ["not expected: --positon rope; did you mean --position?"],
        ),
        ([*COMPARE, "--steps=3", "--sed=4"], ["--sed=4; did you mean --seed?"]),
        (["eval", "--model", "model", "--lenghts", "4"], ["did you mean --lengths?"]),
        (["bench", "--model", "dot/none", "--detph", "2"], ["did you mean --depth?"]),
        (["comapre", "--data", "text.txt"], ["comapre", "did you mean compare?"]),
        (["list", "--jsn"], ["did you mean --json?"]),
        ([*TRAIN, "--task", "image"], ["--task is 'image'; did you mean images? Expected "]),
        ([*TRAIN, "--task", "xyzzy"], ["--task is 'xyzzy'; expected diffusion"]),
        ([*TRAIN, "--position", "t5:bucket=3"], ["did you mean buckets?"]),
        (["eval", "--model", "text.txt"], ["text.txt is not a valid safetensors file"]),
        (["eval", "--model", "comparison"], ["contains no checkpoint.safetensors"]),
        (["eval", "--model", "model", "--lengths", "-4"], ["--lengths contains -4;"]),
        (["eval", "--model", "model", "--lengths", "4,x"], ["--lengths"]),
        (["eval", "--model", "model", "--data", "short.txt"], ["too short"]),
        (["generate", "--model", "model", "--prompt", ""], ["--prompt is empty"]),
        (["generate", "--model", "model", "--temperature", "-1"], ["--temperature"]),
        (["generate", "--model", "model", "--top-k", "257"], ["--top-k is 257", "256 bytes"]),
        (["eval", "--model", "model", "--memory", "-4"], ["--memory"]),
        (["generate", "--model", "model", "--temperature", "0", "--top-k", "3"], ["--top-k"]),
        (["bench", "--cases", "sdpa,dott"], ["dott", "dot"]),
        (["bench", "--length", "0"], ["--length"]),
        (["bench", "--model", "dot"], ["--model: 'dot' is invalid; expected SIMILARITY/POSITION"]),
        (["bench", "--model", "dot/nothing"], ["nothing"]),
        (["bench", "--model", "dot/none", "--heads", "3"], ["dim is 128", "heads, 3"]),
        (["bench", "--model", "dot/none", "--cases", "dot"], ["--model", "--cases"]),
        (["bench", "--depth", "2"], ["--depth requires --model"]),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value, list) else None,
)
def test_wrong_input_is_one_line_and_exit_code_2(folder, model, comparison, arguments, parts):
    before = sorted(p.name for p in folder.iterdir())
    message = refused(*arguments, cwd=folder)
    for part in parts:
        assert part in message
    assert message.count("gnomon: ") == 1
    assert sorted(p.name for p in folder.iterdir()) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder(folder, tmp_path):
    tmp_path.chmod(0o500)
    assert "cannot write" in refused(*TRAIN, "--out", tmp_path / "run", cwd=folder)


def test_generation_beyond_a_learned_table(folder, tmp_path):
    succeed(*TRAIN, "--out", tmp_path / "run", "--steps", 1, "--length", 16,
            "--position", "learned", *TINY, cwd=folder)  # fmt: skip
    assert "defined for only 16 bytes" in refused(
        "generate", "--model", tmp_path / "run", "--tokens", 17, cwd=folder
    )
    succeed("generate", "--model", tmp_path / "run", "--tokens", 16, cwd=folder)


def test_corrupt_checkpoints(folder, model, tmp_path):
    file = model / "checkpoint.safetensors"
    sound = file.read_bytes()
    bad = tmp_path / "bad.safetensors"
    for content in (b"", sound[:100], sound[:-1], b"\xff" * 8 + sound[8:], sound + b"more"):
        bad.write_bytes(content)
        for command in (["eval", "--model"], ["generate", "--model"], ["train", "--resume"]):
            assert "bad.safetensors is not a valid" in refused(*command, bad, cwd=folder)
    with safe_open(file, "numpy") as content:
        metadata = content.metadata()
    tensors = load_file(file)
    save_file(tensors | {"model.norm.bias": 0 * tensors["model.norm.bias"] + np.nan}, bad, metadata)
    assert "bad.safetensors is NaN: the checkpoint contains non-finite weights" in refused(
        "eval", "--model", bad, cwd=folder
    )
    del tensors["model.norm.bias"]
    save_file(tensors, bad, metadata=metadata)
    assert "'model.norm.bias' is missing" in refused("eval", "--model", bad, cwd=folder)


def test_damaged_records_are_not_resumed(folder, comparison, tmp_path):
    record = json.loads((comparison / "results.json").read_text())

    def message(change) -> str:
        damaged = json.loads(json.dumps(record))
        change(damaged)
        (tmp_path / "results.json").write_text(json.dumps(damaged))
        return refused("compare", "--resume", tmp_path, cwd=folder)

    assert "not a comparison record" in message(lambda r: r.pop("settings"))
    assert "lengths" in message(lambda r: r["settings"].pop("lengths"))
    assert "seeds" in message(lambda r: r["settings"].update(seeds="all"))
    assert "batch" in message(lambda r: r["settings"]["training"].update(batch=0))
    assert "runs" in message(lambda r: r.update(runs=[{}]))
    assert "losses" in message(lambda r: r["runs"][0].update(losses=7))
    assert "0 losses" in message(lambda r: r["runs"][0].update(losses=[]))
    assert "unknown combination 9" in message(lambda r: r["runs"][0].update(combination=9))
    assert "has changed since this run started" in message(lambda r: r["data"].update(sha256="00"))
    (tmp_path / "results.json").write_text("[")
    assert "not a comparison record" in refused("compare", "--resume", tmp_path, cwd=folder)


def interrupt(arguments: list[object], cwd: pathlib.Path, when) -> tuple[int, str]:
    """Runs the program and sends one SIGINT as soon as when() is true."""
    process = subprocess.Popen(
        [PROGRAM, *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not when():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, errors


def losses(run: pathlib.Path) -> list:
    record = json.loads((run / "results.json").read_text())
    return [(r["combination"], r["seed"], r["curve"], r["losses"]) for r in record["runs"]]


def test_interrupted_comparison_resumes_to_the_same_result(folder, tmp_path):
    arguments = [*COMPARE, "--position", "none,rope,alibi", "--steps", 400, "--lengths", "16,32",
                 "--evaluation-bytes", 512, "--threads", 1, *TINY]  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    succeed(*arguments, "--out", whole, cwd=folder)
    record = parts / "results.json"

    def one_is_done() -> bool:
        return record.exists() and len(json.loads(record.read_text())["runs"]) == 1

    code, errors = interrupt([*arguments, "--out", parts], folder, one_is_done)
    assert code == 130, errors
    assert errors.splitlines()[-1] == (
        f"stopped: 1 of 3 runs are finished; resume with: gnomon compare --resume {parts} "
        "--threads 1"
    )
    stopped = json.loads(record.read_text())
    assert stopped["status"] == "interrupted"
    assert losses(parts) == losses(whole)[:1]
    assert "dot/none" in (parts / "table.md").read_text()

    # Uses one thread, because with several threads, sums may differ in the last bits.
    succeed("compare", "--resume", parts, "--threads", 1, cwd=folder)
    resumed = json.loads(record.read_text())
    assert resumed["status"] == "finished"
    assert len(resumed["sessions"]) == 2
    assert resumed["runs"][0] == stopped["runs"][0]
    assert losses(parts) == losses(whole)
    assert (parts / "report.html").exists()
    # Resuming a finished comparison only redraws its report.
    (parts / "report.html").unlink()
    succeed("compare", "--resume", parts, cwd=folder)
    assert (parts / "report.html").exists()
    assert losses(parts) == losses(whole)


def test_interrupted_training_resumes_to_the_same_weights(folder, tmp_path):
    arguments = [*TRAIN, "--steps", 400, "--length", 16, "--position", "rope+alibi:slopes=learned",
                 "--dropout", 0.1, *TINY]  # fmt: skip
    with Interrupted(arguments, folder, tmp_path, every=50) as run:
        assert f"resume with: gnomon train --resume {run.folder}" in run.errors
        assert 50 <= step_of(run.file) < 400


def config_of(file: pathlib.Path) -> dict[str, Any]:
    """The configuration stored in a checkpoint."""
    with safe_open(file, "numpy") as content:
        return json.loads(content.metadata()["gnomon"])


def step_of(file: pathlib.Path) -> int:
    return config_of(file)["step"]


def assert_same_tensors(got: pathlib.Path, expected: pathlib.Path) -> None:
    """Compares two checkpoints bitwise."""
    tensors = load_file(got)
    assert tensors.keys() == load_file(expected).keys()
    for name, tensor in load_file(expected).items():
        np.testing.assert_array_equal(tensors[name], tensor, err_msg=name)


class Interrupted:
    """A context manager with a training run that Ctrl-C has stopped after a checkpoint.

    On exit, the run is resumed by a command with the words `resume`, and its weights must equal
    those of an uninterrupted run.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        cwd: pathlib.Path,
        tmp_path: pathlib.Path,
        *,
        every: int,
        resume: Sequence[object] = (),
    ) -> None:
        self.cwd = cwd
        self.resume = resume
        self.whole, self.folder = tmp_path / "whole", tmp_path / "parts"
        self.file = self.folder / "checkpoint.safetensors"
        succeed(*arguments, "--out", self.whole, cwd=cwd)
        code, self.errors = interrupt(
            [*arguments, "--out", self.folder, "--checkpoint-every", every],
            cwd,
            lambda: self.file.exists() and step_of(self.file) >= every,
        )
        assert code == 130, self.errors

    def __enter__(self) -> Interrupted:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            succeed("train", "--resume", self.folder, *self.resume, cwd=self.cwd)
            assert_same_tensors(self.file, self.whole / self.file.name)


def assert_resumes_bitwise(
    train: Callable[..., object], cwd: pathlib.Path, arguments: Sequence[object]
) -> None:
    """Checks that a run of three steps, extended to six, has the weights of a run of six steps.

    train(folder, *words) creates a run in a folder. All steps are in the warm-up, in which the
    learning rate does not depend on the number of steps.
    """
    name = "checkpoint.safetensors"
    train("whole", "--steps", 6, "--warmup", 3, *arguments)
    train("half", "--steps", 3, "--warmup", 3, *arguments)
    copy_with_steps(cwd / "half" / name, cwd / "half" / name, steps=6)
    succeed("train", "--resume", "half", cwd=cwd)
    assert step_of(cwd / "half" / name) == 6
    assert_same_tensors(cwd / "half" / name, cwd / "whole" / name)


def runs_of_the_catalogue(cwd: pathlib.Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Each similarity as a --run specification, and the catalogue's positions that models
    support."""
    catalogue = json.loads(succeed("list", "--json", cwd=cwd))
    similarities = [f"{entry['name']}/none" for entry in catalogue["similarities"]]
    # Positions that only gnomon.attention accepts need tensors.
    return similarities, [e for e in catalogue["positions"] if e["use"] != "attention()"]


def copy_with_steps(file: pathlib.Path, copy: pathlib.Path, steps: int) -> None:
    """Copies a checkpoint so that a run that resumes from it ends after this many steps."""
    config = config_of(file)
    config["training"]["steps"] = steps
    save_file(load_file(file), copy, metadata={"gnomon": json.dumps(config)})


def test_bench_prints_ratios(folder):
    arguments = ["--length", 64, "--dim", 8, "--heads", 2, "--repeats", 2]
    text = succeed("bench", *arguments, cwd=folder)
    for mode in ("forward, full", "forward, causal", "forward + backward, causal"):
        assert f"### {mode}" in text
    result = json.loads(succeed("bench", *arguments, "--cases", "penumbral", "--json", cwd=folder))
    for mode in result["modes"]:
        assert mode["peak_gflops"] > 0
        assert [row["case"] for row in mode["cases"]] == ["sdpa", "dot", "penumbral"]
        assert mode["cases"][0]["to_sdpa"] == 1
        assert mode["cases"][1]["to_dot"] == 1


def test_bench_prints_peak_memory(folder):
    arguments = ["--length", 1024, "--dim", 8, "--heads", 2, "--repeats", 1]
    arguments += ["--cases", "sdpa+mask"]
    assert "| MiB |" in succeed("bench", *arguments, cwd=folder)
    result = json.loads(succeed("bench", *arguments, "--json", cwd=folder))
    for mode in result["modes"]:
        mebibytes = {row["case"]: row["memory_mib"] for row in mode["cases"]}
        # The scores of all pairs take 8 MiB.
        assert mebibytes["sdpa+mask"] > 8
        assert 0 <= mebibytes["dot"] < 8


def test_bench_reports_the_share_of_computed_pairs(folder):
    arguments = ["--length", 1024, "--dim", 8, "--heads", 2, "--repeats", 1, "--cases", "alibi"]
    assert "| pairs |" in succeed("bench", *arguments, cwd=folder)
    result = json.loads(succeed("bench", *arguments, "--json", cwd=folder))
    for mode in result["modes"]:
        computed = {row["case"]: row["computed"] for row in mode["cases"]}
        assert computed["sdpa"] is None
        assert computed["dot"] == 1
        assert 0 < computed["alibi"] < 1


def test_bench_of_models_prints_ratios_to_the_first(folder):
    models = ["dot/none", "penumbral/hype:tau=learned"]
    arguments = ["--model", ",".join(models), "--length", 16, "--repeats", 2, *TINY]
    text = succeed("bench", *arguments, cwd=folder)
    assert "### training step" in text
    assert "| / dot/none |" in text
    result = json.loads(succeed("bench", *arguments, "--json", cwd=folder))
    assert result["training"] == {"batch": 4, "length": 16}
    assert [row["label"] for row in result["models"]] == models
    assert result["models"][0]["to_first"] == 1
    assert all(row["ms"] > 0 for row in result["models"])
