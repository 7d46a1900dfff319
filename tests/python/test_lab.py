"""The interface between the library and the lab: imports, short names and commands."""

import json
import subprocess
import sys

import pytest
from test_cli import ROOT

import gnomon
from gnomon import _lab

pytestmark = pytest.mark.cpu("starts its own processes")


def run(program, **options):
    return subprocess.run(
        [sys.executable, *program], capture_output=True, text=True, check=False, **options
    )


def test_import_loads_nothing_of_the_lab():
    program = """
import json, sys, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import gnomon
end = time.perf_counter()
libraries = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if ".so" in line}
own = sorted(name for name in sys.modules if name.split(".")[0] == "gnomon")
print(json.dumps([own, sorted(sys.modules), sorted(libraries), (end - middle) / (middle - start)]))
"""
    done = run(["-c", program])
    assert done.returncode == 0, done.stderr
    own, modules, libraries, ratio = json.loads(done.stdout)
    assert not [name for name in own if name.startswith("gnomon.lab")]
    assert not {f"gnomon.{name}" for name in _lab.NAMES} & set(own)
    assert not {"matplotlib", "numpy.random", "optuna", "dask"} & (set(modules) - TORCH)
    assert "libgnomon_torch.so" in libraries
    assert "libgnomon_program.so" not in libraries
    assert ratio < 0.25


#: The modules that `import torch` loads.
TORCH = set(
    json.loads(run(["-c", "import json, sys, torch; print(json.dumps(list(sys.modules)))"]).stdout)
)


def test_short_names_are_the_modules_of_the_lab():
    pytest.importorskip("matplotlib")
    program = "import gnomon"
    for name in _lab.NAMES:
        program += f"""
attribute = gnomon.{name}
import gnomon.{name}
from gnomon import {name}
import gnomon.lab.{name} as module
assert attribute is gnomon.{name} is {name} is module, "{name}"
"""
    done = run(["-c", program])
    assert done.returncode == 0, done.stderr


def test_an_unknown_attribute_is_an_error():
    with pytest.raises(AttributeError, match="module 'gnomon' has no attribute 'trainer'"):
        _ = gnomon.trainer


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The package without the lab, as in the library's wheel."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "gnomon").mkdir()
    for path in (ROOT / "python/gnomon").iterdir():
        if path.name not in ("lab", "__pycache__"):
            (folder / "gnomon" / path.name).symlink_to(path)
    return folder


def test_without_the_lab_each_command_says_what_to_install(bare):
    program = """
import runpy, sys
sys.argv[1:] = ["--help"]
for command in ("", ".data", ".demo", ".inspect", ".report"):
    try:
        runpy.run_module(f"gnomon{command}", run_name="__main__", alter_sys=True)
    except SystemExit as stopped:
        print(stopped.code)
"""
    done = run(["-c", program], cwd=bare)
    assert done.stdout.split() == 5 * ["1"], done.stderr
    message = "gnomon: gnomon.lab is not installed; run: pip install 'gnomon[lab]'\n"
    assert done.stderr == 5 * message


def test_without_the_lab_the_library_works(bare):
    program = """
import gnomon, torch
q = torch.randn(1, 2, 3, 4)
assert gnomon.attention(q, q, q).isfinite().all()
try:
    gnomon.models
except ModuleNotFoundError as error:
    print(error)
"""
    done = run(["-c", program], cwd=bare)
    assert done.stdout == "gnomon.lab is not installed; run: pip install 'gnomon[lab]'\n"
    assert run(["-m", "gnomon.info"], cwd=bare).returncode == 0
