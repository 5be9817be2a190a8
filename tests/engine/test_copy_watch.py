"""Copies of the state are told by memory from temporaries, from chance, and from what is freed."""

from __future__ import annotations

import pytest

from mlxspec.engine.ahead import CopyWatch

MB = 1 << 20


def told(*growths, state=100):
    """A watch that was told of steps: ("alone" | "ahead" | "incomparable", MB)."""
    watch = CopyWatch()
    for kind, growth in growths:
        match kind:
            case "alone":
                watch.alone(growth * MB)
            case "ahead":
                watch.ahead(growth * MB, state * MB)
            case "incomparable":
                watch.incomparable()
    return watch


ONCE = [("alone", 5), ("ahead", 105)]
OFTEN = 3 * ONCE


def test_copies_seen_three_times_are_copies_and_their_size_is_what_temporaries_leave():
    watch = told(*OFTEN)
    assert watch.copies == 100 * MB
    assert watch.awaits
    assert "100 MB more" in watch.note


def test_seen_once_the_next_step_waits_and_the_one_after_it_does_not():
    watch = told(*ONCE)
    assert (watch.awaits, watch.copies) == (True, 0)
    watch.alone(5 * MB)
    assert not watch.awaits


def test_what_an_earlier_step_took_hides_nothing():
    assert told(("alone", 500), *OFTEN).copies == 100 * MB


@pytest.mark.parametrize(
    "steps",
    [
        3 * [("alone", 5), ("ahead", 21)],
        3 * [("alone", 105), ("ahead", 105)],
        4 * [("ahead", 105)],
        [("alone", 5), ("ahead", 5), *3 * [("ahead", 105)]],
        3 * [("alone", 5), ("incomparable", 0), ("ahead", 105)],
        [*2 * ONCE, ("alone", 5), ("ahead", 5), *2 * ONCE],
        3 * [("alone", 5), ("ahead", 165)],
        [*2 * ONCE, ("alone", 5), ("ahead", 85), *2 * ONCE],
    ],
    ids=[
        "cheap",
        "temporaries",
        "nothing to compare with",
        "later steps",
        "after others",
        "chance between",
        "another thread's",
        "not alike",
    ],
)
def test_what_is_not_copies_or_cannot_be_known_is_not_put_down_to_them(steps):
    assert told(*steps).copies == 0
