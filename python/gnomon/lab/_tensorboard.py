"""Writes event files for TensorBoard; ``gnomon compare --tensorboard`` starts this program.

``gnomon compare`` writes one JSON object per line to the program's standard input. Each object
contains a run name, a step and scalars by tag. Each run has its own folder of event files.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any


def main() -> int:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("requires TensorBoard; run: pip install tensorboard", file=sys.stderr)
        return 2
    (argument,) = sys.argv[1:]
    if argument == "--check":
        return 0
    writers: dict[str, Any] = {}
    for line in sys.stdin:
        entry = json.loads(line)
        folder = re.sub(r"[^\w.+=-]+", "-", entry["run"])
        if folder not in writers:
            # A resumed run replaces the events of steps that it repeats.
            writers[folder] = SummaryWriter(
                str(pathlib.Path(argument, folder)), purge_step=entry["step"], flush_secs=10
            )
        for tag, value in entry["scalars"].items():
            writers[folder].add_scalar(tag, value, entry["step"])
        if any(not tag.startswith("training/") for tag in entry["scalars"]):
            writers.pop(folder).close()
    for writer in writers.values():
        writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
