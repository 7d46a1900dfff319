"""The requirements of a wheel: the minor release of PyTorch that its library was compiled with."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

try:
    import torch
except ImportError:
    sys.exit(
        "error: gnomon is compiled against your PyTorch, which an isolated build does not see. "
        "Run: pip install scikit-build-core cmake ninja && pip install --no-build-isolation ."
    )


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The dependencies, for scikit-build-core."""
    version = torch.__version__.partition("+")[0]
    # All patch releases of a minor release have the same ABI; builds before a release do not.
    match = re.fullmatch(r"(\d+\.\d+)\.\d+", version)
    needed = f"torch=={match[1]}.*" if match else f"torch=={version}"
    return {"dependencies": [needed, "typing_extensions"]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """The fields that another machine's wheel may have otherwise."""
    return {"dependencies": True}
