"""Loads the operator library, which is built for one PyTorch release or for several."""

import pathlib
import re

import torch

from gnomon import _build


def release_of(version: str) -> str:
    """Returns the minor release that a build supports: "2.15" for 2.15.0, 2.15.1+cpu and so on.

    A pre-release version, such as a nightly build, is returned unchanged.
    """
    match = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version)
    return match[1] if match else version


def check_release(version: str) -> str:
    """Returns the release of a PyTorch version, if gnomon was built for it."""
    release = release_of(version)
    if release not in _build.TORCH_RELEASES:
        raise ImportError(
            f"gnomon was built for PyTorch {', '.join(_build.TORCH_RELEASES)}, but this is PyTorch "
            f"{version}; rebuild it with this interpreter (`make build`, or `pip install .`)"
        )
    return release


RELEASE = check_release(torch.__version__)
#: The folder of the libraries for this PyTorch.
LIBRARIES = pathlib.Path(__file__).parent / _build.LIBRARIES.replace("{release}", RELEASE)
#: The symbol that libraries of terms for this build refer to.
TERMS_SYMBOL = _build.TERMS_SYMBOL.replace("{release}", re.sub(r"\W", "_", RELEASE))

torch.ops.load_library(LIBRARIES / "libgnomon_torch.so")

ops = torch.ops.gnomon
VERSION: str = _build.VERSION
