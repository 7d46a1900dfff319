"""Converts data to the arrays of a task: ``python -m gnomon.data``, which ``gnomon data`` runs."""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from typing import Any, NoReturn

try:
    import numpy as np
except ImportError as error:
    sys.exit(f"gnomon: data reads arrays with numpy: {error}")

from gnomon._output import checked_output
from gnomon.data import read_arrays, write

EXAMPLE = """\
For example, the digits of MNIST:

  gnomon data mnist.safetensors \\
    train.images=train-images-idx3-ubyte.gz train.labels=train-labels-idx1-ubyte.gz \\
    valid.images=t10k-images-idx3-ubyte.gz valid.labels=t10k-labels-idx1-ubyte.gz

Formats: IDX; .npy; .npz (FILE:KEY); .json (FILE:KEY.KEY, lists of numbers); .txt and .csv
(numbers); .wav, or a folder or .tar of them; each also in gzip. Rows of several lengths become NAME
and NAME_lengths.
"""


def main(arguments: list[str] | None = None) -> int:
    with checked_output(_fail):
        return _main(arguments)


def _fail(message: str) -> NoReturn:
    print(f"gnomon: data: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"{message} (see --help)")


def _main(arguments: list[str] | None) -> int:
    parser = _Parser(
        prog="gnomon data",
        description="Writes arrays called PART.NAME, as tasks read them, to a file of safetensors.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help="the file to write")
    parser.add_argument(
        "arrays", nargs="+", metavar="PART.NAME=FILE", help="an array and the file that has it"
    )
    options = parser.parse_args(arguments)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for word in options.arrays:
        name, _, source = word.partition("=")
        if not re.fullmatch(r"\w+\.\w+", name) or not source:
            _fail(f"{word!r} is not PART.NAME=FILE")
        try:
            read = read_arrays(source, name)
        except ValueError as error:
            _fail(str(error))
        for key, array in read.items():
            if key in arrays:
                _fail(f"{key} comes twice")
            arrays[key] = array
    try:
        write(options.out, arrays)
    except ValueError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot write {options.out}: {error.strerror}")
    for name, array in arrays.items():
        print(f"{name}: {array.dtype.name}, {' x '.join(map(str, array.shape))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
