"""Prompt lookup: the longest match, the most recent one, and an index that never lags."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec import PromptLookup


def rescan(history: Sequence[int], budget: int, min_ngram: int, max_ngram: int) -> list[int]:
    """What prompt lookup means, by searching the whole history anew."""
    for n in range(min(max_ngram, len(history) - 1), min_ngram - 1, -1):
        suffix = history[-n:]
        for follower in range(len(history) - 1, n - 1, -1):
            if history[follower - n : follower] == suffix:
                text = list(history)
                draft = []
                for i in range(budget):
                    draft.append(text[follower + i])
                    text.append(draft[-1])
                return draft
    return []


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    budget=st.integers(0, 20),
    min_ngram=st.integers(1, 4),
    more=st.integers(0, 5),
)
def test_the_index_finds_what_a_rescan_finds(tokens, cuts, budget, min_ngram, more):
    lookup = PromptLookup(min_ngram, min_ngram + more)
    for cut in [*sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]:
        history = tokens[:cut]
        lookup.commit(cut)
        expected = rescan(history, budget, min_ngram, min_ngram + more)
        assert lookup.propose(history, budget) == expected


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2)))
def test_a_reset_forgets_and_a_shorter_history_is_indexed_anew(first, second):
    kept, fresh = PromptLookup(1, 3), PromptLookup(1, 3)
    kept.propose(first, 4)
    kept.reset()
    assert kept.propose(second, 4) == fresh.propose(second, 4)

    rewound = PromptLookup(1, 3)
    rewound.propose(first, 4)
    shorter = [*first[: len(first) // 2], 1]
    rewound.commit(len(first) // 2)
    assert rewound.propose(shorter, 4) == PromptLookup(1, 3).propose(shorter, 4)


def test_a_match_that_runs_into_the_end_continues_periodically():
    assert PromptLookup(2, 3).propose([9, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_the_most_recent_of_equal_matches_wins():
    assert PromptLookup(2, 2).propose([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_a_longer_match_wins_over_a_more_recent_shorter_one():
    lookup = PromptLookup(2, 4)
    assert lookup.propose([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1) == [7]
    assert lookup.match_length == 3


def test_the_source_tells_how_long_the_match_is_even_beyond_what_is_looked_for():
    lookup = PromptLookup(2, 3)
    assert lookup.source == ("lookup", 0)
    for length in (2, 3, 4, 11, 64, 65, 80):
        phrase = list(range(10, 10 + length))
        lookup.reset()
        assert lookup.propose([1, *phrase, 2, *phrase], 1) == [2]
        assert lookup.source == ("lookup", min(length, 64))
    assert lookup.propose([1, 2, 3], 0) == []
    assert lookup.source == ("lookup", 0)


def test_a_match_that_overlaps_what_it_continues_is_as_long_as_the_text_before_it():
    lookup = PromptLookup(1, 2)
    assert lookup.propose([7] * 9, 3) == [7, 7, 7]
    assert lookup.source == ("lookup", 8)


def test_every_token_is_indexed_once():
    reads = 0

    class Counting(list):
        def __getitem__(self, index):
            nonlocal reads
            reads += 1
            return super().__getitem__(index)

    lookup = PromptLookup()
    history = Counting(range(5000))
    lookup.propose(history, 4)
    reads = 0
    for token in range(100):
        history.append(token + 6000)
        lookup.propose(history, 4)
    assert reads <= 300


@pytest.mark.parametrize(("arguments", "message"), [((0, 3), "min_ngram"), ((4, 3), "max_ngram")])
def test_impossible_ngrams_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PromptLookup(*arguments)
