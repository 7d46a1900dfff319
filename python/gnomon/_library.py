"""Loads the library of operators, built for one version of PyTorch."""

import pathlib

import torch

from gnomon import _build

LIBRARIES = pathlib.Path(__file__).parent / _build.LIBRARIES


def _load() -> None:
    if torch.__version__ != _build.TORCH_VERSION:
        raise ImportError(
            f"gnomon was built for PyTorch {_build.TORCH_VERSION} and this is {torch.__version__}; "
            "build it again with this interpreter (`make build`, or `pip install .`)"
        )
    torch.ops.load_library(LIBRARIES / "libgnomon_torch.so")


_load()

ops = torch.ops.gnomon
VERSION: str = _build.VERSION
