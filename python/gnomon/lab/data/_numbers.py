"""Reads files of numbers and names: IDX, .npy, .npz, JSON and text tables."""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from typing import Any

import numpy as np

from gnomon._checks import kind_of
from gnomon.lab.data._arrays import Array, Arrays, RaggedError, WrongFileError, numbered, rows_of

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(content: bytes) -> Array:
    """Reads IDX, the MNIST format: two zero bytes, type, number of axes, axis sizes, and values."""
    dtype, axes = np.dtype(IDX_TYPES[content[2]]), content[3]
    start = 4 + 4 * axes
    if axes == 0:
        raise WrongFileError("is not a valid IDX file: it has 0 axes")
    if len(content) < start:
        raise WrongFileError(
            f"is truncated: the sizes of {axes} axes end at byte {start}, but the file has "
            f"{len(content)} bytes"
        )
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    expected = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if (got := len(content) - start) != expected:
        what = "is truncated" if got < expected else "is not a valid IDX file"
        raise WrongFileError(
            f"{what}: an array of shape {shape} and dtype {dtype} requires {expected} bytes, but "
            f"the file contains {got}"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


_NPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"


def read_npy(content: bytes) -> Array:
    _check_mark(content, _NPY, ".npy")
    try:
        return np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        if _is_truncated_npy(content):
            raise WrongFileError(
                f"is truncated: the array ends after {len(content)} bytes"
            ) from error
        raise WrongFileError(f"is not a valid .npy file: {error}") from error


def _check_mark(content: bytes, mark: bytes, suffix: str) -> None:
    """Raises an error if a file does not start with the signature of its format."""
    if not content:
        raise WrongFileError("is empty")
    if len(content) < len(mark) and mark.startswith(content):
        raise WrongFileError(f"is truncated: it has {len(content)} bytes")
    if not content.startswith(mark):
        raise WrongFileError(f"is not a valid {suffix} file: it does not begin with {mark!r}")


def _is_truncated_npy(content: bytes) -> bool:
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        size = int.from_bytes(content[8 : 10 if version == (1, 0) else 12], "little")
        if len(content) < (10 if version == (1, 0) else 12) + size:
            return True
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError:
        return len(content) < 10
    if dtype.hasobject:
        return False
    return len(content) - file.tell() < int(np.prod(shape, dtype=object)) * dtype.itemsize


def read_npz(content: bytes, key: str) -> Array:
    _check_mark(content, _ZIP, ".npz")
    if not zipfile.is_zipfile(io.BytesIO(content)):
        raise WrongFileError(f"is truncated: the archive ends after {len(content)} bytes")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            if key not in arrays.files:
                raise WrongFileError(
                    f"has no array {key!r}; expected FILE:KEY with one of "
                    f"{', '.join(sorted(arrays.files))}"
                )
            return np.asarray(arrays[key])
    except WrongFileError:
        raise
    except Exception as error:  # zipfile and numpy raise several exception classes
        raise WrongFileError(f"is not a valid .npz file: {error}") from error


def read_json(content: bytes, key: str) -> list[Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise WrongFileError(f"is not JSON: {error}") from error
    for part in filter(None, key.split(".")):
        if not isinstance(value, dict) or part not in value:
            keys = f"; it contains {', '.join(map(str, value))}" if isinstance(value, dict) else ""
            raise WrongFileError(f"has no {part!r}{keys}")
        value = value[part]
    if not isinstance(value, list):
        expected = (
            f"FILE:KEY with one of {', '.join(value)}" if isinstance(value, dict) else "a list"
        )
        raise WrongFileError(f"is {kind_of(value)}; expected {expected}")
    return value


def nested(rows: list[Any], name: str) -> Arrays:
    """Converts nested JSON lists, which may be ragged at any depth, to arrays."""
    try:
        return rows_of([_numbers(row, f"row {n}") for n, row in enumerate(rows)], name)
    except RaggedError as ragged:
        for number, row in enumerate(rows):
            if not isinstance(row, list) or not all(isinstance(part, list) for part in row):
                raise WrongFileError(f"row {number} contains neither numbers nor lists") from ragged
        parts = nested([part for row in rows for part in row], name)
        counts = np.array([len(row) for row in rows], np.int64)
        return parts | {f"{name}_lengths_lengths": counts}


def _numbers(value: object, place: str) -> Array:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise RaggedError(f"{place} has lists of different lengths") from error
    # JSON has a single number type, so 58.0 means the integer 58.
    if array.size == 0 or (array.dtype.kind == "f" and _is_whole(array)):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iufb":
        raise WrongFileError(f"{place} does not contain only numbers")
    return array


def _is_whole(array: Array) -> bool:
    return bool(np.all((np.abs(array) < 2.0**53) & (array == np.trunc(array))))


def _text(content: bytes) -> str:
    try:
        # Some editors write a byte-order mark.
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise WrongFileError(f"byte {error.start} is not UTF-8") from error


def read_table(content: bytes) -> list[Array]:
    rows = []
    for number, line in enumerate(_text(content).splitlines(), 1):
        words = re.split(r"[,;\s]+", line.strip())
        try:
            is_whole = all(re.fullmatch(r"[+-]?\d+", word) for word in words)
            row = np.array(words, np.int64) if is_whole else np.array([float(w) for w in words])
        except OverflowError as error:
            raise WrongFileError(f"line {number} has a number beyond 64 bits") from error
        except ValueError as error:
            raise WrongFileError(f"line {number} does not contain only numbers") from error
        rows.append(row)
    # A single column becomes a one-dimensional array.
    return [row[0] for row in rows] if all(len(row) == 1 for row in rows) else rows


def read_names(content: bytes, key: str, name: str) -> Arrays:
    """Reads columns of names and returns them as indices into the sorted list of all names."""
    lines = csv.reader(io.StringIO(_text(content), newline=""), strict=True)
    try:
        head = next(lines, [])
        columns = key.split(",")
        for column in columns:
            if column not in head:
                raise WrongFileError(f"has no column {column!r}; it has {', '.join(head)}")
        places = [head.index(column) for column in columns]
        rows = []
        for line in filter(None, lines):
            if len(line) != len(head):
                raise WrongFileError(
                    f"line {lines.line_num} has {len(line)} columns, but the first has {len(head)}"
                )
            rows.append([line[place] for place in places])
    except csv.Error as error:
        raise WrongFileError(f"line {lines.line_num}: {error}") from error
    if not rows:
        raise WrongFileError("contains no rows")
    numbers = numbered([word for row in rows for word in row], name)
    return numbers | {name: numbers[name].reshape(len(rows), -1)}
