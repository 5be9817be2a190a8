"""Files that are replaced whole or not at all, whatever ends the process meanwhile."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch file beside `path`, which takes its place when the block ends without an error.

    Until then what stands at `path` is as it was. What a killed process leaves is a scratch file
    whose name begins with a dot and ends in ".part".

    Args:
        path: The file to replace or make; a link is followed, so that it stays a link.
    """
    path = Path(os.path.realpath(path))
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield scratch
        with open(scratch, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(scratch, path)
        _sync_folder(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


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
