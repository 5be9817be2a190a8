"""Layers whose arrays have a slot for every position, slot = position."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


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
class SlotLayer:
    """One layer whose state is arrays of slots, written in place.

    Attributes:
        shapes: Of every array.
    """

    shapes: tuple[SlotShape, ...]

    def zeros(self, capacity: int) -> list[mx.array]:
        """The arrays of an empty state with room for `capacity` tokens."""
        return [shape.zeros(capacity) for shape in self.shapes]

    def grow(self, array: mx.array, capacity: int) -> mx.array:
        """The array with room for `capacity` tokens; the slots it has keep their places."""
        more = capacity - array.shape[2]
        return mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)]) if more > 0 else array

    def first_seen(self, start: int) -> int:
        """The first position that a tile from `start` sees."""
        return 0

    def taken(self, array: mx.array, begin: int, end: int) -> mx.array:
        """The slots of positions begin..end-1, in their order."""
        return array[:, :, begin:end]

    def laid(self, array: mx.array, begin: int, capacity: int) -> mx.array:
        """An array with room for `capacity` tokens that holds these slots from `begin` on."""
        return self.grow(array, capacity)

    def held_until(self, array: mx.array, end: int, high_water: int) -> int:
        """One past the last position, below `end`, that has a slot which no earlier one needs."""
        return min(end, array.shape[2])

    def clear(self, array: mx.array, begin: int, end: int) -> mx.array:
        """The array with the slots of positions begin..end-1 zeroed."""
        zeros = mx.zeros((*array.shape[:2], end - begin, array.shape[3]), array.dtype)
        return mx.slice_update(array, zeros, mx.array([begin]), axes=(2,))
