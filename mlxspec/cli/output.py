"""What a command prints: the text as it comes, drafts told apart, and the figures at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from mlxspec.cli.exits import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from mlxspec.generation import GenerationResponse

_RULE = "=" * 10
_CLEAR_LINE = "\r\x1b[K"
_RESET = "\x1b[0m"
# A prompt of this many tokens takes long enough for a person to wonder.
_LONG_PROMPT = 1024


@dataclass(frozen=True)
class DraftStyle:
    """How drafted text looks.

    Attributes:
        name: What a legend calls it.
        begin: The terminal sequence before drafted text; it is reset after every piece, so that
            an interruption leaves the terminal as it was.
    """

    name: str
    begin: str

    def paint(self, text: str) -> str:
        """The text in this style."""
        return f"{self.begin}{text}{_RESET}" if text else ""


_GREEN = DraftStyle("green", "\x1b[32m")
_UNDERLINED = DraftStyle("underlined", "\x1b[4m")


def draft_style(stream: TextIO, environment: Mapping[str, str]) -> DraftStyle | None:
    """How drafts can be told apart on this stream; None if they cannot.

    NO_COLOR (no-color.org) asks for no colour, and an underline has none. FORCE_COLOR wins over
    it, being the more deliberate.
    """
    if environment.get("FORCE_COLOR", "") not in ("", "0"):
        return _GREEN
    if not stream.isatty() or environment.get("TERM") == "dumb":
        return None
    return _UNDERLINED if environment.get("NO_COLOR") else _GREEN


def print_text(
    responses: Generator[GenerationResponse, None, None],
    style: DraftStyle | None,
    report: Callable[[GenerationResponse], str] | None,
) -> int:
    """Print a text piece by piece, then its figures, also if the user interrupts it.

    A piece can hold several tokens, as a character is printed when its last byte comes: it looks
    as the token does that completes it.

    Args:
        responses: From `stream_generate`.
        style: How drafted pieces look; None makes no difference.
        report: Makes the figures of the last response; None prints the text alone.

    Returns:
        The exit code.

    Raises:
        KeyboardInterrupt: The user interrupted before the first token.
    """
    last = None
    code = 0
    if report:
        print(_RULE, flush=True)
    try:
        with closing(responses):
            for response in responses:
                last = response
                drafted = style if response.from_draft else None
                print(drafted.paint(response.text) if drafted else response.text, end="")
                sys.stdout.flush()
    except KeyboardInterrupt:
        if last is None:
            raise
        code = EXIT_INTERRUPTED
    print()
    if report and last is not None:
        print(_RULE)
        print(report(last))
        if style:
            print(f"Drafted text is {style.paint(style.name)}")
    return code


def prefill_progress(stream: TextIO) -> Callable[[int, int], None] | None:
    """A callback that shows how much of a long prompt is processed; None off a terminal."""
    if not stream.isatty():
        return None

    def show(processed: int, total: int) -> None:
        if total >= _LONG_PROMPT:
            # The last token of a prompt is no part of its prefill.
            done = processed >= total - 1
            stream.write(_CLEAR_LINE if done else f"\rprompt: {processed} of {total} tokens")
            stream.flush()

    return show


def print_any_character(stream: TextIO) -> None:
    """A terminal that lacks a character shows a question mark; it does not end the text."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
