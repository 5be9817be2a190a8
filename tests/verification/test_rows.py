"""Rows are compared bit for bit, and what differs is counted in units of the last place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.verification.places import Place
from mlxspec.verification.rows import Answer, compare

PLACE = Place("here", 9, 2)


def answer(*rows, tokens=(0, 1), dtype=mx.float32):
    return Answer(list(tokens), [mx.array(row, dtype) for row in rows])


@given(st.floats(-(2.0**120), 2.0**120, width=32), st.integers(1, 20))
def test_ulps_are_steps_from_one_number_to_the_next(number, steps):
    other = np.float32(number)
    for _ in range(steps):
        other = np.nextafter(other, np.float32(np.inf))
    rows = [[5e37, number], [1.0, 2.0]]
    found = compare(answer(*rows), answer([5e37, float(other)], rows[1]), PLACE)
    assert found is not None
    assert (found.ulps, found.logits, found.at_logit) == (steps, 1, 1)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_is_counted_in_its_own_ulps(dtype):
    one = mx.array([1.0, -1.0], dtype)
    next_up = (one.view(mx.int16) + 1).view(dtype)
    rows = [[1.0, -1.0], [1.0, 2.0]]
    plain = answer(*rows, dtype=dtype)
    found = compare(plain, Answer([0, 1], [next_up, plain.rows[1]]), PLACE)
    assert (found.ulps, found.logits) == (1, 2)


def test_the_first_difference_is_told_with_position_and_margin():
    plain = answer([5.0, 3.0], [1.0, 2.5])
    other = answer([5.0, 3.0], [4.0, 2.5], tokens=(0, 0))
    found = compare(plain, other, PLACE)
    assert (found.token, found.position) == (1, 11)
    assert (found.expected, found.chosen) == (1, 0)
    assert found.margin == 1.5
    assert found.largest == 3.0


def test_where_the_choice_is_the_same_the_margin_is_that_of_the_runner_up():
    found = compare(answer([5.0, 3.0], [1.0, 2.0]), answer([5.5, 3.0], [1.0, 2.0]), PLACE)
    assert (found.chosen, found.margin) == (0, 2.0)
    assert "still chooses 0" in str(found)


def test_equal_rows_are_equal_also_where_they_are_no_numbers():
    nan = answer([np.nan, 1.0], [1.0, 2.0], tokens=(1, 1))
    assert compare(nan, answer([np.nan, 1.0], [1.0, 2.0], tokens=(1, 1)), PLACE) is None
    found = compare(nan, answer([0.0, 1.0], [1.0, 2.0], tokens=(1, 1)), PLACE)
    assert found.at_logit == 0


def test_a_text_that_ends_early_or_chooses_otherwise_from_equal_rows_is_no_equal_text():
    plain = answer([5.0, 3.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="1 tokens instead of 2"):
        compare(plain, answer([5.0, 3.0], tokens=[0]), PLACE)
    with pytest.raises(ValueError, match="other tokens"):
        compare(plain, answer([5.0, 3.0], [1.0, 2.0], tokens=(0, 0)), PLACE)
