"""Compiles the operators for the installed PyTorch: ``python -m gnomon.build``.

A gnomon wheel contains libraries for released versions of PyTorch. Nightly builds, PyTorch compiled
from source and some conda packages need separate libraries. This command compiles them from the
sources in the wheel and stores them in the cache folder (``GNOMON_CACHE``), where ``import gnomon``
finds them. The CPU kernels of the wheel are used unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence

import torch

from gnomon import _build, _release
from gnomon._command_line import Parser, failure
from gnomon._output import checked_output

__all__ = ["main"]

_fail = failure("gnomon.build")


def _say(message: str) -> None:
    print(f"gnomon.build: {message}", flush=True)


def _tool(name: str) -> str:
    """Returns the path of a program that pip installed for this interpreter or that is on PATH."""
    places = (sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        _fail(f"{name} is missing; run: pip install cmake ninja")
    return found


def _compiler() -> str:
    """Returns the C++ compiler as CMake expects it: its path, then its options."""
    try:
        chosen, *options = _release.compiler_command()
    except RuntimeError as error:
        _fail(str(error))
    found = shutil.which(chosen)
    if found is None:
        _fail(f"cannot run {chosen}: {_release.COMPILER_REMEDY}")
    return ";".join([found, *options])


def _configure(sources: pathlib.Path, tree: pathlib.Path, program: bool) -> list[str]:
    """Returns the configure command; the libraries link to the wheel's kernels by absolute path."""
    package = sources.parent
    settings = {
        "CMAKE_BUILD_RPATH": "@loader_path" if sys.platform == "darwin" else "$ORIGIN",
        "CMAKE_CXX_COMPILER": _compiler(),
        "CMAKE_CXX_FLAGS": "-w",
        "CMAKE_MAKE_PROGRAM": _tool("ninja"),
        "GNOMON_BUNDLED": package / "include",
        "GNOMON_CORE_LIBRARY": package / "lib" / _release.library_name("gnomon_core"),
        "GNOMON_PROGRAM": "ON" if program else "OFF",
        "GNOMON_PYTHON": sys.executable,
        "GNOMON_TESTS": "OFF",
        "GNOMON_WHEEL": "ON",
    }
    command = [_tool("cmake"), "-S", str(sources), "-B", str(tree), "-G", "Ninja"]
    return command + [f"-D{name}={value}" for name, value in settings.items()]


@contextlib.contextmanager
def _locked(folder: pathlib.Path, wait: bool = False) -> Iterator[None]:
    """Locks a folder; the lock of a killed process ends.

    Raises:
        OSError: another process has the lock and `wait` is False, or the folder cannot be locked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _work_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder in `folder`; removes the temporary folders of killed builds."""
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as guard:
        # Otherwise another build could remove the new folder before it is locked.
        with contextlib.suppress(OSError):  # some network file systems have no locks
            guard.enter_context(_locked(folder.parent, wait=True))
        for stale in folder.parent.glob("*/build-*"):
            with contextlib.suppress(OSError), _locked(stale):
                shutil.rmtree(stale)
        work = pathlib.Path(tempfile.mkdtemp(dir=folder, prefix="build-"))
        with contextlib.suppress(OSError):
            stack.enter_context(_locked(work))
        # Removed while it is locked.
        stack.callback(shutil.rmtree, work)
        guard.close()
        yield work


def _compile(sources: pathlib.Path, folder: pathlib.Path, program: bool) -> None:
    """Compiles in a temporary folder and moves the libraries to `folder`."""
    targets = ["gnomon_torch", *(["gnomon_program"] if program else [])]
    folder.mkdir(parents=True, exist_ok=True)
    with _work_folder(folder) as tree:
        configure = _configure(sources, tree, program)
        done = subprocess.run(configure, capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            _fail(f"CMake cannot configure the build:\n{done.stderr.strip()}")
        versions = f"gnomon {_build.VERSION} for PyTorch {torch.__version__}"
        _say(f"compiling {versions}, which takes a few minutes")
        build = [configure[0], "--build", str(tree), "--target", *targets]
        if subprocess.run(build).returncode != 0:
            _fail("the compiler failed; its messages are above")
        # The operators come last, because their file is what `import gnomon` looks for.
        for target in reversed(targets):
            name = _release.library_name(target)
            os.replace(tree / "lib" / name, folder / name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    with checked_output(_fail):
        parser = Parser(
            fail=_fail,
            prog="python -m gnomon.build",
            description="Compiles gnomon's operators for the installed PyTorch.",
        )
        parser.add_argument(
            "--program", action="store_true", help="also compile the gnomon command (needs zlib)"
        )
        options = parser.parse_args(arguments)
    version = torch.__version__
    if _release.SOURCES is None:
        _fail(
            "this installation has no sources; in gnomon's source tree, run `make build`, or "
            "`pip install --no-build-isolation .`"
        )
    if options.program and not (_release.SOURCES / "lab").exists():
        _fail("--program needs the sources of the lab; run: pip install 'gnomon[lab]'")
    try:
        if _release.is_too_old(version):
            _fail(f"PyTorch {version} is too old: gnomon needs 2.11 or newer")
        folder = _release.built_folder()
    except (ImportError, RuntimeError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot read {error.filename}: {error.strerror}; reinstall gnomon")
    start = time.monotonic()
    try:
        _compile(_release.SOURCES, folder, options.program)
    except OSError as error:
        _fail(
            f"cannot write to {error.filename}: {error.strerror}; set the environment variable "
            "GNOMON_CACHE to choose another folder"
        )
    _say(f"wrote the libraries to {folder} in {time.monotonic() - start:.0f} seconds")
    check = [sys.executable, "-c", "import gnomon"]
    if subprocess.run(check).returncode != 0:
        _fail("the libraries do not load; the error is above")
    _say("import gnomon works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
