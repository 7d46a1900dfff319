"""The safetensors file format (https://huggingface.co/docs/safetensors).

A file consists of an 8-byte little-endian length, a JSON header of that length, and the tensors'
bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon._files import replacing

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# The header size limit of the format's reference reader.
_LONGEST_HEADER = 100_000_000


def write(
    path: pathlib.Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a temporary file and renames it to `path`, so `path` is never partially written.

    Raises TypeError if the format does not support a tensor's dtype, and OSError if writing fails.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(
                f"safetensors: {name} has dtype {tensor.dtype}; expected one of "
                f"{', '.join(map(str, _NAMES))}"
            )
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # Sorting by decreasing element size aligns every tensor.
    entries = sorted(tensors.items(), key=lambda entry: -entry[1].element_size())
    end = 0
    for name, tensor in entries:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False).encode()
    text = text.ljust((len(text) + 7) // 8 * 8)
    with replacing(path) as part, part.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in entries:
            stored = tensor.detach().cpu().contiguous()
            file.write(ctypes.string_at(stored.data_ptr(), stored.nbytes))
        file.flush()
        os.fsync(file.fileno())


def read(path: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns a file's tensors, which share one memory buffer, and its metadata.

    Raises ValueError, naming the path, if the file cannot be read or violates the format.
    """
    with _naming(path), path.open("rb") as file:
        content = bytearray(os.fstat(file.fileno()).st_size)
        del content[file.readinto(content) :]
        return _parse(content)


def read_metadata(path: pathlib.Path) -> dict[str, str]:
    """Returns a file's metadata, reading only the header; raises the same errors as read()."""
    with _naming(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = bytearray(file.read(8))
        content += file.read(min(int.from_bytes(content, "little"), _LONGEST_HEADER))
        return _header(content, size)[1]


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Converts file errors to a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from error


def _header(content: bytearray, size: int) -> tuple[dict[str, Any], dict[str, str], int]:
    """Returns the entries, the metadata and the data offset of a file of this size."""
    if not content:
        raise ValueError("it is empty")
    if len(content) < 8:
        raise ValueError(f"it has {size} bytes; expected at least 8")
    length = int.from_bytes(content[:8], "little")
    if length > _LONGEST_HEADER:
        raise ValueError("it has no header")
    if length > size - 8:
        raise ValueError(
            f"it is truncated: its header has {length} bytes, but only {size - 8} are present"
        )
    header = json.loads(
        content[8 : 8 + length].decode(), object_pairs_hook=_without_repeats, parse_int=_integer
    )
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is not a JSON object whose values are all strings")
    return header, metadata, 8 + length


def _parse(content: bytearray) -> tuple[dict[str, Tensor], dict[str, str]]:
    header, metadata, begin = _header(content, len(content))
    data = memoryview(content)[begin:]
    tensors = {}
    spans = []
    for name, entry in header.items():
        tensors[name], span = _tensor(name, entry, data)
        spans.append(span)
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise ValueError(f"the tensors overlap or leave a gap at byte {min(first, end)}")
        end = last
    if end != len(data):
        raise ValueError(
            f"the tensors occupy {end} bytes, but the file contains {len(data)} bytes of data"
        )
    return tensors, metadata


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError("a name appears twice in its header")
    return names


def _integer(digits: str) -> int:
    # int() accepts -0, but the format's reference reader does not.
    if digits == "-0":
        raise ValueError("its header contains the number -0")
    return int(digits)


def _is_naturals(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)


def _tensor(name: str, entry: Any, data: memoryview) -> tuple[Tensor, tuple[int, int]]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"the tensor {name!r} lacks dtype, shape or data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise ValueError(f"the tensor {name!r} has the unknown dtype {str(kind)[:40]!r}")
    if not _is_naturals(shape) or not _is_naturals(offsets) or len(offsets) != 2:
        raise ValueError(
            f"the tensor {name!r}: shape and data_offsets must be non-negative integers"
        )
    dtype = _DTYPES[kind]
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        raise ValueError(
            f"the tensor {name!r} has a shape that is too large; expected at most 2^63 - 1 bytes"
        )
    count = math.prod(shape)
    first, last = offsets
    if first <= last and last > len(data):
        raise ValueError(
            f"it is truncated: the tensor {name!r} occupies bytes {first} to {last}, but the file "
            f"contains {len(data)} bytes of data"
        )
    if first > last or last - first != count * dtype.itemsize:
        raise ValueError(
            f"the tensor {name!r} occupies bytes {first} to {last}, but its shape requires "
            f"{count * dtype.itemsize}"
        )
    if count == 0:
        return torch.empty(shape, dtype=dtype), (first, last)
    return torch.frombuffer(data[first:last], dtype=dtype).reshape(shape), (first, last)
