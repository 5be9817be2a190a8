"""The farthest point a next turn may go on from: legal, and blind to what was drafted."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxspec import DynamicShapeEngine
from mlxspec.decoding.turns import common_length, held_prefix
from tests.cases import prompt_of
from tests.families.tiny import tiny_model
from tests.rings.imagined import imagined_engine, legal_to_go_on
from tests.rings.test_imagined_engine import SETUPS, block_of
from tests.scripted import ScriptedEngine

# Without windows and recurrent layers: full attention.
ALL_SETUPS = [([], (1, 2, 4, 8), "free", False), ([], (4,), "aligned", False), *SETUPS]
# A turn: tokens of the prompt, tokens of the answer, how far the next turn goes back.
turns = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 25), st.integers(0, 30)), min_size=1, max_size=4
)
# A round of the drafted run: how many drafts it has, of which how many are accepted.
rounds = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=40)


@cache
def two_engines(index):
    windows, widths, placement, recurrent = ALL_SETUPS[index]
    return [imagined_engine(windows, widths, placement, recurrent=recurrent) for _ in range(2)]


def answer(engine, text, drafts, aligned=True):
    """Decode the text as a decoder does: blocks with wrong tails, taken back after each."""
    begin = engine.processed_token_count
    while (done := engine.processed_token_count - begin) < len(text):
        cursor = engine.processed_token_count
        drafted, accepted = next(drafts, (0, 0))
        fits = engine.one_forward_draft_budget if aligned else engine.max_verify_block_length - 1
        drafted = max(0, min(drafted, fits))
        kept = min(1 + min(accepted, drafted), len(text) - done)
        right = text[done : done + kept]
        engine.verify(right + block_of(1 + drafted - kept, 99))
        engine.reset(cursor + kept)


def wide_tiles(engine, tokens):
    """Where the prefill tiles of these tokens begin, and how wide they are."""
    tiles, forward = [], engine._forward

    def recording(start, rows, width, span, capture, *rest):
        if capture is None:
            tiles.append((start, width))
        return forward(start, rows, width, span, capture, *rest)

    engine._forward = recording
    engine.prefill(tokens)
    engine._forward = forward
    return tiles


@pytest.mark.parametrize("index", range(len(ALL_SETUPS)))
@given(turns=turns, rounds=rounds, aligned=st.booleans())
@example(turns=[(20, 9, 2), (3, 9, 4)], rounds=[(20, 8)], aligned=False)
@example(turns=[(20, 16, 4), (0, 1, 0)], rounds=[(7, 7)] * 3, aligned=True)
@example(turns=[(19, 9, 0), (20, 7, 0), (9, 2, 0)], rounds=[(5, 2)] * 9, aligned=True)
def test_every_turn_after_drafts_goes_on_from_where_it_would_without(index, turns, rounds, aligned):
    plain, drafted = two_engines(index)
    for engine in (plain, drafted):
        engine.reset(0)
    drafts = iter(rounds)
    for number, (prompt, length, back) in enumerate(turns):
        room = 199 - plain.processed_token_count
        if prompt + length >= room:
            break
        tokens = block_of(prompt, number)
        # The tiles of a prompt decide how its sums are rounded.
        assert wide_tiles(plain, tokens) == wide_tiles(drafted, tokens)
        text = block_of(length, 50 + number)
        answer(plain, text, iter(()))
        answer(drafted, text, drafts, aligned)
        assert list(plain.tokens) == list(drafted.tokens)
        cursor = plain.processed_token_count
        with plain.lease(), drafted.lease():
            for to in range(cursor + 2):
                farthest = plain.longest_rewind(to)
                assert farthest == drafted.longest_rewind(to), to
                assert farthest <= to
                for engine in (plain, drafted):
                    assert engine.allows_rewind(farthest)
                    assert legal_to_go_on(engine, farthest)
            assert plain.longest_rewind(cursor) == cursor
            for engine in (plain, drafted):
                engine.reset(engine.longest_rewind(cursor - min(back, cursor)))


@pytest.mark.parametrize("setup", ALL_SETUPS, ids=str)
def test_it_is_the_farthest_that_can_be_promised(setup):
    """Anywhere in full attention; a tile's length back in rings; the prompt's end in a state."""
    windows, widths, placement, recurrent = setup
    engine = imagined_engine(windows, widths, placement, recurrent=recurrent)
    engine.prefill(block_of(100, 1))
    pinned = engine._state.pinned
    answer(engine, block_of(30, 2), iter(()))
    for to in range(130):
        farthest = engine.longest_rewind(to)
        if recurrent:
            assert farthest in (0, pinned)
            assert farthest == 0 or to >= pinned
            if not windows:
                assert farthest == (pinned if to >= pinned else 0)
        elif not windows or (to >= 130 - widths[-1] and placement == "free"):
            assert farthest == to
        else:
            assert farthest in (0, to)


def test_short_texts_go_back_anywhere_in_rings_that_have_not_gone_round():
    engine = imagined_engine([40], (1, 2, 4, 8), "free")
    engine.prefill(block_of(20, 1))
    answer(engine, block_of(15, 2), iter(()))
    assert [engine.longest_rewind(to) for to in range(36)] == list(range(36))


@given(one=st.lists(st.integers(0, 1), max_size=6), other=st.lists(st.integers(0, 1), max_size=6))
def test_the_common_length_is_that_of_the_longest_common_prefix(one, other):
    length = common_length(one, other)
    assert one[:length] == other[:length]
    assert one[: length + 1] != other[: length + 1] or length == min(len(one), len(other))


def test_the_last_token_of_a_prompt_is_always_processed():
    engine = ScriptedEngine([1, 2, 3, 4, 5], 10)
    engine.prefill([1, 2, 3, 4])
    assert held_prefix(engine, [1, 2, 3, 4]) == (4, 3, 0)
    assert held_prefix(engine, [1, 2, 3, 4, 5]) == (4, 4, 0)
    assert held_prefix(engine, [1, 2]) == (2, 1, 0)
    assert held_prefix(engine, [9]) == (0, 0, 0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "llama4_text", "gemma4_text"])
def test_the_dynamic_engine_goes_back_where_its_caches_can_be_trimmed(family):
    model = tiny_model(family)
    engine, fresh = (DynamicShapeEngine(model, max_context_length=60) for _ in "ab")
    for length, trims in ((5, family != "lfm2"), (40, family in ("llama", "llama4_text"))):
        engine.reset(0)
        engine.prefill(prompt_of(length))
        farthest = engine.longest_rewind(length - 2)
        assert farthest == (length - 2 if trims else 0)
        engine.reset(farthest)
        engine.prefill(prompt_of(length)[farthest:])
        fresh.reset(0)
        fresh.prefill(prompt_of(length))
        assert engine.verify([7]).argmax == fresh.verify([7]).argmax
    assert engine.longest_rewind(99) == engine.processed_token_count
