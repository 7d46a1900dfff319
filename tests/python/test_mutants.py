"""All mutants in the lists must apply to the current tree."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu("files alone")

MUTANTS = Path(__file__).resolve().parents[1] / "mutants"


@pytest.fixture
def plant(monkeypatch):
    monkeypatch.syspath_prepend(str(MUTANTS))
    monkeypatch.delitem(sys.modules, "plant", raising=False)
    import plant

    return plant


@pytest.mark.slow
@pytest.mark.parametrize("script", ["mutants/plant.py", "cuda/planted_errors.py"])
def test_errors_fit_the_tree(script):
    command = [sys.executable, MUTANTS.parent / script, "--list"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) >= 40


def test_patterns_select_mutants(plant):
    errors = [plant.Planted(name, "file", "*") for name in ("a-1", "a-2", "b")]
    names = {
        patterns: [error.name for error in plant.select(errors, [*patterns])]
        for patterns in [(), ("a-*",), ("b", "a-2")]
    }
    assert names == {(): ["a-1", "a-2", "b"], ("a-*",): ["a-1", "a-2"], ("b", "a-2"): ["a-2", "b"]}
    with pytest.raises(plant.PlantError, match="no mutant is named a; --list lists all names"):
        plant.select(errors, ["b", "a"])


def test_an_error_replaces_whole_lines(plant):
    error = plant.Planted("name", "file", "*", old=["  a;", "  b;"], new=["  a;"])
    assert error.plant("x\n  a;\n  b;\ny\n") == "x\n  a;\ny\n"
    for text in ("x\n", "  a;\n  b;\n  a;\n  b;\n", "  a;\n  b; // c\n", "  a;\n    b;\n"):
        with pytest.raises(plant.PlantError, match=r"name: its text occurs \d times"):
            error.plant(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a] file Test.*\n-x\n?y\n", "errors.txt:3: neither the first line of a mutant nor"),
        ("[a] file\n", "errors.txt:1: neither"),
        ("-x\n", "errors.txt:1: neither"),
        ("[a] file *\n-x\n\n[a] file *\n-y\n", "errors.txt: a is defined 2 times"),
    ],
)
def test_an_invalid_list_is_reported(plant, tmp_path, text, message):
    path = tmp_path / "errors.txt"
    path.write_text(text)
    with pytest.raises(plant.PlantError, match=message):
        plant.read_errors(path)


def test_the_list_is_read(plant, tmp_path):
    path = tmp_path / "errors.txt"
    path.write_text("# comment\n\n[a-1] dir/file A.*:B.*\n x\n-y\n+z\n+\n")
    assert plant.read_errors(path) == [
        plant.Planted("a-1", "dir/file", "A.*:B.*", ["x", "y"], ["x", "z", ""])
    ]


def test_objects_left_by_the_previous_mutant_are_rebuilt(plant, tmp_path):
    """They are compiled together with the next mutant, so they must be removed with it."""
    workshop = plant.Workshop.__new__(plant.Workshop)
    paths = [
        tmp_path / name for name in ("kernel_Dot.cc.o", "kernel_Hyperbolic.cc.o", "engine.cc.o")
    ]
    paths += [tmp_path / name for name in ("causal_sums.cc.o", "derivatives.cc.o")]
    workshop.including = lambda file: paths
    for path in paths:
        path.touch()
    header = plant.Path("src/cpu/vocabulary-inl.h")
    assert [path.name for path in workshop.objects(header)] == ["kernel_Dot.cc.o", "engine.cc.o"]
    paths[1].unlink()
    paths[3].unlink()
    assert workshop.objects(header) == paths[:4]
