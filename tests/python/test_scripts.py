"""make demo and scripts/demo pass on the requested text, whatever its path."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.cpu("processes of its own")

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path) -> pathlib.Path:
    """A separate tree whose program only prints the path it is asked to read."""
    tree = tmp_path / "a tree"
    (tree / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tree)
    shutil.copy(ROOT / "scripts/demo", tree / "scripts")
    program = tree / ".venv/bin/gnomon"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\n[ "$1 $2" = "compare --data" ] && printf "%s" "$3"\n')
    program.chmod(0o755)
    return tree


def run(words: list[object], cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["text", "a b", 'it\'s 2 "texts"', "*"])
def test_make_demo_takes_any_path(tree, name):
    # Everything that the target needs exists.
    done = run(["make", "--silent", "--old-file=build", "demo", f"DATA={name}"], tree)
    assert done.returncode == 0, done.stderr
    assert done.stdout == str(tree / name)


@pytest.mark.parametrize("name", ["text", "a b", "../text"])
def test_demo_reads_the_named_text(tree, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run([tree / "scripts/demo", name], elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{elsewhere}/{name}"
    assert run([tree / "scripts/demo", tmp_path / name], elsewhere).stdout == str(tmp_path / name)


@pytest.mark.parametrize(
    ("words", "part"), [(["a", "b"], "got 2: a b"), ([""], "DATA is empty")], ids=str
)
def test_demo_rejects_ambiguous_paths(tree, words, part):
    done = run([tree / "scripts/demo", *words], tree)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("demo: error: ")
    assert part in line


def test_demo_reports_missing_files(tree):
    (tree / ".venv/bin/gnomon").unlink()
    done = run([tree / "scripts/demo", "text"], tree)
    assert done.returncode == 2
    assert "make build" in done.stderr


def test_the_makefile_quotes_absolute_paths():
    """The tree's folder may have any name, such as "with space"."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if not re.match(r"NINJA := |#", line)]
    found = 0
    for line in lines:
        for place in re.finditer(r"\$\((CURDIR|NINJA)\)|\$\$PWD", line):
            found += 1
            assert line[: place.start()].count('"') % 2 == 1, line
    assert found >= 3
