"""Speculative decoding: draft, verify, accept, rewind.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), with
the acceptance of `mlxspec.decoding.acceptance`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.callers import require_callable, require_drafter, require_engine
from mlxspec.decoding.acceptance import Acceptance, ModelsChoice
from mlxspec.decoding.options import SpeculativeDecodingOptions
from mlxspec.decoding.sampling import noise_key
from mlxspec.decoding.stats import SpeculationStats
from mlxspec.decoding.target import TargetChoice
from mlxspec.decoding.turns import Prefix, held_prefix
from mlxspec.drafting.adaptive import AdaptiveDraftCount
from mlxspec.drafting.device import DeviceDraft
from mlxspec.drafting.protocol import (
    Drafter,
    ForcingDrafter,
    TargetedDrafter,
    budget_for,
    source_of,
)
from mlxspec.engine.costs import ASSUMED_COSTS
from mlxspec.engine.protocol import ProgressCallback, SpeculativeEngine, VerifyRows
from mlxspec.engine.tokens import TokenView, token_ids
from mlxspec.errors import DrafterError, EngineBusy, NonFiniteLogits, RewindRefused
from mlxspec.numbers import whole_number

FinishReason = Literal["stop", "length"]


class Emission(NamedTuple):
    """One emitted token.

    Attributes:
        token: Its id.
        from_draft: Whether a drafter had guessed it.
        logprobs: Its row of log-probabilities [vocab] in the logits' dtype, if the acceptance has
            them; lazy: nothing is computed unless it is used.
        finish_reason: "stop" after a stop token, "length" where `max_tokens` or the context ends,
            None before the last token.
    """

    token: int
    from_draft: bool
    logprobs: mx.array | None
    finish_reason: FinishReason | None


_HELD = Emission(-1, False, None, None)


class SpeculativeDecoder:
    """Emits what the engine's model would say by itself, in fewer forwards.

    Between rounds the engine has processed every token but the newest, the anchor.

    Args:
        engine: Runs the model.
        drafter: Guesses; None decodes plainly.
        options: How far to draft, and whether one verify stays one forward.
        acceptance: How tokens are chosen from verified rows; default: greedy.
        seed: Of every draw, 0 to 2**64 - 1.
        stats: Counters to add to; default: new ones.
        reuse_prefix: Go on from what the engine holds of a prompt's beginning, as far as its
            layers can go back to it; False begins every sequence anew.
        clock: Returns seconds; drafts adapt to what it says that drafts and forwards take.

    Raises:
        ValueError: The engine or the drafter lacks its methods, or the seed is out of range.
    """

    def __init__(
        self,
        engine: SpeculativeEngine,
        drafter: Drafter | None = None,
        options: SpeculativeDecodingOptions = SpeculativeDecodingOptions(),  # noqa: B008
        *,
        acceptance: Acceptance | None = None,
        seed: int = 0,
        stats: SpeculationStats | None = None,
        reuse_prefix: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ):
        require_engine(engine)
        if drafter is not None:
            require_drafter(drafter)
        self.engine = engine
        self.drafter = drafter
        self.options = options
        self.acceptance = acceptance if acceptance is not None else ModelsChoice()
        self.stats = stats if stats is not None else SpeculationStats()
        self.stats.why_off = self._why_off()
        self.stats.note = engine.note
        self._reuse_prefix = reuse_prefix
        self._clock = clock
        self._adaptive: AdaptiveDraftCount | None = None
        self._noise_key = noise_key(seed)
        # The engine's calls when it was last left; None while this decoder is inside it.
        self._calls: int | None = engine.call_count
        # How many tokens of the engine's history the drafter has been shown.
        # Of the last proposal, the first so many were certain.
        self._certain = 0
        self._shown = 0

    def generate(
        self,
        prompt: Sequence[int] | mx.array | np.ndarray,
        *,
        max_tokens: int = 256,
        stop_tokens: Collection[int] = (),
        progress: ProgressCallback | None = None,
    ) -> Generator[Emission, None, None]:
        """Emit what follows `prompt`.

        What the engine holds of the prompt from the turn before is used again, see
        `reuse_prefix`; `stats.reused_tokens` tells how much.

        Everything is checked at the call, before the engine is touched, and the engine is held
        from the call until the generator ends or is closed. However it ends, the engine then
        covers the prompt and what was emitted but for the last token.

        Args:
            prompt: Token ids, [n] with 1 <= n < max_context_length.
            max_tokens: Most tokens to emit; -1 goes on until the context ends.
            stop_tokens: Ids that end the text; the one that does is emitted, as the last.
            progress: Called during prefill with (tokens processed, tokens of the prompt that are
                not reused).

        Raises:
            ValueError: The prompt is empty, too long or outside the vocabulary, `max_tokens` is
                0 or below -1, or `progress` is no function.
            EngineBusy: The engine is generating for somebody else.
            DrafterError: The drafter proposed something that is no token of the target.
            NonFiniteLogits: A row of logits was NaN throughout.
        """
        ids = token_ids(prompt, self.engine.vocab_size, "prompt")
        limit = _limit(max_tokens)
        if progress is not None:
            require_callable(
                "prompt_progress_callback", progress, "(tokens processed, tokens of the prompt)"
            )
        self._check(ids)
        emissions = self._generate(ids, limit, token_set(stop_tokens), progress)
        next(emissions)
        return emissions

    def _generate(
        self,
        prompt: list[int],
        max_tokens: int,
        stop_tokens: frozenset[int],
        progress: ProgressCallback | None,
    ) -> Generator[Emission, None, None]:
        with self.engine.lease(), self._drafter_lease():
            # The first `next`, inside `generate`: the engine is held from the call on, and an
            # emission generator that is closed or forgotten before its first token frees it.
            yield _HELD
            self._adaptive = None
            if self.options.adapts and self.stats.why_off is None:
                costs = getattr(self.engine, "tile_costs", ASSUMED_COSTS)
                narrowest = getattr(self.engine, "tile_widths", (1,))[0]
                self._adaptive = AdaptiveDraftCount(costs, narrowest)
            self._prefill(prompt, progress)
            anchor = prompt[-1]
            room = self.engine.max_context_length - len(prompt)
            wanted = room if max_tokens < 0 else min(max_tokens, room)
            try:
                while True:
                    emitted, newest = yield from self._round(anchor, stop_tokens, wanted)
                    if newest.finish_reason is not None:
                        return
                    anchor = newest.token
                    wanted -= emitted
            finally:
                learn = getattr(self.engine, "learn_tile_costs", None)
                if self._adaptive is not None and learn is not None:
                    learn(self._adaptive.costs())

    def _round(
        self, anchor: int, stop_tokens: frozenset[int], wanted: int
    ) -> Generator[Emission, None, tuple[int, Emission]]:
        """Draft, verify, emit what is accepted; then rewind to what was emitted.

        Returns:
            How many tokens were emitted, and the newest.
        """
        cursor = self.engine.processed_token_count
        spent = _Spent.by(self.stats)
        proposal = self._draft(anchor, wanted)
        width = self._tile_width_for(len(proposal))
        emitted = accepted = 0
        failed = True
        try:
            rows, draft, scores = self._verify(anchor, proposal)
            if draft and self.engine.vocab_size in rows.nan_count:
                # 0 * NaN is NaN: on CPU a draft that is no number reaches the rows that do not
                # even see it. Without it the model says what it says by itself.
                self._reset(cursor)
                rows, draft, scores = self._verify(anchor, [])
            self.stats.rounds += 1
            self.stats.plain_rounds += not draft
            self.stats.drafted += len(draft)
            self.stats.count_tile(width, len(draft))
            self._require_number(rows, 0, cursor)
            for token, logprobs in self.acceptance.choices(rows, draft, cursor + 1, scores):
                from_draft = emitted < len(draft) and draft[emitted] == token
                emitted += 1
                accepted += from_draft
                self.stats.emitted += 1
                self.stats.accepted += from_draft
                reason = finish_reason(token, stop_tokens, wanted - emitted)
                newest = Emission(token, from_draft, logprobs, reason)
                yield newest
                if reason is not None:
                    break
                if from_draft:
                    self._require_number(rows, emitted, cursor)
            failed = False
        finally:
            self._rewind(cursor + emitted, failed)
            if self.drafter is not None:
                self.drafter.commit(cursor + 1 + emitted)
            if self._adaptive is not None and emitted:
                now = _Spent.by(self.stats)
                self._adaptive.record(
                    # What was certain tells nothing of the guess after it.
                    drafted=max(0, len(draft) - self._certain),
                    accepted=max(0, accepted - self._certain),
                    emitted=emitted,
                    width=width,
                    seconds=now.seconds - spent.seconds,
                    usual=now.forwards - spent.forwards == 1 and now.traces == spent.traces,
                )
        return emitted, newest

    def _check(self, prompt: list[int]) -> None:
        if not prompt:
            raise ValueError("prompt: expected at least one token, got none")
        if not getattr(self.engine, "weights_unchanged", True):
            raise ValueError(
                "engine: the model's weights have changed since this engine was made, and its "
                "graphs hold the old ones; make a new engine"
            )
        if len(prompt) >= self.engine.max_context_length:
            raise ValueError(
                f"prompt: {len(prompt)} tokens leave no room for an answer in a context of "
                f"{self.engine.max_context_length}; shorten the prompt or raise max_context_length"
            )

    def _why_off(self) -> str | None:
        if self.engine.why_no_speculation is not None:
            return self.engine.why_no_speculation
        if self.drafter is None:
            return "no drafter was given"
        if self.options.most_draft_tokens == 0:
            return "num_draft_tokens is 0"
        if self.options.align_proposals and self.engine.verify_tile_width == 1:
            return "the widest tile has one row, which leaves no room for a draft"
        return None

    @property
    def _targeted(self) -> TargetedDrafter | None:
        """The drafter, if it drafts at all and has a state of its own."""
        on = self.stats.why_off is None and isinstance(self.drafter, TargetedDrafter)
        return self.drafter if on else None  # type: ignore[return-value]

    def _drafter_lease(self) -> AbstractContextManager[None]:
        return nullcontext() if self._targeted is None else self._targeted.lease()

    @property
    def _target(self) -> TargetChoice:
        rule = self.acceptance
        return TargetChoice(
            self.engine.vocab_size, rule.sampling, self._noise_key, rule.compares_distributions
        )

    def _prefill(self, prompt: list[int], progress: ProgressCallback | None) -> None:
        begin = self._clock()
        engine, stats = self.engine, self.stats
        forwards, traces = engine.prefill_forward_count, engine.trace_count
        held = held_prefix(engine, prompt) if self._reuse_prefix else Prefix(0, 0, 0)
        if self.drafter is not None and not (
            # What the drafter has seen is still the beginning of the text.
            0 < self._shown <= held.shared and engine.call_count == self._calls
        ):
            self.drafter.reset()
        if self.drafter is not None:
            self.drafter.commit(len(prompt))
        self._shown = 0
        self._calls = None
        if held.reusable < engine.processed_token_count or not held.reusable:
            engine.reset(held.reusable)
        self.acceptance.begin(prompt)
        engine.prefill(prompt[held.reusable : -1], _counting_anchor(progress))
        self._calls = engine.call_count
        stats.prompt_tokens += len(prompt)
        stats.reused_tokens += held.reusable
        stats.lost_tokens += held.lost
        stats.prefill_forwards += engine.prefill_forward_count - forwards
        stats.traces += engine.trace_count - traces
        if self._targeted is not None:
            drafted = self._targeted.forward_count
            self._targeted.begin(prompt, self._target)
            stats.draft_forwards += self._targeted.forward_count - drafted
        stats.seconds["prefill"] += self._clock() - begin

    def _draft(self, anchor: int, wanted: int) -> list[int] | DeviceDraft:
        """A proposal that fits: into one forward, the context, and the tokens still wanted."""
        self._certain = 0
        if self.stats.why_off is not None or self.drafter is None:
            return []
        begin = self._clock()
        if self.options.align_proposals or self._adaptive is not None:
            fits = self.engine.one_forward_draft_budget
        else:
            fits = self.engine.max_verify_block_length - 1
        most = self.options.most_draft_tokens
        limit = max(0, min(fits if most is None else most, fits, wanted - 1))
        history = TokenView(self.engine.tokens, last=anchor)
        certain = self.drafter.certain(limit) if isinstance(self.drafter, ForcingDrafter) else []
        for token in certain:
            history = TokenView(history, last=token)
        limit -= len(certain)
        self._certain = len(certain)
        self._shown = len(history)
        forwards = self._targeted.forward_count if self._targeted else 0
        adaptive = self._adaptive
        if adaptive is not None:
            sure = len(certain)
            adaptive.begin(history, limit, lambda drafts: self._tile_width_for(sure + drafts), sure)
        budget = budget_for(self.drafter, limit, None if adaptive is None else adaptive.budget)
        asked = self._clock()
        draft = checked_proposal(self.drafter, history, budget, self.engine.vocab_size)
        if adaptive is not None:
            took = self._clock() - asked
            known = None if isinstance(draft, DeviceDraft) else draft
            took += draft.seconds if isinstance(draft, DeviceDraft) else 0.0
            kept = adaptive.keep(source_of(self.drafter), len(draft), took, known)
            unused = len(draft) > 0 or adaptive.parked
            self.stats.parked_rounds += not kept and not certain and unused
            draft = draft[:kept]
        if certain:
            assert isinstance(draft, list), "who forces tokens knows what follows them"
            draft = certain + draft
        if self._targeted is not None:
            self.stats.draft_forwards += self._targeted.forward_count - forwards
        self.stats.seconds["draft"] += self._clock() - begin
        return draft

    def _tile_width_for(self, drafts: int) -> int:
        """Rows of the tile that verifies so many drafts; as many as needed where unknown."""
        width_for = getattr(self.engine, "tile_width_for", None)
        return drafts + 1 if width_for is None else width_for(drafts)

    def _verify(
        self, anchor: int, draft: list[int] | DeviceDraft
    ) -> tuple[VerifyRows, list[int], mx.array | None]:
        """Score anchor and draft.

        Returns:
            The rows, the draft's ids, and the scores it was drawn by where it has them.
        """
        begin = self._clock()
        traces = self.engine.trace_count
        self._refuse_intruders()
        self._calls = None
        scores, waited = None, 0.0
        if isinstance(draft, DeviceDraft):
            scores, waited = draft.scores, draft.seconds
        rows, ids = self._scored(anchor, draft)
        self._calls = self.engine.call_count
        self.stats.forwards += rows.forwards
        self.stats.traces += self.engine.trace_count - traces
        self.stats.compiled = self.engine.compiled
        self.stats.note = self.engine.note
        seconds = self._clock() - begin
        waited = min(waited, seconds)
        self.stats.seconds["draft"] += waited
        self.stats.seconds["verify"] += seconds - waited
        return rows, ids, scores

    def _scored(self, anchor: int, draft: list[int] | DeviceDraft) -> tuple[VerifyRows, list[int]]:
        """The rows of anchor and draft, and the draft's ids, read in one go where they can be."""
        engine: Any = self.engine
        capture, key = self.acceptance.capture, self._noise_key
        if not isinstance(draft, DeviceDraft):
            return engine.verify([anchor, *draft], capture, key), draft
        try:
            if getattr(engine, "takes_device_drafts", False):
                rows = engine.verify([anchor], capture, key, draft.tokens)
                return rows, list(rows.drafted)
            ids = token_ids(draft.tokens, engine.vocab_size, "draft")
        except ValueError as problem:
            raise _drafter_error(f"drafter {type(self.drafter).__name__}: {problem}") from problem
        return engine.verify([anchor, *ids], capture, key), ids

    def _rewind(self, to: int, failed: bool) -> None:
        """Leave the engine at what was emitted but for the newest token, or empty.

        Args:
            to: Tokens it shall cover.
            failed: Whether the round ended early: because something failed, or nobody wants more.

        Raises:
            RewindRefused: The engine does not go back, so the text cannot go on.
        """
        self._refuse_intruders()
        if self.engine.processed_token_count > to:
            try:
                self._reset(to)
            except RewindRefused as refusal:
                # An engine that takes no drafts refuses where nothing was emitted since something
                # failed: what failed is the news, and the state is gone.
                self._reset(0)
                if not failed:
                    raise RewindRefused(
                        "the engine did not take back rejected drafts, which its draft budget had "
                        "promised; what was emitted is right, and the engine was emptied: begin "
                        f"again with prompt and output ({refusal})"
                    ) from refusal
        self._calls = self.engine.call_count

    def _reset(self, to: int) -> None:
        self._calls = None
        self.engine.reset(to)
        self._calls = self.engine.call_count

    def _refuse_intruders(self) -> None:
        if self._calls is not None and self.engine.call_count != self._calls:
            raise EngineBusy(
                "somebody else used this engine between two tokens, so what it holds is not this "
                "text; give every sequence an engine of its own"
            )

    def _require_number(self, rows: VerifyRows, row: int, cursor: int) -> None:
        """Refuse to choose from a row without a number; say once that a row had some NaNs."""
        nan_count = rows.nan_count[row]
        if nan_count == self.engine.vocab_size:
            raise NonFiniteLogits(
                f"all {nan_count} logits after position {cursor + row} are NaN, so there is no "
                f"next token (mlx {version('mlx')}, {mx.default_device()}); the weights or the "
                "computation are broken: try the model in float32, or another mlx version"
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


class _Spent(NamedTuple):
    """What the counters say of forwards up to now."""

    seconds: float
    forwards: int
    traces: int

    @staticmethod
    def by(stats: SpeculationStats) -> _Spent:
        """Read them off."""
        return _Spent(stats.seconds["verify"], stats.forwards, stats.traces)


def finish_reason(token: int, stop_tokens: frozenset[int], wanted: int) -> FinishReason | None:
    """Whether the text ends with this token; a stop token wins over the limit.

    Args:
        token: The token emitted.
        stop_tokens: Ids that end the text.
        wanted: Tokens that may still follow it.
    """
    if token in stop_tokens:
        return "stop"
    return "length" if wanted <= 0 else None


def _limit(max_tokens: Any) -> int:
    """The most tokens to emit, -1 for no limit, as an `int`."""
    try:
        limit = whole_number("max_tokens", max_tokens, -1)
    except ValueError:
        raise ValueError(
            f"max_tokens: expected a positive number, or -1 for no limit, got {max_tokens!r}"
        ) from None
    if limit == 0:
        raise ValueError("max_tokens: 0 would emit nothing; use -1 for no limit")
    return limit


def token_set(tokens: Collection[int] | mx.array | np.ndarray) -> frozenset[int]:
    """Token ids of any kind of whole number; those no model emits do no harm."""
    values: Any = tokens.tolist() if isinstance(tokens, mx.array | np.ndarray) else tokens
    if values is None or hasattr(values, "__index__"):
        values = [] if values is None else [values]
    return frozenset(whole_number("stop_tokens", token, 0) for token in values)


def checked_proposal(
    drafter: Drafter, history: TokenView, budget: int, vocab_size: int
) -> list[int] | DeviceDraft:
    """Ask for a proposal, cut it to the budget, and refuse what is no token of the target.

    The ids of a draft on the device are not known yet: the engine refuses what is none.
    """
    proposal: object = drafter.propose(history, budget)
    name = f"drafter {type(drafter).__name__}"
    try:
        if isinstance(proposal, DeviceDraft):
            if proposal.tokens.ndim != 1 or not mx.issubdtype(proposal.tokens.dtype, mx.integer):
                raise TypeError(
                    f"{name}: expected tokens int32 [k], got {proposal.tokens.dtype} "
                    f"{proposal.tokens.shape}"
                )
            return proposal[:budget] if len(proposal) and budget else []
        if not isinstance(proposal, Sequence | mx.array | np.ndarray) or (
            getattr(proposal, "ndim", 1) != 1
        ):
            raise TypeError(f"{name}: expected a sequence of token ids, got {proposal!r}")
        return token_ids(proposal[:budget], vocab_size, name)
    except (TypeError, ValueError) as problem:
        raise _drafter_error(problem) from problem


def _drafter_error(problem: object) -> DrafterError:
    return DrafterError(
        f"{problem}. propose(history, budget) must return ids of the target's vocabulary"
    )


def _counting_anchor(progress: ProgressCallback | None) -> ProgressCallback | None:
    """mlx-lm counts the prompt's last token in the total, though no prefill forward takes it."""
    if progress is None:
        return None
    return lambda processed, total: progress(processed, total + 1)
