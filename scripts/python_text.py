"""Writes a text that every Python installation has: the standard library's sources in one file."""

import os
import pathlib
import sys
import sysconfig
import tempfile


def main(out: pathlib.Path) -> None:
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    # Top-level modules and the larger packages, in a fixed order.
    files = sorted(folder.glob("*.py"))
    for package in ("asyncio", "collections", "concurrent", "email", "html", "http", "json"):
        files += sorted((folder / package).rglob("*.py"))
    out.parent.mkdir(parents=True, exist_ok=True)
    # A unique name, because another process may write the same file.
    with tempfile.NamedTemporaryFile(dir=out.parent, delete=False) as file:
        for source in files:
            file.write(source.read_bytes() + b"\n")
    os.replace(file.name, out)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
