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
import dataclasses
import gzip
import importlib
import io
import json
import pathlib
import re
import struct
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gnomon import _safetensors

__all__ = ["read_arrays", "write"]

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"
_SOUNDS = (".flac", ".wav")
_IMAGES = (".bmp", ".jpeg", ".jpg", ".png")
# Of .wav: integers, floats, and what has the kind further on.
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


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
            IDX, .npy, .npz, .json (nested lists of numbers), .txt, .index and .csv (numbers, a row
            a line); .wav and .flac (float samples in [-1, 1), the mean of all channels; NAME_rate
            is how many a second has); .png, .jpg, .jpeg and .bmp (bytes, height x width of grey
            images and height x width x 3 of others, without alpha; floats in [0, 1] of grey ones of
            16 bits). A sound or an image is one row. A folder or a tar file of them is one row for
            each in the order of their names, and NAME_names has these as UTF-8; those in subfolders
            of a folder have these in their names. After a colon, a regular expression takes those
            of which it matches the whole name, and its named groups are arrays beside NAME: numbers
            where all are whole ones; else UTF-8 of sounds, and of images the numbers in the sorted
            list of all, which is an array as well: GROUP_names.
        name: of the array, of a part: "train.audio".

    Raises:
        ValueError: a file that cannot be read, in no known format, or not whole; it names the file
            and the place.
    """
    path, key = _split(source)
    try:
        if path.is_dir():
            return _files(_folder(path), name, key)
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
        raise ValueError(f"{error.filename or path}: {fault}") from error
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path}: is not whole: {error}") from error
    except (_WrongFileError, tarfile.TarError) as error:
        raise ValueError(f"{path}: {error}") from error


def shared_labels(
    reads: Iterable[Mapping[str, np.ndarray[Any, Any]]],
) -> dict[str, np.ndarray[Any, Any]]:
    """The labels that are numbers of names, by one list of names for all parts."""
    labels: dict[str, np.ndarray[Any, Any]] = {}
    names = {}
    for arrays in reads:
        for key in arrays:
            of = key.removesuffix("_names")
            if not key.endswith(".labels_names") or of not in arrays:
                continue
            # Names of files are no names of labels: their array is of pixels or samples.
            if arrays[of].dtype == np.int64:
                ends = np.cumsum(arrays[f"{key}_lengths"])
                starts = ends - arrays[f"{key}_lengths"]
                text = arrays[key].tobytes()
                labels[of] = arrays[of]
                names[of] = [text[a:b].decode() for a, b in zip(starts, ends, strict=True)]
    together = sorted(set().union(*names.values()))
    number_of = {word: number for number, word in enumerate(together)}
    shared = {}
    for of, own in names.items():
        shared[of] = np.array([number_of[word] for word in own])[labels[of]]
        shared |= _texts(together, f"{of}_names")
    return shared


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
        ".tar": lambda: _files(_archive(content), name, key),
    } | {kind: lambda: _file(content, suffix, name) for kind in (*_SOUNDS, *_IMAGES)}
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


def _text(content: bytes) -> str:
    try:
        # Editors put a mark of byte order in front.
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise _WrongFileError(f"byte {error.start} is not UTF-8") from error


def _table(content: bytes) -> list[np.ndarray[Any, Any]]:
    rows = []
    for number, line in enumerate(_text(content).splitlines(), 1):
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
    lines = csv.reader(io.StringIO(_text(content), newline=""), strict=True)
    try:
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
    except csv.Error as error:
        raise _WrongFileError(f"line {lines.line_num}: {error}") from error
    if not rows:
        raise _WrongFileError("holds no rows")
    numbers = _numbered([word for row in rows for word in row], name)
    return numbers | {name: numbers[name].reshape(len(rows), -1)}


def _numbered(texts: list[str], name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Names as their numbers in the sorted list of all of them."""
    names = sorted(set(texts))
    number_of = {text: number for number, text in enumerate(names)}
    numbers = np.array([number_of[text] for text in texts], np.int64)
    return {name: numbers} | _texts(names, f"{name}_names")


@dataclasses.dataclass(frozen=True)
class _Row:
    """A file of a sound or of an image; `kind` says what all files of an array must share."""

    values: np.ndarray[Any, Any]
    kind: str
    rate: int | None = None  # how many samples of a sound a second has


def _library(module: str, package: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # the latter of a soundfile without its libsndfile
        raise _WrongFileError(
            f"{what} by {package}, which cannot be imported: pip install {package}, or gnomon[data]"
        ) from error


def _row(content: bytes, suffix: str) -> _Row:
    if not content:
        raise _WrongFileError("is empty")
    if suffix in _IMAGES:
        return _image(content)
    with np.errstate(all="ignore"):  # of floats that are not finite
        samples, rate = (_wav(content) if content[:4] == b"RIFF" else None) or _decoded(content)
        if not len(samples):
            raise _WrongFileError("holds no samples")
        mono = samples.mean(axis=1).astype(np.float32)
    if not np.isfinite(mono).all():
        place = np.isfinite(mono).argmin()
        raise _WrongFileError(f"has {mono[place]} at sample {place}, expected finite numbers")
    return _Row(mono, f"has {rate} samples a second", rate)


def _wav(content: bytes) -> tuple[np.ndarray[Any, Any], int] | None:
    """Samples (frames, channels) of a .wav in [-1, 1), and how many a second has.

    Nothing where they are neither integers nor floats.
    """
    chunks: dict[bytes, tuple[int, int]] = {}
    at = 12
    while at + 8 <= len(content):
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        chunks.setdefault(content[at : at + 4], (at + 8, size))
        at += 8 + size + size % 2
    start, size = chunks.get(b"data", (0, 0))
    head, head_size = chunks.get(b"fmt ", (0, 0))
    if start == 0 or head_size < 16 or head + head_size > len(content):
        raise _WrongFileError("is no whole .wav: it has no samples, or does not say of which kind")
    if start + size > len(content):
        raise _WrongFileError(
            f"is not whole: it has {len(content) - start} bytes of samples, its header tells of "
            f"{size}"
        )
    kind, channels, rate, _, block = struct.unpack_from("<HHIIH", content, head)
    if kind == _EXTENSIBLE and head_size >= 26:
        (kind,) = struct.unpack_from("<H", content, head + 24)
    if channels == 0 or block == 0 or block % channels:
        raise _WrongFileError(f"has {channels} channels in {block} bytes")
    width = block // channels
    data = np.frombuffer(content, np.uint8, size - size % block, start)
    if kind == _FLOAT and width in (4, 8):
        samples = data.view(f"<f{width}").astype(np.float64)
    elif kind == _PCM and width == 1:
        samples = data / 128 - 1
    elif kind == _PCM and width <= 4:
        # Zeros below the bytes that there are.
        whole = np.zeros((len(data) // width, 4), np.uint8)
        whole[:, 4 - width :] = data.reshape(-1, width)
        samples = whole.view("<i4") / 2.0**31
    else:
        return None
    return samples.reshape(-1, channels), rate


def _decoded(content: bytes) -> tuple[np.ndarray[Any, Any], int]:
    """Samples (frames, channels), and how many a second has, by libsndfile."""
    what = "is no .wav of integers or floats; other sounds are read"
    soundfile = _library("soundfile", "soundfile", what)
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as sound:
            frames, rate = sound.frames, sound.samplerate
            # By parts: a wrong header may tell of more than memory holds.
            parts = [np.empty((0, sound.channels))]
            while len(part := sound.read(2**20, dtype="float64", always_2d=True)):
                parts.append(part)
            samples = np.concatenate(parts)
    except soundfile.LibsndfileError as error:
        fault = error.error_string.removeprefix("Error : ")
        raise _WrongFileError(f"is no whole sound: {fault}") from error
    if len(samples) != frames:
        raise _WrongFileError(
            f"is not whole: it has {len(samples)} samples, its header tells of {frames}"
        )
    return samples, rate


def _image(content: bytes) -> _Row:
    """Bytes, or floats in [0, 1] of 16 bits: (height, width) of grey, else (height, width, 3)."""
    library = _library("PIL.Image", "pillow", "is read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is read nevertheless
            with library.open(io.BytesIO(content), formats=("BMP", "JPEG", "PNG")) as image:
                if image.mode.startswith("I"):
                    pixels = np.asarray(image, np.float32) / 65535
                else:
                    is_grey = image.mode in ("1", "L", "LA")
                    pixels = np.asarray(image.convert("L" if is_grey else "RGB"))
    except library.UnidentifiedImageError as error:
        raise _WrongFileError("is no image of BMP, JPEG or PNG") from error
    except Exception as error:  # Pillow's, of several classes
        raise _WrongFileError(f"is no whole image: {error}") from error
    return _Row(
        pixels,
        f"has height {pixels.shape[0]}, width {pixels.shape[1]} and "
        f"{'1 channel' if pixels.ndim == 2 else '3 channels'} of "
        f"{8 if pixels.dtype == np.uint8 else 16} bits",
    )


def _folder(path: pathlib.Path) -> Iterable[tuple[str, Callable[[], bytes]]]:
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*")}
    for name in sorted(files):
        # Systems keep files of their own in hidden ones.
        if not re.search(r"(^|/)\.", name) and files[name].is_file():
            yield name, files[name].read_bytes


def _archive(content: bytes) -> Iterable[tuple[str, Callable[[], bytes]]]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            file = archive.extractfile(member) if member.isfile() else None
            name = member.name.rsplit("/", 1)[-1]
            if file is not None and not name.startswith("."):
                yield name, file.read


def _file(content: bytes, suffix: str, name: str) -> dict[str, np.ndarray[Any, Any]]:
    row = _row(content, suffix)
    return _rows([row.values], name) | _rate(row, name)


def _rate(row: _Row, name: str) -> dict[str, np.ndarray[Any, Any]]:
    return {} if row.rate is None else {f"{name}_rate": np.array([row.rate])}


def _files(
    files: Iterable[tuple[str, Callable[[], bytes]]], name: str, pattern: str
) -> dict[str, np.ndarray[Any, Any]]:
    try:
        wanted = re.compile(pattern or ".*", re.DOTALL)
    except re.error as error:
        raise _WrongFileError(f"{pattern!r} is not a regular expression: {error}") from error
    rows: list[_Row] = []
    names: list[str] = []
    groups: dict[str, list[str]] = {group: [] for group in wanted.groupindex}
    for file, read in files:
        match = wanted.fullmatch(file)
        suffix = pathlib.PurePath(file).suffix.lower()
        if match is None or suffix not in (*_SOUNDS, *_IMAGES):
            continue
        try:
            row = _row(read(), suffix)
        except _WrongFileError as error:
            raise _WrongFileError(f"{file} {error}") from error
        if rows and row.kind != rows[0].kind:
            raise _WrongFileError(
                f"{file} {row.kind}, {names[0]} {rows[0].kind}; expected files of one kind"
            )
        rows.append(row)
        names.append(file)
        for group, texts in groups.items():
            texts.append(match[group] or "")
    if not rows:
        named = f" of a name that is wholly {pattern!r}" if pattern else ""
        raise _WrongFileError(f"holds no {', '.join(sorted((*_SOUNDS, *_IMAGES)))}{named}")
    values = [row.values for row in rows]
    is_sounds = rows[0].rate is not None
    arrays = _ragged(values, name) if is_sounds else {name: np.stack(values)}
    arrays |= _texts(names, f"{name}_names") | _rate(rows[0], name)
    part = name[: name.rfind(".") + 1]
    for group, texts in groups.items():
        if part + group in arrays:
            raise _WrongFileError(f"{pattern!r} has a group called as the array {part + group}")
        if all(re.fullmatch(r"-?[0-9]{1,18}", text) for text in texts):
            arrays[part + group] = np.array([int(text) for text in texts])
        else:
            arrays |= (_texts if is_sounds else _numbered)(texts, part + group)
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
