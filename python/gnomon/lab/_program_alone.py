"""Runs the ``gnomon`` command, also without importing PyTorch into Python, which takes seconds.

``gnomon.lab._workers`` starts this file as ``python -I FILE LIBRARY WORD...``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def run(
    library: ctypes.CDLL, words: list[str], group: str | None = None, rank: int = 0, size: int = 1
) -> int:
    """Runs the command in the processes of a group of torch.distributed; None is this process."""
    words = ["gnomon", *words]
    argv = (ctypes.c_char_p * (len(words) + 1))(*map(os.fsencode, words), None)
    name = None if group is None else group.encode()
    return int(library.gnomon_run_program(len(words), argv, name, rank, size))


if __name__ == "__main__":
    # Python's own handler runs only after the native call.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(run(ctypes.CDLL(sys.argv[1]), sys.argv[2:]))
