"""Draws figures of models and terms; an alias of ``gnomon.lab.inspect``."""

import sys
from typing import TYPE_CHECKING

from gnomon import _lab

if TYPE_CHECKING:
    from gnomon.lab.inspect import *  # noqa: F403
elif __name__ == "__main__":
    sys.exit(_lab.run("inspect.__main__"))
else:
    _lab.alias(__name__)
