"""Speculative decoding: draft, verify, accept, rewind.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), with
the acceptance of `mlxspec.decoding.acceptance`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.callers import require_callable, require_drafter, require_engine
from mlxspec.decoding.acceptance import Acceptance, ModelsChoice
from mlxspec.decoding.drafts import Drafts
from mlxspec.decoding.emission import Emission, finish_reason, token_limit, token_set
from mlxspec.decoding.options import SpeculativeDecodingOptions
from mlxspec.decoding.sampling import noise_key
from mlxspec.decoding.sole_caller import SoleCaller
from mlxspec.decoding.stats import SpeculationStats
from mlxspec.decoding.target import TargetChoice
from mlxspec.decoding.turns import Prefix, held_prefix
from mlxspec.drafting.device import DeviceDraft
from mlxspec.drafting.proposals import drafter_error
from mlxspec.drafting.protocol import Drafter
from mlxspec.engine.protocol import ProgressCallback, SpeculativeEngine, VerifyRows
from mlxspec.engine.tokens import token_ids
from mlxspec.errors import NonFiniteLogits, RewindRefused

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
        self._noise_key = noise_key(seed)
        self._caller = SoleCaller(engine)
        on = self.stats.why_off is None
        self._drafts = Drafts(engine, drafter, options, self.stats, clock, on=on)
        self._steps_ahead = self.acceptance.takes_tiles_choice and getattr(
            engine, "steps_ahead", False
        )
        # Whether the anchor's plain step is under way.
        self._begun = False

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
        limit = token_limit(max_tokens)
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
        with self.engine.lease(), self._drafts.lease():
            # The first `next`, inside `generate`: the engine is held from the call on, and an
            # emission generator that is closed or forgotten before its first token frees it.
            yield _HELD
            self._drafts.begin()
            self._prefill(prompt, progress)
            anchor = prompt[-1]
            room = self.engine.max_context_length - len(prompt)
            wanted = most = room if max_tokens < 0 else min(max_tokens, room)
            try:
                while True:
                    emitted, newest = yield from self._round(
                        anchor, stop_tokens, wanted, first=wanted == most
                    )
                    if newest.finish_reason is not None:
                        return
                    anchor = newest.token
                    wanted -= emitted
            finally:
                try:
                    self._abandon_step()
                finally:
                    self._drafts.end()

    def _round(
        self, anchor: int, stop_tokens: frozenset[int], wanted: int, *, first: bool
    ) -> Generator[Emission, None, tuple[int, Emission]]:
        """Draft, verify, emit what is accepted; then rewind to what was emitted.

        Returns:
            How many tokens were emitted, and the newest.
        """
        cursor, begun = self.engine.processed_token_count, self._begun
        proposal = self._drafts.propose(anchor, wanted, begun=begun)
        # Where the model's choice is sure to be the next block, the device need not wait for us;
        # but nobody is to wait for the first token until the second is under way.
        ahead = self._steps_ahead and not first and wanted > 1 and not len(proposal)
        ahead = ahead and self._drafts.nothing_follows
        draft: list[int] = []
        emitted = accepted = 0
        failed = True
        try:
            rows, draft, scores = self._verify(anchor, proposal, ahead)
            if draft and self.engine.vocab_size in rows.nan_count:
                # 0 * NaN is NaN: on CPU a draft that is no number reaches the rows that do not
                # even see it. Without it the model says what it says by itself.
                with self._caller.calls():
                    self.engine.reset(cursor)
                rows, draft, scores = self._verify(anchor, [])
            self._begun = rows.ahead
            self._drafts.rows_read(begun=begun, ahead=rows.ahead)
            self.stats.count_round(self._drafts.tile_width, len(draft), pipelined=begun)
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
            self._drafts.settle(
                cursor + 1 + emitted, drafted=len(draft), accepted=accepted, emitted=emitted
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
        first = getattr(self.engine, "first_tile_widths", (self.engine.verify_tile_width,))
        if self.options.align_proposals and first[-1] == 1:
            return "the widest tile has one row, which leaves no room for a draft"
        return None

    def _prefill(self, prompt: list[int], progress: ProgressCallback | None) -> None:
        """Process the prompt but for its last token, the anchor, and what is held of it."""
        begin = self._clock()
        engine, stats, rule = self.engine, self.stats, self.acceptance
        forwards, traces = engine.prefill_forward_count, engine.trace_count
        held = held_prefix(engine, prompt) if self._reuse_prefix else Prefix(0, 0, 0)
        self._drafts.begin_prompt(prompt, held.shared if self._caller.was_alone else 0)
        with self._caller.calls():
            if held.reusable < engine.processed_token_count or not held.reusable:
                engine.reset(held.reusable)
            rule.begin(prompt)
            engine.prefill(prompt[held.reusable : -1], _counting_anchor(progress))
        stats.prompt_tokens += len(prompt)
        stats.reused_tokens += held.reusable
        stats.lost_tokens += held.lost
        stats.prefill_forwards += engine.prefill_forward_count - forwards
        stats.traces += engine.trace_count - traces
        key, compares = self._noise_key, rule.compares_distributions
        target = TargetChoice(engine.vocab_size, rule.sampling, key, compares)
        self._drafts.end_prompt(prompt, target)
        stats.seconds["prefill"] += self._clock() - begin

    def _verify(
        self, anchor: int, draft: list[int] | DeviceDraft, ahead: bool = False
    ) -> tuple[VerifyRows, list[int], mx.array | None]:
        """Score anchor and draft.

        Returns:
            The rows, the draft's ids, and the scores it was drawn by where it has them.
        """
        begin = self._clock()
        traces = self.engine.trace_count
        self._caller.refuse_others()
        scores, waited = None, 0.0
        if isinstance(draft, DeviceDraft):
            scores, waited = draft.scores, draft.seconds
        with self._caller.calls():
            rows, ids = self._scored(anchor, draft, ahead)
        self.stats.forwards += rows.forwards
        self.stats.traces += self.engine.trace_count - traces
        self.stats.compiled = self.engine.compiled
        self.stats.note = "; ".join(filter(None, (self.engine.note, self._drafts.note))) or None
        seconds = self._clock() - begin
        waited = min(waited, seconds)
        self.stats.seconds["draft"] += waited
        self.stats.seconds["verify"] += seconds - waited
        return rows, ids, scores

    def _scored(
        self, anchor: int, draft: list[int] | DeviceDraft, ahead: bool
    ) -> tuple[VerifyRows, list[int]]:
        """The rows of anchor and draft, and the draft's ids, read in one go where they can be."""
        engine: Any = self.engine
        capture, key = self.acceptance.capture, self._noise_key
        if ahead:
            return engine.verify([anchor], capture, key, ahead=True), []
        if not isinstance(draft, DeviceDraft):
            return engine.verify([anchor, *draft], capture, key), draft
        try:
            if getattr(engine, "takes_device_drafts", False):
                rows = engine.verify([anchor], capture, key, draft.tokens)
                return rows, list(rows.drafted)
            ids = token_ids(draft.tokens, engine.vocab_size, "draft")
        except ValueError as problem:
            raise drafter_error(f"drafter {type(self.drafter).__name__}: {problem}") from problem
        return engine.verify([anchor, *ids], capture, key), ids

    def _rewind(self, to: int, failed: bool) -> None:
        """Leave the engine at what was emitted but for the newest token, or empty.

        Args:
            to: Tokens it shall cover.
            failed: Whether the round ended early: because something failed, or nobody wants more.

        Raises:
            RewindRefused: The engine does not go back, so the text cannot go on.
        """
        self._caller.refuse_others()
        with self._caller.calls():
            if self.engine.processed_token_count <= to:
                return
            try:
                self.engine.reset(to)
            except RewindRefused as refusal:
                # An engine that takes no drafts refuses where nothing was emitted since something
                # failed: what failed is the news, and the state is gone.
                self.engine.reset(0)
                if not failed:
                    raise RewindRefused(
                        "the engine did not take back rejected drafts, which its draft budget had "
                        "promised; what was emitted is right, and the engine was emptied: begin "
                        f"again with prompt and output ({refusal})"
                    ) from refusal

    def _abandon_step(self) -> None:
        """Nobody wants the step under way: the text has ended before it."""
        if self._begun and self._caller.was_alone:
            with self._caller.calls():
                self.engine.reset(self.engine.processed_token_count)
        self._begun = False

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


def _counting_anchor(progress: ProgressCallback | None) -> ProgressCallback | None:
    """mlx-lm counts the prompt's last token in the total, though no prefill forward takes it."""
    if progress is None:
        return None
    return lambda processed, total: progress(processed, total + 1)
