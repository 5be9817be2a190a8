"""Several turns with a model over one engine, within its context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.assembly import make_decoder, widened_for_drafts
from mlxspec.callers import require_text
from mlxspec.chat_template import rendered_chat, require_free_variables
from mlxspec.conversation.fed_text import FedText
from mlxspec.decoding import SpeculationStats
from mlxspec.decoding.decoder import token_set
from mlxspec.decoding.stops import StopStrings
from mlxspec.engine import SpeculativeEngine
from mlxspec.engine.pool import new_engine
from mlxspec.engine.protocol import ProgressCallback
from mlxspec.errors import ContextFull
from mlxspec.generation import GenerationResponse, stream_generate
from mlxspec.numbers import whole_number

DEFAULT_MAX_TOKENS = 256
ContextPolicy = Literal["stop", "trim"]
CONTEXT_POLICIES: tuple[ContextPolicy, ...] = get_args(ContextPolicy)
Ending = Literal["stop", "max_tokens", "context", "interrupted"]
# What is left free of a full context: an answer's room at most, and after a trim.
_ROOM = 4


@dataclass(frozen=True)
class Turn:
    """A message and its answer.

    Attributes:
        message: What the user said.
        answer: What the model said, as far as it came.
        ending: Why the answer ended: "stop" at an end token or a stop string, "max_tokens",
            "context" where the context was full, or "interrupted".
        stats: The answer's counters.
    """

    message: str
    answer: str
    ending: Ending
    stats: SpeculationStats


class Conversation:
    """A system prompt and turns, which one engine goes on from.

    Every turn the model is fed the whole conversation as its chat template renders it; an engine
    goes on from the part it still holds. Past answers are fed as the ids that were emitted
    wherever the template renders their text unchanged. Without a chat template the conversation
    is one running text: each message stands on a line of its own, after the answers before it.

    Args:
        model: A model of mlx-lm.
        tokenizer: Its tokenizer.
        engine: Runs the model, for this conversation alone; "static" (None is the same) and
            "dynamic" make one.
        system_prompt: What the model is told before the first turn.
        max_tokens: Most tokens of an answer; -1 goes on until the context ends.
        context_policy: What to do where the next turn does not fit into the engine's context.
            "stop" raises `ContextFull`; "trim" feeds the system prompt and the newest turns alone,
            as many as leave a quarter of the context free. It does so when there is less room
            than `max_tokens`, or than a quarter of the context.
        chat_template_config: Variables for the chat template, such as `enable_thinking`; the
            arguments of `apply_chat_template` that say what is rendered (`tokenize`, `messages`,
            `add_generation_prompt`, ...) are refused.
        use_chat_template: False makes one running text of the conversation.
        stop_tokens: Ids that end an answer beside the tokenizer's own end tokens.
        stop_strings: What ends an answer; none of it is in the text.
        **options: How to draft and choose, see `make_decoder`.

    Attributes:
        turns: Every turn so far, whether the model is still fed it or not.

    Raises:
        ValueError: An option is out of range or cannot be honoured, or the chat template does not
            take the system prompt.
        UnsupportedModel: The static engine cannot take the model.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        engine: SpeculativeEngine | str | None = None,
        system_prompt: str | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        context_policy: ContextPolicy = "stop",
        chat_template_config: Mapping[str, Any] | None = None,
        use_chat_template: bool = True,
        stop_tokens: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        **options: Any,
    ):
        if context_policy not in CONTEXT_POLICIES:
            raise ValueError(
                f"context_policy: expected one of {', '.join(CONTEXT_POLICIES)}, got "
                f"{context_policy!r}"
            )
        if whole_number("max_tokens", max_tokens, -1) == 0:
            raise ValueError("max_tokens: 0 would emit nothing; use -1 for no limit")
        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.max_tokens = max_tokens
        self.context_policy = context_policy
        self.has_template = bool(tokenizer.has_chat_template and use_chat_template)
        self._template_config = dict(chat_template_config or {})
        require_free_variables("chat_template_config", self._template_config)
        self._encode = partial(tokenizer.encode, add_special_tokens=not self.has_template)
        if system_prompt is not None:
            require_text("system_prompt", system_prompt)
            if not self.has_template:
                raise ValueError("system_prompt: without a chat template there is no place for it")
        self._render([], "hello")
        StopStrings(stop_strings)
        token_set(stop_tokens)
        if engine is None or isinstance(engine, str):
            own = new_engine(model, engine or "static")
            make_decoder(model, engine=own, **options)
            engine = widened_for_drafts(own, **options)
        else:
            make_decoder(model, engine=engine, **options)
        self.engine: SpeculativeEngine = engine
        self._options = {"stop_tokens": stop_tokens, "stop_strings": stop_strings, **options}
        self.turns: list[Turn] = []
        self._first = 0
        self._fed = FedText()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation as role and content, the system prompt first."""
        return self._messages(self.turns)

    @property
    def dropped_turns(self) -> int:
        """How many of the oldest turns the model is not fed any more."""
        return self._first

    @property
    def stats(self) -> SpeculationStats:
        """The counters of all answers together."""
        total = SpeculationStats()
        for turn in self.turns:
            total.add(turn.stats)
        return total

    def reply(
        self, message: str, *, prompt_progress_callback: ProgressCallback | None = None
    ) -> Generator[GenerationResponse, None, None]:
        """Say something and generate the answer.

        Everything is checked at the call. `dropped_turns` tells after it what did not fit. The
        turn is part of the conversation when the generator ends or is closed, with what had been
        emitted by then; nothing is kept of a turn whose answer had not begun.

        Args:
            message: What the user says.
            prompt_progress_callback: See `stream_generate`.

        Returns:
            A generator of responses, see `stream_generate`.

        Raises:
            ContextFull: The context has no room for an answer.
            EngineBusy: The answer before is still being generated.
            ValueError: The chat template does not take the message.
        """
        require_text("message", message)
        first, fed = self._fitted(message)
        stats = SpeculationStats()
        responses = stream_generate(
            self.model,
            self.tokenizer,
            fed.ids,
            max_tokens=self.max_tokens,
            prompt_progress_callback=prompt_progress_callback,
            engine=self.engine,
            stats=stats,
            **self._options,
        )
        self._first = first
        return self._answer(message, fed, responses, stats)

    def as_dict(self) -> dict[str, Any]:
        """All that `restorer` needs to go on from here, ready for JSON."""
        return {
            "system_prompt": self.system_prompt,
            "turns": [[turn.message, turn.answer, turn.ending] for turn in self.turns],
            "dropped_turns": self._first,
            "text": self._fed.text,
            "ids": self._fed.ids,
            "cuts": self._fed.cuts,
        }

    def restorer(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Check what `as_dict` gave, and return what puts it in the place of this conversation.

        Raises:
            KeyError, TypeError, ValueError: It is none.
        """
        turns = [
            Turn(str(message), str(answer), ending, SpeculationStats())
            for message, answer, ending in saved["turns"]
        ]
        ids = [int(token) for token in saved["ids"]]
        cuts = tuple((int(characters), int(count)) for characters, count in saved["cuts"])
        fed = FedText(str(saved["text"]), ids, cuts)
        first, system_prompt = int(saved["dropped_turns"]), saved["system_prompt"]

        def restore() -> None:
            self.turns, self._first, self._fed = turns, first, fed
            self.system_prompt = system_prompt

        return restore

    def reset(self) -> None:
        """Forget every turn; the system prompt stays."""
        self.turns = []
        self._first = 0
        self._fed = FedText()

    def _answer(
        self,
        message: str,
        fed: FedText,
        responses: Generator[GenerationResponse, None, None],
        stats: SpeculationStats,
    ) -> Generator[GenerationResponse, None, None]:
        text, tokens, reason = "", [], None
        try:
            with closing(responses):
                for response in responses:
                    text += response.text
                    tokens.append(response.token)
                    reason = response.finish_reason
                    yield response
        finally:
            if tokens:
                ending = self._ending(reason, len(tokens))
                if ending == "stop" and tokens[-1] in self.tokenizer.eos_token_ids:
                    # The template writes it, or what it has in its place.
                    del tokens[-1]
                if ending == "interrupted":
                    # What a detokenizer held back, up to the last whole character.
                    text = _text(self.tokenizer, tokens).rstrip("\ufffd")
                lead = "" if self.has_template else _lead(self.tokenizer, fed.ids, tokens)
                count, begin = _standing_for(self.tokenizer, text, tokens)
                self._fed = fed.extended(lead + begin, tokens[:count])
                self.turns.append(Turn(message, lead + text, ending, stats))

    def _ending(self, reason: str | None, count: int) -> Ending:
        if reason == "length":
            return "max_tokens" if count == self.max_tokens else "context"
        return "stop" if reason == "stop" else "interrupted"

    def _fitted(self, message: str) -> tuple[int, FedText]:
        """The first turn to be fed, and the conversation from it on.

        Raises:
            ContextFull: It does not fit, or nothing that may be dropped is left.
        """
        length = self.engine.max_context_length
        share = max(1, length // _ROOM)
        room = share if self.max_tokens < 0 else min(self.max_tokens, share)
        first, fed = self._first, self._feed(self._first, message)
        if self.context_policy == "trim" and len(fed.ids) + room > length:
            starts = range(first + 1, len(self.turns))
            first += 1 + bisect_left(
                starts, True, key=lambda f: len(self._feed(f, message).ids) <= length - share
            )
            first = min(first, len(self.turns))
            fed = self._feed(first, message)
        if len(fed.ids) >= length:
            raise ContextFull(self._no_room(len(fed.ids), alone=first == len(self.turns)))
        return first, fed

    def _no_room(self, count: int, *, alone: bool) -> str:
        where = f"a context of {self.engine.max_context_length}"
        if alone:
            return (
                f"the message takes {count} tokens with the system prompt, which leaves no room "
                f"for an answer in {where}; shorten it"
            )
        return (
            f"the conversation takes {count} tokens with this message, which leaves no room for "
            f"an answer in {where}; begin a new one, or let the oldest turns be dropped (context "
            "policy 'trim')"
        )

    def _feed(self, first: int, message: str) -> FedText:
        """The conversation from a turn on as text and ids, this message last."""
        return self._fed.rendered_anew(self._render(self.turns[first:], message), self._encode)

    def _render(self, turns: Sequence[Turn], message: str) -> str:
        if not self.has_template:
            return "".join(f"{turn.message}{turn.answer}\n" for turn in turns) + message
        messages = [*self._messages(turns), {"role": "user", "content": message}]
        return rendered_chat(self.tokenizer, messages, self._template_config)

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        messages = []
        if self.system_prompt is not None:
            messages.append({"role": "system", "content": self.system_prompt})
        for turn in turns:
            messages.append({"role": "user", "content": turn.message})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages


def _text(tokenizer: TokenizerWrapper, tokens: Sequence[int]) -> str:
    """The text of tokens as it is generated: a space that it begins with is left out."""
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    text: str = detokenizer.text
    return text


def _lead(tokenizer: TokenizerWrapper, before: list[int], tokens: list[int]) -> str:
    """What is left out at the beginning of a text and belongs there if it goes on from another."""
    joined = _text(tokenizer, [*before[-1:], *tokens]).removeprefix(_text(tokenizer, before[-1:]))
    text = _text(tokenizer, tokens)
    return joined.removesuffix(text) if joined.endswith(text) else ""


def _standing_for(tokenizer: TokenizerWrapper, text: str, tokens: list[int]) -> tuple[int, str]:
    """How many of an answer's tokens stand for a beginning of its text, and that beginning.

    All do, unless a stop string or an interruption ended the text inside a token or a character.
    """
    for count in range(len(tokens), 0, -1):
        begin = _text(tokenizer, tokens[:count])
        if text.startswith(begin):
            return count, begin
    return 0, ""
