"""Arrays of rows, and errors in a file's contents."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
#: Arrays by name.
Arrays: TypeAlias = dict[str, Array]


class WrongFileError(ValueError):
    """An error in a file's contents; its message is appended to the file's name."""


def fault_of(path: object, fault: object) -> str:
    """Returns a message such as "x is empty" or "x: line 2 has a number beyond 64 bits"."""
    has_subject = not str(fault).startswith(("contains ", "has ", "is "))
    return f"{path}: {fault}" if has_subject else f"{path} {fault}"


class RaggedError(WrongFileError):
    """Raised for lists of different lengths within a row."""


def rows_of(rows: list[Array], name: str) -> Arrays:
    if not rows:
        raise WrongFileError("contains no rows")
    if len({row.shape for row in rows}) == 1:
        return {name: np.stack(rows)}
    return ragged(rows, name)


def ragged(rows: list[Array], name: str) -> Arrays:
    # An empty row does not show the shape of its entries.
    shape = next((row.shape[1:] for row in rows if row.size), ())
    for number, row in enumerate(rows):
        if row.ndim == 0 or (row.size and row.shape[1:] != shape):
            raise WrongFileError(
                f"row {number} contains elements of shape {list(row.shape[1:])}, but those of the "
                f"first row have shape {list(shape)}"
            )
    return {
        name: np.concatenate(
            [row.reshape(-1, *shape) if row.size else row.reshape(0, *shape) for row in rows]
        ),
        f"{name}_lengths": np.array([len(row) for row in rows], np.int64),
    }


def texts_of(texts: list[str], name: str) -> Arrays:
    return ragged([np.frombuffer(text.encode(), np.uint8) for text in texts], name)


def numbered(texts: list[str], name: str) -> Arrays:
    """Returns names as indices into the sorted list of all names, together with the list."""
    names = sorted(set(texts))
    number_of = {text: number for number, text in enumerate(names)}
    numbers = np.array([number_of[text] for text in texts], np.int64)
    return {name: numbers} | texts_of(names, f"{name}_names")
