"""The PyTorch requirement of a wheel: the minor releases that its libraries are compiled for.

The environment variable GNOMON_TORCH_RELEASES, set by scripts/wheel, lists them, oldest first; the
default is the release of the installed PyTorch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

RELEASES = os.environ.get("GNOMON_TORCH_RELEASES", "").split()
if not RELEASES:
    try:
        import torch
    except ImportError:
        sys.exit(
            "error: gnomon is compiled against the installed PyTorch, which is missing or which an "
            "isolated build cannot see. Run: pip install torch scikit-build-core cmake ninja && "
            "pip install --no-build-isolation ."
        )


def requirement() -> str:
    if RELEASES:
        major, minor = RELEASES[-1].split(".")
        return f"torch>={RELEASES[0]},<{major}.{int(minor) + 1}"
    version = torch.__version__.partition("+")[0]
    # Patch releases of the same minor release share an ABI; pre-release builds may not.
    match = re.fullmatch(r"(\d+\.\d+)\.\d+", version)
    return f"torch=={match[1]}.*" if match else f"torch=={version}"


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the wheel's dependencies, for scikit-build-core."""
    return {"dependencies": [requirement(), "typing_extensions"]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the fields that may differ between the source distribution and the wheel."""
    return {"dependencies": True}
