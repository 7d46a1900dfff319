"""Downloads files, and keeps only those whose size and checksum match."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import pathlib
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from typing import Any

from gnomon._files import replacing
from gnomon._library import VERSION
from gnomon.lab.data._arrays import fault_of

_BLOCK = 1 << 20
_TIMEOUT = 60.0  # seconds without data


class _NotReceivedError(Exception):
    """Raised if a URL does not provide the file; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a named data set.

    ``size`` and ``sha256`` describe the file. If ``members`` is not empty, the file is a tar file,
    and both describe only its members whose names end with ``members``. ``sha256`` is then the
    checksum of the output of ``sha256sum *``, because a server that builds an archive for each
    request may return different bytes each time.
    """

    name: str
    size: int
    sha256: str
    urls: tuple[str, ...]
    members: str = ""

    def sum_in_words(self) -> str:
        return f"{self._what('sha256')} {self.sha256}"

    def fault(self, path: pathlib.Path) -> str:
        """Returns how the file at `path` differs from the expected file, or "" if it matches.

        Raises:
            OSError: the file cannot be read.
        """
        if self.members:
            return self._fault_of_archive(path)
        sha256, size = hashlib.sha256(), 0
        with path.open("rb") as content:
            while block := content.read(_BLOCK):
                sha256.update(block)
                size += len(block)
        return self._fault(size, sha256.hexdigest())

    def _fault_of_archive(self, path: pathlib.Path) -> str:
        sums, size = {}, 0
        with path.open("rb") as content:
            try:
                with tarfile.open(fileobj=content, mode="r|*") as archive:
                    for member in archive:
                        if not (member.isfile() and member.name.endswith(self.members)):
                            continue
                        size += member.size
                        if size > self.size:
                            return f"{self._what('size')} is more than {self.size} bytes"
                        opened = archive.extractfile(member)
                        text = opened.read() if opened is not None else b""
                        sums[member.name.rsplit("/", 1)[-1]] = hashlib.sha256(text).hexdigest()
            except (tarfile.TarError, EOFError, zlib.error) as error:
                return f"is not a valid tar file: {error}"
        listed = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
        return self._fault(size, hashlib.sha256(listed.encode()).hexdigest())

    def _fault(self, size: int, sha256: str) -> str:
        if size != self.size:
            return f"{self._what('size')} is {size} bytes; expected {self.size}"
        if sha256 != self.sha256:
            return f"{self._what('sha256')} is {sha256}; expected {self.sha256}"
        return ""

    def _what(self, measure: str) -> str:
        return f"{measure} of its *{self.members} files" if self.members else measure


def obtain(file: File, folder: pathlib.Path, tell: Callable[[str], None]) -> bool:
    """Downloads a file to a folder unless it exists, and returns whether it was downloaded.

    Raises:
        ValueError: a different file exists at the path, or no URL provides the file.
        OSError: the folder cannot be read or written.
    """
    path = folder / file.name
    if path.exists():
        fault = file.fault(path)
        if fault:
            raise ValueError(f"{fault_of(path, fault)}; remove it to download the file again")
        return False
    faults = []
    for url in file.urls:
        tell(f"fetching {url}")
        try:
            _download(url, path, file)
            return True
        except _NotReceivedError as error:
            faults.append(f"{url}: {error}")
    raise ValueError(
        f"cannot download {path}: {'; '.join(faults)}; you can also place the file there yourself"
    )


def _download(url: str, path: pathlib.Path, file: File) -> None:
    with replacing(path) as part:
        with _open(url) as answer, part.open("xb") as out:
            # For an archive, file.size is the total size of its members; its own size is unknown.
            _copy(answer, out, None if file.members else file.size)
        fault = file.fault(part)
        if fault:
            raise _NotReceivedError(fault)


def _open(url: str) -> Any:
    request = urllib.request.Request(url, headers={"User-Agent": f"gnomon/{VERSION}"})
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        raise _NotReceivedError(f"HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _NotReceivedError(_reason(error.reason)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _NotReceivedError(_reason(error)) from error


def _copy(answer: Any, out: Any, size: int | None) -> None:
    told = answer.headers.get("Content-Length", "")
    received = 0
    while True:
        try:
            block = answer.read(_BLOCK)
        except (OSError, http.client.HTTPException) as error:
            raise _NotReceivedError(
                f"the download failed after {received} bytes: {_reason(error)}"
            ) from error
        if not block:
            break
        received += len(block)
        if size is not None and received > size:
            raise _NotReceivedError(f"size is more than {size} bytes")
        out.write(block)
    if told.isdecimal() and received < int(told):
        raise _NotReceivedError(f"the connection ended after {received} of {told} bytes")


def _reason(error: object) -> str:
    """Returns the reason for a failed connection, without the errno."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
