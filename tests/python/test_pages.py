"""Runs the code in README.md and in docs: all blocks of a page, unchanged and in order.

Blocks of `python` share one namespace per page. Blocks of `sh` contain only gnomon commands and run
on small models. Other commands are in blocks of `console`, which do not run.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cpu("runs the program, which has --device")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.M | re.S)

# These numbers replace those on a page, so that its commands finish in seconds.
TRAINING = {
    "--steps": "4",
    "--dim": "16",
    "--depth": "2",
    "--heads": "2",
    "--mlp": "32",
    "--batch": "4",
    "--evaluation-bytes": "4096",
}
SMALL = {
    "train": TRAINING,
    "compare": TRAINING,
    "eval": {"--bytes": "4096"},
    "generate": {"--tokens": "8"},
    "bench": {"--length": "64", "--repeats": "1"},
    "rank": {"--steps": "10", "--restarts": "1"},
}
#: Smaller numbers for flags that a command has.
SMALLER = {"--seeds": "2", "--workers": "2"}


def blocks_of(page: pathlib.Path) -> list[tuple[str, str, int]]:
    """The language, text and first line of each block that runs."""
    text = page.read_text(encoding="utf-8")
    return [
        (match[1], match[2], text.count("\n", 0, match.start(2)) + 1)
        for match in BLOCK.finditer(text)
    ]


def commands(block: str) -> list[list[str]]:
    """The words of each command, with continued lines joined."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def made_small(words: list[str]) -> list[str]:
    """The command with the numbers of SMALL and SMALLER."""
    small = {flag: value for flag, value in SMALLER.items() if flag in words}
    for command in words[1:3]:
        small = small | SMALL.get(command, {})
    if "--resume" in words:
        small = {}  # --resume excludes them
    kept = list(words)
    for flag in small:
        if flag in kept:
            place = kept.index(flag)
            del kept[place : place + 2]
    return kept + [word for flag, value in small.items() for word in (flag, value)]


# The code on these pages is C++, or commands that need network access.
NO_PYTHON = {"cpp.md", "data.md"}
PYTHON_PAGES = [page for page in PAGES if blocks_of(page)]
LONG = {"compare.md", "inspection.md"}  # many commands


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=[pytest.mark.long] * (page.name in LONG), id=str(page.relative_to(ROOT))
        )
        for page in PYTHON_PAGES
    ],
)
def test_the_code_of_a_page_runs(page, tmp_path):
    if "transformers" in "".join(text for _, text, _ in blocks_of(page)):
        pytest.importorskip("transformers", minversion="5.23")
    if "import peft" in "".join(text for _, text, _ in blocks_of(page)):
        pytest.importorskip("peft")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # One page uses torch.distributed, which reads these variables; otherwise, torchrun sets them.
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    (tmp_path / "corpus").mkdir()
    for name in ("ast", "argparse"):
        source = pathlib.Path(sys.modules["os"].__file__).with_name(f"{name}.py")
        (tmp_path / "corpus" / f"{name}.txt").write_bytes(source.read_bytes())
    done = subprocess.run(
        [os.environ["GNOMON_PYTHON"], __file__, page],
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        timeout=600,
        cwd=tmp_path,
        env=os.environ
        | group
        | {
            "OMP_NUM_THREADS": "1",
            # Share the compiled definition with test_define.py.
            "GNOMON_CACHE": str(ROOT / "build" / "cache"),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sh_blocks_contain_only_gnomon_commands(page):
    for language, block, line in blocks_of(page):
        if language == "sh":
            assert {words[0] for words in commands(block)} == {"gnomon"}, f"{page.name}:{line}"


def test_every_tutorial_and_how_to_is_tested():
    for folder in ("tutorials", "howto"):
        pages = list((ROOT / "docs" / folder).glob("*.md"))
        assert pages
        for page in pages:
            assert page.name in NO_PYTHON or page in PYTHON_PAGES, page.name


def run(page: pathlib.Path) -> None:
    from test_cli import PROGRAM

    namespace: dict[str, object] = {"__name__": "__main__"}
    for language, block, line in blocks_of(page):
        if language == "python":
            # With the empty lines, tracebacks name the line on the page.
            code = compile("\n" * (line - 1) + block, str(page), "exec")
            exec(code, namespace)
            continue
        for words in commands(block):
            subprocess.run([PROGRAM, *made_small(words)[1:]], check=True)


if __name__ == "__main__":
    run(pathlib.Path(sys.argv[1]))
