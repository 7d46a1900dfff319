"""The dependency of the lab's wheel: the library in the same version, because the lab uses its
symbols."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

TREE = pathlib.Path(__file__).resolve().parents[1]


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the wheel's dependencies, for scikit-build-core."""
    text = (TREE / "CMakeLists.txt").read_text(encoding="utf-8")
    match = re.search(r"project\(gnomon VERSION ([0-9.]+)", text)
    if match is None:
        raise RuntimeError("CMakeLists.txt has no version")
    return {"dependencies": [f"gnomon=={match[1]}"]}
