"""Finds the libraries for the installed PyTorch, without loading them."""

from __future__ import annotations

import hashlib
import pathlib
import re
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


def release_of(version: str) -> str:
    """Returns the minor release that a build supports: "2.15" for 2.15.0, 2.15.1+cpu and so on.

    A pre-release version, such as a nightly build, is returned unchanged.
    """
    match = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version)
    return match[1] if match else version


def check_release(version: str) -> str:
    """Returns a PyTorch version's release; raises ImportError if there are no libraries for it."""
    release = release_of(version)
    if release not in _build.TORCH_RELEASES:
        remedy = "rebuild it with this interpreter (`make build`, or `pip install .`)"
        if is_too_old(version):
            remedy = "install a newer PyTorch"
        elif SOURCES is not None:
            remedy = "run: python -m gnomon.build"
        raise ImportError(
            f"gnomon was built for PyTorch {', '.join(_build.TORCH_RELEASES)}, but this is PyTorch "
            f"{version}; {remedy}"
        )
    return release


def is_too_old(version: str) -> bool:
    """Returns whether this PyTorch is too old for gnomon's sources."""
    return tuple(map(int, version.split(".")[:2])) < (2, 11)


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
    if SOURCES is not None and (built_folder() / OPERATORS).exists():
        return built_folder()
    release = check_release(torch.__version__)
    return _HERE / _build.LIBRARIES.replace("{release}", release)


def is_building() -> bool:
    """Returns whether this process was started as ``python -m gnomon.build``."""
    return sys.argv[:1] == ["-m"] and any(word.endswith("gnomon.build") for word in sys.orig_argv)
