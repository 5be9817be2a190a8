"""Sliding-window layers: keys live in a ring of `depth` slots, slot = position mod depth.

The ring is deeper than the window by what a rejected block may have overwritten, so that a rewind
finds every key it needs; where it does not, the rewind is refused. Nothing is ever copied back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxspec.engine.state.frame import TileFrame
from mlxspec.engine.state.full import require_rows
from mlxspec.engine.state.slots import SlotLayer, SlotShape


@dataclass(frozen=True)
class RingRule:
    """When a ring still holds what a forward needs.

    Position k is lost if and only if `k + depth < high_water`, where the high-water mark is one
    past the highest position written since the last start at 0, padding and rejected rows
    included: the slot of k then holds a later position.

    Attributes:
        window: Positions a row sees, its own included.
        depth: Slots.
    """

    window: int
    depth: int

    @staticmethod
    def for_decoding(window: int, widest_tile: int) -> RingRule:
        """The rule of a ring from which any one block can be rejected whole, and a little more.

        A tile writes before it attends: that takes `window - 1 + width` slots. Another width
        lets the rejected tile lie behind the cursor. A third lets a next turn take back the last
        tokens of an answer, a stop string for example, however far its drafts have written.
        """
        return RingRule(window, window - 1 + 3 * widest_tile)

    def may_start(self, start: int, high_water: int) -> bool:
        """Whether a tile may start at this position: every key its first row sees is held."""
        return start == 0 or self.last_write(start) >= high_water

    def last_write(self, start: int) -> int:
        """The high-water mark up to which a tile may later start at `start`."""
        return max(0, start - self.window + 1) + self.depth


@dataclass(frozen=True)
class RingLayer(SlotLayer):
    """One layer that sees only the last `window` positions; its arrays are keys and values."""

    rule: RingRule

    @staticmethod
    def of(cache: Any, widest_tile: int) -> RingLayer:
        """Read off a `RotatingKVCache` of mlx-lm that has seen a token."""
        rule = RingRule.for_decoding(cache.max_size, widest_tile)
        return RingLayer((SlotShape.of(cache.keys), SlotShape.of(cache.values)), rule)

    def zeros(self, capacity: int) -> list[mx.array]:
        """Keys and values of an empty state; a short context never fills the ring."""
        return super().zeros(min(capacity, self.rule.depth))

    def grow(self, array: mx.array, capacity: int) -> mx.array:
        """The array with room for `capacity` tokens or the whole ring.

        Below its full depth no position has gone round yet, so every slot keeps its place.
        """
        return super().grow(array, min(capacity, self.rule.depth))

    def first_seen(self, start: int) -> int:
        """The first position of a window that ends at `start`."""
        return max(0, start - self.rule.window + 1)

    def taken(self, array: mx.array, begin: int, end: int) -> mx.array:
        """The slots of positions begin..end-1, in their order; no more than the ring is deep."""
        slots = _slots(mx.arange(begin, end, dtype=mx.int32), self.rule.depth)
        return mx.take_along_axis(array, slots, axis=2)

    def laid(self, array: mx.array, begin: int, capacity: int) -> mx.array:
        """A ring that holds these slots of the positions from `begin` on."""
        positions = mx.arange(begin, begin + array.shape[2], dtype=mx.int32)
        ring = mx.zeros(
            (*array.shape[:2], min(capacity, self.rule.depth), array.shape[3]), array.dtype
        )
        return mx.put_along_axis(ring, _slots(positions, self.rule.depth), array, axis=2)

    def held_until(self, array: mx.array, end: int, high_water: int) -> int:
        """One past the last position, below `end`, that has a slot which no earlier one needs."""
        if array.shape[2] < self.rule.depth:
            return min(end, array.shape[2])
        return min(end, max(high_water, self.rule.depth))

    def clear(self, array: mx.array, begin: int, end: int) -> mx.array:
        """The array with the slots of positions begin..end-1 zeroed; at most the whole ring."""
        slots = _slots(mx.arange(begin, end, dtype=mx.int32), self.rule.depth)
        zeros = mx.zeros((*array.shape[:2], end - begin, array.shape[3]), array.dtype)
        return mx.put_along_axis(array, slots, zeros, axis=2)

    def bind(self, arrays: list[mx.array], frame: TileFrame) -> RingCache:
        """A cache for mlx-lm's model over these arrays."""
        keys, values = arrays
        return RingCache(keys, values, self.rule, frame)


class RingCache:
    """mlx-lm's cache interface over a ring, for the length of one trace.

    A decode tile writes its rows and then attends to the ring. A prefill tile may be wider than
    the ring is deep: it attends to the last `window - 1` keys joined with its own, then writes
    the last of its rows.
    """

    # No __len__ and no __bool__: mlx-lm's models test a cache for being there by its truth.

    def __init__(self, keys: mx.array, values: mx.array, rule: RingRule, frame: TileFrame):
        self.keys = keys
        self.values = values
        self.offset = frame.start
        self.max_size = rule.window
        self._rule = rule
        self._frame = frame
        self._fetched: tuple[mx.array, mx.array] | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values as the tile leaves them."""
        return [self.keys, self.values]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the rows [1, heads, width, size]; return the keys and values they attend to."""
        frame = self._frame
        if frame.prefill:
            self._fetched = (self._joined(self.keys, keys), self._joined(self.values, values))
        self.keys = self._written(self.keys, keys)
        self.values = self._written(self.values, values)
        if not frame.prefill:
            seen = self._decode_slots
            self._fetched = (self.keys[:, :, :seen], self.values[:, :, :seen])
        self.offset = frame.start + keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the tile's rows attend to; layers that share this cache read it after its owner."""
        if self._fetched is None:
            raise ValueError("a model read a sliding-window cache before it wrote it")
        return self._fetched

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """bool [width, keys], whatever form mlx-lm would have chosen for these arguments."""
        require_rows(self._frame, N)
        window = window_size or self._rule.window
        if window > self._rule.window:
            # mlx-lm's own cache shows such a model more keys the wider the forward is.
            raise ValueError(
                f"a model asked for a mask of {window} positions over a cache of "
                f"{self._rule.window}"
            )
        if self._frame.prefill:
            return self._frame.joined_mask(window, self._earlier)
        return self._frame.ring_mask(window, self._rule.depth, self._decode_slots)

    @property
    def _earlier(self) -> int:
        """How many positions before a prefill tile it may see: no more than there are."""
        return min(self._rule.window - 1, self._frame.span - self._frame.width)

    @property
    def _decode_slots(self) -> int:
        """Slots a decode tile attends to: the span, while no position in it has gone round."""
        return min(self._frame.span, self._rule.depth)

    def _joined(self, ring: mx.array, rows: mx.array) -> mx.array:
        if not self._earlier:
            return rows
        earlier = self._frame.start - self._earlier + mx.arange(self._earlier, dtype=mx.int32)
        slots = (earlier % self._rule.depth).reshape(1, 1, -1, 1)
        # Positions before 0 read some slot or other, maybe past a ring that is not grown yet.
        slots = mx.where(earlier.reshape(1, 1, -1, 1) < 0, 0, slots)
        return mx.concatenate([mx.take_along_axis(ring, slots, axis=2), rows], axis=2)

    def _written(self, ring: mx.array, rows: mx.array) -> mx.array:
        kept = min(rows.shape[2], self._rule.depth)
        slots = _slots(self._frame.rows[-kept:], self._rule.depth)
        return mx.put_along_axis(ring, slots, rows[:, :, -kept:], axis=2)


def _slots(positions: mx.array, depth: int) -> mx.array:
    """The slots of positions [n], shaped [1, 1, n, 1] to broadcast over heads and sizes."""
    return (positions % depth).reshape(1, 1, -1, 1)
