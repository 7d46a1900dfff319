"""Installation by pip: the metadata of the wheel, and its contents outside this tree."""

import email
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile

import pytest
import torch
from test_cli import ROOT, TINY

import gnomon
from gnomon import _release, build
from gnomon.lab import __main__, _program

pytestmark = pytest.mark.cpu("starts its own processes")

BUILD = ROOT / "build"


def unpack(project, folder):
    """Fills a folder like pip does with a project's wheel, without recompiling anything."""
    command = [sys.executable, "-m", "pip", "wheel", str(project), "--quiet", "--no-deps"]
    command += [
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--config-settings=wheel.cmake=false",
    ]
    subprocess.run([*command, "-w", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder)
    wheel.unlink()
    settings = (project / "pyproject.toml").read_text(encoding="utf-8")
    (component,) = re.findall(r'^install.components = \["(\w+)"\]$', settings, re.MULTILINE)
    cmake = pathlib.Path(sys.executable).with_name("cmake")
    install = [cmake, "--install", BUILD, "--component", component, "--prefix", folder]
    subprocess.run(list(map(str, install)), check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The files of the library's wheel."""
    folder = tmp_path_factory.mktemp("library")
    unpack(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def site(library, tmp_path_factory):
    """A folder in which both wheels are installed."""
    site = tmp_path_factory.mktemp("both") / "site"
    shutil.copytree(library, site)
    unpack(ROOT / "lab", site)
    return site


def run(site, *arguments, **environment):
    """The output of Python with `site` as its working directory and on its path."""
    environment = {**os.environ, "PYTHONPATH": str(site), **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=site, env=environment, check=True, capture_output=True, text=True
    ).stdout


def metadata_of(folder, name):
    text = (folder / f"{name}-{gnomon.__version__}.dist-info/METADATA").read_text(encoding="utf-8")
    return email.message_from_string(text)


def test_metadata(library):
    (folder,) = library.glob("*.dist-info")
    metadata = metadata_of(library, "gnomon")
    assert metadata["Name"] == "gnomon"
    assert metadata["Version"] == gnomon.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra" not in line]
    # The library is compiled for one minor release of PyTorch, and for every Python 3.
    minor = ".".join(torch.__version__.split(".")[:2])
    assert needed == [f"torch=={minor}.*", "typing_extensions"]
    assert (folder / "WHEEL").read_text().count("Tag: py3-none-") == 1
    assert set(metadata.get_all("Provides-Extra")) == {
        *("data", "lab", "report", "transformers", "tune", "workers")
    }
    scripts = (folder / "entry_points.txt").read_text(encoding="utf-8")
    assert scripts.split("\n")[:2] == ["[console_scripts]", "gnomon = gnomon.__main__:main"]


def test_metadata_of_the_lab(site):
    metadata = metadata_of(site, "gnomon_lab")
    assert metadata["Name"] == "gnomon-lab"
    assert metadata.get_all("Requires-Dist") == [f"gnomon=={gnomon.__version__}"]
    licenses = {"LICENSE", "licenses/CLI11.txt", "licenses/nlohmann-json.txt"}
    assert licenses <= set(metadata.get_all("License-File"))
    for file in metadata.get_all("License-File"):
        folder = site / f"gnomon_lab-{gnomon.__version__}.dist-info/licenses"
        assert (folder / file).read_bytes() == (ROOT / file).read_bytes()


def test_the_wheels_share_no_file_and_the_library_has_nothing_of_the_lab(library, site, tmp_path):
    def names(folder):
        files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {str(file) for file in files if not file.parts[0].endswith(".dist-info")}

    unpack(ROOT / "lab", tmp_path)
    assert not names(library) & names(tmp_path)
    assert names(library) | names(tmp_path) == names(site)
    for name in names(library):
        assert not re.search(r"(^|/)(lab|CLI)/|libgnomon_program", name), name
    done = fails(library, "-m", "gnomon", "list")
    assert done == ["gnomon: gnomon.lab is not installed; run: pip install 'gnomon[lab]'"]


@pytest.mark.parametrize(
    ("built_for", "runs", "refused"),
    [
        (
            ["2.15"],
            ["2.15.0", "2.15.0+cpu", "2.15.1+cu132", "2.15.1.post2"],
            ["2.14.1", "2.16.0", "2.15.0.dev1+cpu"],
        ),
        (["2.11", "2.12"], ["2.11.0", "2.12.1+cu130"], ["2.10.2", "2.13.0", "2.1.1"]),
        (["2.16.0.dev20261101+cpu"], ["2.16.0.dev20261101+cpu"], ["2.16.0", "2.16.0.dev20261102"]),
        (["2.15.0a0+git1"], ["2.15.0a0+git1"], ["2.15.0", "2.15.0a0+git2"]),
    ],
)
def test_a_build_serves_every_patch_of_its_release(built_for, runs, refused, monkeypatch):
    monkeypatch.setattr(_release._build, "TORCH_RELEASES", built_for)
    for version in runs:
        _release.check_release(version)
    for version in refused:
        message = (
            f"gnomon was built for PyTorch {', '.join(built_for)}, but this is PyTorch {version}; "
            + ("install a newer PyTorch" if version in ("2.10.2", "2.1.1") else "rebuild it")
        )
        with pytest.raises(ImportError, match=re.escape(message)):
            _release.check_release(version)


@pytest.mark.parametrize("version", ["garbage", "", "v2.15.0", "2"])
def test_a_damaged_version_is_one_clear_line(version):
    with pytest.raises(ImportError, match=rf"^torch\.__version__ is '{version}'; expected a vers"):
        _release.check_release(version)


def test_versions_agree():
    for file in ("CITATION.cff", "conda/recipe.yaml"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.findall(r"^ *version: (\d.*)", text, re.MULTILINE) == [gnomon.__version__], file
    releases = {
        file: re.search(r"2\.11 [\d. ]+\d", (ROOT / file).read_text(encoding="utf-8"))[0]
        for file in (
            *("scripts/wheel", "pyproject.toml", "lab/pyproject.toml"),
            ".github/workflows/wheels.yml",
        )
    }
    assert len(set(releases.values())) == 1, releases


def test_the_packages_of_read_the_docs_are_those_of_the_setup():
    """Read the Docs runs `make docs` without root, so no package may be missing."""
    setup = (ROOT / "scripts/setup").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^(packages|test_packages)=\(([^)]*)\)", setup, re.MULTILINE))
    pages = (ROOT / ".readthedocs.yaml").read_text(encoding="utf-8")
    apt = re.search(r"apt_packages:\n((?: +- .*\n)+)", pages)[1]
    needed = [*listed["packages"].split(), *listed["test_packages"].split()]
    assert re.findall(r"- (\S+)", apt) == needed


def test_documented_pip_commands_work_as_written():
    """An isolated build is refused, and `.[extra]` would compile everything again."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "cmake").glob("*.py")]
    files += [path for path in (ROOT / "python").rglob("*.py") if path.name != "_build.py"]
    found = 0
    for file in files:
        for command in re.findall(r"pip install [^`\n&]*", file.read_text(encoding="utf-8")):
            if re.search(r"""[ '"]\.($|[\s'"[])""", command):
                found += 1
                assert "--no-build-isolation" in command, (file, command)
                assert ".[" not in command, (file, command)
    assert found >= 4
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(r"\[project\.optional-dependencies\]\n((?:.+\n)+)", project)[1]
    extras = set(re.findall(r"^\w+", section, re.MULTILINE))
    page = (ROOT / "docs/start/installation.md").read_text(encoding="utf-8")
    assert set(re.findall(r"pip install 'gnomon\[(\w+)\]'", page)) == extras


@pytest.mark.parametrize(
    ("name", "folder", "projects"),
    [("gnomon", ".", "."), ("gnomon-lab", "lab", '-C build-dir="$PWD/build-pip" . ./lab')],
)
def test_a_build_that_sees_no_pytorch_names_all_requirements(name, folder, projects, tmp_path):
    backend = """
import sys
from scikit_build_core import build
sys.modules["torch"] = None
build.prepare_metadata_for_build_wheel(sys.argv[1])
"""
    command = [sys.executable, "-c", backend, str(tmp_path)]
    environment = {**os.environ, "GNOMON_TORCH_RELEASES": ""}
    done = subprocess.run(
        command, cwd=ROOT / folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == (
        f"error: {name} is compiled against the installed PyTorch, which is missing or which an "
        "isolated build cannot see. Run: pip install torch scikit-build-core cmake ninja && pip "
        f"install --no-build-isolation {projects}"
    )
    page = (ROOT / "docs/start/installation.md").read_text(encoding="utf-8")
    assert f"$ pip install --no-build-isolation {projects}\n" in page


def test_the_source_distribution_has_the_files_that_a_build_reads_and_no_others(tmp_path):
    backend = "import sys; from scikit_build_core import build; build.build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", backend, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "GNOMON_TORCH_RELEASES": "2.11 2.15"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    included = re.findall(r'"(.*)"', re.search(r"sdist\.include = \[([^]]*)\]", project)[1])
    needed = {"CMakeLists.txt", "cmake", "include", "pyproject.toml", "python/gnomon", "src"}
    assert needed <= set(included)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *included]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    expected = {"PKG-INFO"}
    for path in map(pathlib.Path, listed.splitlines()):
        # A link to a folder is replaced by its files.
        files = (ROOT / path).glob("*") if (ROOT / path).is_dir() else [ROOT / path]
        expected |= {str(file.relative_to(ROOT)) for file in files}
    # The lab is another package.
    assert names == {name for name in expected if not name.startswith("python/gnomon/lab/")}
    assert archive.stat().st_size < 2e6


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
    folder = f"torch-{_release.release_of(torch.__version__)}"
    assert library == str(site / "gnomon" / "lib" / folder / "libgnomon_torch.so")
    assert float(ratio) < 1.3


def test_the_program(site):
    text = site / "text"
    text.write_text("the sun casts a shadow\n" * 100, encoding="utf-8")
    compare = ["compare", "--data", text, "--out", "run", "--steps", 1, "--seeds", 1]
    compare += ["--lengths", 16, "--evaluation-bytes", 64, "--position", "rope,hype", *TINY]
    run(site, "-m", "gnomon", *compare)
    # The installed package wrote the report.
    assert {"results.json", "report.html"} <= {path.name for path in (site / "run").iterdir()}


def test_it_has_the_headers_that_definitions_are_compiled_with(site, tmp_path):
    """The compiler may read only files of the wheel, of PyTorch and of the compiler itself."""
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
    assert site / "gnomon/source/src/core/kernel_template.cc" in read
    known = (site, tmp_path, pathlib.Path(torch.__file__).parent)
    for path in read:
        if not any(path.is_relative_to(folder) for folder in known):
            assert not path.is_relative_to(ROOT), path
            assert "hwy" not in path.parts, path


@pytest.fixture
def other(site, tmp_path):
    """A copy of `site` as if built for a different PyTorch release, with a kernel library."""
    other = tmp_path / "other"
    shutil.copytree(site, other, ignore=shutil.ignore_patterns("torch-*"))
    settings = other / "gnomon/_build.py"
    text = settings.read_text(encoding="utf-8").replace('SOURCES = ""', 'SOURCES = "source"')
    settings.write_text(text + 'TORCH_RELEASES = ["2.11", "2.99"]\n', encoding="utf-8")
    (other / "gnomon/lib/libgnomon_core.so").touch()
    return other


def fails(site, *arguments, **environment):
    """The lines of Python's error output; the command must fail."""
    paths = {"PYTHONPATH": str(site), **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=site, env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert done.returncode != 0
    return done.stderr.splitlines()


def test_the_program_that_compiles_runs_where_the_package_does_not_load(other):
    assert fails(other, "-c", "import gnomon")[-1] == (
        "ImportError: gnomon was built for PyTorch 2.11, 2.99, but this is PyTorch "
        f"{torch.__version__}; run: python -m gnomon.build"
    )
    (line,) = fails(other, "-m", "gnomon.build", CXX="/no/such/c++")
    assert line.startswith("gnomon.build: cannot run /no/such/c++: a C++20 compiler is required;")
    for command in ("apt-get install g++", "xcode-select --install", "conda install", "CXX"):
        assert command in line
    (line,) = fails(other, "-m", "gnomon.build", CXX="g++ '")
    assert line == """gnomon.build: CXX is "g++ '"; expected a C++ compiler, such as g++"""
    assert "--program" in run(other, "-m", "gnomon.build", "--help")


def test_programs_that_cannot_load_the_package_print_one_line(other):
    message = (
        "gnomon was built for PyTorch 2.11, 2.99, but this is PyTorch "
        f"{torch.__version__}; run: python -m gnomon.build"
    )
    assert fails(other, "-m", "gnomon", "list") == [f"gnomon: {message}"]
    assert fails(other, "-Bmgnomon.report", "folder") == [f"gnomon.report: {message}"]
    script = other / "bin/gnomon"
    script.parent.mkdir()
    script.write_text("from gnomon.__main__ import main\nmain()\n")
    assert fails(other, str(script), "list") == [f"gnomon: {message}"]
    # Bug reports ask for this description.
    done = subprocess.run(
        [sys.executable, "-m", "gnomon.info", "--json"],
        cwd=other,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["libraries"] == message
    assert found["PyTorch"].startswith(torch.__version__)
    assert {"gnomon", "Python", "system", "GPUs", "cache", "packages", "environment"} <= set(found)


def test_a_library_that_does_not_load_says_why_and_what_to_do(other):
    """PyTorch builds with the same version as a release may have a different ABI."""
    release = _release.release_of(torch.__version__)
    with (other / "gnomon/_build.py").open("a") as settings:
        settings.write(f'TORCH_RELEASES = ["2.11", "2.99", "{release}"]\n')
    library = other / f"gnomon/lib/torch-{release}/libgnomon_torch.so"
    for held, cause in (
        ("2.99", f"{library}: cannot open shared object file: No such file or directory"),
        (f"2.99, {release}", f"{library}: file too short"),
    ):
        for name in held.split(", "):
            folder = other / f"gnomon/lib/torch-{name}"
            folder.mkdir(exist_ok=True)
            (folder / library.name).touch()
        assert fails(other, "-c", "import gnomon")[-1] == (
            f"ImportError: gnomon's libraries do not load in this PyTorch ({torch.__version__}): "
            f"{cause}; this installation has libraries for PyTorch {held}; run: python -m "
            "gnomon.build"
        )
    # gnomon.build needs the core.
    (other / "gnomon/lib/libgnomon_core.so").unlink()
    assert fails(other, "-c", "import gnomon")[-1].endswith("; reinstall gnomon")


def test_import_needs_no_cache(site, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(site, copy)
    with (copy / "gnomon/_build.py").open("a") as settings:
        settings.write('SOURCES = "source"\n')
    (copy / "gnomon/lib/libgnomon_core.so").touch()
    program = """
import os, pathlib
def home(cls):
    raise RuntimeError("Could not determine home directory.")
pathlib.Path.home = classmethod(home)
import gnomon, gnomon.info
print(gnomon.info.collect()["cache"])
"""
    # Such a name raises an error even where root may read everything.
    name = "x" * 300
    assert run(copy, "-c", program, GNOMON_CACHE=name).strip() == str(copy / name)
    assert "set the environment variable GNOMON_CACHE" in run(
        copy, "-c", program, GNOMON_CACHE="", XDG_CACHE_HOME=""
    )


@pytest.fixture
def sources(site, tmp_path, monkeypatch):
    """Makes gnomon.build use the sources of the wheel when it is called in this process."""
    monkeypatch.setattr(_release, "SOURCES", site / "gnomon/source")
    monkeypatch.setattr(_release, "built_folder", lambda: tmp_path / "cache/torch/key")
    return tmp_path


def refusal(capfd):
    with pytest.raises(SystemExit):
        build.main([])
    (line,) = capfd.readouterr().err.splitlines()
    return line.removeprefix("gnomon.build: ")


def test_what_cannot_be_compiled_is_one_line(sources, monkeypatch, capfd):
    (sources / "cache").touch()
    assert refusal(capfd) == (
        f"cannot write to {sources / 'cache/torch/key'}: Not a directory; set the environment "
        "variable GNOMON_CACHE to choose another folder"
    )
    (sources / "cache").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "garbage")
        assert refusal(capfd).startswith("torch.__version__ is 'garbage'; expected a version such")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda name, path=None: None if name == "cmake" else name)
        assert refusal(capfd) == "cmake is missing; run: pip install cmake ninja"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.10.1+cpu")
        assert refusal(capfd) == "PyTorch 2.10.1+cpu is too old: gnomon needs 2.11 or newer"
    monkeypatch.setattr(_release, "SOURCES", None)
    assert refusal(capfd).startswith("this installation has no sources; in gnomon's source tree")


def test_a_build_removes_what_killed_builds_left(tmp_path):
    folder = tmp_path / "key"
    killed, running = tmp_path / "old/build-killed", folder / "build-running"
    for work in (killed, running):
        work.mkdir(parents=True)
        (work / "file").touch()
    with build._locked(running), build._work_folder(folder) as work:
        assert set(folder.iterdir()) == {running, work}
        with build._work_folder(folder):
            assert work.exists()
    assert list(folder.iterdir()) == [running]
    assert not killed.exists()


def test_a_build_leaves_a_folder_that_another_build_has_just_created(tmp_path, monkeypatch):
    folder = tmp_path / "key"
    folder.mkdir()
    create = tempfile.mkdtemp

    def others_build():
        with build._work_folder(folder):
            pass

    def create_while_another_build_starts(*arguments, **options):
        monkeypatch.setattr(tempfile, "mkdtemp", create)
        work = create(*arguments, **options)
        thread.start()
        thread.join(0.3)  # it must wait until the folder is locked
        return work

    thread = threading.Thread(target=others_build, daemon=True)
    monkeypatch.setattr(tempfile, "mkdtemp", create_while_another_build_starts)
    with build._work_folder(folder) as work:
        thread.join(60)
        assert not thread.is_alive()
        assert list(folder.iterdir()) == [work]
    assert not list(folder.iterdir())


def test_a_build_without_the_program_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(_program, "LIBRARIES", tmp_path)
    monkeypatch.setattr(__main__, "library", _program.library.__wrapped__)
    assert __main__.main(["list"]) == 1
    assert capfd.readouterr().err == (
        f"gnomon: {tmp_path}/libgnomon_program.so does not exist: the gnomon command was not "
        "compiled for this PyTorch; run: python -m gnomon.build --program\n"
    )


def test_it_holds_every_source(site):
    def names(folder):
        return {
            str(path.relative_to(folder))
            for part in ("cmake", "include", "lab", "src")
            for path in (folder / part).rglob("*.*")
            if path.suffix not in (".py", ".pyc", ".toml") and "studies" not in path.parts
        }

    assert names(site / "gnomon/source") == names(ROOT)


@pytest.mark.long
def test_the_sources_compile_where_import_finds_the_result(sources, monkeypatch, capfd):
    """CMake configures the build; instead of compiling, Ninja copies this tree's library."""
    ninja = sources / "ninja"
    library = BUILD / "lib/libgnomon_torch.so"
    ninja.write_text(
        f'''#!/bin/sh
case "$*" in
*gnomon_torch*) mkdir -p lib && cp "{library}" lib ;;
*) exec "{build._tool("ninja")}" "$@" ;;
esac
'''
    )
    ninja.chmod(0o755)
    tool = build._tool
    monkeypatch.setattr(build, "_tool", lambda name: str(ninja) if name == "ninja" else tool(name))
    assert build.main([]) == 0
    assert f"for PyTorch {torch.__version__}, which takes a few minutes" in capfd.readouterr().out
    assert [path.name for path in _release.built_folder().iterdir()] == [library.name]
    assert _release.libraries() == _release.built_folder()
