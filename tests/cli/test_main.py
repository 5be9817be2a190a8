"""`mlxspec` itself: it finds commands, says what there is, and is quick about it."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import mlxspec
from mlxspec.cli.main import COMMANDS, main


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_lists_every_command_in_one_line(word: str, capsys: pytest.CaptureFixture) -> None:
    assert main([word]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for name, command in COMMANDS.items():
        assert [name, command.summary] in lines


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_main(name: str) -> None:
    assert callable(import_module(COMMANDS[name].module).main)


def test_a_command_is_found_as_mlx_lm_writes_it(capsys: pytest.CaptureFixture) -> None:
    for name in ("cache_prompt", "cache-prompt"):
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith("usage: mlxspec cache-prompt")


def test_version_is_the_package_s(capsys: pytest.CaptureFixture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{mlxspec.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["genrate", "--prompt", "hello"],
            "mlxspec: error: unknown command 'genrate' (did you mean 'generate'?); "
            "`mlxspec --help` lists the commands\n",
        ),
        (
            ["xyz"],
            "mlxspec: error: unknown command 'xyz'; `mlxspec --help` lists the commands\n",
        ),
        ([], "mlxspec: error: expected a command; `mlxspec --help` lists them\n"),
    ],
)
def test_an_unknown_command_is_answered_with_a_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(words) == 2
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize(
    "words", [["--help"], ["generate", "--help"], ["generate", "--max-tokens", "0"]]
)
def test_help_and_mistakes_do_not_wait_for_mlx(words: list[str]) -> None:
    script = (
        "import sys\n"
        "from mlxspec.cli.main import main\n"
        "try:\n"
        f"    main({words!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "assert not {'mlx.core', 'mlx_lm', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlxspec", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout == f"{mlxspec.__version__}\n"


def test_every_public_name_is_there_at_its_first_use() -> None:
    for name in mlxspec.__all__:
        assert getattr(mlxspec, name) is not None
    assert set(mlxspec.__all__) <= set(dir(mlxspec))
    with pytest.raises(AttributeError, match="'mlxspec' has no attribute 'nothing'"):
        mlxspec.nothing  # noqa: B018
