"""Terms outside the library: those of examples/terms, as a library that programs load."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from test_cli import ROOT, TINY, gnomon, refused, succeed

pytestmark = pytest.mark.cpu("starts its own processes")

EXAMPLE = ROOT / "examples" / "terms"
FILES = ["adaptive-inl.h", "adaptive.cc", "bits.cc", "root.cc", "student_t-inl.h"]
SECONDS = 1200
#: The terms of the example, from the objects that the C++ tests link.
LIBRARY = ROOT / "build" / "lib" / "libgnomon_example_library.so"


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=SECONDS,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("texts")
    text = "".join(f"line {n}: the quick brown fox, {n * n} times\n" for n in range(400))
    (path / "text.txt").write_text(text)
    return path


@pytest.mark.long
def test_the_project_builds_with_the_installed_library(tmp_path):
    tools = pathlib.Path(sys.executable).parent
    for component in ("core", "torch"):
        run(tools / "cmake", "--install", ROOT / "build", "--prefix", tmp_path / "prefix",
            "--component", component)  # fmt: skip
    run(tools / "cmake", "-S", EXAMPLE, "-B", tmp_path / "build", "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}",
        f"-DGNOMON_PYTHON={sys.executable}",
        # This halves the compilation time of kernels.
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1")  # fmt: skip
    run(tools / "cmake", "--build", tmp_path / "build", "--parallel", 2)
    printed = run(tmp_path / "build" / "example")
    assert printed.splitlines()[-1].endswith("the digits of 5 are right")
    entries = json.loads(succeed("list", "--terms", tmp_path / "build" / "libmine.so", "--json",
                                 cwd=tmp_path))  # fmt: skip
    assert {"adaptive", "student_t"} <= {entry["name"] for entry in entries["similarities"]}


def test_python():
    """Loaded terms persist, so this runs in a separate process."""
    checks = pathlib.Path(__file__).with_name("terms_checks.py")
    run(os.environ["GNOMON_PYTHON"], "-m", "pytest", "-q", "-p", "no:cacheprovider", checks,
        GNOMON_TEST_TERMS=str(LIBRARY))  # fmt: skip


def test_list(tmp_path):
    entries = json.loads(succeed("list", "--terms", LIBRARY, "--json", cwd=tmp_path))
    own = json.loads(succeed("list", "--json", cwd=tmp_path))
    added = {
        kind: {e["name"] for e in entries[kind]} - {e["name"] for e in own[kind]} for kind in own
    }
    assert added == {"similarities": {"adaptive", "student_t"}, "positions": {"bits", "root"}}
    assert "-gamma log(1 + |q - k|^2)" in succeed("list", "--terms", LIBRARY, cwd=tmp_path)


def test_compare_train_eval_and_generate(folder, tmp_path):
    run = tmp_path / "run"
    succeed(
        "compare", "--terms", LIBRARY, "--data", folder / "text.txt", "--out", run,
        "--run", "student_t/rope+root:slopes=learned", "--run", "adaptive/bits", "--steps", 2,
        "--lengths", "16", "--evaluation-bytes", 64, *TINY, cwd=tmp_path,
    )  # fmt: skip
    results = json.loads((run / "results.json").read_text())
    assert [one["losses"][0]["loss"] < 10 for one in results["runs"]] == [True, True]
    assert "Student's t" in (run / "results.json").read_text()

    trained = tmp_path / "trained"
    succeed(
        "train", "--terms", LIBRARY, "--data", folder / "text.txt", "--out", trained, "--steps", 2,
        "--similarity", "student_t", "--position", "root+bits", "--length", 16, *TINY, cwd=tmp_path,
    )  # fmt: skip
    evaluate = ("eval", "--model", trained, "--data", folder / "text.txt", "--lengths", "16")
    succeed(*evaluate, "--bytes", 64, "--terms", LIBRARY, cwd=tmp_path)
    assert "unknown position" in refused(*evaluate, cwd=tmp_path)
    succeed("generate", "--model", trained, "--terms", LIBRARY, "--prompt", "line",
            "--tokens", 4, cwd=tmp_path)  # fmt: skip
    succeed("inspect", "decay", "--model", trained, "--terms", LIBRARY, cwd=tmp_path)
    assert "unknown position" in refused("inspect", "decay", "--model", trained, cwd=tmp_path)


def test_inspect_and_bench(tmp_path):
    decay = ("inspect", "decay", "--position", "root")
    succeed(*decay, "--terms", LIBRARY, cwd=tmp_path)
    assert 'unknown position "root"' in refused(*decay, cwd=tmp_path)
    assert "absent.so is not a file" in refused(*decay, "--terms", "absent.so", cwd=tmp_path)
    bench = ("bench", "--model", "dot/none,student_t/root", "--repeats", 1, "--length", 16,
             "--depth", 1, "--dim", 16, "--heads", 2, "--mlp", 16, "--batch", 2)  # fmt: skip
    rows = json.loads(succeed(*bench, "--terms", LIBRARY, "--json", cwd=tmp_path))["models"]
    assert len(rows) == 2


def test_wrong_libraries_are_one_line(tmp_path):
    line = refused("list", "--terms", "absent.so", cwd=tmp_path)
    assert re.search(r"absent\.so is not a file", line)
    assert "student_t" in refused(
        "compare", "--data", __file__, "--run", "student_t/none", "--steps", 1, cwd=tmp_path
    )
    assert gnomon("list", "--terms", cwd=tmp_path).returncode == 2


def test_a_library_without_terms(tmp_path):
    (tmp_path / "empty.c").write_text("const char gnomon_terms = 0;\n")
    run("cc", "-shared", "-fPIC", "-o", tmp_path / "libempty.so", tmp_path / "empty.c")
    for _ in range(2):
        line = refused("list", "--terms", tmp_path / "libempty.so", cwd=tmp_path)
        assert "libempty.so contains no terms" in line


def test_contributing_shows_the_files():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"<!-- example: (\S+) -->\n```cpp\n(.*?)```", page, re.DOTALL))
    for name in FILES:
        assert shown[name] == (EXAMPLE / name).read_text(encoding="utf-8"), name
    assert sorted(path.name for path in EXAMPLE.iterdir()) == sorted(
        ["CMakeLists.txt", "main.cc", *FILES]
    )
