"""Files installed by pip: the wheel's metadata, and its contents away from this tree."""

import email
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest
import torch
from test_cli import ROOT, TINY

import gnomon
from gnomon import _library

pytestmark = pytest.mark.cpu("processes of its own")

BUILD = ROOT / "build"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder as installed by pip, without compiling anything again."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--quiet", "--no-deps"]
    command += [
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--config-settings=wheel.cmake=false",
    ]
    subprocess.run([*command, "-w", str(site)], check=True)
    (wheel,) = site.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    wheel.unlink()
    cmake = pathlib.Path(sys.executable).with_name("cmake")
    install = [str(cmake), "--install", str(BUILD), "--component", "python", "--prefix", str(site)]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    return site


def run(site, *arguments):
    """The output of Python when that folder is the only one with gnomon besides this tree."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=site, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_metadata(site):
    (folder,) = site.glob("*.dist-info")
    metadata = email.message_from_string((folder / "METADATA").read_text(encoding="utf-8"))
    assert metadata["Name"] == "gnomon"
    assert metadata["Version"] == gnomon.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra" not in line]
    # The library is compiled for one minor release of PyTorch, and for every Python 3.
    minor = ".".join(torch.__version__.split(".")[:2])
    assert needed == [f"torch=={minor}.*", "typing_extensions"]
    assert (folder / "WHEEL").read_text().count("Tag: py3-none-") == 1
    assert set(metadata.get_all("Provides-Extra")) == {
        *("data", "report", "transformers", "tune", "workers")
    }
    scripts = (folder / "entry_points.txt").read_text(encoding="utf-8")
    assert scripts.split("\n")[:2] == ["[console_scripts]", "gnomon = gnomon.__main__:main"]


@pytest.mark.parametrize(
    ("built_for", "runs", "refused"),
    [
        (
            ["2.15"],
            ["2.15.0", "2.15.0+cpu", "2.15.1+cu132"],
            ["2.14.1", "2.16.0", "2.15.0.dev1+cpu"],
        ),
        (["2.11", "2.12"], ["2.11.0", "2.12.1+cu130"], ["2.10.2", "2.13.0", "2.1.1"]),
        (["2.16.0.dev20261101+cpu"], ["2.16.0.dev20261101+cpu"], ["2.16.0", "2.16.0.dev20261102"]),
        (["2.15.0a0+git1"], ["2.15.0a0+git1"], ["2.15.0", "2.15.0a0+git2"]),
    ],
)
def test_a_build_serves_every_patch_of_its_release(built_for, runs, refused, monkeypatch):
    monkeypatch.setattr(_library._build, "TORCH_RELEASES", built_for)
    for version in runs:
        _library.check_release(version)
    for version in refused:
        message = (
            f"gnomon was built for PyTorch {', '.join(built_for)}, but this is PyTorch {version}; "
            "rebuild it"
        )
        with pytest.raises(ImportError, match=re.escape(message)):
            _library.check_release(version)


def test_it_holds_every_module_and_its_types(site):
    def names(folder):
        return {str(path.relative_to(folder)) for path in folder.rglob("*.py")}

    assert names(site / "gnomon") == names(ROOT / "python" / "gnomon")
    assert (site / "gnomon" / "py.typed").exists()


def test_the_wheel_is_self_contained(site):
    program = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import gnomon
from gnomon import _library
end = time.perf_counter()
q = torch.randn(1, 2, 9, 8, requires_grad=True)
gamma = torch.ones(2, requires_grad=True)
o = gnomon.attention(q, q, q, similarity=gnomon.similarity.Laplacian(gamma), causal=True)
o.sum().backward()
assert q.grad.isfinite().all() and gamma.grad.isfinite().all()
loaded = [line.split()[-1] for line in open("/proc/self/maps") if "libgnomon" in line]
print(gnomon.__file__, *set(loaded), (end - start) / (middle - start), sep="\\n")
"""
    package, library, ratio = run(site, "-c", program).splitlines()
    assert package == str(site / "gnomon" / "__init__.py")
    folder = f"torch-{_library.RELEASE}"
    assert library == str(site / "gnomon" / "lib" / folder / "libgnomon_torch.so")
    assert float(ratio) < 1.3


def test_the_program(site):
    text = site / "text"
    text.write_text("the sun casts a shadow\n" * 100, encoding="utf-8")
    compare = ["compare", "--data", text, "--out", "run", "--steps", 1, "--seeds", 1]
    compare += ["--lengths", 16, "--evaluation-bytes", 64, "--position", "rope,hype", *TINY]
    run(site, "-m", "gnomon", *compare)
    # Drawn by the installed package.
    assert {"results.json", "report.html"} <= {path.name for path in (site / "run").iterdir()}


def test_it_has_the_headers_that_definitions_are_compiled_with(site, tmp_path):
    """The compiler reads only files of the wheel, of PyTorch and of the compiler."""
    program = f"""
import pathlib, subprocess
from gnomon import _define, _formula
place = pathlib.Path({str(tmp_path)!r})
text = _formula.definition_of("Plain", "g", (), True, {{}})
(place / "Plain-inl.h").write_text(text)
names = {{"struct": "Plain", "class_name": "Plain", "name": "plain", "symbol": "symbol"}}
source = _define._SOURCE.format(text=text, **names)
(place / "terms.cc").write_text(source)
command = [*_define._command(), f"-I{{place}}", "-M", str(place / "terms.cc")]
print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
"""
    # A make rule: lines continue after a backslash, which also escapes spaces in names.
    rule = run(site, "-c", program).replace("\\\n", " ").strip()
    names = [name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", rule)[1:]]
    read = [pathlib.Path(os.path.normpath(name)) for name in names]
    assert site / "gnomon/include/hwy/highway.h" in read
    assert site / "gnomon/include/gnomon/kernel/core/kernel_template.cc" in read
    known = (site, tmp_path, pathlib.Path(torch.__file__).parent)
    for path in read:
        if not any(path.is_relative_to(folder) for folder in known):
            assert not path.is_relative_to(ROOT), path
            assert "hwy" not in path.parts, path
