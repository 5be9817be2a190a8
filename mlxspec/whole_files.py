"""Files that are replaced whole or not at all, whatever ends the process meanwhile."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch file beside `path`, which takes its place when the block ends without an error.

    Until then what stands at `path` is as it was. What a killed process leaves is a scratch file
    whose name begins with a dot and ends in ".part". Who may read the old file may read the new
    one, and nobody else.

    Args:
        path: The file to replace or make; a link is followed, so that it stays a link.

    Raises:
        OSError: What stands there is no file, or none can be written beside it.
    """
    mode = _mode(path)
    path = Path(os.path.realpath(path))
    # A name as long as names may be has to leave room.
    scratch = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}.part")
    try:
        scratch.touch(0o666 if mode is None else mode, exist_ok=False)
        if mode is not None:
            scratch.chmod(mode)
        yield scratch
        with open(scratch, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(scratch, path)
        _sync_folder(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def _mode(path: Path) -> int | None:
    """Who may do what with the file that stands there; None where nothing does."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise FileExistsError(errno.EEXIST, "what stands there is no file", str(path))
    return stat.S_IMODE(mode)


def _sync_folder(folder: Path) -> None:
    """Make the new name last; systems that cannot open a folder do so by themselves."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
