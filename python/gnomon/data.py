"""Reads and writes training data; an alias of ``gnomon.lab.data``."""

import sys
from typing import TYPE_CHECKING

from gnomon import _lab

if TYPE_CHECKING:
    from gnomon.lab.data import *  # noqa: F403
elif __name__ == "__main__":
    sys.exit(_lab.run("data.__main__"))
else:
    _lab.alias(__name__)
