"""Drafted text is told apart where the terminal can, and never changes otherwise."""

from __future__ import annotations

import io
import re
from collections.abc import Generator

import pytest

from mlxspec.cli.output import draft_style, prefill_progress, print_text
from mlxspec.generation import GenerationResponse
from tests.cli.conftest import Run
from tests.cli.story_model import STORY

DRAFTED = re.compile("\x1b\\[32m(.*?)\x1b\\[0m", re.DOTALL)
SHOW = ["--prompt-lookup", "--num-draft-tokens=7", "--show-drafts", "--verbose=False"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "name"),
    [
        (Terminal(), {}, "green"),
        (Terminal(), {"NO_COLOR": "1"}, "underlined"),
        (Terminal(), {"NO_COLOR": ""}, "green"),
        (Terminal(), {"TERM": "dumb"}, None),
        (io.StringIO(), {}, None),
        (io.StringIO(), {"FORCE_COLOR": "1"}, "green"),
        (io.StringIO(), {"FORCE_COLOR": "0"}, None),
        (Terminal(), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, "green"),
    ],
)
def test_drafts_are_marked_as_stream_and_user_allow(
    stream: io.StringIO, environment: dict[str, str], name: str | None
) -> None:
    style = draft_style(stream, environment)
    assert (style.name if style else None) == name


def test_accepted_drafts_are_coloured_and_the_text_stays_the_same(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--ignore-chat-template", "--prompt", STORY + "Once upon a", "-m", "40", *SHOW]
    plain = generate(*options).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = generate(*options)
    assert coloured.err == ""
    assert "\x1b" not in plain
    assert DRAFTED.sub(r"\1", coloured.out) == plain
    # Seven drafted tokens, then the model's own, which is not coloured.
    words = ["time", "there", "was", "one", "quick", "brown", "fox", "jumping"]
    assert DRAFTED.findall(coloured.out)[:7] == [words[0], *(f" {word}" for word in words[1:7])]
    assert DRAFTED.sub("", coloured.out).startswith(f" {words[7]}")


def test_the_legend_says_how_drafts_look(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    outcome = generate("--prompt-lookup", "--show-drafts", "-m", "2")
    assert outcome.figures[-1] == "Drafted text is \x1b[32mgreen\x1b[0m"


def _response(text: str, from_draft: bool) -> GenerationResponse:
    return GenerationResponse(
        text=text,
        token=0,
        logprobs=None,
        from_draft=from_draft,
        prompt_tokens=1,
        prompt_tps=1.0,
        generation_tokens=1,
        generation_tps=1.0,
        peak_memory=0.0,
    )


@pytest.mark.parametrize(
    ("pieces", "printed"),
    [
        ([("", True), ("é", False)], "é\n"),
        ([("", False), ("é", True)], "\x1b[32mé\x1b[0m\n"),
        ([("a", True), ("", True), ("b", False)], "\x1b[32ma\x1b[0mb\n"),
    ],
)
def test_a_piece_looks_as_the_token_does_that_completes_it(
    pieces: list[tuple[str, bool]], printed: str, capsys: pytest.CaptureFixture
) -> None:
    style = draft_style(Terminal(), {})
    assert print_text((_response(*piece) for piece in pieces), style, None) == 0
    assert capsys.readouterr().out == printed


def test_every_piece_leaves_the_program_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(pipe, encoding="utf-8"))
    seen = []

    def responses() -> Generator[GenerationResponse, None, None]:
        for text in ("Once", " upon", " a"):
            yield _response(text, False)
            seen.append(pipe.getvalue())

    print_text(responses(), None, None)
    assert seen == [b"Once", b"Once upon", b"Once upon a"]


def test_a_character_that_stdout_lacks_does_not_end_the_text(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    assert generate("--ignore-chat-template", "-p", "at all", "-m", "9", "--verbose=F").code == 0
    assert stdout.buffer.getvalue() == b"?!?\nOnce\n"


def test_a_long_prompt_shows_its_progress_and_leaves_no_trace() -> None:
    terminal = Terminal()
    show = prefill_progress(terminal)
    assert show is not None
    for processed in (0, 2048, 2999):
        show(processed, 3000)
    assert terminal.getvalue() == (
        "\rprompt: 0 of 3000 tokens\rprompt: 2048 of 3000 tokens\r\x1b[K"
    )


def test_a_short_prompt_and_a_pipe_show_no_progress() -> None:
    terminal = Terminal()
    show = prefill_progress(terminal)
    assert show is not None
    show(0, 30)
    assert terminal.getvalue() == ""
    assert prefill_progress(io.StringIO()) is None
