"""What a wheel requires: the release of PyTorch that its library was compiled with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The dependencies, for scikit-build-core."""
    release = torch.__version__.partition("+")[0]
    return {"dependencies": [f"torch=={release}", "typing_extensions"]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """The fields that another machine's wheel may have otherwise."""
    return {"dependencies": True}
