"""What a person types, or a pipe brings: lines, and messages of several lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TextIO

from mlxspec.cli.exits import UsageError

QUOTES = '"""'


class Entry(NamedTuple):
    """What was entered.

    Attributes:
        text: The text, without the marks of its form.
        quoted: Whether it stood in quotes, so that it is a message whatever it says.
    """

    text: str
    quoted: bool = False


# Reads a line without its end; the argument says whether the line goes on with an entry. Raises
# EOFError where there is none, and KeyboardInterrupt where the user gives the entry up.
ReadLine = Callable[[bool], str]


def read_entry(read_line: ReadLine) -> Entry:
    '''Read one entry: a line, lines that end in a backslash, or lines between """ and """.

    Raises:
        EOFError: There is no more.
        KeyboardInterrupt: The user gave the entry up.
    '''
    line = read_line(False)
    if line.lstrip().startswith(QUOTES):
        return Entry(_quoted(line.lstrip().removeprefix(QUOTES), read_line), quoted=True)
    text = ""
    while line.endswith("\\"):
        text += line.removesuffix("\\") + "\n"
        try:
            line = read_line(True)
        except EOFError:
            line = ""
    return Entry(text + line)


def line_reader(stream: TextIO | None) -> ReadLine:
    """Read lines from a pipe or a file; nothing is printed."""
    if stream is None:
        raise UsageError("stdin is closed; give the messages on stdin, or a terminal")

    def read_line(goes_on: bool) -> str:
        try:
            line = stream.readline()
            line.encode()
        except UnicodeError:
            raise UsageError("stdin: expected text in UTF-8, got other bytes") from None
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    return read_line


def terminal_reader() -> ReadLine:
    """Read lines from the terminal, with editing, history, and pasted text as one entry."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.vt100 import Vt100_Output

    output = create_output(always_prefer_tty=True)
    if isinstance(output, Vt100_Output):
        # Asked where its cursor is, a terminal answers on stdin, in the midst of what is typed.
        output.enable_cpr = False
    session: PromptSession[str] = PromptSession(output=output)
    return lambda goes_on: session.prompt("... " if goes_on else ">>> ")


def _quoted(line: str, read_line: ReadLine) -> str:
    lines = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        try:
            line = read_line(True)
        except EOFError:
            break
    else:
        lines.append(line.rstrip().removesuffix(QUOTES))
    # The quotes may stand on lines of their own.
    return "\n".join(lines).removeprefix("\n").removesuffix("\n")
