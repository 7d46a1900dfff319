"""Reports of comparisons; an alias of ``gnomon.lab.report``."""

import sys
from typing import TYPE_CHECKING

from gnomon import _lab

if TYPE_CHECKING:
    from gnomon.lab.report import *  # noqa: F403
elif __name__ == "__main__":
    sys.exit(_lab.run("report.__main__"))
else:
    _lab.alias(__name__)
