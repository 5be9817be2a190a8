"""`mlxspec chat`: from a pipe, and through a pseudo-terminal as a person uses it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest

import mlxspec
from mlxspec.cli.chat_input import Entry, line_reader, read_entry
from mlxspec.cli.chat_session import ChatSession
from mlxspec.cli.exits import UsageError
from mlxspec.cli.main import main
from tests.cli.conftest import Outcome
from tests.cli.story_model import WORDS, told

DRAFTED = re.compile("\x1b\\[32m(.*?)\x1b\\[0m", re.DOTALL)
Chat = Callable[..., Outcome]


@pytest.fixture
def chat(
    capsys: pytest.CaptureFixture[str], story_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Chat:
    """Run `mlxspec chat` on lines from a pipe."""

    def run(text: str, *options: str | int | Path, model: Path = story_model) -> Outcome:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = main(["chat", "--model", str(model), *map(str, options)])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("lines", "entries"),
    [
        ("one\ntwo\r\n", [Entry("one"), Entry("two")]),
        ("one\\\ntwo\\\nthree\nfour", [Entry("one\ntwo\nthree"), Entry("four")]),
        ('"""\none\n\n/help\n"""\nx', [Entry("one\n\n/help", quoted=True), Entry("x")]),
        (
            '  """one\ntwo"""\n"""x"""\n""""""',
            [Entry(t, quoted=True) for t in ("one\ntwo", "x", "")],
        ),
        ('"""one\ntwo', [Entry("one\ntwo", quoted=True)]),
        ("one\\", [Entry("one\n")]),
        ('say """ now', [Entry('say """ now')]),
    ],
)
def test_an_entry_is_a_line_or_several_that_are_marked(lines: str, entries: list[Entry]) -> None:
    read_line = line_reader(io.StringIO(lines, newline=""))
    for entry in entries:
        assert read_entry(read_line) == entry
    with pytest.raises(EOFError):
        read_entry(read_line)


def test_input_that_is_no_text_is_refused() -> None:
    broken = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8")
    with pytest.raises(UsageError, match="stdin: expected text in UTF-8"):
        read_entry(line_reader(broken))
    with pytest.raises(UsageError, match="stdin is closed"):
        line_reader(None)


@pytest.mark.parametrize("drafting", [[], ["--prompt-lookup"], ["--engine", "dynamic"]])
def test_answers_to_piped_lines_come_alone_and_are_the_api_s(
    drafting: list[str], chat: Chat, story_model: Path
) -> None:
    messages = ["Once upon a", "one quick brown fox", f"{WORDS} {WORDS}"]
    outcome = chat("\n\n".join(messages), "-m", 30, *drafting)
    model, tokenizer = mlxspec.load(str(story_model))
    conversation = mlxspec.Conversation(model, tokenizer, max_tokens=30)
    answers = ["".join(r.text for r in conversation.reply(message)) for message in messages]
    assert outcome.out == "".join(f"{answer}\n" for answer in answers)
    assert outcome.err == "[cut after 30 tokens; --max-tokens allows more]\n" * 3


def test_an_answer_without_a_word_is_an_empty_line(chat: Chat, story_model: Path) -> None:
    tokenizer = mlxspec.load(str(story_model), lazy=True)[1]
    (once,) = tokenizer.encode("Once", add_special_tokens=False)
    outcome = chat("two\nOnce upon\n", "-m", 4, "--extra-eos-token", once)
    assert outcome.code == 0
    assert outcome.out == "\n\n"


def test_commands_are_obeyed_and_others_are_explained(chat: Chat, tmp_path: Path) -> None:
    name = tmp_path / "chat.md"
    entries = [
        "/stats",
        "two",
        "/stats",
        f"/save {name}",
        "/sav x",
        "/save",
        f"/save {tmp_path}/chat.doc",
        f"/save {tmp_path}/none/chat.md",
        "/etc/hosts is a file",
        " /help",
        '"""q"""',
        "r",
        "/stats",
        "h",
        "q",
        "never",
    ]
    outcome = chat("\n".join(entries), "-m", 3, "--prompt-lookup")
    assert outcome.code == 0
    out = outcome.out
    assert out.startswith("Nothing was said yet.\nOnce upon a\nThe last answer\n  Prompt: 5 tokens")
    assert "The conversation: 1 turn\n  Context: 7 of 4096 tokens\n  Speculation: " in out
    # The path, the one with a space before it and the quoted one were messages.
    after = out.partition("The conversation: 1 turn")[2]
    assert after.count("Once upon a\n") == 3
    assert out.count("Nothing was said yet.") == 2
    assert "/save FILE" in after
    notices = outcome.err.replace("[cut after 3 tokens; --max-tokens allows more]\n", "")
    assert notices.splitlines()[0] == f"[saved to {name}]"
    assert notices.splitlines()[1].startswith("[there is no command /sav (did you mean /save?)")
    assert notices.splitlines()[2].startswith("[/save needs a file")
    assert "expected a name that ends in .json, .md or .safetensors" in notices.splitlines()[3]
    assert "No such file or directory" in notices.splitlines()[4]
    assert notices.splitlines()[5:] == ["[the conversation is forgotten]"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chat.md"]


def test_a_file_that_this_chat_did_not_write_is_replaced_only_when_asked(
    chat: Chat, tmp_path: Path
) -> None:
    name = tmp_path / "notes.json"
    name.write_text("precious")
    outcome = chat(f"/save {name}\n", "-m", 3)
    assert name.read_text() == "precious"
    assert "is there already" in outcome.err
    outcome = chat(f"two\n/save! {name}\ndogs\n/save {name}\n", "-m", 3)
    assert outcome.err.count("[saved to") == 2
    saved = json.loads(name.read_text())
    assert [m["content"] for m in saved["messages"]] == [
        "two",
        "Once upon a",
        "dogs",
        "Once upon a",
    ]
    assert saved["endings"] == ["max_tokens", "max_tokens"]
    assert saved["stats"]["emitted"] == 6


def test_a_full_context_is_said_and_dropped_turns_are_counted(chat: Chat) -> None:
    lines = f"{WORDS}\ntwo\n{WORDS}\n{WORDS * 3}\n"
    stopped = chat(lines, "-m", 20, "--max-context-length", 60)
    assert "[cut: the context of 60 tokens is full; /reset begins anew" in stopped.err
    assert stopped.err.count("leaves no room for an answer in a context of 60") == 2
    trimmed = chat(lines + "/stats", "-m", 10, "--max-context-length", 60, "--context-policy=trim")
    assert "is full: the oldest turn no longer reaches the model]" in trimmed.err
    assert "the oldest 1 no longer reach the model" in trimmed.out
    assert trimmed.err.count("leaves no room for an answer") == 1


def test_what_cannot_be_is_refused_before_a_weight_is_read(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx.core.eval", lambda *a: pytest.fail("weights were read"))
    for options, message in (
        (["--context-policy", "forget"], "--context-policy: expected one of stop, trim"),
        (["--max-kv-size", "9"], "--max-kv-size 9"),
        (["--prompt", "hi"], "unknown option --prompt"),
        (["--system-prompt", "forbidden"], "no such system"),
    ):
        outcome = chat("two", *options)
        assert outcome.code == 2
        assert outcome.err.startswith("mlxspec chat: error: ")
        assert message in outcome.err


def test_the_defaults_are_mlx_lm_s() -> None:
    from mlx_lm.chat import setup_arg_parser as theirs

    from mlxspec.cli.chat import setup_arg_parser

    ours = vars(setup_arg_parser().parse([]))
    for name, value in vars(theirs().parse_args([])).items():
        if name not in ("model", "pipeline"):
            assert ours[name] == value, name


def test_a_model_without_a_template_is_one_running_text_and_says_so(
    chat: Chat, bare_model: Path
) -> None:
    outcome = chat("Once upon\n two\n", "-m", 4, "--system-prompt", "x", model=bare_model)
    assert outcome.out == "a time there was\nlazy dogs while nobody\n"
    assert "has no chat template: the conversation is one running text" in outcome.err
    assert "without effect: --system-prompt (the model has no chat template)" in outcome.err


def test_a_saved_chat_goes_on_in_another(
    chat: Chat, story_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tmp_path / "chat.safetensors"
    whole = chat("two\none quick\ndogs\n", "-m", 30, "--prompt-lookup", "--system-prompt", "Tell.")
    begin = chat(f"two\none quick\n/save {name}\n", "-m", 30, "--system-prompt", "Tell.")
    assert f"[saved to {name}]" in begin.err
    resumed = ["--prompt-cache-file", name, "-m", 30, "--prompt-lookup"]
    end = chat("dogs\n/stats\n", *resumed)
    assert (begin.out + end.out).startswith(whole.out)
    assert "[going on after 2 turns]" in end.err
    assert re.search(r"Turns: (\d+) of (\d+) prompt tokens reused", end.out)
    assert "The conversation: 3 turns" in end.out
    outcome = chat("dogs", *resumed, "--engine", "dynamic")
    assert (outcome.code, outcome.out) == (2, "")
    with monkeypatch.context() as patch:
        patch.setattr("mlx.core.eval", lambda *a: pytest.fail("weights were read"))
        outcome = chat("dogs", *resumed, "--max-context-length", 30)
    assert outcome.code == 2
    assert "tokens do not fit into a context of 30; raise --max-context-length" in outcome.err
    prompt = tmp_path / "prompt.safetensors"
    words = ["cache-prompt", "--model", str(story_model), "-p", "two", "--prompt-cache-file"]
    assert main([*words, str(prompt)]) == 0
    outcome = chat("dogs", "--prompt-cache-file", prompt)
    assert "it holds a prompt and no conversation" in outcome.err
    assert outcome.code == 2


def test_a_draft_model_drafts_in_a_chat(chat: Chat, story_model: Path) -> None:
    plain = chat("two\ndogs\n", "-m", 30)
    drafted = chat("two\ndogs\n/stats", "-m", 30, "--draft-model", story_model)
    assert drafted.out.startswith(plain.out)
    assert re.search(r"drafted, \d+ accepted \(100%\)", drafted.out)


def test_every_answer_is_what_a_grammar_asks_for(chat: Chat) -> None:
    outcome = chat("two\ndogs\n/stats", "--regex", "(two|ten) (dogs|foxes)", "--prompt-lookup")
    first, second, stats = outcome.out.split("\n", 2)
    assert {first, second} <= {f"{n} {a}" for n in ("two", "ten") for a in ("dogs", "foxes")}
    assert "The conversation: 2 turns" in stats
    assert chat("two", "--regex", "(").code == 2


READY = "\x1b[?2004h"  # the terminal is told to mark pasted text: the prompt waits
CTRL_C, CTRL_D = "\x03", "\x04"
_ENDLESS = ["--max-tokens=-1", "--max-context-length=1000000"]


@contextmanager
def _terminal(model: Path, *options: str) -> Iterator[pexpect.spawn]:
    # What is measured would be said in the midst of the screen, or not, by the tests before.
    quiet = "from mlxspec.engine import survey; survey._say = lambda *about: None"
    script = f"import sys; from mlxspec.cli.main import main; {quiet}; sys.exit(main())"
    words = ["-c", script, "chat", "--model", str(model), *options]
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    child = pexpect.spawn(
        sys.executable,
        words,
        env=environment | {"TERM": "xterm-256color"},
        encoding="utf-8",
        dimensions=(24, 200),
        timeout=90,
        # The terminal would write ^C into the midst of a character.
        echo=False,
    )
    _keep_output_on_ctrl_c(child.child_fd)
    try:
        child.expect_exact(READY)
        yield child
    finally:
        child.close(force=True)


def _keep_output_on_ctrl_c(terminal: int) -> None:
    """A terminal drops what it has not passed on yet when Ctrl-C is pressed, unless told not to."""
    attributes = termios.tcgetattr(terminal)
    attributes[3] |= termios.NOFLSH
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)


def _enter(child: pexpect.spawn, text: str) -> str:
    """Type a line, and return what comes before the next prompt."""
    child.send(text + "\r")
    child.expect_exact("\x1b[?2004l")
    child.expect_exact(READY)
    return child.before.replace("\r\n", "\n")


def test_a_person_chats_through_a_terminal(story_model: Path, tmp_path: Path) -> None:
    name = tmp_path / "chat.json"
    options = ["--prompt-lookup", "--num-draft-tokens=7", "--show-drafts", "-m", "60"]
    options += ["--system-prompt", "Tell."]
    with _terminal(story_model, *options) as child:
        assert "a context of 4096 tokens. Drafted text is \x1b[32mgreen\x1b[0m." in child.before
        answer = _enter(child, f"{WORDS} é")
        text, _, notices = answer.partition("\n[")
        assert DRAFTED.search(text)
        assert DRAFTED.sub(r"\1", text) == told("\n", 10_000)[: len(DRAFTED.sub(r"\1", text))]
        assert notices.startswith("cut after 60 tokens; --max-tokens allows more]\n[60 tokens, ")
        assert re.search(r"tokens/s, \d+ forwards, \d+ of \d+ drafted tokens accepted]\n$", notices)

        child.send("never said")
        child.send(CTRL_C)
        child.expect_exact(READY)
        _enter(child, '"""two')
        _enter(child, "")
        _enter(child, 'dogs"""')
        _enter(child, "two\\")
        _enter(child, "foxes")
        _enter(child, "\x1b[200~pasted\n/help\x1b[201~")
        stats = _enter(child, "/stats")
        assert "The conversation: 4 turns\n" in stats
        assert "/save FILE" in _enter(child, "/help")
        assert f"[saved to {name}]" in _enter(child, f"/save {name}")
        assert "forgotten" in _enter(child, "/reset")
        assert "Nothing was said yet." in _enter(child, "/stats")
        child.send(CTRL_D)
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0
    messages = json.loads(name.read_text())["messages"]
    assert messages[0] == {"role": "system", "content": "Tell."}
    assert [m["content"] for m in messages if m["role"] == "user"] == [
        f"{WORDS} é",
        "two\n\ndogs",
        "two\nfoxes",
        "pasted\n/help",
    ]


class _Interrupted(mlxspec.Conversation):
    """Whose user presses Ctrl-C after so many tokens."""

    count = 0

    def reply(self, message: str, **options: Any) -> Iterator[Any]:
        responses = super().reply(message, **options)

        def interrupted() -> Iterator[Any]:
            with closing(responses):
                for number, response in enumerate(responses, 1):
                    if number == self.count:
                        os.kill(os.getpid(), signal.SIGINT)
                    yield response

        return interrupted()


def test_a_stopped_answer_is_on_the_screen_as_far_as_it_is_remembered(
    story_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = mlxspec.load(str(story_model))
    # The beginning of a stop string is held back until it is none.
    conversation = _Interrupted(model, tokenizer, stop_strings=["at all of", "fox who"])
    session = ChatSession(conversation, lambda goes_on: "", "story", on_terminal=True)
    for count in range(1, 30):
        conversation.count = count
        session._obey(Entry("two"))
        assert conversation.turns[-1].ending == "interrupted"
        assert conversation.turns[-1].stats.emitted == count
        assert capsys.readouterr().out == f"{conversation.turns[-1].answer}\n"


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(story_model: Path, tmp_path: Path) -> None:
    name = tmp_path / "chat.json"
    with _terminal(story_model, *_ENDLESS, "--prompt-lookup") as child:
        child.logfile_read = io.StringIO()
        for message in ("two", "dogs"):
            child.send(message + "\r")
            for _ in range(2):
                child.expect_exact("at allé!😀\r\n")
            child.send(CTRL_C)
            child.expect_exact(READY)
            assert "\r\n[stopped]\r\n" in child.before
        _enter(child, f"/save {name}")
        child.send("/exit\r")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0
        screen = child.logfile_read.getvalue().replace("\r\n", "\n")
    saved = json.loads(name.read_text())
    assert saved["endings"] == ["interrupted", "interrupted"]
    answers = [m["content"] for m in saved["messages"] if m["role"] == "assistant"]
    for answer in answers:
        assert answer == told("\n", 1_000_000)[: len(answer)]
        assert answer.count("at allé!😀\n") >= 2
        assert f"{answer}\n[stopped]\n" in screen


def test_a_chat_drafts_in_wider_tiles_where_they_pay(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, wide_tiles_are_cheap: None
) -> None:
    engines = []
    stream_generate = mlxspec.conversation.conversation.stream_generate

    def record(*prompt: Any, engine: Any, **options: Any) -> Any:
        engines.append(engine)
        return stream_generate(*prompt, engine=engine, **options)

    monkeypatch.setattr("mlxspec.conversation.conversation.stream_generate", record)
    said = set()
    for options, wide in (
        ((), False),
        (("--prompt-lookup", "--adaptive-draft-count"), True),
        (("--prompt-lookup", "--no-adaptive-draft-count"), False),
    ):
        outcome = chat("Once upon a\n", "-m", 40, *options)
        assert outcome.code == 0
        said.add(outcome.out)
        assert (engines[-1].tile_widths[-1] > 16) == wide
    assert len(said) == 1
    assert len(engines) == 3
