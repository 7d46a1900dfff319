"""Tests for documentation pages that list code, tests or data."""

import ast
import doctest
import inspect
import io
import json
import pathlib
import pickle
import re

import pytest
import torch
import write_facades
import write_page
from formulas import POSITIONS, SIMILARITIES
from test_cli import ROOT, succeed
from test_content import CONTENT

import gnomon
import gnomon.lab.models
from gnomon import info

pytestmark = pytest.mark.cpu("files alone")

TESTS = ROOT / "tests"
SOURCES = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")


def test_generated_files_match_the_catalogue():
    stale = [
        path
        for path, text in write_facades.facades().items()
        if (ROOT / path).read_text(encoding="utf-8") != text
    ]
    assert not stale, "run: make facades"


def test_the_benchmarks_page_matches_its_script():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    fixed = [
        write_page.INTRODUCTION,
        write_page.TARGETS,
        write_page.CURVE,
        write_page.CASES,
        write_page.MODELS,
    ]
    places = [page.index(text) for text in fixed]
    assert places == sorted(places)
    assert places[0] == 0
    table = page[places[1] : places[2]]
    cases = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    assert cases[1:] == [f"| {row.name}" for row in write_page.targets.rows()]


def names_in(file: pathlib.Path) -> set[str]:
    """The names of the tests in a file, as a command line selects them."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    return {f"{a}.{b}" for a, b in re.findall(r"^TEST(?:_[FP])?\((\w+), (\w+)\)", text, re.M)}


ROWS = [
    line.strip("|").split(" | ")
    for line in SOURCES.splitlines()
    if line.startswith("| ") and not line.startswith("| source")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].strip()}: {row[1]}")
def test_every_source_has_its_tests(row):
    assert len(row) == 4
    found = re.findall(r"`([^`]+)`", row[3])
    assert found
    for name in found:
        file, test = name.split("::")
        (path,) = TESTS.glob(f"*/{file}")
        test, _, entry = test.rstrip("]").partition("[")
        assert test in names_in(path), name
        assert entry in {"", *SIMILARITIES, *POSITIONS, *CONTENT}, name


@pytest.mark.slow
def test_every_entry_of_the_catalogue_has_a_source(tmp_path):
    catalogue = json.loads(succeed("list", "--json", cwd=tmp_path))
    for entry in catalogue["similarities"] + catalogue["positions"]:
        assert re.search(rf"\| [^|]*`{entry['name']}[`:]", SOURCES), entry["name"]


MODULES = {
    "attention": gnomon,
    "similarity": gnomon.similarity,
    "position": gnomon.position,
    "nn": gnomon.nn,
    "cones": gnomon.cones,
    "lorentz": gnomon.lorentz,
    "distributed": gnomon.distributed,
    "models": gnomon.lab.models,
}


def public_objects(module) -> list[str]:
    return [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]


@pytest.mark.parametrize("page", MODULES)
def test_an_api_page_lists_every_public_name(page):
    module = MODULES[page]
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text(encoding="utf-8")
    assert f".. automodule:: {module.__name__}\n" in text
    listed = re.findall(r"^   (\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(public_objects(module))


@pytest.mark.parametrize("package", [gnomon.nn, gnomon.lab.models], ids=lambda one: one.__name__)
def test_public_names_of_a_package_can_be_pickled(package):
    for name in public_objects(package):
        assert getattr(package, name).__module__ == package.__name__
        assert pickle.loads(pickle.dumps(getattr(package, name))) is getattr(package, name)


def test_the_page_of_the_cpp_interface_lists_headers_and_setters():
    page = (ROOT / "docs" / "api" / "cpp.md").read_text(encoding="utf-8")
    folder = ROOT / "include"
    headers = {path.relative_to(folder).as_posix() for path in folder.rglob("*.h")}
    assert set(re.findall(r"^\| `(gnomon/[\w/]+\.h)` \|", page, re.M)) == headers
    header = (folder / "gnomon/torch/attention.h").read_text(encoding="utf-8")
    setters = re.findall(r"^  TORCH_ARG\(.*, (\w+)\)", header, re.M)
    table = page.partition("\n| setter |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(setters)


def test_pages_list_environment_variables_and_files_of_cuda():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert [name for name in info.VARIABLES if not re.search(rf"`\$?{name}`", page)] == []
    folder = ROOT / "src" / "cuda"
    page = (folder / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in folder.iterdir()} - {"README.md"}
    assert sorted(name for name in files if f"`{name}`" not in page) == []


#: Abstract base classes, which users do not instantiate.
BASES = {"DefinedSimilarity", "Similarity", "Position"}


@pytest.mark.parametrize("page", MODULES)
def test_every_docstring_has_an_example_that_runs(page):
    module = MODULES[page]
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    for name in set(public_objects(module)) - BASES:
        text = inspect.getdoc(getattr(module, name))
        full = f"{module.__name__}.{name}"
        example = parser.get_doctest(text, {"torch": torch, "gnomon": gnomon}, full, None, 0)
        assert example.examples, f"{full} has no example"
        report = io.StringIO()
        assert runner.run(example, out=report.write).failed == 0, report.getvalue()
