"""What people have as the arrays that tasks read: ``gnomon data``.

A task reads one file of safetensors whose tensors are called PART.NAME, "train.images" or
"valid.labels"; the page docs/tasks.md says which ones. ``read_arrays`` makes them from a file in
another format, ``write`` puts them into one file.

Rows of different lengths become two arrays: NAME has all of them one after the other, NAME_lengths
how many each row has. Where a row is itself a list of such rows, NAME_lengths is split in the same
way: NAME_lengths_lengths has how many of them each row has.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import pathlib
import re
import tarfile
import wave
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gnomon import _safetensors

__all__ = ["read_arrays", "write"]

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"


class _WrongFileError(ValueError):
    """What is wrong with a file's content, for a message that names the file."""


class _RaggedError(_WrongFileError):
    """Lists of different lengths within a row."""


def read_arrays(source: str, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a file, by name: NAME, and NAME_lengths where its rows differ in length.

    Args:
        source: a path; after a colon, what to take of a file that holds several: the key of an
            array of .npz, keys of objects of JSON joined by dots, or columns of .csv, by the names
            in its first line joined by commas, which hold names: a row is their numbers in
            NAME_names, the sorted list of them as UTF-8. Known formats, each as it is or in gzip:
            IDX, .npy, .npz, .wav (PCM; float samples in [-1, 1), one row each), .json (nested lists
            of numbers), .txt, .index and .csv (numbers, a row a line). A folder or a tar file of
            .wav is one row for each in the order of their names, and NAME_names has these as UTF-8;
            after a colon, a regular expression takes those of which it matches the whole name, and
            its named groups are arrays beside NAME: numbers where all are whole ones, and else
            UTF-8. NAME_rate is how many samples of .wav a second has.
        name: of the array, of a part: "train.audio".

    Raises:
        ValueError: a file that cannot be read, in no known format, or not whole; it names the file
            and the place.
    """
    path, key = _split(source)
    try:
        if path.is_dir():
            return _sounds(_folder(path), name, key)
        content = path.read_bytes()
        suffixes = [suffix.lower() for suffix in path.suffixes]
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
            suffixes = [suffix for suffix in suffixes if suffix != ".gz"]
            if suffixes and suffixes[-1] == ".tgz":
                suffixes[-1] = ".tar"
        return _read(content, suffixes[-1] if suffixes else "", key, name)
    except OSError as error:
        # gzip's own is one, without an errno.
        fault = error.strerror or f"is not whole: {error}"
        raise ValueError(f"{path}: {fault}") from error
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path}: is not whole: {error}") from error
    except (_WrongFileError, tarfile.TarError) as error:
        raise ValueError(f"{path}: {error}") from error


#: By this a file of arrays is known from others, a checkpoint's.
_MARK = {"made_by": "gnomon data"}


def write(path: pathlib.Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Writes arrays called PART.NAME as one file of safetensors.

    Raises:
        ValueError: a dtype that the format does not have.
        OSError: the file cannot be written.
    """
    tensors = {}
    for name, array in arrays.items():
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        try:
            # Torch warns of arrays that are views of a file's bytes.
            own = np.require(native, requirements=["C", "W"])
            tensors[name] = torch.from_numpy(own).reshape(array.shape)
        except TypeError as error:
            raise ValueError(f"{name} is of {array.dtype}; expected numbers") from error
    _safetensors.write(path, tensors, _MARK)


def is_data(path: pathlib.Path) -> bool:
    """Whether write() has made a file."""
    try:
        return _safetensors.read_metadata(path) == _MARK
    except ValueError:
        return False


def _split(source: str) -> tuple[pathlib.Path, str]:
    """The path, and what follows a colon, unless there is a file of the whole name."""
    if ":" not in source or pathlib.Path(source).exists():
        return pathlib.Path(source), ""
    # A pattern may have colons of its own.
    colons = [n for n, letter in enumerate(source) if letter == ":"]
    at = next((n for n in reversed(colons) if pathlib.Path(source[:n]).exists()), colons[-1])
    return pathlib.Path(source[:at]), source[at + 1 :]


def _read(content: bytes, suffix: str, key: str, name: str) -> dict[str, np.ndarray[Any, Any]]:
    readers: dict[str, Callable[[], dict[str, np.ndarray[Any, Any]]]] = {
        ".npy": lambda: {name: _numpy(content)},
        ".npz": lambda: {name: _npz(content, key)},
        ".json": lambda: _nested(_json(content, key), name),
        ".txt": lambda: _rows(_table(content), name),
        ".index": lambda: _rows(_table(content), name),
        ".csv": lambda: _named(content, key, name) if key else _rows(_table(content), name),
        ".wav": lambda: _sound(content, name),
        ".tar": lambda: _sounds(_archive(content), name, key),
    }
    if content[:2] == b"\0\0" and len(content) > 3 and content[2] in _IDX_TYPES:
        return {name: _idx(content)}
    if suffix not in readers:
        raise _WrongFileError(
            f"is in no known format; expected IDX, or one of {', '.join(sorted(readers))}"
        )
    if key and suffix not in (".npz", ".json", ".csv", ".tar"):
        raise _WrongFileError(f"holds one array; expected nothing after it, got {key!r}")
    return readers[suffix]()


def _idx(content: bytes) -> np.ndarray[Any, Any]:
    """The format of MNIST: two zeros, a type, how many axes, their sizes, the values."""
    dtype, axes = np.dtype(_IDX_TYPES[content[2]]), content[3]
    start = 4 + 4 * axes
    if axes == 0 or len(content) < start:
        raise _WrongFileError(f"has {axes} axes and {len(content)} bytes; expected IDX")
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    expected = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(content) - start != expected:
        raise _WrongFileError(
            f"is not whole: {shape} of {dtype} take {expected} bytes, there are "
            f"{len(content) - start}"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


def _numpy(content: bytes) -> np.ndarray[Any, Any]:
    try:
        return np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise _WrongFileError(f"is not a sound .npy: {error}") from error


def _npz(content: bytes, key: str) -> np.ndarray[Any, Any]:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            if key not in arrays.files:
                raise _WrongFileError(
                    f"has no array {key!r}; expected FILE:KEY with one of "
                    f"{', '.join(sorted(arrays.files))}"
                )
            return np.asarray(arrays[key])
    except _WrongFileError:
        raise
    except Exception as error:  # zipfile's and numpy's, of several classes
        raise _WrongFileError(f"is not a sound .npz: {error}") from error


def _json(content: bytes, key: str) -> list[Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise _WrongFileError(f"is not JSON: {error}") from error
    for part in filter(None, key.split(".")):
        if not isinstance(value, dict) or part not in value:
            keys = f"; it has {', '.join(map(str, value))}" if isinstance(value, dict) else ""
            raise _WrongFileError(f"has no {part!r}{keys}")
        value = value[part]
    if not isinstance(value, list):
        expected = (
            f"FILE:KEY with one of {', '.join(value)}" if isinstance(value, dict) else "a list"
        )
        raise _WrongFileError(f"is a {type(value).__name__}, expected {expected}")
    return value


def _nested(rows: list[Any], name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Lists of JSON, ragged to any depth."""
    try:
        return _rows([_numbers(row, f"row {n}") for n, row in enumerate(rows)], name)
    except _RaggedError as ragged:
        for number, row in enumerate(rows):
            if not isinstance(row, list) or not all(isinstance(part, list) for part in row):
                raise _WrongFileError(f"row {number} is not of numbers, nor of lists") from ragged
        parts = _nested([part for row in rows for part in row], name)
        counts = np.array([len(row) for row in rows], np.int64)
        return parts | {f"{name}_lengths_lengths": counts}


def _numbers(value: object, place: str) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise _RaggedError(f"{place} has lists of several lengths") from error
    # JSON has one kind of numbers: 58.0 is 58.
    if array.size == 0 or (array.dtype.kind == "f" and _is_whole(array)):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iufb":
        raise _WrongFileError(f"{place} is not of numbers")
    return array


def _is_whole(array: np.ndarray[Any, Any]) -> bool:
    return bool(np.all((np.abs(array) < 2.0**53) & (array == np.trunc(array))))


def _table(content: bytes) -> list[np.ndarray[Any, Any]]:
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise _WrongFileError(f"byte {error.start} is not UTF-8") from error
    rows = []
    for number, line in enumerate(lines, 1):
        words = re.split(r"[,;\s]+", line.strip())
        try:
            is_whole = all(re.fullmatch(r"[+-]?\d+", word) for word in words)
            rows.append(np.array([int(w) if is_whole else float(w) for w in words]))
        except (ValueError, OverflowError) as error:
            raise _WrongFileError(f"line {number} is not of numbers") from error
    # A column is an array of one axis.
    return [row[0] for row in rows] if all(len(row) == 1 for row in rows) else rows


def _named(content: bytes, key: str, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Columns of names, as their numbers in the sorted list of all of them."""
    try:
        lines = csv.reader(io.StringIO(content.decode(), newline=""), strict=True)
        head = next(lines, [])
        columns = key.split(",")
        for column in columns:
            if column not in head:
                raise _WrongFileError(f"has no column {column!r}; it has {', '.join(head)}")
        places = [head.index(column) for column in columns]
        rows = []
        for line in filter(None, lines):
            if len(line) != len(head):
                raise _WrongFileError(
                    f"line {lines.line_num} has {len(line)} columns, the first {len(head)}"
                )
            rows.append([line[place] for place in places])
    except UnicodeDecodeError as error:
        raise _WrongFileError(f"byte {error.start} is not UTF-8") from error
    except csv.Error as error:
        raise _WrongFileError(f"line {lines.line_num}: {error}") from error
    if not rows:
        raise _WrongFileError("holds no rows")
    names = sorted({word for row in rows for word in row})
    number_of = {word: number for number, word in enumerate(names)}
    texts = [np.array(list(word.encode()), np.uint8) for word in names]
    return {
        name: np.array([[number_of[word] for word in row] for row in rows], np.int64)
    } | _ragged(texts, f"{name}_names")


def _wav(content: bytes) -> tuple[np.ndarray[Any, Any], int]:
    """Samples of all channels as float32 in [-1, 1), and how many a second has.

    They are (frames,), or (frames, channels).
    """
    try:
        with wave.open(io.BytesIO(content)) as sound:
            channels, width, rate, frames = sound.getparams()[:4]
            data = sound.readframes(frames)
    except (wave.Error, EOFError) as error:
        raise _WrongFileError(f"is not a sound .wav: {error}") from error
    if len(data) != frames * channels * width:
        raise _WrongFileError(
            f"is not whole: it has {len(data)} bytes of samples, its header tells of "
            f"{frames * channels * width}"
        )
    if width == 1:
        samples = np.frombuffer(data, np.uint8).astype(np.float32) / 128 - 1
    elif width in (2, 4):
        kind = {2: "<i2", 4: "<i4"}[width]
        samples = np.frombuffer(data, kind).astype(np.float64) / 2.0 ** (8 * width - 1)
    elif width == 3:
        parts = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.int32)
        whole = (parts[:, 0] << 8) | (parts[:, 1] << 16) | (parts[:, 2] << 24)
        samples = whole / 2.0**31
    else:
        raise _WrongFileError(f"has samples of {width} bytes, expected 1 to 4")
    samples = samples.astype(np.float32)
    return samples if channels == 1 else samples.reshape(-1, channels), rate


def _folder(path: pathlib.Path) -> Iterable[tuple[str, bytes]]:
    for file in sorted(path.glob("*.wav")):
        yield file.name, file.read_bytes()


def _archive(content: bytes) -> Iterable[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = [m for m in archive.getmembers() if m.isfile() and m.name.endswith(".wav")]
        for member in sorted(members, key=lambda m: m.name):
            file = archive.extractfile(member)
            if file is not None:
                yield member.name.rsplit("/", 1)[-1], file.read()


def _sound(content: bytes, name: str) -> dict[str, np.ndarray[Any, Any]]:
    samples, rate = _wav(content)
    return _rows([samples], name) | {f"{name}_rate": np.array([rate])}


def _sounds(
    files: Iterable[tuple[str, bytes]], name: str, pattern: str
) -> dict[str, np.ndarray[Any, Any]]:
    try:
        wanted = re.compile(pattern or ".*", re.DOTALL)
    except re.error as error:
        raise _WrongFileError(f"{pattern!r} is not a regular expression: {error}") from error
    names: list[str] = []
    rows = []
    rates: dict[int, str] = {}  # the first file of each
    groups: dict[str, list[str]] = {group: [] for group in wanted.groupindex}
    for file, content in files:
        match = wanted.fullmatch(file)
        if match is None:
            continue
        try:
            samples, rate = _wav(content)
        except _WrongFileError as error:
            raise _WrongFileError(f"{file} {error}") from error
        rows.append(samples)
        names.append(file)
        rates.setdefault(rate, file)
        for group, texts in groups.items():
            texts.append(match[group] or "")
    if not rows:
        named = f" of a name that is wholly {pattern!r}" if pattern else ""
        raise _WrongFileError(f"holds no .wav{named}")
    if len(rates) > 1:
        (rate, first), (other, second) = list(rates.items())[:2]
        raise _WrongFileError(
            f"{second} has {other} samples a second, {first} has {rate}; expected one rate"
        )
    arrays = _ragged(rows, name) | _texts(names, f"{name}_names")
    arrays[f"{name}_rate"] = np.array(list(rates))
    part = name[: name.rfind(".") + 1]
    for group, texts in groups.items():
        if part + group in arrays:
            raise _WrongFileError(f"{pattern!r} has a group called as the array {part + group}")
        is_whole = all(re.fullmatch(r"-?[0-9]{1,18}", text) for text in texts)
        arrays |= (
            {part + group: np.array([int(text) for text in texts])}
            if is_whole
            else _texts(texts, part + group)
        )
    return arrays


def _texts(texts: list[str], name: str) -> dict[str, np.ndarray[Any, Any]]:
    return _ragged([np.frombuffer(text.encode(), np.uint8) for text in texts], name)


def _rows(rows: list[np.ndarray[Any, Any]], name: str) -> dict[str, np.ndarray[Any, Any]]:
    if not rows:
        raise _WrongFileError("holds no rows")
    if len({row.shape for row in rows}) == 1:
        return {name: np.stack(rows)}
    return _ragged(rows, name)


def _ragged(rows: list[np.ndarray[Any, Any]], name: str) -> dict[str, np.ndarray[Any, Any]]:
    # A row without entries has lost the shape of one.
    shape = next((row.shape[1:] for row in rows if row.size), ())
    for number, row in enumerate(rows):
        if row.ndim == 0 or (row.size and row.shape[1:] != shape):
            raise _WrongFileError(
                f"row {number} has entries of shape {list(row.shape[1:])}, the first {list(shape)}"
            )
    return {
        name: np.concatenate(
            [row.reshape(-1, *shape) if row.size else row.reshape(0, *shape) for row in rows]
        ),
        f"{name}_lengths": np.array([len(row) for row in rows], np.int64),
    }
