"""The programs of examples/python run unchanged, and their output is correct."""

import os
import re
import subprocess
import sys

import pytest
from test_cli import ROOT

pytestmark = pytest.mark.cpu("processes of its own")

FOLDER = ROOT / "examples" / "python"


def run(name: str) -> str:
    return subprocess.run(
        [sys.executable, FOLDER / name],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


def replace_sdpa(printed: str) -> None:
    (difference,) = re.findall(r"largest difference ([\d.e+-]+)", printed)
    assert float(difference) < 1e-5


def learned_hype(printed: str) -> None:
    # Without a position, the best guess has loss log(16) = 2.77.
    first, *_, last = losses(printed)
    assert last < 0.1 < first < 2.5
    before, after = re.findall(r"tau \[(.*)\]", printed)
    assert before != after


def cone_vit(printed: str) -> None:
    first, *_, last = losses(printed)
    assert last < 0.4 < 1.2 < first
    (right,) = re.findall(r"right: (\d+)%", printed)
    assert int(right) > 85


EXAMPLES = {check.__name__: check for check in (replace_sdpa, learned_hype, cone_vit)}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_examples(name):
    EXAMPLES[name](run(f"{name}.py"))


def test_the_readme_lists_every_example():
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for path in (path for path in (ROOT / "examples").iterdir() if path.is_dir()):
        names = path.glob("*.py") if path.name == "python" else [path]
        for name in names:
            assert f"\n| `{name.name}` |" in text, name
