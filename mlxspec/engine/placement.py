"""Where a tile starts and ends: the rule that makes a position's row the same in every round.

Three rules, for what the layers of a model and the device's kernels allow:

- free (attention only): a tile starts at the cursor.
- anchored (recurrent layers whose rows are bitwise equal in every width): the recurrent state is
  kept at a position at or before the cursor. A tile starts there and feeds again the tokens
  between. A tile whose every row is committed moves the state forward.
- aligned (rows that depend on the width): there is one width, and a tile starts at a multiple
  of it, so a position is always computed in the same row of the same shape.

No decode tile of any rule crosses a limit: the end of a span, or where keys become quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mlxspec.engine.spans import TileLimits
from mlxspec.numbers import whole_number

Placement = Literal["free", "anchored", "aligned"]

_DEFAULT_LADDER = (1, 2, 4, 8, 16)
_DEFAULT_ALIGNED_WIDTH = (8,)
# Far above any width that pays; a tile takes memory and time by its rows.
_WIDEST = 1024


class TilePlacement(Protocol):
    """Start and end of the tile that computes a position."""

    def start(self, position: int, checkpoint: int) -> int:
        """First position of the tile; `checkpoint` is what the recurrent state covers."""

    def end(self, start: int) -> int:
        """One past the last position a tile from `start` may compute."""

    def reaches(self, position: int, checkpoint: int) -> bool:
        """Whether one tile computes `position` with a recurrent state kept at `checkpoint`."""

    def prefill_widths(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the widths that full prefill tiles may have, descending."""


@dataclass(frozen=True)
class FreePlacement:
    """Tiles start where they are needed.

    Attributes:
        rows: Most rows of a tile that are used.
        limits: What no tile crosses.
    """

    rows: int
    limits: TileLimits

    def start(self, position: int, checkpoint: int) -> int:
        """The position itself."""
        return position

    def end(self, start: int) -> int:
        """As many rows on as are used, or the next limit."""
        return min(start + self.rows, self.limits.end(start))

    def reaches(self, position: int, checkpoint: int) -> bool:
        """Always: there is no recurrent state."""
        return True

    def prefill_widths(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """All of them."""
        return widths


@dataclass(frozen=True)
class AnchoredPlacement:
    """Tiles start where the recurrent state is kept.

    A tile that would cross a limit is narrowed to the widest that does not; as the narrowest
    width divides all others and every limit, the state always arrives at the limit exactly.
    """

    widths: tuple[int, ...]
    limits: TileLimits

    def start(self, position: int, checkpoint: int) -> int:
        """The position the state covers."""
        return checkpoint

    def end(self, start: int) -> int:
        """The widest ladder step on that does not cross a limit."""
        room = self.limits.end(start) - start
        return start + max(width for width in self.widths if width <= room)

    def reaches(self, position: int, checkpoint: int) -> bool:
        """Whether the tile from the checkpoint holds the position."""
        return position < self.end(checkpoint)

    def prefill_widths(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """The multiples of the narrowest width, so that the state can arrive at every limit."""
        return _multiples(widths, self.widths[0])


@dataclass(frozen=True)
class AlignedPlacement:
    """Tiles of one width at its multiples."""

    width: int
    recurrent: bool

    def start(self, position: int, checkpoint: int) -> int:
        """The last multiple of the width."""
        return position // self.width * self.width

    def end(self, start: int) -> int:
        """The next multiple; the width divides every limit, so it crosses none."""
        return start + self.width

    def reaches(self, position: int, checkpoint: int) -> bool:
        """Whether a recurrent state, if there is one, is kept at the tile's start."""
        return not self.recurrent or checkpoint == self.start(position, checkpoint)

    def prefill_widths(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """All, or for recurrent state the multiples of the width, so it ends at a tile's start."""
        return _multiples(widths, self.width) if self.recurrent else widths


def _multiples(widths: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Those of the descending widths that are multiples of the unit, and the unit itself."""
    multiples = tuple(width for width in widths if width % unit == 0)
    return multiples if unit in multiples else (*multiples, unit)


def tile_placement(
    placement: Placement,
    widths: tuple[int, ...],
    limits: TileLimits,
    recurrent: bool,
    *,
    rows_agree: bool = True,
) -> TilePlacement:
    """The rule of that name.

    Args:
        placement: Its name.
        widths: The ladder, ascending.
        limits: What no tile crosses.
        recurrent: Whether a layer has a recurrent state.
        rows_agree: Whether a position is known to come out the same in every row of a tile. If
            not, a free tile computes one position only; the others always have it in one row.

    Raises:
        ValueError: The rule does not fit the layers: recurrent state cannot be placed freely,
            and without one there is nothing to anchor. Or quantisation begins inside a tile.
    """
    unit = 1 if placement == "free" else widths[0]
    if limits.quantized_from is not None and limits.quantized_from % unit:
        raise ValueError(
            f"quantized_kv_start: expected a multiple of {unit}, the tile width of {placement} "
            f"placement, got {limits.quantized_from}"
        )
    if placement == "aligned":
        return AlignedPlacement(widths[0], recurrent)
    if placement == "free" and recurrent:
        raise ValueError(
            "placement: 'free' would need the state after every token, and this model has "
            "recurrent layers; use 'anchored' or 'aligned'"
        )
    if placement == "anchored":
        if not recurrent:
            raise ValueError("placement: 'anchored' is for recurrent layers; use 'free'")
        return AnchoredPlacement(widths, limits)
    return FreePlacement(widths[-1] if rows_agree else 1, limits)


def default_tile_widths(placement: Placement | None) -> tuple[int, ...]:
    """The ladder of a placement where the user names none."""
    return _DEFAULT_ALIGNED_WIDTH if placement == "aligned" else _DEFAULT_LADDER


def checked_tile_widths(
    tile_widths: Sequence[int] | None, placement: Placement | None, span_step: int
) -> tuple[int, ...]:
    """The ladder in ascending order, checked against the placement (None: not known yet).

    Raises:
        ValueError: No width, a width below 1, an unknown placement, or widths that it cannot use.
    """
    if placement not in (None, "free", "anchored", "aligned"):
        raise ValueError(f"placement: expected 'free', 'anchored' or 'aligned', got {placement!r}")
    if tile_widths is None:
        tile_widths = default_tile_widths(placement)
    try:
        widths = tuple(sorted({whole_number("width", w, 1, _WIDEST) for w in tile_widths}))
    except (TypeError, ValueError):
        widths = ()
    if not widths:
        raise ValueError(
            f"tile_widths: expected widths from 1 to {_WIDEST} rows, got {tile_widths!r}"
        )
    if placement == "aligned" and (len(widths) != 1 or span_step % widths[0]):
        raise ValueError(
            "aligned placement: expected one tile width that divides the span step of "
            f"{span_step}, got {tile_widths!r}; for example tile_widths=(8,)"
        )
    if placement == "anchored" and any(width % widths[0] for width in (*widths, span_step)):
        raise ValueError(
            "anchored placement: expected a narrowest width that divides all others and the span "
            f"step of {span_step}, got {tile_widths!r}; for example tile_widths=(1, 2, 4, 8)"
        )
    return widths


def prefill_ladder(step_size: int) -> tuple[int, ...]:
    """Widths of prefill tiles, descending: `step_size` and the powers of two below it."""
    step_size = whole_number("prefill_step_size", step_size, 1)
    powers = [1 << bit for bit in reversed(range((step_size - 1).bit_length()))]
    return (step_size, *powers)
