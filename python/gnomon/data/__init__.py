"""What people have as the arrays that tasks read: ``gnomon data``.

A task reads one file of safetensors whose tensors are called PART.NAME, "train.images" or
"valid.labels"; the page docs/tasks.md says which ones. ``read_arrays`` makes them from a file in
another format, ``write`` puts them into one file.

Rows of different lengths become two arrays: NAME has all of them one after the other, NAME_lengths
how many each row has. Where a row is itself a list of such rows, NAME_lengths is split in the same
way: NAME_lengths_lengths has how many of them each row has.
"""

from __future__ import annotations

import gzip
import pathlib
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from gnomon import _safetensors
from gnomon.data._arrays import Array, Arrays, WrongFileError, rows_of, texts_of
from gnomon.data._folders import archive, files_of, folder, one_file
from gnomon.data._media import IMAGES, SOUNDS
from gnomon.data._numbers import (
    IDX_TYPES,
    nested,
    read_idx,
    read_json,
    read_names,
    read_npy,
    read_npz,
    read_table,
)

__all__ = ["read_arrays", "write"]

_GZIP = b"\x1f\x8b"


def read_arrays(source: str, name: str) -> Arrays:
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
        ValueError: a file that cannot be read, in no known format, damaged or truncated; it names
            the file and the place.
    """
    path, key = _split(source)
    try:
        if path.is_dir():
            return files_of(folder(path), name, key)
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
        fault = error.strerror or f"is damaged: {error}"
        raise ValueError(f"{error.filename or path}: {fault}") from error
    except EOFError as error:
        raise ValueError(f"{path}: is truncated: its gzip data end early") from error
    except zlib.error as error:
        raise ValueError(f"{path}: is damaged: {error}") from error
    except tarfile.TarError as error:
        raise ValueError(f"{path}: is truncated or not a valid tar file: {error}") from error
    except WrongFileError as error:
        raise ValueError(f"{path}: {error}") from error


def shared_labels(
    reads: Iterable[Mapping[str, Array]],
) -> Arrays:
    """The labels that are numbers of names, by one list of names for all parts."""
    labels: Arrays = {}
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
        shared |= texts_of(together, f"{of}_names")
    return shared


#: By this a file of arrays is known from others, a checkpoint's.
_MARK = {"made_by": "gnomon data"}


#: What is stored of a kind of wide numbers that Torch hardly has an operator for.
_SIGNED = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


def write(path: pathlib.Path | str, arrays: Mapping[str, Array]) -> Arrays:
    """Writes arrays called PART.NAME as one file of safetensors, and returns what it holds.

    Unsigned integers of 16 bits become signed ones of 32, wider ones of 64.

    Raises:
        ValueError: numbers of a dtype that the file cannot hold, or beyond 64 bits with a sign.
        OSError: the file cannot be written.
    """
    path = pathlib.Path(path)
    written: Arrays = {}
    tensors = {}
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("=")
        if (signed := _SIGNED.get(dtype.name)) is not None:
            if array.size > 0 and array.max() > np.iinfo(signed).max:
                raise ValueError(f"{name} has {array.max()}; expected at most 2^63 - 1")
            dtype = np.dtype(signed)
        if dtype.kind not in "iufb" or dtype.itemsize > 8:
            raise ValueError(
                f"{name} is of {array.dtype}; expected real numbers of 64 bits or less"
            )
        written[name] = array.astype(dtype, copy=False)
        # Torch warns of arrays that are views of a file's bytes.
        own = np.require(written[name], requirements=["C", "W"])
        tensors[name] = torch.from_numpy(own).reshape(array.shape)
    _safetensors.write(path, tensors, _MARK)
    return written


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


def _read(content: bytes, suffix: str, key: str, name: str) -> Arrays:
    readers: dict[str, Callable[[], Arrays]] = {
        ".npy": lambda: {name: read_npy(content)},
        ".npz": lambda: {name: read_npz(content, key)},
        ".json": lambda: nested(read_json(content, key), name),
        ".txt": lambda: rows_of(read_table(content), name),
        ".index": lambda: rows_of(read_table(content), name),
        ".csv": lambda: (
            read_names(content, key, name) if key else rows_of(read_table(content), name)
        ),
        ".tar": lambda: files_of(archive(content), name, key),
    } | {kind: lambda: one_file(content, suffix, name) for kind in (*SOUNDS, *IMAGES)}
    if content[:2] == b"\0\0" and len(content) > 3 and content[2] in IDX_TYPES:
        return {name: read_idx(content)}
    if suffix not in readers:
        raise WrongFileError(
            f"is in no known format; expected IDX, or one of {', '.join(sorted(readers))}"
        )
    if key and suffix not in (".npz", ".json", ".csv", ".tar"):
        raise WrongFileError(f"holds one array; expected nothing after it, got {key!r}")
    return readers[suffix]()
