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
torchs = set(sys.modules)
middle = time.perf_counter()
import gnomon
end = time.perf_counter()
libraries = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if ".so" in line}
own = sorted(name for name in sys.modules if name.split(".")[0] == "gnomon")
modules = sorted(set(sys.modules) - torchs)
print(json.dumps([own, modules, sorted(libraries), (end - middle) / (middle - start)]))
"""
    done = run(["-c", program])
    assert done.returncode == 0, done.stderr
    own, modules, libraries, ratio = json.loads(done.stdout)
    assert not [name for name in own if name.startswith("gnomon.lab")]
    assert not {f"gnomon.{name}" for name in _lab.NAMES} & set(own)
    assert not {"matplotlib", "numpy.random", "optuna", "dask", "transformers"} & set(modules)
    assert "libgnomon_torch.so" in libraries
    assert "libgnomon_program.so" not in libraries
    assert ratio < 0.25


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


def test_without_matplotlib():
    """Reports say what to install, and the demo says it before it trains."""
    program = "import sys; sys.modules['matplotlib'] = None; from gnomon import _lab; "
    report = run(["-c", program + "sys.exit(_lab.run('report.__main__', ['x']))"])
    program = "import importlib.util as u; u.find_spec = lambda _: None; from gnomon import _lab; "
    demo = run(["-c", program + "_lab.run('demo', [])"])
    remedy = "matplotlib is not installed; run: pip install matplotlib"
    assert (report.returncode, report.stderr) == (1, f"gnomon: {remedy}\n")
    assert (demo.returncode, demo.stderr) == (2, f"gnomon.demo: {remedy}\n")


def test_an_unknown_attribute_is_an_error():
    with pytest.raises(AttributeError, match="module 'gnomon' has no attribute 'trainer'"):
        _ = gnomon.trainer


def test_without_the_lab(tmp_path):
    """The package as in the library's wheel works, and commands say what to install."""
    (tmp_path / "gnomon").mkdir()
    for path in (ROOT / "python/gnomon").iterdir():
        if path.name not in ("lab", "__pycache__"):
            (tmp_path / "gnomon" / path.name).symlink_to(path)
    program = """
import runpy, sys, torch, gnomon
q = torch.randn(1, 2, 3, 4)
assert gnomon.attention(q, q, q).isfinite().all()
try:
    gnomon.models
except ModuleNotFoundError as error:
    print(error)
from gnomon import info
info.main([])
print("commands")
sys.argv[1:] = ["--help"]
for command in ("", ".data", ".demo", ".inspect", ".report"):
    try:
        runpy.run_module(f"gnomon{command}", run_name="__main__", alter_sys=True)
    except SystemExit as stopped:
        print(stopped.code)
"""
    done = run(["-c", program], cwd=tmp_path)
    message = "gnomon.lab is not installed; run: pip install 'gnomon[lab]'\n"
    library, _, commands = done.stdout.partition("commands\n")
    assert library.startswith(message), done.stderr
    assert "PyTorch" in library
    assert commands.split() == 5 * ["1"]
    assert done.stderr == 5 * f"gnomon: {message}"
