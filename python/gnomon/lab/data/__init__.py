"""Converts data files to the arrays that tasks read: ``gnomon data``.

A task reads one safetensors file whose tensors are named SPLIT.NAME, such as "train.images" or
"valid.labels"; docs/tasks.md lists the names. ``read_arrays`` reads arrays from a file in another
format, and ``write`` stores arrays in one safetensors file.

Rows of different lengths become two arrays: NAME is their concatenation, and NAME_lengths contains
the length of each row. If the rows are grouped in lists, NAME concatenates the rows of all lists,
and NAME_lengths_lengths contains the number of rows in each list.
"""

from __future__ import annotations

import gzip
import pathlib
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from gnomon.lab import _safetensors
from gnomon.lab.data._arrays import Array, Arrays, WrongFileError, fault_of, rows_of, texts_of
from gnomon.lab.data._folders import archive, files_of, folder, one_file
from gnomon.lab.data._media import IMAGES, SOUNDS
from gnomon.lab.data._numbers import (
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
    """Reads the arrays of a file: NAME, and NAME_lengths if its rows differ in length.

    Supported formats, uncompressed or compressed with gzip:

    - IDX, .npy, .npz, and .json (nested lists of numbers);
    - .txt, .index and .csv (numbers, one row per line);
    - .wav and .flac: float samples in [-1, 1), averaged over channels; NAME_rate is the sample rate
      in Hz;
    - .png, .jpg, .jpeg and .bmp: bytes, height x width for greyscale images and
      height x width x 3 for others, without alpha. 16-bit greyscale images become floats in [0, 1].

    A sound or an image becomes one row. A folder or tar file of sounds or images becomes one row
    per file, sorted by file name. NAME_names contains the file names in UTF-8; for a folder, they
    include the names of subfolders.

    A selection after a colon reads only a part of the source:

    - for .npz, the key of an array;
    - for .json, object keys joined by dots;
    - for .csv, comma-separated headings of text columns. Each row contains indices into NAME_names,
      the sorted list of all values in UTF-8;
    - for a folder or tar file, a regular expression that must match the whole file name. Each of
      its named groups becomes an additional array, which contains numbers if all values are
      integers. Otherwise, it contains UTF-8 text for sounds; for images, it contains indices into
      the sorted list of all values, which is stored as GROUP_names.

    Args:
        source: a path, optionally followed by a colon and a selection as above.
        name: the array's name, such as "train.audio".

    Raises:
        ValueError: a file cannot be read, has an unknown format, or is damaged or truncated; the
            message names the file and the position of the fault.
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
        # gzip's own errors are OSErrors without an errno.
        fault = error.strerror or f"is damaged: {error}"
        raise ValueError(fault_of(error.filename or path, fault)) from error
    except EOFError as error:
        raise ValueError(f"{path} is truncated: its gzip data ends early") from error
    except zlib.error as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except tarfile.TarError as error:
        raise ValueError(f"{path} is truncated or not a valid tar file: {error}") from error
    except WrongFileError as error:
        raise ValueError(fault_of(path, error)) from error


def shared_labels(
    reads: Iterable[Mapping[str, Array]],
) -> Arrays:
    """Returns name labels renumbered as indices into one list of names for all splits."""
    labels: Arrays = {}
    names = {}
    for arrays in reads:
        for key in arrays:
            of = key.removesuffix("_names")
            if not key.endswith(".labels_names") or of not in arrays:
                continue
            # If an array contains pixels or samples, its names are file names, not labels.
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


#: Metadata that distinguishes data files from other safetensors files, such as checkpoints.
_MARK = {"made_by": "gnomon data"}


#: Stored dtypes that replace unsigned integers, which few PyTorch operators support.
_SIGNED = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


def write(path: pathlib.Path | str, arrays: Mapping[str, Array]) -> Arrays:
    """Writes arrays named SPLIT.NAME to one safetensors file, and returns the stored arrays.

    uint16 is stored as int32; wider unsigned integers are stored as int64.

    Raises:
        ValueError: a dtype cannot be stored, or a value does not fit into a signed 64-bit integer.
        OSError: the file cannot be written.
    """
    path = pathlib.Path(path)
    written: Arrays = {}
    tensors = {}
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("=")
        if (signed := _SIGNED.get(dtype.name)) is not None:
            if array.size > 0 and array.max() > np.iinfo(signed).max:
                raise ValueError(f"{name} contains {array.max()}; expected at most 2^63 - 1")
            dtype = np.dtype(signed)
        if dtype.kind not in "iufb" or dtype.itemsize > 8:
            raise ValueError(
                f"{name} has dtype {array.dtype}; expected real numbers of at most 64 bits"
            )
        written[name] = array.astype(dtype, copy=False)
        # PyTorch warns about read-only arrays, such as views of a file's bytes.
        own = np.require(written[name], requirements=["C", "W"])
        tensors[name] = torch.from_numpy(own).reshape(array.shape)
    _safetensors.write(path, tensors, _MARK)
    return written


def is_data(path: pathlib.Path) -> bool:
    """Returns whether `path` is a file that write() created."""
    try:
        return _safetensors.read_metadata(path) == _MARK
    except ValueError:
        return False


def _split(source: str) -> tuple[pathlib.Path, str]:
    """Splits a source at a colon into path and selection, unless all of it is an existing path."""
    if ":" not in source or pathlib.Path(source).exists():
        return pathlib.Path(source), ""
    # A pattern may contain colons.
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
            f"has an unknown format; expected IDX, or one of {', '.join(sorted(readers))}"
        )
    if key and suffix not in (".npz", ".json", ".csv", ".tar"):
        raise WrongFileError(f"contains one array; leave out {key!r}")
    return readers[suffix]()
