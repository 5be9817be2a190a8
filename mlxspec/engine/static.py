"""The static-shape engine: an mlx-lm model run in compiled forwards of fixed width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.engine.ahead import CopyWatch, StepAhead, Submitted
from mlxspec.engine.costs import TileCosts
from mlxspec.engine.exactness import best_class
from mlxspec.engine.exclusive import one_call
from mlxspec.engine.placement import Placement, checked_tile_widths, prefill_ladder, tile_placement
from mlxspec.engine.protocol import Capture, ProgressCallback, VerifyRows
from mlxspec.engine.reach import Bound, Reach
from mlxspec.engine.regimes import ComparedRegimes, Measured, Regime
from mlxspec.engine.rollout import GoOn, Rollout, RolloutStep
from mlxspec.engine.rows import DecodeTile, rows_of
from mlxspec.engine.sequence import OneSequence
from mlxspec.engine.spans import SpanRule, TileLimits
from mlxspec.engine.state import KVQuantization, ModelState, StateImage
from mlxspec.engine.state.image import image_of, put_image, why_not
from mlxspec.engine.support import (
    checked_context_length,
    default_placement,
    require_static,
    starts_without_state,
)
from mlxspec.engine.survey import WidthSurvey, price_of_exactness
from mlxspec.engine.tiles import TileKey, Tiles
from mlxspec.engine.tokens import token_ids
from mlxspec.engine.warm_up import warm_up
from mlxspec.errors import RewindRefused, in_words
from mlxspec.numbers import whole_number

DEFAULT_PREFILL_STEP_SIZE = 2048
DEFAULT_QUANTIZED_KV_START = 5000
_NO_NOISE = mx.array([0, 0], mx.uint32)


class StaticShapeEngine(OneSequence):
    """Implements `SpeculativeEngine` with one compiled graph per width, span and capture.

    Args:
        model: A model of mlx-lm. Its weights must not change while the engine lives; see
            `weights_unchanged`.
        max_context_length: Most tokens of a sequence, prompt and output. Default: what the
            model's config declares.
        tile_widths: The ladder: widths that decode tiles may have, in rows. Default: what the
            placement takes, see `placement.default_tile_widths`.
        placement: Where a tile starts: "free", "anchored" or "aligned", see `placement`. Default:
            "free" for attention, else what keeps the family's recurrent layers exact.
        exact: Of a default ladder, keep the widths that compute the same bits on this device. It
            takes a tile of each width to find out, once per model and device. Widths that you
            name are taken as they are.
        prefill_step_size: Rows of the widest prefill tile; the others are powers of two below.
        span_step: Slots of the smallest span bucket.
        initial_capacity: Tokens to make room for at first; the state grows with use.
        kv_bits: Bits of a quantised number of keys and values, as mlx-lm's; None keeps them
            whole.
        kv_group_size: Numbers that share a scale, as mlx-lm's.
        quantized_kv_start: Position from which on keys are seen quantised, as mlx-lm's: as there,
            the first forward never is, nor a prompt chunk that begins before. A multiple of
            the narrowest tile width for recurrent models.

    Raises:
        UnsupportedModel: A layer of the model has a state that cannot be kept exactly, or not
            quantised, or its family is unknown.
        ValueError: An option is out of range.
    """

    takes_device_drafts = True
    steps_ahead = True

    def __init__(
        self,
        model: nn.Module,
        *,
        max_context_length: int | None = None,
        tile_widths: Sequence[int] | None = None,
        placement: Placement | None = None,
        exact: bool = True,
        prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE,
        span_step: int = SpanRule.step,
        initial_capacity: int = 0,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    ):
        self._spans = SpanRule(whole_number("span step", span_step, 1))
        initial_capacity = whole_number("initial_capacity", initial_capacity, 0)
        quantization = None if kv_bits is None else KVQuantization(kv_bits, kv_group_size)
        _check_quantized_start(quantized_kv_start)
        checked_tile_widths(tile_widths, placement, span_step)
        prefill_widths = prefill_ladder(prefill_step_size)
        require_static(model)
        placement = placement or default_placement(model)
        ladder = checked_tile_widths(tile_widths, placement, span_step)
        context_length = checked_context_length(max_context_length, model, ladder[-1])
        warm = warm_up(model, ladder[-1], quantization)
        layout = warm.layout
        super().__init__(model, warm.vocab_size, context_length)
        # What every sequence begins in; and what was asked for that a context so long can fill.
        self._ladder = ladder
        self._usable = tuple(width for width in ladder if width < context_length) or ladder[:1]
        # What the rings are made for, also where some of the widths are given up later.
        self._widest = ladder[-1]
        self._step_widths = prefill_widths
        self._exact = exact
        # Whether widths are used only as far as they are known to compute the same bits.
        self._compares = exact and tile_widths is None and placement != "aligned"
        options: dict[str, Any] = {
            "placement": placement,
            "prefill_step_size": prefill_step_size,
            "span_step": span_step,
            "kv_bits": kv_bits,
            "kv_group_size": kv_group_size,
            "quantized_kv_start": quantized_kv_start,
            "initial_capacity": initial_capacity,
        }
        make = partial(StaticShapeEngine, model, max_context_length=context_length, **options)
        self._survey = WidthSurvey(
            model,
            options,
            context_length,
            is_recurrent=layout.is_recurrent,
            may_widen=tile_widths is None and placement != "aligned" and not layout.rings,
            make=make,
        )
        self._make_twin = make
        self._tile_costs: TileCosts | None = None
        # Of what was asked for: whether it was known from an earlier run, or measured.
        self.remembered: dict[str, bool] = {}
        self._recurrent = layout.is_recurrent
        self.kv_quantization = quantization
        # Widths are compared on whole keys, whose tiles nothing cuts short.
        self._placement: Placement = placement
        self._quantize_from(None)
        self._decode_in(ladder)
        self._warm = warm
        quantized = layout if quantization is None else layout.quantized(quantization)
        first = layout.before_first_token() if starts_without_state(model) else layout
        self._tiles = {form: Tiles(model, form) for form in (layout, quantized, first)}
        self._cursor = 0
        # Tokens that follow the history and that the host has not read, int32 [n] each.
        self._unread: list[mx.array] = []
        self._rollout: Rollout | None = None
        self._ahead: StepAhead | None = None
        self._watch = CopyWatch()
        self._state = ModelState(
            layout,
            quantized,
            first,
            self._capacity_for(max(1, min(initial_capacity, self._context_length))),
        )
        self.width_classes: list[tuple[int, ...]] | None = None
        if placement == "aligned":
            self._notes["placement"] = (
                f"aligned tiles: plain decoding computes {self._widths[0]} rows a token"
            )
        if self._compares:
            ladder = self._equal_widths()
        quantized_from = None
        if quantization is not None:
            # mlx-lm converts after a forward, so its first one sees whole keys; so does ours.
            quantized_from = max(quantized_kv_start, ladder[0] if self._recurrent else 1)
        self._quantize_from(quantized_from)
        self._ladder = ladder
        self._decode_in(ladder)

    @property
    def processed_token_count(self) -> int:
        """The cursor: how many tokens the state covers, and the position of the anchor."""
        return self._cursor

    @property
    def tile_widths(self) -> tuple[int, ...]:
        """The ladder, ascending."""
        return self._widths

    @property
    def note(self) -> str | None:
        """What a user should know of how the engine runs, or None."""
        return "; ".join([*self._notes.values(), *self._places.values()]) or None

    @property
    def first_tile_widths(self) -> tuple[int, ...]:
        """The ladder that a sequence begins in, ascending: of it some may be given up far out."""
        return self._ladder

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer has a state that only full tiles move on."""
        return self._recurrent

    @property
    def windows(self) -> tuple[int, ...]:
        """How many positions the sliding-window layers see, each number once; empty without."""
        return tuple(sorted({rule.window for rule in self._state.layout.rings}))

    def span_end(self, position: int) -> int:
        """The first position after this one whose row attends to another number of slots."""
        return self._spans.span(position)

    @property
    def verify_tile_width(self) -> int:
        """Rows of the widest decode tile."""
        return self._widths[-1]

    @property
    def one_forward_draft_budget(self) -> int:
        """How many drafts after an anchor at the cursor fit one forward; never below 0."""
        return self._reach.one_forward_draft_budget

    @property
    def max_verify_block_length(self) -> int:
        """The longest block `verify` takes from the present cursor.

        Four things bound it. The context: its last token is emitted and never processed. Every
        ring: a block that is rejected whole must leave the keys which the next forward sees, so
        it may write no further than the ring is deep, padding included. The start of
        quantisation, which cannot be taken back. And kernels for which widths have not been
        compared yet. The error of `verify` says which it was.
        """
        return self._reach.verify_bound[0]

    @property
    def tile_costs(self) -> TileCosts:
        """Seconds of a decode tile by its width in a short context.

        Measured when it is first asked for, on an engine of its own, and remembered on disk for
        this model, device and version of MLX: see `costs.measure_costs`.
        """
        if self._tile_costs is None:
            self._tile_costs, known = self._survey.costs_at(0, self._survey.widths(self._ladder))
            self.remembered["tile costs"] = known
            price = price_of_exactness(self._tile_costs, self._ladder)
            if self._compares and price:
                self._notes["price"] = price
        return self._tile_costs

    def measured(self) -> list[Measured]:
        """What tiles compute and cost in every kernel regime that this context can reach.

        Measured where it is not remembered: classes take about two tiles of every width, costs
        at most 25 tiles of width 1 (see `measure_costs`), on an engine of its own with a state
        of random numbers; this engine is left as it is. The widths are those of the ladder and
        those that it may be widened by.
        """
        return list(self._survey.regimes(self._ladder, self._limits))

    def learn_tile_costs(self, costs: TileCosts) -> None:
        """Take what rounds have shown as `tile_costs` from now on; nothing is written down."""
        self._tile_costs = costs

    def tile_width_for(self, drafts: int) -> int:
        """Rows of the tile that verifies this many drafts from the present cursor."""
        rows = self._cursor + 1 + drafts - self._tile_start(self._cursor)
        return next((width for width in self._widths if width >= rows), self._widths[-1])

    def twin(self, tile_widths: Sequence[int], **changes: Any) -> StaticShapeEngine:
        """An empty engine of the same model and options, but for these, in other widths."""
        return self._make_twin(tile_widths=tile_widths, **changes)

    def pretend(self, position: int) -> None:
        """Stand at this position with a state of random numbers: for measurements there."""
        self._history = [i % self._vocab_size for i in range(position)]
        self._cursor = position
        self._state.pretend(position)

    def widened(self) -> StaticShapeEngine:
        """This engine, or an empty one with more widths, if rows get cheaper in wider tiles.

        Only a default ladder is widened, by widths that compute the same bits as it, and only
        where nothing else would change: the rings of sliding windows are as deep as the widest
        tile needs, and another depth adds the same keys in another order.
        """
        if not self._survey.may_widen:
            return self
        widths, ladder = self._survey.ladder_that_pays(self._ladder, self.tile_costs), self._ladder
        if widths == ladder:
            return self
        classes, notes = self.width_classes, {}
        if self._exact:
            looked_at = tuple(sorted({*widths, *self._usable}))
            classes, known = self._survey.classes_at(0, widths)
            self.remembered["width classes"] = known
            alike = next((group for group in classes if set(ladder) <= set(group)), ())
            widths = tuple(sorted({*ladder, *alike}))
            if widths == ladder:
                return self
            if widths != looked_at:
                notes["widths"] = _given_up(widths, looked_at)
        if "price" in self._notes:
            notes["price"] = self._notes["price"]
        engine = self.twin(widths)
        engine.width_classes, engine._notes = classes, notes
        engine._tile_costs, engine._compares = self._tile_costs, self._compares
        engine.remembered = self.remembered
        return engine

    def _examine(self, position: int) -> None:
        """Use the widths that compute the same bits where this position's row runs.

        Of the ladder they are what is one class there, so they depend on nothing but where the
        engine stands: not on how it came there, nor on what was drafted. Where no part of the
        ladder is one class, the narrowest width goes on, with what is the same whatever was
        drafted: one position a tile, or one row for every position.
        """
        if self._reach.compared_at(position):
            return
        regime = self._regimes.at(position)
        kept, reason, begin = self._ladder, "", self._regimes.begin(regime)
        if self._regimes.at(begin) != regime:
            kept, reason = (), "cannot be compared before attention takes other kernels"
        elif regime != self._regimes.at(0):
            quantized = self._limits.quantized_at(begin)
            kept, reason = self._survey.equal_at(begin, self._ladder, quantized)
        widths = kept or self._ladder[:1]
        # What is given up farther out than here is taken back.
        passed = [about for about in self._places if about < begin]
        places = {about: self._places[about] for about in passed}
        if kept != self._ladder:
            ladder = ", ".join(map(str, self._ladder))
            where = f" from {begin} tokens on"
            if not kept and (widths == (1,) or not self._recurrent):
                places[begin] = (
                    f"one position a forward{where}: the rows of tile widths {ladder} {reason}"
                )
            elif widths != self._ladder:
                places[begin] = _given_up(widths, self._ladder, where, reason)
        self._decode_in(widths, rows_agree=bool(kept), regime=regime, places=places)

    @property
    def trace_count(self) -> int:
        """How often a tile was traced since the engine was made, in all threads."""
        return sum(tiles.trace_count for tiles in self._tiles.values())

    @property
    def compiled(self) -> bool | None:
        """Whether MLX compiles the tiles; None until a tile has been called twice."""
        known = [tiles.compiled for tiles in self._tiles.values()]
        return False if False in known else next((c for c in known if c is not None), None)

    @property
    def quantized_from(self) -> int | None:
        """Position from which on keys and values are seen quantised; None is nowhere."""
        return self._limits.quantized_from

    @property
    def capacity(self) -> int:
        """Tokens the state has room for at present, padding included."""
        return self._state.capacity

    @property
    def weights_unchanged(self) -> bool:
        """Whether the model still has the weights that the compiled tiles hold as constants."""
        return self._warm.has_weights_of(self.model)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the engine for one sequence; a second holder gets `EngineBusy`."""
        with super().lease():
            # All that is there counts as reached, in however few blocks: see `longest_rewind`.
            self._state.begin_call(self._cursor)
            yield

    @one_call
    def prefill(self, tokens: Sequence[int], progress: ProgressCallback | None = None) -> None:
        """Extend the history by `tokens` and process them in wide tiles without logits.

        Every tile is full: the widest that the rest fills, then the next. What no full tile of
        a recurrent model holds is fed by the next `verify`.

        Args:
            tokens: Token ids; may be empty.
            progress: Called with (tokens processed so far, all of them) before the first tile
                and after every one.

        Raises:
            ValueError: An id outside the vocabulary, or more tokens than the context has room
                for. The engine is as it was.
            EngineBusy: Another thread is inside the engine.
        """
        self._mend()
        ids = token_ids(tokens, self._vocab_size, "prefill")
        _require_length("prefill", len(ids), self._reach.context_bound)
        report = progress or (lambda processed, total: None)
        report(0, len(ids))
        before, state = self._cursor, self._state
        with _Call(self, ids, prefills=before > 0):
            reached = before
            for reached in self._prefill_tiles():
                report(max(0, reached - before), len(ids))
            if reached < len(self._history):
                report(len(ids), len(ids))
            state.pinned = state.position
            # The tiles have no rows to read.
            state.non_finite_until = max(state.non_finite_until, len(self._history))
        self._examine(self._cursor)
        # Wide tiles leave wide temporaries in MLX's buffer cache, which decoding cannot use.
        mx.clear_cache()

    @one_call
    def verify(
        self,
        block: Sequence[int],
        capture: Capture = Capture(),  # noqa: B008
        noise_key: mx.array | None = None,
        drafted: mx.array | None = None,
        ahead: bool = False,
    ) -> VerifyRows:
        """Extend the history by `block`, process it, and say what the model makes of every row.

        A block within `one_forward_draft_budget` takes one forward; a longer one is cut where a
        tile ends.

        With `ahead`, the step after a block of one token is submitted too, from the row's choice
        on the device, while the host has yet to read it. A call that asks for just that step
        finds it under way; any other call discards it. There is none, and `VerifyRows.ahead` is
        False, after longer blocks, at the end of a span or of the context, where quantisation
        begins, after a row that is no number, and where steps seem to copy the state.

        Args:
            block: The anchor, then the drafts.
            capture: What to bring back of every row.
            noise_key: uint32 [2], for the capture's scores.
            drafted: Drafts after the block that the host has not read yet, int32 [k]: they are
                read back with the rows, so that one wait serves both.
            ahead: Whether to submit the step after the block.

        Raises:
            ValueError: An empty block, one longer than `max_verify_block_length`, or an id
                outside the vocabulary. The engine is as it was.
            EngineBusy: Another thread is inside the engine.
        """
        self._mend()
        ids = token_ids(block, self._vocab_size, "verify")
        if not ids:
            raise ValueError("verify: expected at least the anchor, got an empty block")
        count = 0 if drafted is None else len(drafted)
        self._examine(self._cursor)
        _require_length("verify", len(ids) + count, self._reach.verify_bound)
        before = self._cursor
        single = not count and len(ids) == 1
        ahead = ahead and single
        with _Call(self, ids):
            begun = self._begun(ids, capture, noise_key) if single else None
            if drafted is not None and count:
                # An id outside would be refused too late: MLX reads past a table unasked.
                self._unread = [mx.clip(drafted.astype(mx.int32), 0, self._vocab_size - 1)]
            if begun is not None:
                tiles = [begun.tile]
                self._state.checkpoints += begun.checkpoints
            else:
                if not self._place.reaches(before, self._state.position):
                    # Wider tiles than are left would feed again what is behind the cursor.
                    self._bring_state_to_cursor()
                with self._memory_watched("alone" if ahead else "incomparable"):
                    tiles = self._verify_tiles(capture, noise_key)
                    if ahead:
                        self._submit(tiles[-1].outputs)
                self._forward_count += len(tiles)
            if ahead:
                self._step_ahead(tiles[-1], capture, noise_key)
            rows = self._read_rows(tiles, capture, drafted)
            self._history += rows.drafted
        self._state.settle(before)
        return rows

    def roll_out_limit(self, pending: int) -> int:
        """Most tokens that `roll_out` chooses after `pending` tokens at the cursor.

        The context bounds it, and so do the rings and the start of quantisation: if nothing of
        the rollout is kept, the state has to go on after the pending tokens.
        """
        return self._reach.roll_out_limit(pending)

    @one_call
    def roll_out(
        self,
        tokens: Sequence[int],
        count: int,
        capture: Capture = Capture(),  # noqa: B008
        noise_key: mx.array | None = None,
        go_on: GoOn | None = None,
    ) -> Rollout:
        """Extend the history by `tokens`, then choose tokens one after the other on the device.

        Each chosen token is fed to the next step without being read by the host, nor awaited, but
        where that seems to copy the state. The history ends with `tokens`; `keep` then takes
        over what of the rollout turned out right.

        Args:
            tokens: What follows the history, at least one.
            count: Most tokens to choose, from 1 to `roll_out_limit(len(tokens))`.
            capture: How to choose, and whether to bring the logits.
            noise_key: uint32 [2], for the capture's scores.
            go_on: Asked after every step whether another one is wanted.

        Raises:
            ValueError: No token, an id outside the vocabulary, or more tokens than there is room
                for. The engine is as it was.
            EngineBusy: Another thread is inside the engine.
        """
        self._mend()
        ids = token_ids(tokens, self._vocab_size, "roll_out")
        if not ids:
            raise ValueError("roll_out: expected at least one token to go on from, got none")
        promised = self.roll_out_limit(len(ids))
        self._examine(self._cursor)
        _require_length("roll_out", len(ids), self._reach.verify_bound)
        limit = self.roll_out_limit(len(ids))
        if not 1 <= count <= max(limit, promised) or not limit:
            raise ValueError(f"roll_out: expected 1 to {limit} tokens to choose, got {count}")
        # Fewer, if the narrowest width has been given up just now.
        count = min(count, limit)
        before = self._cursor
        with _Call(self, ids):
            rollout = self._rollout = self._rolled_out(count, capture, noise_key, go_on)
        self._state.settle(before)
        return rollout

    @one_call
    def keep(self, count: int) -> None:
        """Take the first `count` tokens of the last rollout into the history.

        Raises:
            ValueError: That many tokens have not been processed, or another call came between.
                The engine is as it was.
            EngineBusy: Another thread is inside the engine.
        """
        self._mend()
        rollout = self._rollout
        processed = 0 if rollout is None else rollout.processed
        if not 0 <= count <= processed:
            raise ValueError(
                f"keep: expected 0 to {processed} tokens, which is what the last rollout has "
                f"processed, got {count}"
            )
        if rollout is None:
            return
        try:
            ids = rollout.ids(count)
        except Exception as failure:
            self._cursor = 0
            raise self._emptied(failure) from failure
        self._forget_unread()
        cursor = self._cursor + count
        self._history += ids
        self._state.checkpoints += [c for c in rollout.checkpoints if c.position <= cursor]
        self._cursor = cursor

    def allows_rewind(self, to: int) -> bool:
        """Whether `reset(to)` would succeed: the state holds what the next forward there needs.

        That is every key a ring's window shows to the tile that would start there, a recurrent
        checkpoint from which one tile reaches the token after `to`, and keys in the form,
        quantised or not, in which that token sees them. The empty state needs nothing.
        """
        return 0 <= to <= self._cursor and self._reach.why_no_rewind(to) is None

    def longest_rewind(self, to: int) -> int:
        """The farthest length, `to` or less, that a next turn may go on from.

        It is the same whatever was drafted: what rings hold beyond that, and recurrent
        checkpoints other than the prompt's end, depend on where blocks happened to end.
        """
        return self._reach.longest_rewind(to)

    @one_call
    def reset(self, to: int) -> None:
        """Shorten history and cursor to `to` tokens; 0 also zeroes the state.

        Raises:
            ValueError: `to` lies outside 0..processed_token_count. The engine is as it was.
            RewindRefused: The state no longer holds what is needed there. The engine, every
                layer of it, is as it was.
            EngineBusy: Another thread is inside the engine.
        """
        self._mend()
        if not 0 <= to <= self._cursor:
            raise ValueError(
                f"reset: expected a length from 0 to {self._cursor}, the tokens processed so "
                f"far, got {to}"
            )
        if reason := self._reach.why_no_rewind(to):
            raise RewindRefused(
                f"reset: cannot go back from {self._cursor} tokens to {to}: {reason}. Use "
                "reset(0) and process the tokens again"
            )
        self._forget_unread()
        self._cursor = to
        if to == 0:
            self._history.clear()
            self._state.empty()
            self._survey.forget_failures()
        else:
            self._mend()

    @one_call
    def image(self) -> StateImage:
        """What the engine holds, without padding and rejected rows: see `restore`.

        Raises:
            EngineBusy: Another thread is inside the engine.
        """
        self._mend()
        start = self._bring_state_to_cursor()
        kept = min(self._reach.always_kept, start)
        return image_of(self._state, list(self._history), kept)

    @one_call
    def restore(self, image: StateImage) -> None:
        """Hold what another engine of this model held, and nothing else.

        Raises:
            ValueError: The image is not of this model, or this engine cannot go on from there:
                its context, the widths of its tiles, its quantisation. It is as it was.
            EngineBusy: Another thread is inside the engine.
        """
        self._mend()
        tokens = token_ids(image.tokens, self._vocab_size, "the image's tokens")
        count = len(tokens)
        if count >= self._context_length:
            raise ValueError(
                f"it holds {count} tokens, too many for a context of {self._context_length}; "
                "raise max_context_length"
            )
        forms = self._state.forms
        if reason := why_not(image, forms[1 if image.is_quantized else 0]):
            raise ValueError(reason)
        capacity = max(self._state.capacity, self._capacity_for(max(1, count)))
        state = ModelState(*forms, capacity)
        if count:
            put_image(state, image)
        if reason := self._reach.why_not_on(state, count):
            raise ValueError(reason)
        self._forget_unread()
        # As one, should Ctrl-C arrive here.
        self._state, self._history, self._cursor = state, tokens, count
        if self._survey.forget_failures():
            # The next call finds out again which widths are left here.
            self._regimes.compared = set()

    def _mend(self) -> None:
        """Take back what a call left half done that failed, or because Ctrl-C came inside.

        The cursor says what stays. Every call begins so, and those that add tokens end so if they
        fail; where Ctrl-C keeps them from that, the next call does it.
        """
        state = self._state
        del self._history[self._cursor :]
        if self._cursor == 0:
            if not state.is_empty:
                self._rollout = self._ahead = None
                state.empty()
            state.journal = None
        elif state.journal is not None:
            # All that was written is doubted anyhow, whatever they would say of it.
            self._rollout = self._ahead = None
            try:
                state.undo()
            except Exception as failure:
                self._cursor = 0
                raise self._emptied(failure) from failure
        if self._ahead is not None and (
            self._ahead.position != self._cursor or state.non_finite_until > self._cursor
        ):
            # Others have gone on since it was submitted, or what it has written is to be cleared.
            self._forget_unread()
        self._unread = []
        state.rewind(self._cursor)

    def _quantize_from(self, position: int | None) -> None:
        """Show keys quantised from this position on; None is nowhere."""
        self._limits = TileLimits(self._spans, position)
        self._regimes = ComparedRegimes(self._limits, self._context_length)

    def _decode_in(
        self,
        widths: tuple[int, ...],
        *,
        rows_agree: bool = True,
        regime: Regime | None = None,
        places: Mapping[int, str] | None = None,
    ) -> None:
        """Use these widths: the ladder, or the part of it that computes the same bits.

        Args:
            widths: Ascending.
            rows_agree: Whether a position is known to come out the same in all of their rows.
            regime: Where that is so; None is where a context begins.
            places: What is to say of widths that are given up, by the position from which on.
        """
        place = tile_placement(
            self._placement, widths, self._limits, self._recurrent, rows_agree=rows_agree
        )
        prefill_widths = place.prefill_widths(self._step_widths)
        regime = self._regimes.at(0) if regime is None else regime
        # As one, should Ctrl-C arrive here.
        self._widths, self._place, self._prefill_widths, self._places, self._regimes.compared = (
            widths,
            place,
            prefill_widths,
            places or {},
            {regime},
        )
        self._aligned = self._placement == "aligned"

    def _equal_widths(self) -> tuple[int, ...]:
        """The part of the ladder that is one class, so that no draft length changes a bit."""
        self.width_classes, known = self._survey.classes_at(0, self._usable, engine=self)
        self.remembered["width classes"] = known
        kept = best_class(self.width_classes) if self.width_classes else self._usable[:1]
        if kept != self._usable:
            self._notes["widths"] = _given_up(kept, self._usable)
        return kept

    def _tile_start(self, position: int) -> int:
        return self._place.start(position, self._state.position)

    def _prefill_tiles(self) -> Iterator[int]:
        """Process the history from the cursor on in full tiles; yields where each has come to.

        First the state is brought to the cursor: where prefill tiles begin, and so how their sums
        are rounded, must not tell how much was drafted before. Then come mlx-lm's own chunks:
        each sees keys quantised or not as its first position says.
        """
        position, end = self._bring_state_to_cursor(), len(self._history)
        for chunk in range(position, end, self._prefill_widths[0]):
            if self._limits.quantized_at(chunk):
                self._state.quantize()
            chunk_end = min(end, chunk + self._prefill_widths[0])
            for width in self._prefill_widths:
                while chunk_end - position >= width:
                    span = self._spans.span(position + width - 1)
                    outputs = self._forward(position, width, width, span, capture=None)
                    position = self._finish_prefill_tile(outputs, position + width)
                    yield position

    def _bring_state_to_cursor(self) -> int:
        """Leave the state where plain decoding would have left it; returns the next tile's start.

        That is the cursor, as near as the narrowest decode tile allows.
        """
        self._examine(self._cursor)
        position = self._tile_start(self._cursor)
        for width in reversed(self._widths):
            while self._cursor - position >= width:
                outputs = self._decode_tile(position, position + width, Capture()).outputs
                position = self._finish_prefill_tile(outputs, position + width)
        return position

    def _finish_prefill_tile(self, outputs: list[mx.array], position: int) -> int:
        """Compute what is under way. Nobody goes back inside a prefill: one state is kept."""
        self._evaluate([outputs])
        self._prefill_forward_count += 1
        self._state.settle(position)
        return position

    def _verify_tiles(self, capture: Capture, noise_key: mx.array | None) -> list[DecodeTile]:
        """Run the tiles that cover the history from the cursor on; nothing is read back yet."""
        tiles: list[DecodeTile] = []
        position = self._cursor
        end = len(self._history) + sum(map(len, self._unread))
        while position < end:
            start = self._tile_start(position)
            stop = min(end, self._place.end(start))
            tiles.append(self._decode_tile(position, stop, capture, noise_key))
            position = stop
        return tiles

    def _rolled_out(
        self, count: int, capture: Capture, noise_key: mx.array | None, go_on: GoOn | None
    ) -> Rollout:
        """Process the history from the cursor on, then choose; everything is submitted."""
        after = len(self._history)
        position = self._cursor
        tiles: list[DecodeTile] = []
        while position < after:
            start = self._tile_start(position)
            stop = min(after, self._place.end(start))
            full = [width for width in self._widths if position - start < width <= stop - start]
            if self._recurrent and full:
                # The state arrives there, and no later step has to feed these tokens again.
                stop = start + full[-1]
            only = not tiles and stop == after
            with self._memory_watched("alone" if only else "incomparable"):
                tiles.append(self._submitted_tile(position, stop, capture, noise_key))
            position = stop
        steps: list[RolloutStep] = []
        while True:
            tile = tiles[-1]
            row = slice(tile.rows.stop - 1, tile.rows.stop)
            logits = tile.outputs[1][row] if capture.logits else None
            steps.append(RolloutStep(tile.outputs[0][:, row], logits))
            if (go_on is not None and not go_on(steps)) or len(steps) == count:
                break
            alone = self._watch.awaits
            if alone:
                self._evaluate([[steps[-1].head]])
            self._unread.append(steps[-1].token)
            with self._memory_watched("alone" if alone else "ahead"):
                tiles.append(self._submitted_tile(position, position + 1, capture, noise_key))
            position += 1
        self._forward_count += len(tiles)
        nan_counts = mx.concatenate([tile.outputs[0][1] for tile in tiles])
        state = self._state
        heads = [step.head for step in steps]
        self._submit(heads, nan_counts, state.slots, [c.arrays for c in state.checkpoints])
        end = max(tile.end for tile in tiles)
        past = [c for c in state.checkpoints if c.position > after]
        return Rollout(steps, nan_counts, end, past)

    def _step_ahead(self, tile: DecodeTile, capture: Capture, noise_key: mx.array | None) -> None:
        """Submit the step after a tile's last row, if it would do what a call for it would do."""
        state, position = self._state, len(self._history)
        if (
            self._watch.awaits
            or position >= self._context_length - 1
            or self._spans.span(position) != self._spans.span(position - 1)
            or self._limits.quantized_at(self._tile_start(position)) != state.is_quantized
        ):
            return
        self._unread = [tile.outputs[0][0, tile.rows.stop - 1 : tile.rows.stop]]
        with self._memory_watched("ahead"):
            step = self._submitted_tile(position, position + 1, capture, noise_key)
            past = [c for c in state.checkpoints if c.position > position]
            # The token needs them not, and another thread cannot compute them.
            self._submit([c.arrays for c in past])
        self._ahead = StepAhead(position, tile, capture, noise_key, step, past)
        self._forward_count += 1
        self._unread = []

    def _begun(
        self, ids: list[int], capture: Capture, noise_key: mx.array | None
    ) -> StepAhead | None:
        """The step under way, if it is what is asked for."""
        ahead = self._ahead
        if ahead is None or not ahead.serves(ids, capture, noise_key):
            return None
        self._ahead = None
        return ahead

    @contextmanager
    def _memory_watched(self, kind: Submitted) -> Iterator[None]:
        """Tell the watch by how much MLX's memory grows inside the block, until it has seen enough.

        Where the state itself grows there, nothing can be told.
        """
        watch, state = self._watch, self._state
        self._forget_unread()
        before, capacity = mx.get_active_memory(), state.capacity
        yield
        growth = mx.get_active_memory() - before
        if watch.copies:
            return
        if kind == "incomparable" or state.capacity != capacity:
            watch.incomparable()
        elif kind == "alone":
            watch.alone(growth)
        elif watch.compares:
            watch.ahead(growth, sum(array.nbytes for array in state.slots))
        if watch.copies:
            self._notes["copies"] = watch.note

    def _forget_unread(self) -> None:
        """What was submitted unread is rejected, but for what was kept; what it wrote is known."""
        for unread in (self._rollout, self._ahead):
            if unread is None:
                continue
            try:
                nan_counts: Any = unread.nan_counts.tolist()
            except Exception as failure:
                self._cursor = 0
                raise self._emptied(failure) from failure
            if any(nan_counts):
                self._state.non_finite_until = max(self._state.non_finite_until, unread.end)
        self._rollout = self._ahead = None

    def _submitted_tile(
        self, position: int, stop: int, capture: Capture, noise_key: mx.array | None
    ) -> DecodeTile:
        """Run the tile that computes positions up to `stop`; the device begins."""
        tile = self._decode_tile(position, stop, capture, noise_key)
        # Not the slots: MLX would copy what is submitted before its use.
        self._submit(tile.outputs)
        return tile

    def _decode_tile(
        self, position: int, stop: int, capture: Capture, noise_key: mx.array | None = None
    ) -> DecodeTile:
        """Run the tile that computes positions up to `stop`; lazily."""
        start = self._tile_start(position)
        if self._limits.quantized_at(start):
            self._state.quantize()
        width = next(width for width in self._widths if width >= stop - start)
        span = self._spans.span(start)
        outputs = self._forward(start, stop - start, width, span, capture, noise_key)
        return DecodeTile(outputs, slice(position - start, stop - start), start + width)

    def _forward(
        self,
        start: int,
        rows: int,
        width: int,
        span: int,
        capture: Capture | None,
        noise_key: mx.array | None = None,
    ) -> list[mx.array]:
        """Run the history's tokens from `start`, `rows` of them, in one tile; lazily."""
        state = self._state
        self._forget_unread()
        try:
            state.clear_non_finite(self._cursor)
        except Exception as failure:
            self._cursor = 0
            raise self._emptied(failure) from failure
        if span + self.verify_tile_width > state.capacity:
            state.grow(self._capacity_for(span))
        tokens = self._tile_tokens(start, rows, width)
        tile = self._tiles[state.tile_layout].get(TileKey(width, span, state.capacity, capture))
        outputs, slots, recurrent = tile(
            tokens,
            mx.array(start, dtype=mx.int32),
            _NO_NOISE if noise_key is None else noise_key,
            state.slots,
            state.checkpoints[-1].arrays,
        )
        # The old arrays have no owner left when the tile is evaluated, or MLX would copy them.
        state.wrote(slots, start, start + width, self._cursor)
        if rows == width and recurrent:
            state.adopt(start + width, recurrent)
        return outputs

    def _tile_tokens(self, start: int, rows: int, width: int) -> mx.array:
        """The tokens from `start`, `rows` of them, and padding: int32 [1, width]."""
        known = self._history[start : start + rows]
        # A committed or just proposed token: padding meets no embedding that the rows do not.
        if len(known) == rows:
            return mx.array([known + known[-1:] * (width - rows)], dtype=mx.int32)
        begin = max(0, start - len(self._history))
        unread = mx.concatenate(self._unread)[begin : begin + rows - len(known)]
        padding = mx.broadcast_to(unread[-1:], (width - rows,))
        return mx.concatenate([mx.array(known, dtype=mx.int32), unread, padding])[None]

    def _read_rows(
        self, tiles: list[DecodeTile], capture: Capture, drafted: mx.array | None = None
    ) -> VerifyRows:
        """Evaluate the tiles, read back what the host needs, and remember non-finite slots."""
        outputs = [*[tile.outputs for tile in tiles], [] if drafted is None else [drafted]]
        # The state is what the step under way works at.
        self._evaluate(outputs, with_state=self._ahead is None)
        drafts = [] if drafted is None else token_ids(drafted, self._vocab_size, "verify")
        for tile in tiles:
            if tile.is_non_finite:
                self._state.non_finite_until = max(self._state.non_finite_until, tile.end)
                # The step under way may have met what is no number.
                self._forget_unread()
        cap = self._tiles[self._state.tile_layout].final_cap if capture.raw else None
        return rows_of(tiles, capture, cap, drafts, ahead=self._ahead is not None)

    def _evaluate(self, outputs: list[list[mx.array]], *, with_state: bool = True) -> None:
        """Compute outputs, and the state."""
        state = self._state
        try:
            if with_state:
                arrays = [checkpoint.arrays for checkpoint in state.checkpoints]
                mx.eval(outputs, state.slots, arrays)
            else:
                mx.eval(outputs)
        except Exception as failure:
            self._cursor = 0
            raise self._emptied(failure) from failure

    def _submit(self, *arrays: Any) -> None:
        """Let the device begin; the host goes on."""
        try:
            mx.async_eval(*arrays)
        except Exception as failure:
            self._cursor = 0
            raise self._emptied(failure) from failure

    def _emptied(self, failure: Exception) -> RuntimeError:
        """A device that fails takes the state with it; this is what to raise.

        Whoever catches the failure sets the cursor to 0 first, with nothing between where Ctrl-C
        could come: then the next call does the rest, if this one does not.
        """
        self._rollout = self._ahead = None
        self._history.clear()
        self._state.empty()
        return RuntimeError(
            "the device failed while it computed a forward; the engine was emptied, so begin "
            f"again with the whole prompt ({in_words(failure)})"
        )

    def _capacity_for(self, tokens: int) -> int:
        """Room to make for `tokens`: doublings of the first span, up to the last span.

        The last legal tile starts below a span's end, so it writes less than a tile past it.
        """
        largest = self._spans.span(self._context_length - 1)
        slots = self._spans.step
        while slots < tokens:
            slots *= 2
        return min(slots, largest) + self.verify_tile_width

    @property
    def _reach(self) -> Reach:
        """What may be done from where the engine stands now."""
        return Reach(
            self._cursor,
            self._context_length,
            self._state,
            self._place,
            self._widths,
            self._widest,
            self._limits,
            # Even of a single width the rows may differ among themselves, but for one row's.
            self._regimes if self._compares and self._ladder != (1,) else None,
            moves_by_tiles=self._recurrent or self._aligned,
            aligned=self._aligned,
        )


class _Call:
    """A call that adds tokens to an engine's history: all of them, or it was never made.

    No generator makes this context manager: one that Ctrl-C keeps from its end would end later,
    when it is collected, and take back what others have done since.

    Args:
        engine: The engine.
        ids: The tokens.
        prefills: Whether prefill tiles are run in a state that is not empty.
    """

    def __init__(self, engine: StaticShapeEngine, ids: list[int], *, prefills: bool = False):
        self._engine = engine
        self._ids = ids
        self._prefills = prefills

    def __enter__(self) -> None:
        engine = self._engine
        engine._state.begin_call(engine._cursor)
        engine._state.open_journal(prefills=self._prefills)
        engine._history += self._ids

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        engine = self._engine
        if kind is None:
            end = len(engine._history)
            # As one, should Ctrl-C arrive here.
            engine._cursor, engine._state.journal = end, None
        engine._mend()


def _given_up(
    kept: tuple[int, ...],
    ladder: tuple[int, ...],
    where: str = "",
    reason: str = "round differently on this device",
) -> str:
    """A note about the widths of a ladder that are left out."""
    few, many = (", ".join(map(str, widths)) for widths in (kept, ladder))
    return f"tile widths {few} of {many}{where}: the others {reason}"


def _require_length(what: str, count: int, bound: Bound) -> None:
    length, reason = bound
    if count > length:
        raise ValueError(f"{what}: expected at most {length} tokens, got {count}: {reason}")


def _check_quantized_start(start: int) -> None:
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise ValueError(f"quantized_kv_start: expected a position, 0 or more, got {start!r}")
