"""The requirements of both wheels: PyTorch for the library, and the library for the lab.

The environment variable GNOMON_TORCH_RELEASES, set by scripts/wheel, lists the minor releases of
PyTorch that the libraries are compiled for, oldest first; the default is the release of the
installed PyTorch.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

RELEASES = os.environ.get("GNOMON_TORCH_RELEASES", "").split()
TREE = pathlib.Path(__file__).resolve().parents[1]


def installed_torch(name: str) -> str:
    """Returns the version of the installed PyTorch; exits if a build does not see any."""
    try:
        import torch
    except ImportError:
        projects = '-C build-dir="$PWD/build-pip" . ./lab' if name == "gnomon-lab" else "."
        sys.exit(
            f"error: {name} is compiled against the installed PyTorch, which is missing or which "
            "an isolated build cannot see. Run: pip install torch scikit-build-core cmake ninja && "
            f"pip install --no-build-isolation {projects}"
        )
    return torch.__version__


def torch_requirement(name: str) -> str:
    if RELEASES:
        major, minor = RELEASES[-1].split(".")
        return f"torch>={RELEASES[0]},<{major}.{int(minor) + 1}"
    version = installed_torch(name).partition("+")[0]
    # Patch releases of the same minor release share an ABI; pre-release builds may not.
    match = re.fullmatch(r"(\d+\.\d+)\.\d+(\.post\d+)?", version)
    return f"torch=={match[1]}.*" if match else f"torch=={version}"


def library_requirement() -> str:
    """Returns the same version of the library, because the lab uses its symbols."""
    text = (TREE / "CMakeLists.txt").read_text(encoding="utf-8")
    match = re.search(r"project\(gnomon VERSION ([0-9.]+)", text)
    if match is None:
        raise RuntimeError("CMakeLists.txt has no version")
    return f"gnomon=={match[1]}"


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the wheel's dependencies, for scikit-build-core."""
    # The lab is also compiled against PyTorch, so it also ends here if there is none.
    torch = torch_requirement(project["name"])
    if project["name"] == "gnomon-lab":
        return {"dependencies": [library_requirement()]}
    return {"dependencies": [torch, "typing_extensions"]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the fields that may differ between the source distribution and the wheel."""
    return {"dependencies": True}
