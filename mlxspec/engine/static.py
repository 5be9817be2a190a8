"""The static-shape engine: an mlx-lm model run in compiled forwards of fixed width."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.engine.caches import LayerShape
from mlxspec.engine.exclusive import Exclusive
from mlxspec.engine.protocol import Capture, ProgressCallback, VerifyRows
from mlxspec.engine.spans import SpanRule
from mlxspec.engine.support import context_limit, default_context_length, require_static
from mlxspec.engine.tiles import TileKey, Tiles
from mlxspec.engine.tokens import TokenView, token_ids

Placement = Literal["free", "aligned"]

DEFAULT_TILE_WIDTHS = (1, 2, 4, 8, 16)
DEFAULT_PREFILL_STEP_SIZE = 2048


@dataclass(frozen=True)
class _Tile:
    """One decode forward under way.

    Attributes:
        outputs: What the tile returned, see `Tiles.get`.
        rows: The rows that belong to the block, without re-fed tokens and padding.
        end: One past the last slot the tile wrote, padding included.
    """

    outputs: list[mx.array]
    rows: slice
    end: int


class StaticShapeEngine:
    """Implements `SpeculativeEngine` for models whose every layer is full attention.

    A decode tile of the narrowest width that holds the block starts at the cursor ("free") or at
    the last multiple of its one width ("aligned", where a position is always computed in the
    same row of the same shape, at the price of re-feeding the tile's committed tokens).

    Args:
        model: A model of mlx-lm. Its weights must not change while the engine lives; see
            `weights_unchanged`.
        max_context_length: Most tokens of a sequence, prompt and output. Default: what the
            model's config declares.
        tile_widths: The ladder: widths that decode tiles may have, in rows.
        placement: "free" or "aligned"; aligned takes exactly one width.
        prefill_step_size: Rows of the widest prefill tile; the others are its powers of two.
        span_step: Slots of the smallest span bucket.
        initial_capacity: Slots to allocate at first, in tokens; the state grows with use.

    Raises:
        UnsupportedModel: A layer of the model is not full attention, or its family is unknown.
        ValueError: An option is out of range.
    """

    why_no_speculation: str | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        max_context_length: int | None = None,
        tile_widths: Sequence[int] = DEFAULT_TILE_WIDTHS,
        placement: Placement = "free",
        prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE,
        span_step: int = SpanRule.step,
        initial_capacity: int = 0,
    ):
        self._spans = SpanRule(span_step)
        self._widths = checked_tile_widths(tile_widths, placement, span_step)
        self._aligned = placement == "aligned"
        self._prefill_widths = _prefill_widths(prefill_step_size)
        require_static(model)
        self._context_length = _checked_context_length(
            max_context_length, model, self.verify_tile_width
        )
        self._model = model
        self._weights = _weights(model)
        self._layers, self._vocab_size = _warm_up(model)
        self._tiles = Tiles(model)
        self._exclusive = Exclusive()
        self._history: list[int] = []
        self._cursor = 0
        self._non_finite_until = 0
        self._forward_count = 0
        self._prefill_forward_count = 0
        self._capacity = self._capacity_for(max(1, min(initial_capacity, self._context_length)))
        self._arrays = self._zero_state()

    @property
    def vocab_size(self) -> int:
        """Entries in a row of logits; every token id lies below it."""
        return self._vocab_size

    @property
    def max_context_length(self) -> int:
        """Most tokens a sequence may have, prompt and output; the last is never processed."""
        return self._context_length

    @property
    def tokens(self) -> TokenView:
        """The history: every token the state covers, as a read-only view."""
        return TokenView(self._history)

    @property
    def processed_token_count(self) -> int:
        """The cursor: how many tokens the state covers, and the position of the anchor."""
        return self._cursor

    @property
    def tile_widths(self) -> tuple[int, ...]:
        """The ladder, ascending."""
        return self._widths

    @property
    def verify_tile_width(self) -> int:
        """Rows of the widest decode tile."""
        return self._widths[-1]

    @property
    def one_forward_draft_budget(self) -> int:
        """How many drafts after an anchor at the cursor fit one forward; never below 0.

        The tile has to hold them, all rows have to attend to one span, and the token after the
        last draft needs a position of its own inside the context.
        """
        cursor = self._cursor
        in_tile = self._tile_start(cursor) + self.verify_tile_width - cursor - 1
        in_span = self._spans.span(cursor) - cursor - 1
        in_context = self._context_length - cursor - 2
        return max(0, min(in_tile, in_span, in_context))

    @property
    def max_verify_block_length(self) -> int:
        """The longest block `verify` takes here: full attention is bounded by the context alone.

        The token at the context's last position is emitted and never processed.
        """
        return max(0, self._context_length - 1 - self._cursor)

    @property
    def forward_count(self) -> int:
        """Decode forwards since the engine was made."""
        return self._forward_count

    @property
    def prefill_forward_count(self) -> int:
        """Prefill forwards since the engine was made."""
        return self._prefill_forward_count

    @property
    def trace_count(self) -> int:
        """How often a tile was traced since the engine was made, in all threads."""
        return self._tiles.trace_count

    @property
    def compiled(self) -> bool | None:
        """Whether MLX compiles the tiles; None until a tile has been called twice."""
        return self._tiles.compiled

    @property
    def capacity(self) -> int:
        """Slots allocated per layer at present."""
        return self._capacity

    @property
    def leased(self) -> bool:
        """Whether somebody is generating with this engine now."""
        return self._exclusive.leased

    @property
    def weights_unchanged(self) -> bool:
        """Whether the model still has the weights that the compiled tiles hold as constants."""
        now = _weights(self._model)
        return len(now) == len(self._weights) and all(
            a is b for a, b in zip(now, self._weights, strict=True)
        )

    def lease(self) -> AbstractContextManager[None]:
        """Hold the engine for one sequence; a second holder gets `EngineBusy`."""
        return self._exclusive.lease()

    def prefill(self, tokens: Sequence[int], progress: ProgressCallback | None = None) -> None:
        """Extend the history by `tokens` and process them in wide tiles without logits.

        Every tile is full: the widest that the rest fills, then the next, down to one row.

        Args:
            tokens: Token ids; may be empty.
            progress: Called with (tokens processed so far, all of them) before the first tile
                and after every one.

        Raises:
            ValueError: An id outside the vocabulary, or more tokens than the context has room
                for. The engine is as it was.
            EngineBusy: Another thread is inside the engine.
        """
        with self._exclusive.call("prefill"):
            ids = token_ids(tokens, self._vocab_size, "prefill")
            self._require_room(len(ids), "prefill")
            report = progress or (lambda processed, total: None)
            report(0, len(ids))
            before = self._cursor
            try:
                self._history += ids
                for width in self._prefill_widths:
                    while len(self._history) - self._cursor >= width:
                        span = self._spans.span(self._cursor + width - 1)
                        self._forward(self._cursor, width, width, span, capture=None)
                        self._evaluate([])
                        self._prefill_forward_count += 1
                        self._cursor += width
                        report(self._cursor - before, len(ids))
            except BaseException:
                self._cursor = min(before, self._cursor)
                raise
            finally:
                del self._history[self._cursor :]
            # Wide tiles leave wide temporaries in MLX's buffer cache, which decoding cannot use.
            mx.clear_cache()

    def verify(self, block: Sequence[int], capture: Capture = Capture()) -> VerifyRows:  # noqa: B008
        """Extend the history by `block`, process it, and say what the model makes of every row.

        A block within `one_forward_draft_budget` takes one forward; a longer one is cut where a
        tile or a span ends.

        Args:
            block: The anchor, then the drafts.
            capture: What to bring back besides the argmax of every row.

        Raises:
            ValueError: An empty block, one longer than `max_verify_block_length`, or an id
                outside the vocabulary. The engine is as it was.
            EngineBusy: Another thread is inside the engine.
        """
        with self._exclusive.call("verify"):
            ids = token_ids(block, self._vocab_size, "verify")
            if not ids:
                raise ValueError("verify: expected at least the anchor, got an empty block")
            self._require_room(len(ids), "verify")
            try:
                self._history += ids
                rows = self._read_rows(self._verify_tiles(capture), capture)
                self._cursor = len(self._history)
            finally:
                del self._history[self._cursor :]
            self._forward_count += rows.forwards
            return rows

    def allows_rewind(self, to: int) -> bool:
        """Whether `reset(to)` would succeed: full attention holds every earlier position."""
        return 0 <= to <= self._cursor

    def reset(self, to: int) -> None:
        """Shorten history and cursor to `to` tokens; 0 also zeroes the state.

        Raises:
            ValueError: `to` lies outside 0..processed_token_count. The engine is as it was.
            EngineBusy: Another thread is inside the engine.
        """
        with self._exclusive.call("reset"):
            if not self.allows_rewind(to):
                raise ValueError(
                    f"reset: expected a length from 0 to {self._cursor}, the tokens processed so "
                    f"far, got {to}"
                )
            del self._history[to:]
            self._cursor = to
            if to == 0:
                self._arrays = []
                self._arrays = self._zero_state()
                self._non_finite_until = 0

    def _tile_start(self, position: int) -> int:
        return position // self._widths[0] * self._widths[0] if self._aligned else position

    def _verify_tiles(self, capture: Capture) -> list[_Tile]:
        """Run the tiles that cover the history from the cursor on; nothing is read back yet."""
        tiles: list[_Tile] = []
        position, end = self._cursor, len(self._history)
        while position < end:
            start = self._tile_start(position)
            span = self._spans.span(position)
            stop = min(end, start + self.verify_tile_width, span)
            width = next(width for width in self._widths if width >= stop - start)
            outputs = self._forward(start, stop - start, width, span, capture)
            tiles.append(_Tile(outputs, slice(position - start, stop - start), start + width))
            position = stop
        return tiles

    def _read_rows(self, tiles: list[_Tile], capture: Capture) -> VerifyRows:
        """Evaluate the tiles, read back what the host needs, and remember non-finite slots."""
        self._evaluate([tile.outputs for tile in tiles])
        argmax: list[int] = []
        nan_count: list[int] = []
        for tile in tiles:
            head: Any = tile.outputs[0].tolist()
            tile_argmax, tile_nan_count = head
            if any(tile_nan_count):
                self._non_finite_until = max(self._non_finite_until, tile.end)
            argmax += tile_argmax[tile.rows]
            nan_count += tile_nan_count[tile.rows]
        captured = [
            mx.concatenate(list(parts)) if len(parts) > 1 else parts[0]
            for parts in zip(*([o[t.rows] for o in t.outputs[1:]] for t in tiles), strict=True)
        ]
        logits = captured.pop(0) if capture.logits else None
        top_values, top_indices = captured if capture.top_k else (None, None)
        return VerifyRows(argmax, nan_count, len(tiles), logits, top_values, top_indices)

    def _forward(
        self, start: int, rows: int, width: int, span: int, capture: Capture | None
    ) -> list[mx.array]:
        """Run the history's tokens from `start`, `rows` of them, in one tile; lazily."""
        self._clear_non_finite()
        self._grow(span)
        tokens = self._history[start : start + rows]
        # A committed or just proposed token: padding meets no embedding that the rows do not.
        tokens += tokens[-1:] * (width - rows)
        tile = self._tiles.get(TileKey(width, span, self._capacity, capture))
        arrays, self._arrays = self._arrays, []
        try:
            outputs, updated = tile(
                mx.array([tokens], dtype=mx.int32), mx.array(start, dtype=mx.int32), arrays
            )
        except BaseException:
            self._arrays = arrays
            raise
        # The old arrays must have no owner left when the tile is evaluated, or MLX copies them.
        del arrays
        self._arrays = updated
        return outputs

    def _evaluate(self, outputs: list[list[mx.array]]) -> None:
        """Compute outputs and state; a device that fails here takes the state with it."""
        try:
            mx.eval(outputs, self._arrays)
        except Exception as failure:
            self._history.clear()
            self._cursor = 0
            self._arrays = []
            self._arrays = self._zero_state()
            raise RuntimeError(
                "the device failed while it computed a forward; the engine was emptied, so begin "
                f"again with the whole prompt ({failure})"
            ) from failure

    def _clear_non_finite(self) -> None:
        """Zero the slots past the cursor if a row there was not finite.

        A masked slot has weight 0, and 0 * NaN is NaN: a rejected row that was not a number
        would poison every later one.
        """
        stale = self._non_finite_until - self._cursor
        if stale > 0:
            at = mx.array([self._cursor])
            for index, array in enumerate(self._arrays):
                zeros = mx.zeros((*array.shape[:2], stale, array.shape[3]), array.dtype)
                self._arrays[index] = mx.slice_update(array, zeros, at, axes=(2,))
            mx.eval(self._arrays)
        self._non_finite_until = 0

    def _grow(self, span: int) -> None:
        """Give the state room for `span` and a tile past it, one layer's copy at a time."""
        needed = span + self.verify_tile_width
        if needed <= self._capacity:
            return
        capacity = self._capacity_for(span)
        origin = mx.array([0])
        for index, array in enumerate(self._arrays):
            shape = (*array.shape[:2], capacity, array.shape[3])
            self._arrays[index] = mx.slice_update(
                mx.zeros(shape, array.dtype), array, origin, axes=(2,)
            )
            del array
            mx.eval(self._arrays[index])
        self._capacity = capacity
        self._tiles.forget_other_capacities(capacity)

    def _capacity_for(self, tokens: int) -> int:
        """Slots to allocate so that `tokens` fit: doublings of the first span, then the rest.

        The last legal tile starts below a span's end, so it writes less than a tile past it.
        """
        largest = self._spans.span(self._context_length - 1)
        slots = self._spans.step
        while slots < tokens:
            slots *= 2
        return min(slots, largest) + self.verify_tile_width

    def _zero_state(self) -> list[mx.array]:
        arrays = [array for layer in self._layers for array in layer.zeros(self._capacity)]
        mx.eval(arrays)
        return arrays

    def _require_room(self, count: int, what: str) -> None:
        if count > self.max_verify_block_length:
            raise ValueError(
                f"{what}: expected at most {self.max_verify_block_length} tokens, got {count}: "
                f"the context holds {self._context_length} tokens, the last of which is only "
                f"emitted, and {self._cursor} are processed. Shorten the input or raise "
                "max_context_length"
            )


def checked_tile_widths(
    tile_widths: Sequence[int], placement: str, span_step: int
) -> tuple[int, ...]:
    """The ladder in ascending order.

    Raises:
        ValueError: No width, a width below 1, an unknown placement, or for "aligned" more than
            one width or one that does not divide the span buckets.
    """
    widths = tuple(sorted(set(tile_widths)))
    if not widths or any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in widths):
        raise ValueError(f"tile_widths: expected positive widths in rows, got {tile_widths!r}")
    if placement not in ("free", "aligned"):
        raise ValueError(f"placement: expected 'free' or 'aligned', got {placement!r}")
    if placement == "aligned" and (len(widths) != 1 or span_step % widths[0]):
        raise ValueError(
            "aligned placement: expected one tile width that divides the span step of "
            f"{span_step}, got {tile_widths!r}; for example tile_widths=(8,)"
        )
    return widths


def _prefill_widths(step_size: int) -> tuple[int, ...]:
    """Widths of prefill tiles, descending: `step_size` and the powers of two below it."""
    if isinstance(step_size, bool) or not isinstance(step_size, int) or step_size < 1:
        raise ValueError(f"prefill_step_size: expected a positive number, got {step_size!r}")
    powers = [1 << bit for bit in reversed(range((step_size - 1).bit_length()))]
    return (step_size, *powers)


def _checked_context_length(asked: int | None, model: nn.Module, widest_tile: int) -> int:
    if asked is None:
        return default_context_length(model, widest_tile)
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 2:
        raise ValueError(
            f"max_context_length: expected at least 2 (one prompt token, one answer), got {asked!r}"
        )
    limit = context_limit(model, widest_tile)
    if limit is not None and asked > limit:
        raise ValueError(
            f"max_context_length: this model has a table of positions with room for {limit} "
            f"tokens beside a tile of {widest_tile} rows, got {asked}"
        )
    return asked


def _weights(model: nn.Module) -> list[mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return [array for _, array in flat]


def _warm_up(model: nn.Module) -> tuple[list[LayerShape], int]:
    """Run one token eagerly, which evaluates what the tiles hold as constants.

    An array that is not evaluated when a tile is traced, such as a lazily built table of rope
    frequencies that is no parameter, would be computed again in every call.

    Returns:
        Every layer's shape, and the width of a row of logits.
    """
    caches = make_prompt_cache(model)
    logits = model(mx.array([[0]]), cache=caches)
    mx.eval(logits, model.parameters())
    return [LayerShape.of(cache) for cache in caches], logits.shape[-1]
