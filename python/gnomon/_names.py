"""Public names of a package's classes and functions."""

import sys
from collections.abc import Sequence


def publish(package: str, names: Sequence[str]) -> None:
    """Sets `__module__` of a package's public classes and functions to the package's name.

    Messages, pickles and documentation then show names such as "gnomon.nn.KVCache" without the
    private module that defines the class.
    """
    for name in names:
        vars(sys.modules[package])[name].__module__ = package
