"""The ``gnomon`` command as a library: its entry point and its lists of options."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon import _release
from gnomon._checks import check_flag, check_integer, check_number, check_string, wrong_type
from gnomon._library import LIBRARIES


def library_path() -> pathlib.Path:
    """Returns the library that contains the command.

    Raises:
        ImportError: it was not compiled.
    """
    path = LIBRARIES / _release.library_name("gnomon_program")
    if not path.exists():
        raise ImportError(
            f"{path} does not exist: the gnomon command was not compiled for this PyTorch; run: "
            "python -m gnomon.build --program"
        )
    return path


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(library_path()))


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of the ``gnomon`` command: its key in JSON files, kind, default and range.

    choices is empty if any text is valid. If the default is None, the value may also be None.
    """

    key: str
    kind: str
    default: Any
    lowest: float
    highest: float
    may_lack: bool
    choices: list[str]

    def check(self, operator: str, value: object, of: str = "") -> Any:
        """Checks a value and returns it as stored in JSON.

        Error messages name the option, for example "steps", or "steps of run" with ``of="run"``.
        """
        if value is None and self.default is None:
            return None
        name = f"{self.key} of {of}" if of else self.key
        if self.kind == "text":
            check_string(operator, name, value)
            if self.choices and value not in self.choices:
                raise ValueError(
                    f"gnomon.{operator}: {name} is {value!r}; expected one of "
                    f"{', '.join(self.choices)}"
                )
            return value
        if self.kind == "flag":
            return check_flag(operator, name, value)
        if self.kind == "integers":
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise wrong_type(operator, name, value, "a sequence of integers")
            entries = (
                dataclasses.replace(self, key=f"{self.key}[{n}]", kind="integer")
                for n in range(len(value))
            )
            return [
                entry.check(operator, number, of)
                for entry, number in zip(entries, value, strict=True)
            ]
        check = check_integer if self.kind == "integer" else check_number
        number = check(operator, name, value)
        if not self.lowest <= number <= self.highest:
            bound = (
                f"at most {self.highest:g}"
                if number > self.highest
                else f"at least {self.lowest:g}"
            )
            raise ValueError(f"gnomon.{operator}: {name} is {number}; expected {bound}")
        return number if self.kind == "integer" else float(number)


@functools.cache
def options(struct: str) -> Mapping[str, Option]:
    """Returns the options of "model", "training" or "run" by name, in the order of the C++ list."""
    describe = library().gnomon_options
    describe.restype = ctypes.c_char_p
    lists = json.loads(describe().decode())
    return {entry["key"]: Option(**entry) for entry in lists[struct]}
