"""A command ends cleanly: after Ctrl-C, when its reader leaves, and where it cannot write."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mlxspec.models
from mlxspec.cli.exits import run_command
from mlxspec.cli.main import main
from tests.cli.story_model import STORY, told

# Long enough that no machine is done before the test has read a line.
_ENDLESS = ["--max-tokens=-1", "--max-context-length=1000000"]
_DEADLINE = 60
# A shell starts background jobs, the tests perhaps among them, with Ctrl-C ignored.
_SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from mlxspec.cli.main import main
from mlxspec.engine import survey
survey._say = lambda *about: None
sys.exit(main())
"""


@contextmanager
def _generating(model: Path, *options: str) -> Iterator[subprocess.Popen]:
    """The command in a process of its own, killed if the test leaves it running."""
    words = ["generate", "--model", str(model), *_ENDLESS, *options]
    # An unbuffered stdout would hide what is lost, or complained of, in its buffer.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _beside_the_context(err: str) -> str:
    """What was complained of, but for the context that is longer than the model declares."""
    warning, _, rest = err.partition("\n")
    assert warning.startswith("mlxspec: warning: --max-context-length: the model's config declares")
    return rest


def _read_two_lines(process: subprocess.Popen) -> str:
    return process.stdout.readline() + process.stdout.readline()


@pytest.mark.parametrize("verbose", [True, False])
def test_ctrl_c_keeps_the_text_and_prints_the_figures(verbose: bool, story_model: Path) -> None:
    with _generating(story_model, "--prompt-lookup", f"--verbose={verbose}") as process:
        begin = _read_two_lines(process)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=_DEADLINE)
    assert (process.returncode, _beside_the_context(err)) == (130, "")
    rule = "=" * 10 + "\n"
    text, _, figures = (begin + rest).removeprefix(rule).partition("\n" + rule)
    text = text.removesuffix("\n")
    assert len(text) >= len(STORY) - 1
    assert text == told("\n", len(text))
    assert [line.split()[0] for line in figures.splitlines()] == (
        ["Prompt:", "Generation:", "Peak", "Speculation:"] if verbose else []
    )


def test_a_reader_that_leaves_ends_the_command_quietly(story_model: Path) -> None:
    with _generating(story_model) as process:
        assert _read_two_lines(process) == "=" * 10 + "\n" + STORY
        process.stdout.close()
        assert process.wait(timeout=_DEADLINE) == 128 + signal.SIGPIPE
        assert _beside_the_context(process.stderr.read()) == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("generate", "interrupted before the first token"),
        ("chat", "interrupted"),
        ("verify", "interrupted"),
        ("benchmark", "interrupted"),
    ],
)
def test_ctrl_c_before_anything_was_printed_says_so(
    command: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(mlxspec.models, "resolve", interrupted)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main([command])
    finally:
        signal.signal(signal.SIGINT, previous)
    assert (code, *capsys.readouterr()) == (130, "", f"mlxspec {command}: {said}\n")


def test_a_config_that_lies_is_one_line(tmp_path, story_model, capsys):
    folder = tmp_path / "lies"
    shutil.copytree(story_model, folder)
    config = json.loads((folder / "config.json").read_text())
    for change in ({"hidden_size": "x"}, {"num_hidden_layers": 9}, {"vocab_size": 7}):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert main(["generate", "--model", str(folder), "-m", "1"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("mlxspec generate: error:")
        assert "config.json" in err
        assert err.count("\n") == 1


def _mlxspec(*words: str, **settings: Any) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mlxspec", *words]
    return subprocess.run(command, text=True, stderr=subprocess.PIPE, check=False, **settings)


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        (["--help"], ">&-", 0),
        (["models", "list"], ">&-", 0),
        (["nothing"], ">&-", 2),
        (["nothing"], "2>&-", 2),
        (["nothing"], ">&- 2>&-", 2),
    ],
)
def test_a_closed_stream_is_written_nothing(words: list[str], closed: str, code: int) -> None:
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "mlxspec", *words]
    ended = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.count("\n") == (code == 2 and "2>&-" not in closed)
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["models", "list"]])
def test_a_full_disk_is_a_sentence(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = _mlxspec(*words, stdout=full)
    assert ended.returncode == 2
    assert "No space left on device; free some room and try again" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_what_the_system_refuses_is_a_sentence_that_names_the_file(capsys) -> None:
    def refused() -> int:
        raise OSError(errno.EFBIG, "File too large", "cached.safetensors")

    assert run_command("mlxspec cache-prompt", refused) == 2
    assert capsys.readouterr().err == (
        "mlxspec cache-prompt: error: cached.safetensors: File too large\n"
    )


def test_a_cache_that_cannot_be_a_folder_holds_no_models(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = os.environ | {"MLXSPEC_CACHE_DIR": str(tmp_path / "file" / "cache")}
    ended = _mlxspec("models", "list", stdout=subprocess.PIPE, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "smollm2" in ended.stdout
