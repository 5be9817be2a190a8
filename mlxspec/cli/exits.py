"""How a command ends: one line and a code for what can be expected, a traceback for the rest."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

from mlxspec.errors import MlxspecError, in_words

_LOGGER = logging.getLogger("mlxspec")
_FULL = (errno.ENOSPC, errno.EDQUOT)
EXIT_ERROR = 2
# What a shell reports of a program that a signal ended: 128 + SIGINT, 128 + SIGPIPE.
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class UsageError(MlxspecError, ValueError):
    """The command line asks for something that cannot be; the message names the option."""


def run_command(name: str, command: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command and turn its expected endings into exit codes.

    What the library does once and what may take long is said on stderr.

    Args:
        name: How error messages call it, for example "mlxspec generate".
        command: Returns an exit code.
        interrupted: What to say of a Ctrl-C that the command did not take for its own.
    """
    # Who closed them wants nothing written there; what is meant for stderr would go to stdout.
    sys.stdout, sys.stderr = (stream or _nowhere() for stream in (sys.stdout, sys.stderr))
    said, level = logging.StreamHandler(sys.stderr), _LOGGER.level
    # A terminal's line may show how far the command is.
    over = "\r\x1b[K" if sys.stderr.isatty() else ""
    said.setFormatter(logging.Formatter(f"{over}{name}: %(message)s"))
    _LOGGER.addHandler(said)
    _LOGGER.setLevel(logging.INFO)
    try:
        return _flushed(command)
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
        try:
            sys.stdout.flush()
        except OSError:
            _discard_stdout()
        where = f" {error.filename}:" if error.filename else ""
        reason = " ".join((error.strerror or in_words(error)).split())
        advice = "; free some room and try again" if error.errno in _FULL else ""
        print(f"{name}: error:{where} {reason}{advice}", file=sys.stderr)
        return EXIT_ERROR
    finally:
        _LOGGER.removeHandler(said)
        _LOGGER.setLevel(level)


def _flushed(command: Callable[[], int]) -> int:
    """Run a command and let all of its output leave, also that of --help, which ends it."""
    try:
        code = command()
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def warn(name: str, message: str) -> None:
    """Print one warning of a command, if there is anything to say."""
    if message:
        print(f"{name}: warning: {message}", file=sys.stderr)


def _nowhere() -> TextIO:
    return open(os.devnull, "w", errors="backslashreplace")


def _discard_stdout() -> None:
    """Let the interpreter flush into nothing at its end, where it would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
