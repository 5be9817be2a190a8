"""How a command ends: one line and a code for what can be expected, a traceback for the rest."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from mlxspec.errors import MlxspecError

EXIT_ERROR = 2
# What a shell reports of a program that a signal ended: 128 + SIGINT, 128 + SIGPIPE.
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class UsageError(MlxspecError, ValueError):
    """The command line asks for something that cannot be; the message names the option."""


def run_command(name: str, command: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command and turn its expected endings into exit codes.

    Args:
        name: How error messages call it, for example "mlxspec generate".
        command: Returns an exit code.
        interrupted: What to say of a Ctrl-C that the command did not take for its own.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except MlxspecError as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"{name}: {interrupted}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_stdout()
        print(f"{name}: error: {error.strerror}; free some room and try again", file=sys.stderr)
        return EXIT_ERROR


def warn(name: str, message: str) -> None:
    """Print one warning of a command, if there is anything to say."""
    if message:
        print(f"{name}: warning: {message}", file=sys.stderr)


def _discard_stdout() -> None:
    """Let the interpreter flush into nothing at its end, where it would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
