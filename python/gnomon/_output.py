"""Makes this package's programs report an error if standard output cannot be written."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def checked_output(fail: Callable[[str], object]) -> Iterator[None]:
    """Calls `fail` with a message if the output printed in this context cannot be written.

    The output is collected and written at the end, because argparse ignores failed writes of
    --help.
    """
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        fault = _write(text.getvalue())
        if fault is not None:
            fail(f"cannot write to standard output: {fault}")


def _write(text: str) -> str | None:
    """Writes the text. Returns the reason if that fails, otherwise None."""
    if not text:
        return None
    if sys.stdout is None:
        return "it is closed"
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # Without this redirection, Python would flush again at exit and report the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error.strerror
    return None
