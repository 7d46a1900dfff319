"""Command line: ``python -m gnomon`` runs the ``gnomon`` command (``gnomon.lab.__main__``)."""

import sys
from collections.abc import Sequence

from gnomon import _lab


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the given arguments, by default those of this process, and returns the exit code."""
    return _lab.run("__main__", arguments)


if __name__ == "__main__":
    sys.exit(main())
