"""A draft model: a smaller model of the same vocabulary guesses by generating."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.decoding.target import TargetChoice
from mlxspec.drafting.device import DeviceDraft
from mlxspec.drafting.fitting import FittedScores
from mlxspec.engine.exclusive import Exclusive
from mlxspec.engine.pool import borrowed_engine, engine_for
from mlxspec.engine.protocol import Capture
from mlxspec.engine.rollout import Rollout, RolloutStep
from mlxspec.engine.static import StaticShapeEngine
from mlxspec.engine.support import require_static
from mlxspec.models.vocabulary import require_same_vocabulary, tokenizer_of
from mlxspec.numbers import real_number

# Every so many proposals one is waited for, to know what a forward of the draft model takes.
_MEASURED_EVERY = 64


class DraftModel:
    """Implements `TargetedDrafter` with any model of mlx-lm, in a static engine of its own.

    A proposal is rolled out without a wait between its tokens and handed to the target as it lies
    on the device. Between rounds the engine covers a prefix of the committed text; what it lacks
    of it, it is fed before the next proposal.

    It chooses as the target does: by the same temperature, filters and, position by position, the
    same noise, so that the two agree as often as their distributions allow. Logits processors and
    a sampler of the caller's own see no drafts: with processors the draft model goes by the
    temperature alone, with a sampler it drafts greedily.

    Where the history is longer than its own context, or holds an id that it lacks, it is mute.

    Args:
        model: A model of mlx-lm.
        tokenizer: Its tokenizer, with which the vocabularies are compared token by token. Models
            that `mlxspec.load` loaded know theirs.
        p_min: Propose only tokens that the draft model gave at least this probability, before
            temperature and filters, up to the first that has less; 0 proposes all. Under
            `acceptance="rejection"` it is asked of the likeliest token in the place of the one
            drawn: a draft that ended by what was drawn would no longer have the distribution it
            is compared by. The answer for one token is awaited while the next is computed, which
            costs one forward at the end of a proposal; the last token is proposed unasked.
        max_context_length: Most tokens of a history; None is what the model's config declares.
        tile_widths: As of `StaticShapeEngine`.
        exact: As of `StaticShapeEngine`.

    Raises:
        UnsupportedModel: The static engine cannot take the model.
        ValueError: An option is out of range.
    """

    source = ("model", 0)

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        p_min: float = 0.0,
        max_context_length: int | None = None,
        tile_widths: Sequence[int] | None = None,
        exact: bool | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise ValueError(f"DraftModel: expected a model of mlx-lm, got {model!r}")
        require_static(model)
        self.model = model
        self.tokenizer = tokenizer if tokenizer is not None else tokenizer_of(model)
        self.p_min = real_number("p_min", p_min, 0.0, 1.0)
        self._engine_options: dict[str, Any] = {
            "max_context_length": max_context_length,
            "tile_widths": None if tile_widths is None else tuple(tile_widths),
            "exact": exact,
        }
        self._engine: StaticShapeEngine | None = None
        self._exclusive = Exclusive("this DraftModel", "give every generation one of its own")
        self._calls = -1
        self._target: TargetChoice | None = None
        self._forwards_elsewhere = 0
        self._proposals = 0
        self._seconds_per_forward: float | None = None
        self._rollout: Rollout | None = None
        self.reset()

    @property
    def engine(self) -> StaticShapeEngine:
        """The engine that drafts, which is kept with the model; another one while that is busy."""
        if self._engine is None:
            self._take(engine_for(self.model, role="draft", **self._engine_options))
        assert self._engine is not None
        return self._engine

    @property
    def forward_count(self) -> int:
        """Forwards of the draft model so far, those over prompts included."""
        return self._forwards_elsewhere + (self._engine_forwards if self._engine else 0)

    @property
    def note(self) -> str | None:
        """What its engine has to say about itself, or None."""
        note = None if self._engine is None else self._engine.note
        return note and f"draft model: {note}"

    @property
    def seconds_per_token(self) -> float:
        """What a drafted token takes: measured once per model and device, see `tile_costs`."""
        return self.engine.tile_costs.of(self.engine.tile_widths[0])

    def seconds_behind(self, length: int) -> float:
        """What it takes to take in a history so long, beyond what a draft's first tile holds.

        While it is asked for nothing, the history goes on without it.
        """
        engine = self.engine
        pending = length - engine.processed_token_count
        if pending <= min(engine.verify_tile_width, engine.max_verify_block_length):
            return 0.0
        # Of tiles as wide as were measured; prefill's are no dearer by the row.
        costs, widest = engine.tile_costs, engine.tile_costs.widths[-1]
        return costs.of(pending) if pending <= widest else costs.of(widest) * pending / widest

    def require_vocabulary(self, vocab_size: int, tokenizer: Any) -> None:
        """See `TargetedDrafter`. Without both tokenizers the sizes alone are compared."""
        require_same_vocabulary(vocab_size, tokenizer, self.engine.vocab_size, self.tokenizer)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold this drafter, and an engine that nobody else uses."""
        options = self._engine_options
        with (
            self._exclusive.lease(),
            borrowed_engine(self.model, role="draft", **options) as engine,
        ):
            try:
                self._take(engine)
                yield
            finally:
                self._calls = engine.call_count

    def begin(self, prompt: Sequence[int], target: TargetChoice) -> None:
        """Take in the prompt, but for its last token, and how the target chooses."""
        self._target = target
        self._catch_up(prompt)
        if len(prompt) < self.engine.max_context_length and self._knows(prompt):
            self.engine.prefill(prompt[self.engine.processed_token_count : -1])

    def propose(self, history: Sequence[int], budget: int) -> Sequence[int] | DeviceDraft:
        """Roll out up to `budget` tokens; a shorter proposal, maybe none, where it has to end."""
        engine = self.engine
        # A proposal of its own would be history's next token, which must have a position.
        if budget < 1 or not history or len(history) >= engine.max_context_length:
            return []
        self._catch_up(history)
        if not self._knows(history):
            return []
        pending = history[engine.processed_token_count :]
        if len(pending) > min(engine.verify_tile_width, engine.max_verify_block_length):
            engine.prefill(pending[:-1])
            pending = history[engine.processed_token_count :]
        count = min(budget, engine.roll_out_limit(len(pending)))
        return self._rolled_out(list(pending), count) if count > 0 else []

    def commit(self, length: int) -> None:
        """Keep what was accepted of the last proposal; the engine forgets the rest."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            accepted = length - self.engine.processed_token_count - 1
            self.engine.keep(max(0, min(accepted, rollout.processed)))

    def reset(self) -> None:
        """Begin a new sequence; what it shares with the last one need not be fed again."""
        self._rollout = None
        # So much of the engine's tokens is known to be what the history says.
        self._agreed = 0
        self._stranger = False

    def _catch_up(self, history: Sequence[int]) -> None:
        """Take the engine back to where it agrees with the history, before the newest token."""
        engine = self.engine
        self._rollout = None
        most = min(engine.processed_token_count, len(history) - 1)
        agreed = min(self._agreed, most)
        tokens = engine.tokens
        while agreed < most and tokens[agreed] == history[agreed]:
            agreed += 1
        if agreed < engine.processed_token_count:
            engine.reset(agreed if engine.allows_rewind(agreed) else 0)
        self._agreed = engine.processed_token_count

    def _knows(self, history: Sequence[int]) -> bool:
        """Whether the draft model has an embedding for every token that it has to be fed."""
        if not self._stranger:
            size = self.engine.vocab_size
            unknown = (t >= size for t in history[self.engine.processed_token_count :])
            self._stranger = any(unknown)
        return not self._stranger

    def _rolled_out(self, pending: list[int], count: int) -> DeviceDraft | list[int]:
        begin = time.perf_counter()
        engine, target = self.engine, self._target
        forwards, traces = engine.forward_count, engine.trace_count
        scores = self._scores
        wants_scores = target is not None and target.compares_distributions
        confidence = _Confidence(self.p_min, of_drawn=not wants_scores)
        rollout = engine.roll_out(
            pending,
            count,
            Capture(logits=wants_scores or self.p_min > 0, scores=scores),
            None if target is None else target.noise_key,
            confidence.go_on if self.p_min > 0 else None,
        )
        self._rollout = rollout
        self._agreed = engine.processed_token_count
        steps = rollout.steps[: len(rollout.steps) - confidence.doubtful]
        if not steps:
            self._rollout = None
            return []
        tokens = mx.concatenate([step.token for step in steps])
        drawn_from = None
        if wants_scores and scores is not None and target is not None:
            assert target.noise_key is not None
            first = engine.processed_token_count
            logits = [step.logits for step in steps if step.logits is not None]
            drawn_from = target.sampling.tempered(
                scores.fitted(mx.concatenate(logits)),
                mx.arange(first, first + len(steps), dtype=mx.int32),
                target.noise_key,
            )
        seconds = self._measured(tokens, begin, engine.forward_count - forwards, traces)
        return DeviceDraft(tokens, drawn_from, seconds)

    @property
    def _scores(self) -> FittedScores | None:
        """What to take the argmax of; None is the draft model's own logits."""
        target = self._target
        if target is None:
            return None
        if target.sampling.greedy and self.engine.vocab_size <= target.vocab_size:
            return None
        return FittedScores(target.sampling, target.vocab_size)

    def _measured(self, tokens: mx.array, begin: float, forwards: int, traces: int) -> float:
        """How long the device still works at these tokens, by the last proposal waited for."""
        self._proposals += 1
        if self._seconds_per_forward is not None and self._proposals % _MEASURED_EVERY:
            return forwards * self._seconds_per_forward
        mx.eval(tokens)
        if self.engine.trace_count == traces or self.engine.compiled is False:
            self._seconds_per_forward = (time.perf_counter() - begin) / forwards
        return 0.0

    def _take(self, engine: Any) -> None:
        """Use an engine, in which somebody else may have drafted meanwhile."""
        if engine.call_count != self._calls:
            self.reset()
        if engine is self._engine:
            return
        if self._engine is not None:
            self._forwards_elsewhere += self._engine_forwards
        self._engine = engine
        self._forwards_before = engine.forward_count + engine.prefill_forward_count
        self.reset()

    @property
    def _engine_forwards(self) -> int:
        assert self._engine is not None
        total = self._engine.forward_count + self._engine.prefill_forward_count
        return total - self._forwards_before


class _Confidence:
    """Ends a rollout at the first token in doubt, one step after it was chosen.

    Args:
        least: Least probability of a token that is not in doubt.
        of_drawn: Whether of the token drawn; else of the likeliest.
    """

    def __init__(self, least: float, *, of_drawn: bool):
        self._least = least
        self._of_drawn = of_drawn
        self._probabilities: list[mx.array] = []
        self.doubtful = 0

    def go_on(self, steps: list[RolloutStep]) -> bool:
        """See `roll_out`: the newest step is under way, the one before it is looked at."""
        step = steps[-1]
        assert step.logits is not None
        logits = step.logits.astype(mx.float32)
        if self._of_drawn:
            chosen = mx.take_along_axis(logits, step.token[None], axis=-1)[0, 0]
        else:
            chosen = logits.max()
        self._probabilities.append(mx.exp(chosen - mx.logsumexp(logits)))
        mx.async_eval(self._probabilities[-1])
        if len(steps) > 1 and float(self._probabilities[-2]) < self._least:
            self.doubtful = 2
            return False
        return True
