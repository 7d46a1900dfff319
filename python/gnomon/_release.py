"""Finds the libraries for the installed PyTorch, without loading them."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import shlex
import sys

import torch

from gnomon import _build
from gnomon._files import cache_folder


def library_name(name: str) -> str:
    """Returns the file name of a shared library on this platform."""
    return f"lib{name}{'.dylib' if sys.platform == 'darwin' else '.so'}"


#: The file that contains the operators for one PyTorch release.
OPERATORS = library_name("gnomon_torch")
_HERE = pathlib.Path(__file__).parent
#: The folder of the C++ sources in a wheel; None in a source tree, where `make build` builds them.
SOURCES = _HERE / _build.SOURCES if _build.SOURCES else None
#: The end of messages about a C++ compiler that does not run.
COMPILER_REMEDY = (
    "a C++20 compiler is required; install one (apt-get install g++, xcode-select --install, or "
    "conda install -c conda-forge cxx-compiler), or set the environment variable CXX to choose one"
)


def compiler_command() -> list[str]:
    """Returns the command that starts the C++ compiler: ``CXX``, which may contain options.

    Raises:
        RuntimeError: ``CXX`` is not a command.
    """
    chosen = os.environ.get("CXX") or "c++"
    try:
        words = shlex.split(chosen)
    except ValueError:  # a quote has no end
        words = []
    if not words:
        raise RuntimeError(f"CXX is {chosen!r}; expected a C++ compiler, such as g++")
    return words


def release_of(version: str) -> str:
    """Returns the minor release that a build supports: "2.15" for 2.15.0, 2.15.1+cpu and so on.

    A pre-release version, such as a nightly build, is returned unchanged.
    """
    match = re.fullmatch(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?", version)
    return match[1] if match else version


def check_release(version: str) -> str:
    """Returns a PyTorch version's release; raises ImportError if there are no libraries for it."""
    release = release_of(version)
    if release not in _build.TORCH_RELEASES:
        remedy = "install a newer PyTorch" if is_too_old(version) else _remedy()
        raise ImportError(
            f"gnomon was built for PyTorch {', '.join(_build.TORCH_RELEASES)}, but this is PyTorch "
            f"{version}; {remedy}"
        )
    return release


def is_too_old(version: str) -> bool:
    """Returns whether this PyTorch is too old for gnomon's sources.

    Raises:
        ImportError: this is not a version.
    """
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None:
        raise ImportError(
            f"torch.__version__ is {str(version)!r}; expected a version such as 2.15.0: reinstall "
            "PyTorch"
        )
    return (int(number[1]), int(number[2])) < (2, 11)


def _remedy() -> str:
    """Returns what to do if there are no libraries for this PyTorch, or if they do not load."""
    if SOURCES is not None:
        has_core = os.path.exists(_HERE / "lib" / library_name("gnomon_core"))
        return "run: python -m gnomon.build" if has_core else "reinstall gnomon"
    return (
        "rebuild it with this interpreter (`make build`, or `pip install --no-build-isolation .`)"
    )


def built_folder() -> pathlib.Path:
    """Returns the folder in which ``gnomon.build`` stores the libraries for this PyTorch."""
    core = (_HERE / "lib" / library_name("gnomon_core")).stat()
    key = repr(
        (
            *(_build.VERSION, str(_HERE), core.st_size, core.st_mtime_ns),
            *(torch.__version__, torch.version.git_version, torch.__file__),
        )
    )
    return cache_folder() / "torch" / hashlib.sha256(key.encode()).hexdigest()[:16]


def libraries() -> pathlib.Path:
    """Returns the folder of the libraries for this PyTorch.

    Libraries that ``gnomon.build`` compiled take precedence over those in the package.
    """
    if SOURCES is not None:
        try:
            folder = built_folder()
        except (OSError, RuntimeError):
            pass  # there is no cache, for instance because this user has no home folder
        else:
            if os.path.exists(folder / OPERATORS):
                return folder
    return _folder_of(check_release(torch.__version__))


def _folder_of(release: str) -> pathlib.Path:
    return _HERE / _build.LIBRARIES.replace("{release}", release)


def load(folder: pathlib.Path) -> None:
    """Loads the operators in this folder; raises ImportError if they do not load."""
    try:
        torch.ops.load_library(folder / OPERATORS)
    except OSError as error:
        # PyTorch's message names only the file; its cause is the message of the dynamic loader.
        cause = " ".join(str(error.__cause__ or error).split())
        held = [
            release
            for release in _build.TORCH_RELEASES
            if os.path.exists(_folder_of(release) / OPERATORS)
        ]
        raise ImportError(
            f"gnomon's libraries do not load in this PyTorch ({torch.__version__}): {cause}; this "
            f"installation has libraries for PyTorch {', '.join(held) or '(none)'}; {_remedy()}"
        ) from None


def program() -> str:
    """Returns the program of this package for which Python imports it, such as "gnomon.info".

    Programs are started by ``python -m`` or, without a module name, by the script ``gnomon``.
    Returns an empty string in other programs.
    """
    if sys.argv[:1] != ["-m"]:
        return "gnomon" if sys.argv and pathlib.Path(sys.argv[0]).name == "gnomon" else ""
    # The arguments follow the module name, which may be joined to the options: -Bmgnomon.info.
    module = re.sub(r"^-[A-Za-z]*?m", "", sys.orig_argv[-len(sys.argv)])
    return module if module.partition(".")[0] == "gnomon" else ""
