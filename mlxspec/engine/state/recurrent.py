"""Recurrent and convolutional layers: one state for all that came before, kept at checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxspec.engine.state.frame import TileFrame
from mlxspec.engine.state.full import require_rows


@dataclass(frozen=True)
class RecurrentLayer:
    """One layer whose state after a token is a function of the state before it.

    Attributes:
        shapes: Shape and dtype of every array of the state.
        given: Whether a tile is given the state. Before the first token it may be missing, as in
            mlx-lm, for models that tell the first token by that.
    """

    shapes: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    given: bool = True

    @property
    def input_count(self) -> int:
        """How many arrays a tile is given."""
        return len(self.shapes) if self.given else 0

    @staticmethod
    def of(cache: Any) -> RecurrentLayer:
        """Read off an `ArraysCache` of mlx-lm that has seen a token."""
        return RecurrentLayer(tuple((array.shape, array.dtype) for array in cache.cache))

    def zeros(self) -> list[mx.array]:
        """The state before the first token."""
        return [mx.zeros(shape, dtype) for shape, dtype in self.shapes[: self.input_count]]

    def bind(self, arrays: list[mx.array], frame: TileFrame) -> RecurrentCache:
        """A cache for mlx-lm's model over these arrays."""
        return RecurrentCache(arrays if self.given else [None] * len(self.shapes), frame)


class RecurrentCache:
    """mlx-lm's `ArraysCache` interface for the length of one trace.

    The state a tile leaves covers all its rows: it is worth keeping only if each of them is a
    token that stays, which the engine decides.
    """

    # No __len__ and no __bool__: mlx-lm's models test a cache for being there by its truth.

    lengths = None
    left_padding = None

    def __init__(self, arrays: Sequence[mx.array | None], frame: TileFrame):
        self.cache: list[Any] = list(arrays)
        self._frame = frame

    @property
    def arrays(self) -> list[mx.array]:
        """The state as the tile leaves it."""
        return self.cache

    def __getitem__(self, index: int) -> mx.array:
        return self.cache[index]

    def __setitem__(self, index: int, array: mx.array) -> None:
        self.cache[index] = array

    def __iter__(self) -> Iterator[mx.array]:
        return iter(self.cache)

    def advance(self, N: int) -> None:
        """Nothing to count: there is one sequence, and every row of it is real."""

    def make_mask(self, N: int) -> None:
        """No mask: rows that are not real come last and their state is not kept."""
        require_rows(self._frame, N)
