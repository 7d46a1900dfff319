"""Runs the ``gnomon`` command without importing PyTorch into Python, which takes seconds.

``gnomon.lab._workers`` starts this file as ``python -I FILE LIBRARY WORD...``.
"""

import ctypes
import os
import signal
import sys

if __name__ == "__main__":
    # Python's own handler runs only after the native call.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    words = ["gnomon", *sys.argv[2:]]
    argv = (ctypes.c_char_p * (len(words) + 1))(*map(os.fsencode, words), None)
    sys.exit(ctypes.CDLL(sys.argv[1]).gnomon_run_program(len(words), argv, None, 0, 1))
