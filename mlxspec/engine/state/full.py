"""Full-attention layers: keys and values stay where they were written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxspec.engine.state.frame import TileFrame
from mlxspec.engine.state.slots import SlotLayer, SlotShape


@dataclass(frozen=True)
class FullAttentionLayer(SlotLayer):
    """One layer that sees every earlier position; its arrays are keys and values."""

    @staticmethod
    def of(cache: Any) -> FullAttentionLayer:
        """Read off a `KVCache` of mlx-lm that has seen a token."""
        return FullAttentionLayer((SlotShape.of(cache.keys), SlotShape.of(cache.values)))

    def bind(self, arrays: list[mx.array], frame: TileFrame) -> FullAttentionCache:
        """A cache for mlx-lm's model over these arrays."""
        return FullAttentionCache(arrays, frame)


class FullAttentionCache:
    """mlx-lm's cache interface over slots of fixed number, for the length of one trace.

    The model writes its rows at the tile's start and attends to the first `span` slots. The mask
    names for every row the slots of its own and earlier positions, so what lies in the others
    (rejected rows, padding, zeros) never matters as long as it is finite.

    Attributes:
        arrays: The layer's arrays as the tile leaves them.
        offset: int32 [], how many tokens stand before the next row; models rotate by it.
    """

    # No __len__ and no __bool__: mlx-lm's models test a cache for being there by its truth.

    def __init__(self, arrays: list[mx.array], frame: TileFrame):
        self.arrays = list(arrays)
        self.offset = frame.start
        self._frame = frame

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Write the rows [1, heads, width, size]; return the first `span` slots."""
        self._write([keys, values])
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        """The first `span` slots of keys and values, [1, heads, span, size]."""
        return tuple(self._seen)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """bool [width, span], whatever form mlx-lm would have chosen for these arguments."""
        require_rows(self._frame, N)
        return self._frame.causal_mask(window_size)

    @property
    def _seen(self) -> list[mx.array]:
        return [array[:, :, : self._frame.span] for array in self.arrays]

    def _write(self, rows: list[mx.array]) -> None:
        """Put one row set [1, heads, width, size] into each array, at the tile's start."""
        at = self._frame.start.reshape(1)
        self.arrays = [
            mx.slice_update(array, row, at, axes=(2,))
            for array, row in zip(self.arrays, rows, strict=True)
        ]
        self.offset = self._frame.start + self._frame.width


def require_rows(frame: TileFrame, rows: int) -> None:
    """Refuse a model that asks for another number of rows than the tile has."""
    if rows != frame.width:
        raise ValueError(f"a model asked for a mask of {rows} rows inside a tile of {frame.width}")
