"""Public names of a package's classes and functions."""

import sys
from collections.abc import Sequence


def publish(package: str, names: Sequence[str]) -> None:
    """Sets the package as the module of its classes and functions.

    Messages, pickles and documentation then use "gnomon.nn.KVCache", whichever file defines it.
    """
    for name in names:
        vars(sys.modules[package])[name].__module__ = package
