"""The ring rule on a ring of Python integers: no wrong allow, no needless refusal."""

from __future__ import annotations

import pytest

from mlxspec.engine.state import RingRule
from tests.conftest import PROFILE

# A window of one position sees no earlier key, so nothing can be lost; no model has one.
WINDOWS = range(2, 8) if PROFILE == "deep" else range(2, 6)
WIDTHS = (1, 2, 3, 5) if PROFILE == "deep" else (1, 2, 3)


class Ring:
    """Which position each slot holds, and the engine's mark of what has been written."""

    def __init__(self, depth: int):
        self.depth = depth
        self.slots = [-1] * depth
        self.high_water = 0

    def copy(self) -> Ring:
        """Another ring in this state."""
        other = Ring(self.depth)
        other.slots, other.high_water = list(self.slots), self.high_water
        return other

    def write(self, start: int, end: int) -> None:
        """What a tile from `start` does, padding included; only the last `depth` rows stay."""
        if start == 0:
            self.high_water = 0
        for position in range(max(start, end - self.depth), end):
            self.slots[position % self.depth] = position
        self.high_water = max(self.high_water, end)

    def shows(self, window: int, row: int, before: int) -> bool:
        """Whether the row finds all keys of its window that lie before position `before`."""
        seen = range(max(0, row - window + 1), min(row + 1, before))
        return all(self.slots[k % self.depth] == k for k in seen)


def cases():
    """Every ring that decoding may have, after a prefill of every length in every chunk."""
    for window in WINDOWS:
        for width in WIDTHS:
            for depth in range(window - 1 + width, window + 3 * width):
                longest = 2 * depth + 2
                for prompt in range(longest):
                    for chunk in {1, width, depth + 1, longest}:
                        ring = Ring(depth)
                        for begin in range(0, prompt, chunk):
                            ring.write(begin, min(prompt, begin + chunk))
                        yield RingRule(window, depth), width, prompt, ring


def legal(rule: RingRule, ring: Ring, start: int) -> bool:
    """The truth: the first row of a tile finds every key before it. Nothing stands before 0."""
    return ring.shows(rule.window, start, start)


def test_every_start_is_allowed_if_and_only_if_its_keys_are_held():
    """After a prefill and two tiles with their rewinds, for every target."""
    checked = 0
    for rule, width, prompt, ring in cases():
        for first in {0, 1, width - 1}:
            start = prompt - first
            if start < 0 or not rule.may_start(start, ring.high_water):
                continue
            after = ring.copy()
            after.write(start, start + width)
            for target in range(start + width + 1):
                allowed = rule.may_start(target, after.high_water)
                assert allowed == legal(rule, after, target), (rule, prompt, start, target)
                checked += 1
                if not allowed:
                    continue
                again = after.copy()
                again.write(target, target + width)
                for second in range(target + width + 1):
                    assert rule.may_start(second, again.high_water) == legal(rule, again, second), (
                        rule,
                        (prompt, start, target, second),
                    )
    assert checked > 10_000


def test_the_last_write_that_keeps_a_start_is_the_last_one():
    for rule, _, prompt, ring in cases():
        last = rule.last_write(prompt)
        for end, kept in ((last, True), (last + 1, prompt == 0)):
            if end < prompt:
                continue
            after = ring.copy()
            after.write(prompt, end)
            assert rule.may_start(prompt, after.high_water) == kept
            if prompt:
                assert legal(rule, after, prompt) == kept


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_tile_that_writes_first_needs_its_width_beyond_the_window(window, width):
    """`depth >= window - 1 + width`, padding counted, is enough and no less is."""

    def all_rows_see_their_window(depth: int) -> bool:
        ring = Ring(depth)
        ring.write(0, 3 * depth)
        ring.write(3 * depth, 3 * depth + width)
        return all(ring.shows(window, 3 * depth + row, row + 3 * depth) for row in range(width))

    assert all_rows_see_their_window(window - 1 + width)
    if width > 1:
        assert not all_rows_see_their_window(window - 2 + width)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_decoding_can_reject_any_block_of_one_tile_wherever_its_tile_began(window, width):
    """Also where the tile begins up to a width before the cursor, as aligned ones do."""
    rule = RingRule.for_decoding(window, width)
    for cursor in range(4 * rule.depth):
        for start in range(max(0, cursor - width + 1), cursor + 1):
            assert rule.last_write(start) >= start + width
            assert rule.may_start(start, cursor + width)
