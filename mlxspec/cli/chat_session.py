"""A chat: entries are messages, which are answered, or commands, which are obeyed."""

from __future__ import annotations

import difflib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mlxspec.cli.chat_input import Entry, ReadLine, read_entry
from mlxspec.cli.exits import EXIT_INTERRUPTED
from mlxspec.cli.output import DraftStyle, prefill_progress
from mlxspec.errors import MlxspecError

if TYPE_CHECKING:
    from mlxspec.conversation import Conversation, Turn
    from mlxspec.engine.protocol import ProgressCallback
    from mlxspec.generation import GenerationResponse

_HELP = '''\
  /help           this list (h)
  /stats          figures of the last answer and of the conversation
  /reset          forget the conversation; the system prompt stays (r)
  /save FILE      write the conversation to FILE.json or FILE.md, or what the model holds of it to
                  FILE.safetensors for --prompt-cache-file; /save! replaces a file
  /exit           leave (q, Ctrl-D)
A message of several lines stands between """ and """, or its lines end in a backslash.
Ctrl-C stops an answer, or gives up a line. A line that begins with a space is always a message.'''
# mlx-lm's commands.
_SHORT = {"h": "/help", "r": "/reset", "q": "/exit"}
_COMMAND = re.compile(r"(/[A-Za-z]+!?)(?:[ \t]+(.*))?")


@dataclass
class _CtrlC:
    """Whether Ctrl-C was pressed."""

    pressed: bool = False


@dataclass
class ChatSession:
    """Reads entries until there are no more.

    Attributes:
        conversation: What messages are put to.
        read_line: Where entries come from.
        model: How saved conversations call the model.
        style: How drafted text looks; None makes no difference.
        on_terminal: Whether a person sits there: Ctrl-C then stops an answer and not the program,
            and figures follow every answer.
        notices: Where everything goes that is neither an answer nor asked for.
    """

    conversation: Conversation
    read_line: ReadLine
    model: str
    style: DraftStyle | None = None
    on_terminal: bool = False
    notices: TextIO = field(default_factory=lambda: sys.stderr)
    _last_report: str = ""
    _saved: set[Path] = field(default_factory=set)

    def run(self) -> int:
        """Go on until the user leaves.

        Returns:
            The exit code.
        """
        while True:
            try:
                entry = read_entry(self.read_line)
                if not self._obey(entry):
                    return 0
            except EOFError:
                if self.on_terminal:
                    print(file=self.notices)
                return 0
            except KeyboardInterrupt:
                if not self.on_terminal:
                    print()
                    return EXIT_INTERRUPTED

    def _obey(self, entry: Entry) -> bool:
        """Do what an entry says; False leaves."""
        command = None if entry.quoted else _COMMAND.fullmatch(_SHORT.get(entry.text, entry.text))
        if command is None:
            if entry.text.strip():
                self._answer(entry.text)
            return True
        name, argument = command[1], (command[2] or "").strip()
        if name == "/exit":
            return False
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(_HELP),
            "/stats": lambda _: print(self._stats()),
            "/reset": lambda _: self._reset(),
            "/save": lambda file: self._save(file, replace=False),
            "/save!": lambda file: self._save(file, replace=True),
        }
        if name in commands:
            commands[name](argument)
        else:
            close = difflib.get_close_matches(name, [*commands, "/exit"], n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            self._say(
                f"there is no command {name}{meant}; /help lists the commands, and a message that "
                "begins with a slash has a space before it"
            )
        sys.stdout.flush()
        return True

    def _answer(self, message: str) -> None:
        conversation = self.conversation
        turns, dropped = len(conversation.turns), conversation.dropped_turns
        printed, last = "", None
        with _ctrl_c(self.on_terminal) as ctrl_c:
            try:
                responses = conversation.reply(
                    message, prompt_progress_callback=self._progress(ctrl_c)
                )
                self._say_dropped(conversation.dropped_turns - dropped)
                with closing(responses):
                    for last in responses:
                        self._print(last.text, drafted=last.from_draft)
                        printed += last.text
                        if ctrl_c.pressed:
                            break
            except (MlxspecError, ValueError) as problem:
                if printed:
                    print()
                self._say(str(problem))
                return
            except KeyboardInterrupt:
                if not self.on_terminal:
                    raise
        if len(conversation.turns) == turns:
            self._say("stopped before the answer began; the message is forgotten")
            return
        turn = conversation.turns[-1]
        # What was held back when the answer was stopped.
        print(turn.answer.partition(printed)[2] if printed else turn.answer, flush=True)
        self._say_ending(turn, last)

    def _print(self, text: str, *, drafted: bool) -> None:
        print(self.style.paint(text) if self.style and drafted else text, end="", flush=True)

    def _say(self, text: str) -> None:
        sys.stdout.flush()
        print(f"[{text}]", file=self.notices, flush=True)

    def _progress(self, ctrl_c: _CtrlC) -> ProgressCallback:
        show = prefill_progress(self.notices) or (lambda processed, total: None)

        def progress(processed: int, total: int) -> None:
            if ctrl_c.pressed:
                show(total, total)
                raise KeyboardInterrupt
            show(processed, total)

        return progress

    def _say_dropped(self, count: int) -> None:
        if count:
            turns = "turn no longer reaches" if count == 1 else f"{count} turns no longer reach"
            self._say(
                f"the context of {self.conversation.engine.max_context_length} tokens is full: the "
                f"oldest {turns} the model"
            )

    def _say_ending(self, turn: Turn, last: GenerationResponse | None) -> None:
        conversation = self.conversation
        if turn.ending == "max_tokens":
            self._say(f"cut after {turn.stats.emitted} tokens; --max-tokens allows more")
        elif turn.ending == "context":
            then = (
                "the next turn drops the oldest"
                if conversation.context_policy == "trim"
                else "/reset begins anew, and --context-policy trim drops the oldest turns"
            )
            self._say(
                f"cut: the context of {conversation.engine.max_context_length} tokens is full; "
                f"{then}"
            )
        elif turn.ending == "interrupted":
            self._say("stopped")
        if last is not None:
            from mlxspec.generation import report

            self._last_report = report(last)
            if self.on_terminal:
                self._say(_figures(last, turn))

    def _reset(self) -> None:
        self.conversation.reset()
        self._last_report = ""
        self._say("the conversation is forgotten")

    def _stats(self) -> str:
        conversation = self.conversation
        if not conversation.turns:
            return "Nothing was said yet."
        count = len(conversation.turns)
        said = "1 turn" if count == 1 else f"{count} turns"
        if conversation.dropped_turns:
            said += f", of which the oldest {conversation.dropped_turns} no longer reach the model"
        engine = conversation.engine
        return (
            f"The last answer\n{_indented(self._last_report)}\n"
            f"The conversation: {said}\n"
            f"  Context: {engine.processed_token_count} of {engine.max_context_length} tokens\n"
            f"{_indented(conversation.stats.summary())}"
        )

    def _save(self, name: str, *, replace: bool) -> None:
        from mlxspec.conversation.files import save_conversation

        if not name:
            self._say("/save needs a file, such as /save chat.md or /save chat.json")
            return
        path = Path(name).expanduser()
        if path.exists() and path not in self._saved and not replace:
            self._say(f"{name} is there already; name another file, or replace it with /save!")
            return
        try:
            save_conversation(self.conversation, path, model=self.model)
        except (OSError, ValueError, MlxspecError) as problem:
            self._say(f"/save: {problem}")
            return
        self._saved.add(path)
        self._say(f"saved to {name}")


@contextmanager
def _ctrl_c(on_terminal: bool) -> Iterator[_CtrlC]:
    """Note Ctrl-C instead of raising: inside a forward it would cost what the engine holds."""
    ctrl_c = _CtrlC()
    if not on_terminal:
        yield ctrl_c
        return

    def note(signal_number: int, frame: object) -> None:
        ctrl_c.pressed = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield ctrl_c
    finally:
        signal.signal(signal.SIGINT, previous)


def _figures(last: GenerationResponse, turn: Turn) -> str:
    stats = turn.stats
    text = f"{stats.emitted} tokens, {last.generation_tps:.1f} tokens/s, {stats.forwards} forwards"
    if stats.drafted:
        text += f", {stats.accepted} of {stats.drafted} drafted tokens accepted"
    return text


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
