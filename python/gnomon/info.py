"""Describes the installation: ``python -m gnomon.info``.

Include its output in bug reports. With ``--json``, it prints one JSON object.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

import torch

from gnomon import _build, _library
from gnomon._command_line import Parser, failure
from gnomon._files import cache_folder
from gnomon._output import checked_output

__all__ = ["collect"]

_fail = failure("gnomon.info")

#: Optional packages whose versions are reported.
PACKAGES = ("numpy", "transformers", "timm", "torch_geometric", "onnx", "matplotlib")
#: Environment variables that affect results or speed; GNOMON_... variables are always reported.
VARIABLES = ("CUDA_HOME", "CXX", "MKL_CBWR", "OMP_NUM_THREADS")


def collect() -> dict[str, Any]:
    """Returns a description of the installation.

    Returns:
        A dictionary of JSON values: versions ("gnomon", "PyTorch", "Python"), "system",
        "instruction set" of the CPU kernels, "instruction sets" that ``GNOMON_TARGET`` may select,
        "threads", "GPUs" (each with its compute capability), "cache" and "libraries" (folders),
        "packages" and "environment".

    Example:
        >>> import gnomon.info
        >>> gnomon.info.collect()["gnomon"] == gnomon.__version__
        True
    """
    kernels: dict[str, Any] = {}
    if _library.failure is None:
        target, targets = _library.query("instruction_sets")
        kernels = {"instruction set": target, "instruction sets": targets}
    names = sorted(name for name in os.environ if name.startswith("GNOMON_") or name in VARIABLES)
    return {
        "gnomon": _library.VERSION,
        "PyTorch": f"{torch.__version__} (gnomon was built for {', '.join(_build.TORCH_RELEASES)})",
        "Python": platform.python_version(),
        "system": platform.platform(),
        **kernels,
        "threads": torch.get_num_threads(),
        "GPUs": _gpus(),
        "cache": _cache(),
        "libraries": _library.failure or str(_library.LIBRARIES.resolve()),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "environment": {name: os.environ[name] for name in names},
    }


def _cache() -> str:
    try:
        return str(cache_folder())
    except RuntimeError as error:
        return str(error)


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"CUDA {torch.version.cuda}"
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)


def main(arguments: list[str] | None = None) -> int:
    """Prints the result of ``collect``."""
    with checked_output(_fail):
        parser = Parser(
            fail=_fail,
            prog="python -m gnomon.info",
            description="Describes the installation, for bug reports.",
        )
        parser.add_argument("--json", action="store_true", help="print a JSON object")
        options = parser.parse_args(arguments)
        found = collect()
        if options.json:
            print(json.dumps(found, indent=2))
        else:
            for name, value in found.items():
                print(f"{name + ':':18}{_text(value)}")
    return 0 if _library.failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
