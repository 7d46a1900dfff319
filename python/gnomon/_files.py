"""Writing files that are never seen half written."""

from __future__ import annotations

import contextlib
import errno
import pathlib
import secrets
from collections.abc import Iterator

# What a write or a close says of a disk, without the name of the file.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file that becomes `path` at the end, and is removed where that is not reached.

    A link stays one: what it leads to is replaced. Devices and pipes are written to as they are.

    Raises:
        OSError: of `path`, where the file cannot be written; what else fails inside is as it is.
    """
    if path.is_char_device() or path.is_block_device() or path.is_fifo():
        yield path
        return
    named, path = path, path.resolve()
    # A name that no other writer has; texts in folders that are read do not have hidden names.
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
