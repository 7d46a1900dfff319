"""The standard output of the programs of this package."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def checked_output(fail: Callable[[str], object]) -> Iterator[None]:
    """Calls fail with a message where what is printed inside cannot be written.

    It is written at the end, as argparse says nothing where the words of --help are lost.
    """
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        fault = _write(text.getvalue())
        if fault is not None:
            fail(f"cannot write to the standard output: {fault}")


def _write(text: str) -> str | None:
    """Returns why that cannot be, if it cannot."""
    if not text:
        return None
    if sys.stdout is None:
        return "it is closed"
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # Python would try again as it ends, and complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error.strerror
    return None
