"""The arrays of one sequence, and what of it they still hold."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlxspec.engine.state.layout import StateLayout


class Checkpoint(NamedTuple):
    """Recurrent states that cover the first `position` tokens."""

    position: int
    arrays: list[mx.array]


class ModelState:
    """Slots, recurrent checkpoints, and two marks that say what a rewind may still use.

    Args:
        layout: The model's layers.
        capacity: Tokens to make room for at first.
    """

    def __init__(self, layout: StateLayout, capacity: int):
        self.layout = layout
        self.capacity = capacity
        self.empty()

    def empty(self) -> None:
        """Begin a sequence: zero slots, and the state before the first token."""
        # The old arrays go first, so that the peak is one state and not two.
        self.slots: list[mx.array] = []
        self.slots = self.layout.zero_slots(self.capacity)
        self.checkpoints = [Checkpoint(0, self.layout.zero_recurrent())]
        self.pinned = 0
        self.high_water = 0
        self.non_finite_until = 0
        mx.eval(self.slots, self.checkpoints[0].arrays)

    @property
    def position(self) -> int:
        """How many tokens the newest recurrent checkpoint covers."""
        return self.checkpoints[-1].position

    def nearest_checkpoint(self, to: int) -> int:
        """Position of the newest checkpoint at or before `to`."""
        return max(c.position for c in self.checkpoints if c.position <= to)

    def rings_allow(self, start: int) -> bool:
        """Whether every ring holds what a tile that starts here sees."""
        return all(rule.may_start(start, self.high_water) for rule in self.layout.rings)

    def last_write(self, start: int) -> int | None:
        """The slot position up to which may be written so that `start` stays a legal start."""
        return min((rule.last_write(start) for rule in self.layout.rings), default=None)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens."""
        self.layout.grow(self.slots, capacity)
        self.capacity = capacity

    def clear_non_finite(self, cursor: int) -> None:
        """Zero the slots past the cursor if a row there was not finite.

        A masked slot has weight 0, and 0 * NaN is NaN: a rejected row that was not a number
        would poison every later one.
        """
        if self.non_finite_until > cursor:
            self.layout.clear(self.slots, cursor, self.non_finite_until)
        self.non_finite_until = 0

    def adopt(self, position: int, recurrent: list[mx.array]) -> None:
        """Keep a state that covers `position` tokens; until `settle` it can be revoked."""
        self.checkpoints.append(Checkpoint(position, recurrent))

    def settle(self) -> None:
        """Earlier blocks are emitted: keep the newest checkpoint and that of the prompt's end."""
        self.checkpoints = [
            checkpoint
            for checkpoint in self.checkpoints
            if checkpoint.position in (self.pinned, self.position)
        ]

    def rewind(self, to: int) -> None:
        """Revoke the checkpoints past `to`."""
        self.checkpoints = [c for c in self.checkpoints if c.position <= to]
        self.pinned = min(self.pinned, self.position)
