"""What the names of a package's files are called where users find them."""

import sys
from collections.abc import Sequence


def publish(package: str, names: Sequence[str]) -> None:
    """Makes classes and functions of a package's files those of the package.

    Messages, pickles and pages then say "gnomon.nn.KVCache", wherever in the package it stands.
    """
    for name in names:
        vars(sys.modules[package])[name].__module__ = package
