"""The command `mlxspec`: finds the command that is meant and hands it the rest of the line."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from mlxspec._version import __version__
from mlxspec.cli.exits import UsageError, run_command


@dataclass(frozen=True)
class Command:
    """A command of `mlxspec`.

    Attributes:
        module: Where its `main(argv) -> exit code` is; imported when the command is used.
        summary: One line for `mlxspec --help`.
    """

    module: str
    summary: str


COMMANDS = {
    "generate": Command("mlxspec.cli.generate", "answer a prompt, with or without speculation"),
    "chat": Command("mlxspec.cli.chat", "talk with a model, with or without speculation"),
    "cache-prompt": Command(
        "mlxspec.cli.cache_prompt", "process a prompt ahead, for many questions that begin so"
    ),
    "verify": Command(
        "mlxspec.cli.verify", "show on this machine that speculation changes nothing"
    ),
    "benchmark": Command(
        "mlxspec.cli.benchmark", "measure mlx-lm and mlxspec on the same texts in one run"
    ),
    "models": Command("mlxspec.cli.models", "list, fetch and remove demo models; what a model is"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlxspec COMMAND ...`.

    Args:
        argv: The words after `mlxspec`; default: the command line's.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    typed = words[0] if words else None
    # mlx-lm writes its commands' names with underscores.
    name = typed and typed.replace("_", "-")
    if name in COMMANDS:
        command_main = import_module(COMMANDS[name].module).main
        return command_main(words[1:])
    return run_command("mlxspec", lambda: _answer(typed))


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {c.summary}" for name, c in COMMANDS.items())
    return (
        "usage: mlxspec COMMAND [options]\n"
        "       mlxspec --version\n\n"
        "Language models generate faster on Apple silicon, without changing one token.\n\n"
        f"commands:\n{commands}\n\n"
        "`mlxspec COMMAND --help` lists the options of a command."
    )


def _answer(name: str | None) -> int:
    """What there is, which version it is, or why this is no command."""
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name is None:
        raise UsageError("expected a command; `mlxspec --help` lists them")
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    raise UsageError(f"unknown command {name!r}{meant}; `mlxspec --help` lists the commands")
