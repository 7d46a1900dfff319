"""The demo: ``python -m gnomon.demo`` compares four positions on the Python standard library.

It trains small language models with three seeds per position, evaluates them at lengths beyond the
training length, and reports which differences are significant. The results are in ``runs/``.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import sysconfig
from collections.abc import Sequence

import torch

from gnomon import _lab
from gnomon._command_line import Parser, failure
from gnomon._files import cache_folder, replacing
from gnomon._output import checked_output

__all__ = ["write_text"]

_fail = failure("gnomon.demo")

#: The positions, and the seeds for each.
POSITIONS = ("none", "sinusoidal", "rope", "alibi")
SEEDS = 3
OPTIONS = (
    *("--position", ",".join(POSITIONS), "--lengths", "128,256,512"),
    *("--dim", "64", "--depth", "2", "--heads", "2"),
    *("--steps", "250", "--seeds", str(SEEDS), "--margin", "0.02"),
)


def write_text(out: pathlib.Path) -> None:
    """Writes the sources of Python's standard library to one file.

    Args:
        out: the output file; its folder is created if necessary.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    # Top-level modules and the larger packages, in a fixed order.
    files = sorted(folder.glob("*.py"))
    for package in ("asyncio", "collections", "concurrent", "email", "html", "http", "json"):
        files += sorted((folder / package).rglob("*.py"))
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as part:
        part.write_bytes(b"".join(source.read_bytes() + b"\n" for source in files))


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the default text if necessary, and replaces this process with the comparison."""
    with checked_output(_fail):
        parser = Parser(
            fail=_fail,
            prog="python -m gnomon.demo",
            description="Compares four positions, with three seeds each, on a text.",
        )
        parser.add_argument(
            "data",
            nargs="?",
            metavar="DATA",
            help="a text file or a folder of text files (default: the sources of Python's standard "
            "library)",
        )
        parser.add_argument(
            "--text", type=pathlib.Path, metavar="FILE", help="only write the default text to FILE"
        )
        options = parser.parse_args(arguments)
    data, text = options.data, options.text
    if data is None and text is None:
        try:
            data = text = cache_folder() / "demo" / "python.txt"
        except RuntimeError as error:
            _fail(str(error))
    if text is not None:
        try:
            write_text(text)
        except OSError as error:
            _fail(f"cannot write to {error.filename}: {error.strerror}")
    if data is None:
        return 0
    # Otherwise, the report would fail after the comparison.
    if importlib.util.find_spec("matplotlib") is None:
        _fail(_lab.NO_MATPLOTLIB)
    # On a busy machine, waiting threads should sleep instead of spinning.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    command = [sys.executable, "-m", "gnomon", "compare", "--data", str(data), *OPTIONS]
    # Two cores train such a small model hardly faster than one, so each core trains its own.
    command += ["--workers", str(min(torch.get_num_threads(), len(POSITIONS) * SEEDS))]
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    sys.exit(main())
