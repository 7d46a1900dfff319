"""Converts data to the arrays of a task: ``python -m gnomon.data``, run by ``gnomon data``."""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

try:
    import numpy as np
except ImportError as error:
    sys.exit(f"gnomon: data requires numpy: {error}")

from gnomon._checks import did_you_mean
from gnomon._command_line import Parser
from gnomon._output import checked_output
from gnomon.lab.data import is_data, read_arrays, shared_labels, write
from gnomon.lab.data.sets import SETS, convert, fetch

EXAMPLE = """\
For example, the digits of MNIST:

  gnomon data mnist.safetensors \\
    train.images=train-images-idx3-ubyte.gz train.labels=train-labels-idx1-ubyte.gz \\
    valid.images=t10k-images-idx3-ubyte.gz valid.labels=t10k-labels-idx1-ubyte.gz

Formats: IDX; .npy; .npz (FILE:KEY); .json (FILE:KEY.KEY, lists of numbers); .txt, .index and .csv
(numbers); .csv (FILE:COLUMN,COLUMN, names); sounds (.wav, .flac) and images (.png, .jpg, .jpeg,
.bmp), or a folder or .tar of them (FILE:PATTERN, a regular expression for file names, whose named
groups become additional arrays). Any of these may be gzipped. Rows of different lengths become NAME
and NAME_lengths.

`gnomon data get NAME` downloads a data set; `gnomon data get --list` lists the names.
"""


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with checked_output(_fail):
            return _get(words[1:]) if words[:1] == ["get"] else _main(words)
    except KeyboardInterrupt:
        return 130


def _fail(message: str) -> NoReturn:
    print(f"gnomon: data: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def _main(arguments: list[str]) -> int:
    parser = Parser(
        fail=_fail,
        prog="gnomon data",
        description="Converts files to one safetensors file with the arrays SPLIT.NAME of a task.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help="the file to write")
    parser.add_argument(
        "arrays",
        nargs="+",
        metavar="SPLIT.NAME=FILE",
        help="an array and the file that contains it",
    )
    options = parser.parse_args(arguments)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    reads = []
    for word in options.arrays:
        name, _, source = word.partition("=")
        if not re.fullmatch(r"\w+\.\w+", name) or not source:
            hint = did_you_mean(arguments[0], ["get"])
            expected = f"{hint} Expected" if hint else "expected"
            _fail(f"{word!r} is invalid; {expected} SPLIT.NAME=FILE")
        if _is_read(options.out, source):
            _fail(
                f"OUT is {options.out}, which is also the source of {name}; expected a different "
                "file"
            )
        _check_replaced(options.out)
        try:
            read = read_arrays(source, name)
        except ValueError as error:
            _fail(str(error))
        for key, array in read.items():
            if key in arrays:
                _fail(f"{key} is given twice")
            arrays[key] = array
        reads.append(read)
    arrays |= shared_labels(reads)
    try:
        written = write(options.out, arrays)
    except ValueError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot write {options.out}: {error.strerror}")
    _print_arrays(written)
    return 0


def _check_replaced(out: pathlib.Path) -> None:
    if out.is_dir():
        _fail(f"OUT is {out}, which is a folder; expected a file")
    if out.is_file() and out.stat().st_size > 0 and not is_data(out):
        _fail(
            f"OUT is {out}, which exists and was not written by `gnomon data`; expected a new file"
        )


def _is_read(out: pathlib.Path, source: str) -> bool:
    """Returns whether a source (FILE or FILE:KEY) is `out` or a folder that contains it."""
    files = [pathlib.Path(path).resolve() for path in (source, source.rpartition(":")[0]) if path]
    own = out.resolve()
    return own.exists() and any(file == own or file in own.parents for file in files)


def _get(arguments: list[str]) -> int:
    parser = Parser(
        fail=_fail,
        prog="gnomon data get",
        description="Downloads a data set by name, checks the SHA-256 of each file, and creates "
        "the files that tasks read. Existing downloads are kept.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name printed by --list")
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="FOLDER", help="output folder; default: NAME"
    )
    parser.add_argument(
        "--list", action="store_true", help="print names, download sizes and licences"
    )
    options = parser.parse_args(arguments)
    if options.list:
        if options.name is not None or options.out is not None:
            parser.error("--list cannot be combined with NAME or --out")
        _print_sets()
        return 0
    if options.name not in SETS:
        what = "no data set given" if options.name is None else f"unknown data set {options.name!r}"
        hint = did_you_mean(options.name or "", SETS)
        known = f"one of {', '.join(SETS)}"
        parser.error(f"{what}; {hint} Expected {known}" if hint else f"{what}; expected {known}")
    chosen = SETS[options.name]
    folder = pathlib.Path(chosen.name) if options.out is None else options.out
    print(f"{chosen.name}: {chosen.title}")
    print(f"source: {chosen.source}")
    print(f"licence: {chosen.licence}")
    try:
        for path, is_new in fetch(chosen, folder, _tell).items():
            print(
                f"{path}: {'downloaded' if is_new else 'already present'}, "
                f"{_size(path.stat().st_size)}"
            )
        for path, arrays in convert(chosen, folder).items():
            print(f"{path}: created, {_size(path.stat().st_size)}")
            _print_arrays(arrays)
    except ValueError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or folder}: {error.strerror or error}")
    return 0


def _tell(line: str) -> None:
    """Reports progress if stderr is a terminal; otherwise, only failures are reported."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"gnomon: data: {line}", file=sys.stderr)


def _print_sets() -> None:
    rows = [
        (chosen.name, _size(chosen.size), chosen.title, chosen.licence) for chosen in SETS.values()
    ]
    wide, high = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, size, title, licence in rows:
        print(f"{name:{wide}}  {size:>{high}}  {title}; licence: {licence}")


def _print_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    for name, array in arrays.items():
        print(f"{name}: {array.dtype.name}, {' x '.join(map(str, array.shape))}")


def _size(number: int) -> str:
    return f"{number / 1e6:.1f} MB" if number >= 1e6 else f"{number / 1e3:.1f} kB"


if __name__ == "__main__":
    sys.exit(main())
