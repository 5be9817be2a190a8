"""The arrays of one sequence, and what of it they still hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlxspec.engine.state.layout import StateLayout


class Checkpoint(NamedTuple):
    """Recurrent states that cover the first `position` tokens."""

    position: int
    arrays: list[mx.array]


@dataclass
class Journal:
    """An unfinished call: what it has to be taken back to, wherever it ends.

    Decode tiles need little of it: rings are deep enough for any block that is rejected, and
    checkpoints are revoked by their position. A prefill tile overwrites rings, so the old ones are
    held meanwhile, and MLX copies them once. So are keys and values that the call quantises.

    Attributes:
        layout: The layers before the call.
        unconverted: The slots before the call quantised them; empty if it did not.
        before_prefill: What else there was; None if the call runs decode tiles only.
    """

    layout: StateLayout
    unconverted: list[mx.array]
    before_prefill: BeforePrefill | None


class BeforePrefill(NamedTuple):
    """The rings' slots by their index, and what `ModelState` calls so."""

    rings: dict[int, mx.array]
    checkpoints: list[Checkpoint]
    pinned: int
    high_water: int
    reached: int


class ModelState:
    """Slots, recurrent checkpoints, and the marks that say what a rewind may still use.

    Args:
        layout: The model's layers.
        capacity: Tokens to make room for at first.
        quantized: What the layout becomes by `quantize`; the same for never.
        first: The layout of a tile at 0.

    Attributes:
        layout: The layers as they are now, quantised or not.
        capacity: Tokens there is room for.
        slots: The slot layers' arrays.
        checkpoints: Recurrent states by ascending position; never empty.
        pinned: Position of a checkpoint that is kept: that of the prompt's end.
        reached: The most tokens that a call or a lease has begun with since the last start at 0:
            unlike the high-water mark it does not tell how much was drafted, if both begin after
            the rejected tokens of the call before are taken back.
        high_water: One past the highest position written into the rings since the last start at
            0, padding and rejected rows included.
        written: One past the last slot written since the state was empty; unlike the high-water
            mark never further than there are slots.
        non_finite_until: One past the last slot that a row may have written that was no number,
            as far as anybody has read.
        journal: Of the call that has not come to its end, or None.
    """

    def __init__(
        self, layout: StateLayout, quantized: StateLayout, first: StateLayout, capacity: int
    ):
        self._unquantized = layout
        self._quantized = quantized
        self._first = first
        self.is_empty = False
        self.capacity = capacity
        self.empty()

    def empty(self) -> None:
        """Begin a sequence: zero slots, and the state before the first token."""
        self.is_empty = False
        # There is nothing left that a call could be taken back to.
        self.journal: Journal | None = None
        self.layout = self._unquantized
        # The old arrays go first, so that the peak is one state and not two.
        self.slots: list[mx.array] = []
        self.slots = self.layout.zero_slots(self.capacity)
        self.checkpoints = [self._first_checkpoint()]
        self.pinned = 0
        self.high_water = 0
        self.reached = 0
        self.written = self.non_finite_until = 0
        mx.eval(self.slots)
        self.is_empty = True

    @property
    def forms(self) -> tuple[StateLayout, StateLayout, StateLayout]:
        """The layout whole, quantised, and at 0: what a state like this one is made of."""
        return self._unquantized, self._quantized, self._first

    def pretend(self, position: int) -> None:
        """Hold a state of random numbers that covers `position` tokens, for measurements.

        Zeros would not do: sums of zeros are the same in any order.
        """
        self.empty()

        def random(arrays: list[mx.array]) -> list[mx.array]:
            return [
                mx.random.normal(array.shape, key=mx.random.key(index)).astype(array.dtype)
                for index, array in enumerate(arrays)
            ]

        self.slots = random(self.slots)
        arrays = random(self.layout.zero_recurrent())
        self.checkpoints = [Checkpoint(position, arrays)]
        self.pinned = self.high_water = self.written = position
        mx.eval(self.slots, arrays)

    @property
    def position(self) -> int:
        """How many tokens the newest recurrent checkpoint covers."""
        return self.checkpoints[-1].position

    @property
    def tile_layout(self) -> StateLayout:
        """What the next tile is given, in slots and in the newest recurrent state."""
        return self._first if self.position == 0 and not self.is_quantized else self.layout

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values have been converted."""
        return self.layout is not self._unquantized

    def quantize(self) -> None:
        """Convert keys and values to their quantised form, if there is one; once is enough."""
        if self.layout is self._quantized:
            return
        if self.journal is not None:
            self.journal.unconverted = self.slots
        slots = self.layout.convert(self.slots, self._quantized)
        # Both or neither, should Ctrl-C arrive here.
        self.slots, self.layout = slots, self._quantized

    def nearest_checkpoint(self, to: int) -> int:
        """Position of the newest checkpoint at or before `to`; 0 needs none, its state is zero."""
        return max((c.position for c in self.checkpoints if c.position <= to), default=0)

    def rings_allow(self, start: int) -> bool:
        """Whether every ring holds what a tile that starts here sees."""
        return all(rule.may_start(start, self.high_water) for rule in self.layout.rings)

    def rings_always_allow(self, start: int, kept: int) -> bool:
        """Whether every ring holds what a tile that starts here sees, whatever was drafted.

        Args:
            start: Where the tile would start.
            kept: The earliest start that no block so far can have made illegal.
        """
        return all(rule.last_write(start) >= rule.last_write(kept) for rule in self.layout.rings)

    def last_write(self, start: int) -> int | None:
        """The slot position up to which may be written so that `start` stays a legal start."""
        return min((rule.last_write(start) for rule in self.layout.rings), default=None)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens."""
        self.layout.grow(self.slots, capacity)
        self.capacity = capacity

    def clear_non_finite(self, cursor: int) -> None:
        """Zero the slots past the cursor if a row there may not have been finite.

        A masked slot has weight 0, and 0 * NaN is NaN: a rejected row that was not a number
        would poison every later one. What stands before the cursor is known no better, and is
        cleared if a rewind leaves it behind.
        """
        if self.non_finite_until > cursor:
            self.layout.clear(self.slots, cursor, self.non_finite_until, self.high_water)
            self.non_finite_until = cursor

    def begin_call(self, cursor: int) -> None:
        """A call or a lease begins with a state of `cursor` tokens."""
        self.reached = max(self.reached, cursor)

    def open_journal(self, *, prefills: bool) -> None:
        """A call is about to write; until the journal is None again, `undo` takes it back.

        Args:
            prefills: Whether it runs prefill tiles, in a state that is not empty.
        """
        before = None
        if prefills:
            rings, checkpoints = self.layout.ring_slots(self.slots), list(self.checkpoints)
            before = BeforePrefill(rings, checkpoints, self.pinned, self.high_water, self.reached)
        self.journal = Journal(self.layout, [], before)

    def undo(self) -> None:
        """Take back the call that the journal is of, if there is one.

        Should Ctrl-C arrive here, the journal is still there, and all of it can be done again.
        """
        journal = self.journal
        if journal is None:
            return
        # Nobody has read whether what was written is numbers.
        self.non_finite_until = max(self.non_finite_until, self.written)
        before = journal.before_prefill
        if self.layout is not journal.layout:
            self.layout, self.slots = journal.layout, journal.unconverted
        if before is not None:
            for index, array in before.rings.items():
                self.slots[index] = array
            self.checkpoints, self.pinned = list(before.checkpoints), before.pinned
            self.high_water, self.reached = before.high_water, before.reached
        if before is not None or journal.unconverted:
            self.grow(self.capacity)
        # What is left to compute is computed here: another thread may make the next call, and
        # could not.
        mx.eval(self.slots, [checkpoint.arrays for checkpoint in self.checkpoints])
        self.journal = None

    def wrote(self, slots: list[mx.array], start: int, end: int, cursor: int) -> None:
        """A tile has written the slots of positions start..end-1; a start at 0 begins anew.

        Args:
            slots: The slots after it.
            start: First position of the tile.
            end: One past its last, padding included.
            cursor: Tokens the state covered when the call began.
        """
        high_water = max(self.high_water, end) if start else end
        reached = self.reached if start else cursor
        written = max(self.written, end)
        # As one, should Ctrl-C arrive here.
        self.slots, self.is_empty, self.written = slots, False, written
        self.high_water, self.reached = high_water, reached

    def adopt(self, position: int, recurrent: list[mx.array]) -> None:
        """Keep a state that covers `position` tokens; until it is settled it can be revoked."""
        self.checkpoints.append(Checkpoint(position, recurrent))

    def settle(self, emitted: int) -> None:
        """Nobody goes back before `emitted` tokens, except to the prompt's end.

        Of the checkpoints up to there the newest is kept and the pinned one.
        """
        newest = self.nearest_checkpoint(emitted)
        self.checkpoints = [
            c for c in self.checkpoints if c.position >= newest or c.position == self.pinned
        ]

    def rewind(self, to: int) -> None:
        """Revoke the checkpoints past `to`."""
        kept = [c for c in self.checkpoints if c.position <= to]
        self.checkpoints = kept or [self._first_checkpoint()]
        self.pinned = min(self.pinned, self.position)

    def _first_checkpoint(self) -> Checkpoint:
        arrays = self._first.zero_recurrent()
        mx.eval(arrays)
        return Checkpoint(0, arrays)
