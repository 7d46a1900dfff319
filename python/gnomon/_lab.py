"""Short names and commands of the lab (``gnomon.lab``), which may not be installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

_PACKAGE = "gnomon.lab"
NO_MATPLOTLIB = "matplotlib is not installed; run: pip install matplotlib"
#: Packages of the lab that are also attributes of ``gnomon``.
NAMES = ("data", "inspect", "models", "report")


def load(name: str) -> ModuleType:
    """Imports a module of the lab, such as "report" for ``gnomon.lab.report``."""
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name != _PACKAGE:
            raise
        raise ModuleNotFoundError(
            f"{_PACKAGE} is not installed; run: pip install 'gnomon[lab]'", name=error.name
        ) from None


def alias(name: str) -> None:
    """Makes ``gnomon.NAME``, the module being imported, an alias of ``gnomon.lab.NAME``."""
    sys.modules[name] = load(name.removeprefix("gnomon."))


def run(name: str, arguments: Sequence[str] | None = None) -> int:
    """Calls ``main`` in a module of the lab and returns the exit code."""
    try:
        program = load(name)
    except ModuleNotFoundError as error:
        if error.name == _PACKAGE:
            print(f"gnomon: {error}", file=sys.stderr)
        elif error.name == "matplotlib":
            print(f"gnomon: {NO_MATPLOTLIB}", file=sys.stderr)
        else:
            raise
        return 1
    return program.main(arguments)
