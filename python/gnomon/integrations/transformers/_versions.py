"""Constants for the tested releases of transformers; tests and the sweep also use them."""

from __future__ import annotations

#: Tests and the sweep over model types run with the first and last release of the range.
OLDEST, NEWEST = (5, 23), (5, 24)
#: The same releases as text, such as "5.23".
OLDEST_NAME, NEWEST_NAME = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))


def release_of(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version such as "5.24.0.dev0"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
