"""Reads sounds and images from single files, folders and archives."""

from __future__ import annotations

import io
import pathlib
import re
import tarfile
from collections.abc import Callable, Iterable

import numpy as np

from gnomon.lab.data._arrays import Arrays, WrongFileError, numbered, ragged, rows_of, texts_of
from gnomon.lab.data._media import IMAGES, SOUNDS, Row, read_row


def folder(path: pathlib.Path) -> Iterable[tuple[str, Callable[[], bytes]]]:
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*")}
    for name in sorted(files):
        # Skip hidden files, which operating systems create.
        if not re.search(r"(^|/)\.", name) and files[name].is_file():
            yield name, files[name].read_bytes


def archive(content: bytes) -> Iterable[tuple[str, Callable[[], bytes]]]:
    # If tarfile tries several formats, its error message lists all of them, so name the format.
    is_plain = len(content) < tarfile.BLOCKSIZE or content[257:262] == b"ustar"
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:" if is_plain else "r") as archive:
        members = archive.getmembers()
        # A complete archive ends with two blocks of zeros, but tarfile does not require them.
        if len(content) < archive.offset + tarfile.BLOCKSIZE:
            raise WrongFileError(f"is truncated: the archive ends after {len(content)} bytes")
        for member in sorted(members, key=lambda m: m.name):
            file = archive.extractfile(member) if member.isfile() else None
            name = member.name.rsplit("/", 1)[-1]
            if file is not None and not name.startswith("."):
                yield name, file.read


def one_file(content: bytes, suffix: str, name: str) -> Arrays:
    row = read_row(content, suffix)
    return rows_of([row.values], name) | _rate(row, name)


def _rate(row: Row, name: str) -> Arrays:
    return {} if row.rate is None else {f"{name}_rate": np.array([row.rate])}


def files_of(files: Iterable[tuple[str, Callable[[], bytes]]], name: str, pattern: str) -> Arrays:
    try:
        wanted = re.compile(pattern or ".*", re.DOTALL)
    except re.error as error:
        raise WrongFileError(f"{pattern!r} is not a valid regular expression: {error}") from error
    rows: list[Row] = []
    names: list[str] = []
    groups: dict[str, list[str]] = {group: [] for group in wanted.groupindex}
    for file, read in files:
        match = wanted.fullmatch(file)
        suffix = pathlib.PurePath(file).suffix.lower()
        if match is None or suffix not in (*SOUNDS, *IMAGES):
            continue
        try:
            row = read_row(read(), suffix)
        except WrongFileError as error:
            raise WrongFileError(f"{file} {error}") from error
        if rows and row.kind != rows[0].kind:
            raise WrongFileError(
                f"{file} {row.kind}, but {names[0]} {rows[0].kind}; expected files of one kind"
            )
        rows.append(row)
        names.append(file)
        for group, texts in groups.items():
            texts.append(match[group] or "")
    if not rows:
        named = f" whose name fully matches {pattern!r}" if pattern else ""
        raise WrongFileError(f"contains no {', '.join(sorted((*SOUNDS, *IMAGES)))} file{named}")
    values = [row.values for row in rows]
    is_sounds = rows[0].rate is not None
    arrays = ragged(values, name) if is_sounds else {name: np.stack(values)}
    arrays |= texts_of(names, f"{name}_names") | _rate(rows[0], name)
    part = name[: name.rfind(".") + 1]
    for group, texts in groups.items():
        if part + group in arrays:
            raise WrongFileError(
                f"{pattern!r} has a group with the same name as the array {part + group}"
            )
        if all(re.fullmatch(r"-?[0-9]{1,18}", text) for text in texts):
            arrays[part + group] = np.array([int(text) for text in texts])
        else:
            arrays |= (texts_of if is_sounds else numbered)(texts, part + group)
    return arrays
