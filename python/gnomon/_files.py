"""Writes files atomically, and finds the cache folder."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import secrets
from collections.abc import Iterator

# Disk errors that write() and close() raise without naming the file.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def cache_folder() -> pathlib.Path:
    """Returns the folder for compiled kernels and term libraries (src/cuda/cubin_cache.h).

    Raises:
        RuntimeError: the user has no home folder.
    """
    own = os.environ.get("GNOMON_CACHE")
    if own:
        return pathlib.Path(own).resolve()
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError:
        raise RuntimeError(
            "gnomon's cache folder is unknown, because this user has no home folder; set the "
            "environment variable GNOMON_CACHE to choose a folder"
        ) from None
    return pathlib.Path(caches).resolve() / "gnomon"


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary file that replaces `path` on success and is removed on failure.

    If `path` is a symbolic link, its target is replaced. Devices and pipes are written to
    directly.

    Raises:
        OSError: the file cannot be written; the error names `path`. Other errors propagate
            unchanged.
    """
    if path.is_char_device() or path.is_block_device() or path.is_fifo():
        yield path
        return
    named, path = path, path.resolve()
    # The name is unique. The file is hidden because readers of text folders skip hidden files.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        is_own = error.filename == str(part) or (
            error.filename is None and error.errno in _OF_DISKS
        )
        if not is_own:
            raise
        raise OSError(error.errno, error.strerror, str(named)) from error
    finally:
        part.unlink(missing_ok=True)
