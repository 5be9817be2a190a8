"""Speculative decoding, greedy: draft, verify, accept, rewind.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), with
the acceptance that greedy decoding needs: a draft token stays where it is the model's own choice.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Generator, Sequence
from importlib.metadata import version
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.decoding.options import SpeculativeDecodingOptions
from mlxspec.decoding.stats import SpeculationStats
from mlxspec.drafting import Drafter
from mlxspec.engine.protocol import Capture, ProgressCallback, SpeculativeEngine, VerifyRows
from mlxspec.engine.tokens import TokenView, token_ids
from mlxspec.errors import DrafterError, EngineBusy, NonFiniteLogits

FinishReason = Literal["stop", "length"]


class Emission(NamedTuple):
    """One emitted token.

    Attributes:
        token: Its id.
        from_draft: Whether a drafter had guessed it.
        logits: The row it was chosen from, [vocab] in the model's dtype, if logits are captured.
        finish_reason: "stop" after a stop token, "length" where `max_tokens` or the context ends,
            None before the last token.
    """

    token: int
    from_draft: bool
    logits: mx.array | None
    finish_reason: FinishReason | None


_HELD = Emission(-1, False, None, None)


class SpeculativeDecoder:
    """Emits what the engine's model would say by itself, in fewer forwards.

    Between rounds the engine has processed every token but the newest, the anchor.

    Args:
        engine: Runs the model.
        drafter: Guesses; None decodes plainly.
        options: How far to draft, and whether one verify stays one forward.
        stats: Counters to add to; default: new ones.
    """

    def __init__(
        self,
        engine: SpeculativeEngine,
        drafter: Drafter | None = None,
        options: SpeculativeDecodingOptions = SpeculativeDecodingOptions(),  # noqa: B008
        *,
        stats: SpeculationStats | None = None,
    ):
        self.engine = engine
        self.drafter = drafter
        self.options = options
        self.stats = stats if stats is not None else SpeculationStats()
        self.stats.why_off = self._why_off()

    def generate(
        self,
        prompt: Sequence[int] | mx.array | np.ndarray,
        *,
        max_tokens: int = 256,
        stop_tokens: Collection[int] = (),
        capture_logits: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Generator[Emission, None, None]:
        """Begin a new sequence with `prompt` and emit what follows it.

        Everything is checked at the call, before the engine is touched, and the engine is held
        from the call until the generator ends or is closed. However it ends, the engine then
        covers the prompt and what was emitted but for the last token.

        Args:
            prompt: Token ids, [n] with 1 <= n < max_context_length.
            max_tokens: Most tokens to emit; -1 goes on until the context ends.
            stop_tokens: Ids that end the text; the one that does is emitted, as the last.
            capture_logits: Bring every token's row of logits.
            progress: Called during prefill with (tokens processed, tokens of the prompt).

        Raises:
            ValueError: The prompt is empty, too long or outside the vocabulary, or `max_tokens`
                is 0 or below -1.
            EngineBusy: The engine is generating for somebody else.
            DrafterError: The drafter proposed something that is no token of the target.
            NonFiniteLogits: A row of logits was NaN throughout.
        """
        ids = token_ids(prompt, self.engine.vocab_size, "prompt")
        self._check(ids, max_tokens)
        emissions = self._generate(
            ids, max_tokens, frozenset(stop_tokens), capture_logits, progress
        )
        next(emissions)
        return emissions

    def _generate(
        self,
        prompt: list[int],
        max_tokens: int,
        stop_tokens: frozenset[int],
        capture_logits: bool,
        progress: ProgressCallback | None,
    ) -> Generator[Emission, None, None]:
        engine = self.engine
        with engine.lease():
            # The first `next`, inside `generate`: the engine is held from the call on, and an
            # emission generator that is closed or forgotten before its first token frees it.
            yield _HELD
            self._prefill(prompt, progress)
            anchor = prompt[-1]
            room = engine.max_context_length - len(prompt)
            wanted = room if max_tokens < 0 else min(max_tokens, room)
            while True:
                cursor = engine.processed_token_count
                draft = self._draft(anchor, wanted)
                rows = self._verify([anchor, *draft], capture_logits)
                if draft and self._any_row_without_a_number(rows):
                    # 0 * NaN is NaN: on CPU a draft that is no number reaches the rows that do
                    # not even see it. Without it the model says what it says by itself.
                    engine.reset(cursor)
                    draft = []
                    rows = self._verify([anchor], capture_logits)
                accepted = count_accepted(draft, rows.argmax)
                tokens, reason = cut_at_stop(rows.argmax[: accepted + 1], stop_tokens, wanted)
                self._require_numbers(rows, len(tokens), cursor)
                engine.reset(cursor + len(tokens))
                self._count_round(draft, accepted)
                emitted = 0
                try:
                    for row, token in enumerate(tokens):
                        emitted += 1
                        self.stats.emitted += 1
                        last = emitted == len(tokens)
                        yield Emission(
                            token,
                            row < accepted,
                            None if rows.logits is None else rows.logits[row],
                            reason if last else None,
                        )
                finally:
                    if emitted < len(tokens):
                        engine.reset(cursor + emitted)
                if reason is not None:
                    return
                anchor = tokens[-1]
                wanted -= len(tokens)
                if engine.processed_token_count != cursor + len(tokens):
                    raise EngineBusy(
                        f"somebody else used this engine between two tokens: it covers "
                        f"{engine.processed_token_count} tokens where {cursor + len(tokens)} were "
                        "left; give every sequence an engine of its own"
                    )

    def _check(self, prompt: list[int], max_tokens: int) -> None:
        if not prompt:
            raise ValueError("prompt: expected at least one token, got none")
        if len(prompt) >= self.engine.max_context_length:
            raise ValueError(
                f"prompt: {len(prompt)} tokens leave no room for an answer in a context of "
                f"{self.engine.max_context_length}; shorten the prompt or raise max_context_length"
            )
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < -1:
            raise ValueError(
                f"max_tokens: expected a positive number, or -1 for no limit, got {max_tokens!r}"
            )
        if max_tokens == 0:
            raise ValueError("max_tokens: 0 would emit nothing; use -1 for no limit")

    def _why_off(self) -> str | None:
        if self.engine.why_no_speculation is not None:
            return self.engine.why_no_speculation
        if self.drafter is None:
            return "no drafter was given"
        if self.options.num_draft_tokens == 0:
            return "num_draft_tokens is 0"
        if self.options.align_proposals and self.engine.verify_tile_width == 1:
            return "the widest tile has one row, which leaves no room for a draft"
        return None

    def _prefill(self, prompt: list[int], progress: ProgressCallback | None) -> None:
        begin = time.perf_counter()
        engine, stats = self.engine, self.stats
        forwards, traces = engine.prefill_forward_count, engine.trace_count
        engine.reset(0)
        if self.drafter is not None:
            self.drafter.reset()
        engine.prefill(prompt[:-1], _counting_anchor(progress))
        stats.prompt_tokens += len(prompt)
        stats.prefill_forwards += engine.prefill_forward_count - forwards
        stats.traces += engine.trace_count - traces
        stats.seconds["prefill"] += time.perf_counter() - begin

    def _draft(self, anchor: int, wanted: int) -> list[int]:
        """A proposal that fits: into one forward, the context, and the tokens still wanted."""
        if self.stats.why_off is not None or self.drafter is None:
            return []
        begin = time.perf_counter()
        if self.options.align_proposals:
            fits = self.engine.one_forward_draft_budget
        else:
            fits = self.engine.max_verify_block_length - 1
        budget = max(0, min(self.options.num_draft_tokens, fits, wanted - 1))
        history = TokenView(self.engine.tokens, last=anchor)
        self.drafter.commit(len(history))
        draft = _checked_proposal(self.drafter, history, budget, self.engine.vocab_size)
        self.stats.seconds["draft"] += time.perf_counter() - begin
        return draft

    def _verify(self, block: list[int], capture_logits: bool) -> VerifyRows:
        begin = time.perf_counter()
        traces = self.engine.trace_count
        rows = self.engine.verify(block, Capture(logits=capture_logits))
        self.stats.forwards += rows.forwards
        self.stats.traces += self.engine.trace_count - traces
        self.stats.seconds["verify"] += time.perf_counter() - begin
        return rows

    def _require_numbers(self, rows: VerifyRows, count: int, cursor: int) -> None:
        """Refuse to choose from rows without a number; say once that a row had some NaNs."""
        for row, nan_count in enumerate(rows.nan_count[:count]):
            if nan_count == self.engine.vocab_size:
                self.engine.reset(cursor)
                raise NonFiniteLogits(
                    f"all {nan_count} logits after position {cursor + row} are NaN, so there is "
                    f"no next token (mlx {version('mlx')}, {mx.default_device()}); the weights or "
                    "the computation are broken: try the model in float32, or another mlx version"
                )
            if nan_count:
                if not self.stats.nan_rows:
                    warnings.warn(
                        f"{nan_count} of {self.engine.vocab_size} logits after position "
                        f"{cursor + row} are NaN and count as -inf; further rows are counted in "
                        "stats.nan_rows",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                self.stats.nan_rows += 1

    def _any_row_without_a_number(self, rows: VerifyRows) -> bool:
        return self.engine.vocab_size in rows.nan_count

    def _count_round(self, draft: list[int], accepted: int) -> None:
        stats = self.stats
        stats.rounds += 1
        stats.plain_rounds += not draft
        stats.drafted += len(draft)
        stats.accepted += accepted
        stats.compiled = self.engine.compiled


def count_accepted(draft: Sequence[int], choices: Sequence[int]) -> int:
    """How many leading draft tokens are the model's own choices.

    Args:
        draft: The proposal, [k].
        choices: The model's choice after the anchor and after each draft token, [k + 1].
    """
    accepted = 0
    while accepted < len(draft) and draft[accepted] == choices[accepted]:
        accepted += 1
    return accepted


def cut_at_stop(
    tokens: list[int], stop_tokens: frozenset[int], wanted: int
) -> tuple[list[int], FinishReason | None]:
    """The tokens of a round that are emitted, and whether the text ends with them.

    A stop token ends the text and is the last one emitted; within the limit it wins over it.
    """
    for index, token in enumerate(tokens[:wanted]):
        if token in stop_tokens:
            return tokens[: index + 1], "stop"
    return tokens[:wanted], "length" if len(tokens) >= wanted else None


def _checked_proposal(
    drafter: Drafter, history: TokenView, budget: int, vocab_size: int
) -> list[int]:
    """Ask for a proposal, cut it to the budget, and refuse what is no token of the target."""
    proposal: object = drafter.propose(history, budget)
    name = f"drafter {type(drafter).__name__}"
    try:
        if not isinstance(proposal, Sequence | mx.array | np.ndarray):
            raise TypeError(f"{name}: expected a sequence of token ids, got {proposal!r}")
        return token_ids(proposal[:budget], vocab_size, name)
    except (TypeError, ValueError) as problem:
        raise DrafterError(
            f"{problem}. propose(history, budget) must return ids of the target's vocabulary"
        ) from problem


def _counting_anchor(progress: ProgressCallback | None) -> ProgressCallback | None:
    """mlx-lm counts the prompt's last token in the total, though no prefill forward takes it."""
    if progress is None:
        return None
    return lambda processed, total: progress(processed, total + 1)
