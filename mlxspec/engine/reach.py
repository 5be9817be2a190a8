"""How far an engine may go from where it stands, on and back, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from mlxspec.engine.placement import TilePlacement
from mlxspec.engine.regimes import ComparedRegimes
from mlxspec.engine.spans import TileLimits
from mlxspec.engine.state import ModelState

# A length in tokens, and a sentence about what bounds it.
Bound = tuple[int, str]


@dataclass(frozen=True)
class Reach:
    """What an engine may do next, by its state and the rules of its tiles.

    Attributes:
        cursor: Tokens that the state covers.
        context_length: Most tokens of the sequence; the last is never processed.
        state: What is kept of them.
        place: Where a tile starts and ends.
        widths: The ladder, ascending.
        widest: Rows of the widest tile that the rings are made for.
        limits: Positions that no tile crosses.
        regimes: Where widths have been compared; None where they need not be.
        moves_by_tiles: Whether the state is recurrent or tiles are aligned, so that the
            narrowest tile is the least step.
        aligned: Whether tiles are.
    """

    cursor: int
    context_length: int
    state: ModelState
    place: TilePlacement
    widths: tuple[int, ...]
    widest: int
    limits: TileLimits
    regimes: ComparedRegimes | None
    moves_by_tiles: bool
    aligned: bool

    def tile_start(self, position: int) -> int:
        """Where the tile that computes this position starts."""
        return self.place.start(position, self.state.position)

    def compared_at(self, position: int) -> bool:
        """Whether all widths may be used where a row of this position would run."""
        return self.regimes is None or self.regimes.include(position)

    @property
    def one_forward_draft_budget(self) -> int:
        """How many drafts after an anchor at the cursor fit one forward; never below 0.

        The tile has to hold them beside the tokens it feeds again, all rows have to attend to
        one span, and the token after the last draft needs a position inside the context.
        """
        if not self.compared_at(self.cursor):
            # The next call finds out which widths are left, and so what fits.
            return 0
        end = self.place.end(self.tile_start(self.cursor))
        return max(0, min(end, self.context_length - 1) - self.cursor - 1)

    @property
    def context_bound(self) -> Bound:
        """How many more tokens the context takes."""
        return max(0, self.context_length - 1 - self.cursor), (
            f"the context holds {self.context_length} tokens, the last of which is only emitted, "
            f"and {self.cursor} are processed. Shorten the input or raise max_context_length"
        )

    @property
    def verify_bound(self) -> Bound:
        """How long a block may be."""
        length, reason = self.context_bound
        quantized_from = self.limits.quantized_from
        if quantized_from is not None and 0 < quantized_from - self.cursor < length:
            length = quantized_from - self.cursor
            reason = (
                f"keys become quantised at position {quantized_from}, and a block across it "
                "could not be taken back. Verify a shorter block"
            )
        if self.regimes is not None:
            end = self.regimes.compared_until(self.cursor + 1, self.cursor + length)
            if end - self.cursor < length:
                length = end - self.cursor
                reason = (
                    f"from position {end} on tiles run on other kernels, for which widths are "
                    "compared when the text has come there. Verify a shorter block"
                )
        if (reach := self._ring_reach(self.cursor + length)) < length:
            return reach, (
                "were more rejected at once, the sliding windows could not go back: their rings "
                "are as deep as three of the widest tiles need. Verify a shorter block"
            )
        return length, reason

    def roll_out_limit(self, pending: int) -> int:
        """Most tokens that a rollout chooses after `pending` tokens at the cursor.

        The context bounds it, and so do the rings and the start of quantisation: if nothing of
        the rollout is kept, the state has to go on after the pending tokens.
        """
        after = self.cursor + pending
        limit = self.context_length - after
        quantized_from = self.limits.quantized_from
        if quantized_from is not None and after < quantized_from:
            limit = min(limit, quantized_from - after + 1)
        narrowest = self.widths[0]
        start = after // narrowest * narrowest if self.moves_by_tiles else after
        last_write = self.state.last_write(start)
        if last_write is not None:
            last = last_write - narrowest
            if self.aligned:
                last = last_write // narrowest * narrowest - 1
            limit = min(limit, last - after + 2)
        return max(0, limit)

    def longest_rewind(self, to: int) -> int:
        """The farthest length, `to` or less, that a next turn may go on from.

        It is the same whatever was drafted: what rings hold beyond that, and recurrent
        checkpoints other than the prompt's end, depend on where blocks happened to end.
        """
        to = max(0, min(to, self.cursor))
        if to == self.cursor:
            return to
        state = self.state
        if state.layout.is_recurrent:
            to = state.pinned if to >= state.pinned else 0
        if not state.rings_always_allow(self.place.start(to, to), self.always_kept):
            return 0
        return to if self.why_no_rewind(to) is None else 0

    @property
    def always_kept(self) -> int:
        """The first position whose keys rings hold for a next turn, whatever was drafted."""
        return max(0, max(self.state.reached, self.cursor) - self.widest)

    def why_no_rewind(self, to: int) -> str | None:
        """What the state no longer holds of the first `to` tokens, or None if nothing is missing.

        Rings, recurrent layers and full attention go back together or not at all.
        """
        state = self.state
        if to in (0, self.cursor):
            return None
        checkpoint = state.nearest_checkpoint(to)
        start = self.place.start(to, checkpoint)
        if not self.place.reaches(to, checkpoint):
            return f"of the recurrent state only that after {checkpoint} tokens is left before it"
        if not state.rings_allow(start):
            return (
                f"the sliding windows have been written up to position {state.high_water} and no "
                "longer hold what the next token there would see"
            )
        if state.is_quantized and not self.limits.quantized_at(start):
            return f"keys and values are quantised since position {self.limits.quantized_from}"
        return None

    def why_not_on(self, state: ModelState, count: int) -> str | None:
        """Why no tile goes on from another engine's state of `count` tokens, if none does."""
        start = self.place.start(count, state.position)
        if not self.place.reaches(count, state.position):
            return (
                f"its recurrent state covers {state.position} of its {count} tokens, from where "
                f"no tile of this engine's widths {self.widths} goes on; use the widths it was "
                "made with"
            )
        if not state.rings_allow(start):
            return (
                f"its sliding windows lack keys that a tile of this engine's widths "
                f"{self.widths} would see; use the widths it was made with"
            )
        if state.is_quantized and not self.limits.quantized_at(count):
            return (
                f"its keys and values are quantised after {count} tokens, and this engine's are "
                f"from position {self.limits.quantized_from} on"
            )
        return None

    def _ring_reach(self, end: int) -> int:
        """How long a block up to `end` may be so that all of it can be rejected.

        And then a tile's length more of what came before it: see `longest_rewind`.
        """
        position, start = self.cursor, self.tile_start(self.cursor)
        last_write = self.state.last_write(max(0, start - self.widest))
        if last_write is None:
            return end - position
        while position < end:
            widths = [width for width in self.widths if start + width <= last_write]
            tile_end = min(end, self.place.end(start))
            reached = min(tile_end, start + max(widths, default=0))
            position = max(position, reached)
            if reached < tile_end:
                break
            start = position
        return position - self.cursor
