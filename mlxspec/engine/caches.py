"""Key-value state of fixed shape under unmodified mlx-lm model classes."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import KVCache


@dataclass(frozen=True)
class LayerShape:
    """Shape and dtype of one full-attention layer's keys and values, but for their capacity."""

    key_heads: int
    key_size: int
    key_dtype: mx.Dtype
    value_heads: int
    value_size: int
    value_dtype: mx.Dtype

    @staticmethod
    def of(cache: KVCache) -> LayerShape:
        """Read off a cache of mlx-lm that has seen at least one token."""
        _, key_heads, _, key_size = cache.keys.shape
        _, value_heads, _, value_size = cache.values.shape
        return LayerShape(
            key_heads, key_size, cache.keys.dtype, value_heads, value_size, cache.values.dtype
        )

    def zeros(self, capacity: int) -> list[mx.array]:
        """Fresh keys [1, heads, capacity, size] and values, zero: masked slots must be finite."""
        return [
            mx.zeros((1, self.key_heads, capacity, self.key_size), self.key_dtype),
            mx.zeros((1, self.value_heads, capacity, self.value_size), self.value_dtype),
        ]


class StaticKVCache:
    """mlx-lm's cache interface over arrays of fixed capacity, for the length of one trace.

    The model writes its rows at the tile's start and attends to the first `span` slots. The mask
    names for every row the slots of its own and earlier positions, so that what lies in the
    other slots (rejected rows, padding, zeros) never matters as long as it is finite.

    Args:
        keys: [1, heads, capacity, size].
        values: [1, heads, capacity, size].
        start: int32 [], position of the tile's first row.
        mask: bool [width, span], true where a row sees a slot.
    """

    # No __len__ and no __bool__: mlx-lm's models test a cache for being there by its truth.

    def __init__(self, keys: mx.array, values: mx.array, start: mx.array, mask: mx.array):
        self.keys = keys
        self.values = values
        self.offset = start
        self._start = start
        self._mask = mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the rows [1, heads, width, size]; return the first `span` slots."""
        at = self._start.reshape(1)
        self.keys = mx.slice_update(self.keys, keys, at, axes=(2,))
        self.values = mx.slice_update(self.values, values, at, axes=(2,))
        self.offset = self._start + keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The first `span` slots of keys and values, [1, heads, span, size]."""
        span = self._mask.shape[1]
        return self.keys[:, :, :span], self.values[:, :, :span]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """The tile's mask, whatever form mlx-lm would have chosen for these arguments."""
        width, _ = self._mask.shape
        if width != N:
            raise ValueError(f"a model asked for a mask of {N} rows inside a tile of {width}")
        if window_size is not None:
            raise ValueError("a model asked a full-attention cache for a sliding-window mask")
        return self._mask


def causal_mask(width: int, span: int, start: mx.array) -> mx.array:
    """Which slot each row of a tile sees: its own position and every earlier one.

    Args:
        width: Rows of the tile.
        span: Slots attended to.
        start: int32 [], position of the first row.

    Returns:
        bool [width, span].
    """
    rows = start + mx.arange(width, dtype=mx.int32)
    return mx.arange(span, dtype=mx.int32)[None] <= rows[:, None]
