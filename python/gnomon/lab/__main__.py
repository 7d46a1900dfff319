"""Command line: ``python -m gnomon`` runs the ``gnomon`` command in this interpreter.

Several processes can train one model, with the same result as a single process:

    torchrun --nproc-per-node 2 -m gnomon train --data corpus/ --batch 16

torch.distributed connects the processes through the environment variables that torchrun sets (RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT). On CPUs, it uses the gloo backend. All commands other than
train require a single process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import torch.distributed

from gnomon.lab._program import library
from gnomon.lab._program_alone import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; by default, those of this process.

    Returns:
        The exit code: 0 for success, 1 for an internal failure, 2 for invalid input, and 130 after
        Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # The program draws reports and pictures with this interpreter.
    os.environ.setdefault("GNOMON_PYTHON", sys.executable)
    # Python's own signal handlers run only between bytecode instructions, and therefore not during
    # the native call.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return _run(words)
    try:
        torch.distributed.init_process_group()
    except (ValueError, RuntimeError) as error:
        print(f"gnomon: torch.distributed: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    try:
        name = torch.distributed.group.WORLD.group_name
        size = torch.distributed.get_world_size()
        return _run(words, name, torch.distributed.get_rank(), size)
    finally:
        torch.distributed.destroy_process_group()


def _run(words: list[str], group: str | None = None, rank: int = 0, size: int = 1) -> int:
    try:
        program = library()
    except ImportError as error:
        print(f"gnomon: {error}", file=sys.stderr)
        return 1
    return run(program, words, group, rank, size)


if __name__ == "__main__":
    sys.exit(main())
