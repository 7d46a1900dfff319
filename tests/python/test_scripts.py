"""The demo, the Makefile and the nightly workflow."""

from __future__ import annotations

import inspect
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from gnomon.lab import demo

pytestmark = pytest.mark.cpu("starts its own processes")

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path) -> pathlib.Path:
    """A separate tree, whose mock interpreter only prints the path that is passed to the demo."""
    tree = tmp_path / "a tree"
    python = tree / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tree)
    python.write_text('#!/bin/sh\n[ "$1 $2" = "-m gnomon.demo" ] && printf "%s" "$3"\n')
    python.chmod(0o755)
    return tree


def run(words: list[object], cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["text", "a b", 'it\'s 2 "texts"', "*"])
def test_make_demo_takes_any_path(tree, name):
    # With --old-file, make assumes that `build` is up to date.
    done = run(["make", "--silent", "--old-file=build", "demo", f"DATA={name}"], tree)
    assert done.returncode == 0, done.stderr
    assert done.stdout == name


def test_make_demo_leaves_out_what_only_tests_need(tree):
    (tree / "scripts").mkdir()
    for file in ("scripts/setup", "requirements.txt"):
        (tree / file).touch()
    demo = run(["make", "--dry-run", "demo"], tree).stdout
    assert "scripts/setup demo" in demo
    assert "-DGNOMON_TESTS=OFF" in demo
    build = run(["make", "--dry-run", "build"], tree).stdout
    assert "scripts/setup base" in build
    assert "-DGNOMON_TESTS=ON" in build
    # The tests of an existing build remain.
    (tree / "build").mkdir()
    (tree / "build/CMakeCache.txt").write_text("GNOMON_TESTS:BOOL=ON\n")
    assert "-DGNOMON_TESTS=ON" in run(["make", "--dry-run", "demo"], tree).stdout


#: Mocks of the programs that scripts/wheel calls; each appends its arguments to the file `log`.
#: `pip wheel` writes a wheel of SIZE bytes.
PROGRAMS = {
    "uname": "echo $SYSTEM",
    "cmake": 'echo "cmake $*" >>log',
    "delocate-wheel": """echo "delocate $*" >>log
while [ $# != 2 ]; do shift; done
mkdir -p "$1" && cp "$2" "$1"
""",
    "python": """echo "$*" >>log
case "$*" in
*" wheel "*) while [ $# != 1 ]; do shift; done; mkdir -p "$1"; truncate -s $SIZE "$1/a.whl" ;;
*auditwheel*) while [ $# != 2 ]; do shift; done; mkdir -p "$1"; cp "$2" "$1" ;;
esac
""",
}


def wheel_log(tree: pathlib.Path, system: str, size: int) -> tuple[str, str]:
    """Runs scripts/wheel with mock programs; returns the log and the error output."""
    (tree / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/wheel", tree / "scripts")
    torch = tree / "build-wheel/torch-2.15/torch/version.py"
    for folder in (torch.parent, tree / "build-wheel/core"):
        folder.mkdir(parents=True)
    torch.touch()
    for name, text in PROGRAMS.items():
        program = tree / ".venv/bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    path = f"{tree / '.venv/bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(tree / "scripts/wheel"), "2.15"], capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": path, "SYSTEM": system, "SIZE": str(size)},
    )  # fmt: skip
    assert (done.returncode == 0) == (size <= 30_000_000), done.stderr
    return (tree / "log").read_text(), done.stderr


def test_wheels_have_a_size_limit(tree):
    assert "wheel: error: a wheel is larger than 30 MB" in wheel_log(tree, "Linux", 30_000_001)[1]
    assert not (tree / "dist").exists()


@pytest.mark.parametrize(
    ("system", "suffix", "repair", "has_lab"),
    [("Linux", "so", "auditwheel", True), ("Darwin", "dylib", "delocate", False)],
)
def test_wheels_are_built_by_the_tools_of_the_system(tree, system, suffix, repair, has_lab):
    log, _ = wheel_log(tree, system, 30_000_000)
    assert f"libgnomon_core.{suffix} " in log
    assert {name for name in ("auditwheel", "delocate") if name in log} == {repair}
    assert "--exclude libtorch" in log
    for words in ("gnomon_program", "--component lab", " wheel ./lab "):
        assert (words in log) == has_lab, words
    assert (tree / "dist/a.whl").exists()


def test_scripts_for_macos_need_no_newer_bash():
    """The bash of macOS is 3.2, and macOS lacks some programs of Linux."""
    for name in ("setup", "wheel"):
        text = (ROOT / "scripts" / name).read_text(encoding="utf-8")
        code = re.sub(r"(?m)(^| )#.*", "", text)
        newer = r"\b(mapfile|readarray|nproc)\b|(declare|local) -[An]|\$\{\w+(,|\^)"
        assert not re.search(newer, code), name


@pytest.fixture
def started(monkeypatch, tmp_path) -> list[str]:
    """The words after `gnomon compare` in the process that the demo starts."""
    words: list[str] = []

    def start(program, command, environment):
        assert command[:4] == [program, "-m", "gnomon", "compare"]
        words.extend(command[4:])

    monkeypatch.setattr("os.execve", start)
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "cache"))
    return words


def test_the_demo_writes_its_text(started, tmp_path):
    demo.main([])
    text = tmp_path / "cache/demo/python.txt"
    assert started[:2] == ["--data", str(text)]
    assert inspect.getsource(pathlib) in text.read_text(encoding="utf-8", errors="replace")


def test_the_demo_reads_the_named_text(started, tmp_path):
    demo.main(["a b"])
    assert started[:2] == ["--data", "a b"]
    assert not (tmp_path / "cache").exists()


def test_the_demo_only_writes_the_text(started, tmp_path):
    demo.main(["--text", str(tmp_path / "new/text")])
    assert not started
    assert (tmp_path / "new/text").stat().st_size > 1e6


def test_the_demo_reports_a_folder_that_cannot_be_written(started, tmp_path, capsys):
    (tmp_path / "cache").touch()
    with pytest.raises(SystemExit):
        demo.main([])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gnomon.demo: cannot write to {tmp_path / 'cache'}")
    assert not started


def test_the_workflow_runs_the_parts_of_make_nightly():
    makefile = (ROOT / "Makefile").read_text()
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    parts = re.search(r"^nightly: (.*) ##", makefile, re.MULTILINE)[1].split()
    matrix = re.search(r"^ {8}target:\n((?: {10}- .*\n)+)", workflow, re.MULTILINE)[1]
    assert re.findall(r"- (.*)", matrix) == parts
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    row = re.search(r"\| `make nightly` \|(.*)", contributing)[1]
    assert re.findall("`(.*?)`", row) == parts


def test_the_makefile_quotes_absolute_paths():
    """The path of the tree may contain spaces."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if not re.match(r"NINJA := |#", line)]
    found = 0
    for line in lines:
        for place in re.finditer(r"\$\((CURDIR|NINJA)\)|\$\$PWD", line):
            found += 1
            assert line[: place.start()].count('"') % 2 == 1, line
    assert found >= 3
