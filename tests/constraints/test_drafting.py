"""What another drafter is shown under a constraint, and what becomes of its guesses."""

from __future__ import annotations

import numpy as np
import pytest

from mlxspec import DrafterError, Grammar
from mlxspec.constraints.drafting import ConstrainedDrafter
from mlxspec.constraints.lookahead import Lookahead
from tests.constraints.vocabularies import PADDED_SIZE, VOCABULARIES


class Recorder:
    """Guesses what it is told to and remembers what it was asked."""

    source = ("recorder", 3)

    def __init__(self, guess=()):
        self.guess = guess
        self.asked = []

    def propose(self, history, budget):
        self.asked.append((list(history), budget))
        return self.guess

    def commit(self, length):
        self.asked.append(("commit", length))

    def reset(self):
        self.asked.append("reset")


def ids(text):
    return VOCABULARIES["bytes"]().encode(text, add_special_tokens=False)


def made(pattern, guess=None):
    lookahead = Lookahead(Grammar.from_regex(pattern).bind(VOCABULARIES["bytes"]()), PADDED_SIZE)
    inner = None if guess is None else Recorder(guess)
    return ConstrainedDrafter(inner, lookahead), inner, lookahead


def proposal(drafter, history, budget):
    """The whole draft, asked for as the decoder does."""
    certain = drafter.certain(budget)
    return certain + drafter.propose([*history, *certain], budget - len(certain))


def test_a_guess_is_cut_at_the_first_forbidden_token_and_extended_by_forced_ones():
    drafter, inner, _ = made("xy[ab]{3}zz[0-9]", ids("abq"))
    drafter.commit(2)
    assert drafter.certain(20) == ids("xy")
    assert drafter.propose([1, 2, *ids("xy")], 18) == ids("ab")
    assert inner.asked == [("commit", 2), ([1, 2, *ids("xy")], 18)]
    inner.guess = ids("aba9")
    assert proposal(drafter, [1, 2], 20) == ids("xyabazz")


def test_a_proposal_never_passes_the_budget():
    for budget in range(9):
        drafter, _, _ = made("xy[ab]{3}zz[0-9]", ids("aba"))
        assert proposal(drafter, [1, 2], budget) == ids("xyabazz")[:budget]


def test_what_is_forced_is_drafted_though_the_other_drafter_is_worth_nothing():
    drafter, inner, _ = made("xy[ab]{3}zz[0-9]", ids("aba"))
    for worth in (0, 2):
        budgets = {"grammar": 9, "recorder": worth}
        drafter.budget_of = lambda name, seconds, behind, budgets=budgets: budgets[name]
        assert proposal(drafter, [1, 2], 9) == ids("xy") + ids("aba")[:worth]
        assert inner.asked[-1] == ([1, 2, *ids("xy")], worth)


def test_the_source_of_a_guess_is_the_other_drafters():
    drafter, _, _ = made("xy[ab]z", [])
    assert drafter.source == ("recorder", 3)
    drafter, _, _ = made("xy[ab]z")
    assert drafter.source == ("grammar", 0)
    assert proposal(drafter, [1, 2], 9) == ids("xy")
    drafter.commit(2)
    drafter.reset()


@pytest.mark.parametrize("guess", [[PADDED_SIZE], [-1], "text", [1.5], None])
def test_a_guess_that_is_no_token_is_refused_by_the_name_of_its_drafter(guess):
    drafter, inner, _ = made("[ab]", [])
    inner.guess = guess
    with pytest.raises(DrafterError, match="drafter Recorder"):
        drafter.propose([1, 2], 5)


def test_a_drafter_that_was_shown_forced_tokens_which_never_came_begins_anew():
    drafter, inner, _ = made("xy[ab]", [])
    proposal(drafter, [1, 2], 9)
    inner.asked.clear()
    proposal(drafter, [1, 2, 3], 9)
    assert inner.asked[0] == "reset"
    drafter, inner, lookahead = made("xy[ab]", [])
    proposal(drafter, [1, 2], 9)
    inner.asked.clear()
    for token in ids("xy"):
        lookahead.emit(token)
    proposal(drafter, [1, 2, *ids("xy")], 9)
    assert "reset" not in inner.asked


def test_a_drafter_is_not_told_that_forced_tokens_were_its_own():
    """Of what was committed past its history, all but the newest is what it proposed."""
    drafter, inner, _ = made("xy[ab]{3}zz[0-9]", ids("aba9"))
    for length, told in [(3, 3), (5, 5), (8, 8), (9, 8), (11, 8)]:
        assert proposal(drafter, [1, 2], 20) == ids("xyabazz")
        inner.asked.clear()
        drafter.commit(length)
        assert inner.asked == [("commit", told)]
    drafter.commit(40)
    assert inner.asked[-1] == ("commit", 40), "a prompt is told of as it is"


def test_looking_ahead_is_taken_back_before_the_next_proposal():
    drafter, _, lookahead = made("[xy]{9}", ids("xy"))
    assert proposal(drafter, [1], 5) == proposal(drafter, [1], 5) == ids("xy")
    assert drafter.propose([1], 5) == ids("xy")
    letters = sorted(ids("xy"))
    assert np.flatnonzero(lookahead.allowed()).tolist() == letters
