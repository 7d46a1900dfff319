"""The demo: ``python -m gnomon.demo`` (``gnomon.lab.demo``)."""

import sys

from gnomon import _lab

if __name__ == "__main__":
    sys.exit(_lab.run("demo"))
