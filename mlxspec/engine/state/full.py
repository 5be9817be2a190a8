"""Full-attention layers: every key has a slot of its own, slot = position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxspec.engine.state.frame import TileFrame


@dataclass(frozen=True)
class SlotShape:
    """Shape and dtype of an array of slots, [1, heads, slots, size], but for their number."""

    heads: int
    size: int
    dtype: mx.Dtype

    @staticmethod
    def of(array: mx.array) -> SlotShape:
        """Read off an array [1, heads, any, size]."""
        return SlotShape(array.shape[1], array.shape[3], array.dtype)

    def zeros(self, slots: int) -> mx.array:
        """Fresh slots. They are zero, since what is masked must be finite."""
        return mx.zeros((1, self.heads, slots, self.size), self.dtype)


@dataclass(frozen=True)
class FullAttentionLayer:
    """One layer whose keys and values stay where they were written."""

    keys: SlotShape
    values: SlotShape

    @staticmethod
    def of(cache: Any) -> FullAttentionLayer:
        """Read off a `KVCache` of mlx-lm that has seen a token."""
        return FullAttentionLayer(SlotShape.of(cache.keys), SlotShape.of(cache.values))

    def zeros(self, capacity: int) -> list[mx.array]:
        """Keys and values of an empty state."""
        return [self.keys.zeros(capacity), self.values.zeros(capacity)]

    def grow(self, array: mx.array, capacity: int) -> mx.array:
        """The array with room for `capacity` tokens; the slots it has keep their places."""
        more = capacity - array.shape[2]
        return mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)]) if more > 0 else array

    def clear(self, array: mx.array, begin: int, end: int) -> mx.array:
        """The array with the slots of positions begin..end-1 zeroed."""
        zeros = mx.zeros((*array.shape[:2], end - begin, array.shape[3]), array.dtype)
        return mx.slice_update(array, zeros, mx.array([begin]), axes=(2,))

    def bind(self, arrays: list[mx.array], frame: TileFrame) -> FullAttentionCache:
        """A cache for mlx-lm's model over these arrays."""
        keys, values = arrays
        return FullAttentionCache(keys, values, frame)


class FullAttentionCache:
    """mlx-lm's cache interface over slots of fixed number, for the length of one trace.

    The model writes its rows at the tile's start and attends to the first `span` slots. The mask
    names for every row the slots of its own and earlier positions, so what lies in the others
    (rejected rows, padding, zeros) never matters as long as it is finite.
    """

    # No __len__ and no __bool__: mlx-lm's models test a cache for being there by its truth.

    def __init__(self, keys: mx.array, values: mx.array, frame: TileFrame):
        self.keys = keys
        self.values = values
        self.offset = frame.start
        self._frame = frame

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values as the tile leaves them."""
        return [self.keys, self.values]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the rows [1, heads, width, size]; return the first `span` slots."""
        at = self._frame.start.reshape(1)
        self.keys = mx.slice_update(self.keys, keys, at, axes=(2,))
        self.values = mx.slice_update(self.values, values, at, axes=(2,))
        self.offset = self._frame.start + keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The first `span` slots of keys and values, [1, heads, span, size]."""
        span = self._frame.span
        return self.keys[:, :, :span], self.values[:, :, :span]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """bool [width, span], whatever form mlx-lm would have chosen for these arguments."""
        require_rows(self._frame, N)
        return self._frame.causal_mask(window_size)


def require_rows(frame: TileFrame, rows: int) -> None:
    """Refuse a model that asks for another number of rows than the tile has."""
    if rows != frame.width:
        raise ValueError(f"a model asked for a mask of {rows} rows inside a tile of {frame.width}")
