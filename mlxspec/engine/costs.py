"""What a decode tile costs by its width: measured on the engine's own tiles, and remembered."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mlxspec.engine.measurements import remember, remembered
from mlxspec.engine.protocol import SpeculativeEngine

# Widths worth a try on some device, see `tile_widths_that_pay`.
CANDIDATE_WIDTHS = (1, 2, 4, 5, 8, 10, 16, 24, 32, 48, 64)
# Most time that a measurement takes, in width-1 steps; the tracing of the tiles comes on top.
BUDGET_IN_STEPS = 25.0
# A measurement may take this long where that is longer: so short times need more repetitions.
BUDGET_IN_SECONDS = 0.1
# Less than this share saved is no saving: clocks are not that exact.
_NOTICEABLE = 0.03
# A tile that took so much longer than others let expect is timed once more.
_SUSPICIOUS = 1.25

Clock = Callable[[], float]


@dataclass(frozen=True)
class TileCosts:
    """Seconds of a decode tile by its width; between the measured widths a straight line.

    Attributes:
        seconds: (rows, seconds) by ascending rows, at least one.
        assumed: Whether nothing was measured, so that only the ratios mean something.
    """

    seconds: tuple[tuple[int, float], ...]
    assumed: bool = False

    def of(self, width: int) -> float:
        """Seconds of a tile of this width.

        Beyond the widest measured one every row costs what the last rows did, or the average
        where only one width is known.
        """
        points = ((0, 0.0), *self.seconds) if len(self.seconds) == 1 else self.seconds
        for (low, before), (high, after) in pairwise(points):
            if width <= high or high == points[-1][0]:
                return max(1e-9, before + (after - before) * (width - low) / (high - low))
        raise AssertionError("unreachable")

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths measured, ascending."""
        return tuple(width for width, _ in self.seconds)


# Of an engine that cannot be measured: ten rows cost as much again as the first. Rounds correct it.
ASSUMED_COSTS = TileCosts(((1, 1.0), (11, 2.0)), assumed=True)


def measure_costs(
    engine: SpeculativeEngine, widths: Sequence[int], clock: Clock = time.perf_counter
) -> TileCosts:
    """Time one tile of each width, each after a first call that traces it.

    Doublings of the width come first, and end where a row has cost no less twice in a row (once
    can be a kernel that is bad at two rows); the widths between them follow while there is time.
    The whole takes at most 25 width-1 steps, or a tenth of a second, tracing apart; beyond them
    what the last width costs more than those before it let expect.

    Args:
        engine: An engine whose ladder has these widths; what it holds afterwards is nobody's
            text.
        widths: Rows, ascending.
        clock: Returns seconds.
    """
    tokens = [(37 * i + 11) % engine.vocab_size for i in range(widths[-1])]
    if engine.max_verify_block_length > widths[0]:
        # Going back to the beginning would also empty the state, which takes its time. After a
        # full tile of the narrowest width every other one can begin.
        engine.verify(tokens[: widths[0]])
    begin = engine.processed_token_count
    room = engine.one_forward_draft_budget + 1
    # A short context or span fills a tile in part, or never needs it.
    widths = [width for below, width in pairwise((0, *widths)) if below < room]

    def once(width: int) -> float:
        start = clock()
        engine.verify(tokens[: min(width, room)])
        seconds = clock() - start
        engine.reset(begin)
        return seconds

    def least(width: int, calls: int) -> float:
        """The quickest of a few calls after the first: what disturbs a call only adds to it."""
        once(width)
        return min(once(width) for _ in range(calls))

    found = {widths[0]: least(widths[0], 3)}
    left = max((BUDGET_IN_STEPS - 5) * found[widths[0]], BUDGET_IN_SECONDS)

    def measure(width: int) -> bool:
        """Time a width if that fits into what is left, as far as the widths before can tell."""
        nonlocal left
        known = TileCosts(tuple(sorted(found.items())))
        # As many tiles of the narrowest width would do too.
        expected = min(known.of(width), found[widths[0]] * width / widths[0])
        if 2 * expected > left:
            return False
        # Where time is short, to see one width more is worth more than to see one again.
        calls = 5 if 50 * expected < left else 1
        found[width] = least(width, calls)
        left -= (calls + 1) * found[width]
        if found[width] > _SUSPICIOUS * expected and found[width] <= left:
            # Dearer than expected may mean that something else ran meanwhile.
            found[width] = min(found[width], once(width))
            left -= found[width]
        return True

    doublings = [widths[0]]
    for width in widths:
        if width >= 2 * doublings[-1]:
            doublings.append(width)
    dear = 0
    for narrower, width in pairwise(doublings):
        if not measure(width):
            break
        falls = found[width] / width < (1 - _NOTICEABLE) * found[narrower] / narrower
        dear = 0 if falls else dear + 1
        if dear == 2:
            break
    for width in widths:
        if width not in found and width < max(found):
            measure(width)
    return TileCosts(tuple(sorted(found.items())))


def tile_widths_that_pay(costs: TileCosts) -> tuple[int, ...]:
    """Of the widths measured, those up to where a row gets no cheaper, without useless steps.

    A step is useless where the next wider tile costs the same.
    """
    best = costs.seconds[0][1] / costs.seconds[0][0]
    kept: list[tuple[int, float]] = []
    for width, seconds in costs.seconds:
        if not kept or seconds / width < (1 - _NOTICEABLE) * best:
            best = min(best, seconds / width)
            while len(kept) > 1 and seconds < (1 + _NOTICEABLE) * kept[-1][1]:
                kept.pop()
            kept.append((width, seconds))
    return tuple(width for width, _ in kept)


def remembered_costs(circumstances: dict[str, Any]) -> TileCosts | None:
    """What was measured before in these circumstances; None if nothing was."""

    def read(stored: dict[str, Any]) -> TileCosts:
        seconds = tuple((int(width), float(cost)) for width, cost in stored["seconds"])
        rising = all(below < width for below, width in pairwise((0, *(w for w, _ in seconds))))
        if not seconds or not rising or not all(0 < cost < math.inf for _, cost in seconds):
            raise ValueError("no costs")
        return TileCosts(seconds)

    return remembered(circumstances, read)


def remember_costs(circumstances: dict[str, Any], costs: TileCosts) -> None:
    """Keep a measurement; where the cache cannot be written it is measured again next time."""
    remember(circumstances, {"seconds": costs.seconds})
