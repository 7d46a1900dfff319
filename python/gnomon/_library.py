"""Loads the operator library, which is built for one PyTorch release."""

import pathlib
import re

import torch

from gnomon import _build

LIBRARIES = pathlib.Path(__file__).parent / _build.LIBRARIES


def release_of(version: str) -> str:
    """Returns the minor release that a build supports: "2.15" for 2.15.0, 2.15.1+cpu and so on.

    A pre-release version, such as a nightly build, is returned unchanged.
    """
    match = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version)
    return match[1] if match else version


def check_release(version: str) -> None:
    if release_of(version) != _build.TORCH_RELEASE:
        raise ImportError(
            f"gnomon was built for PyTorch {_build.TORCH_RELEASE}, but this is PyTorch "
            f"{version}; rebuild it with this interpreter (`make build`, or `pip install .`)"
        )


check_release(torch.__version__)
torch.ops.load_library(LIBRARIES / "libgnomon_torch.so")

ops = torch.ops.gnomon
VERSION: str = _build.VERSION
