"""The engine's own bookkeeping, swept over an imagined model that checks every key it reads."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec import RewindRefused
from tests.conftest import PROFILE
from tests.rings.imagined import VOCAB, imagined_engine, legal_to_go_on

# (windows, ladder, placement, recurrent)
SETUPS = [
    ([4], (1, 2, 4), "free", False),
    ([5], (3,), "free", False),
    ([16], (1, 2, 4, 8, 16), "free", False),
    ([3, 7], (1, 4), "free", False),
    ([6], (4,), "aligned", False),
    ([5], (4,), "aligned", True),
    ([], (8,), "aligned", True),
    ([], (1, 2, 4, 8), "anchored", True),
    ([5], (1, 2, 4), "anchored", True),
    ([9], (2, 4), "anchored", True),
    ([20], (2, 4, 8), "anchored", True),
]


def state_of(engine):
    """Everything a refused call must leave alone."""
    state = engine._state
    return (
        list(engine.tokens),
        engine.processed_token_count,
        [dict(slots.slots) for slots in state.slots],
        [tuple(checkpoint) for checkpoint in state.checkpoints],
        (state.pinned, state.high_water),
        state.non_finite_until,
    )


def check_rewinds(engine):
    """Every target is allowed if and only if it is legal; a refused one changes nothing."""
    before = state_of(engine)
    for to in range(engine.processed_token_count + 1):
        allowed = engine.allows_rewind(to)
        assert allowed == legal_to_go_on(engine, to), to
        if not allowed:
            with pytest.raises(RewindRefused, match="cannot go back"):
                engine.reset(to)
    assert state_of(engine) == before


def block_of(length, salt):
    return [(7 * i + 13 * salt) % VOCAB for i in range(length)]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_after_every_prompt_every_block_can_be_rejected_at_every_row(setup):
    windows, widths, placement, recurrent = setup
    prompts = range(1, 50) if PROFILE == "deep" else [1, 5, 15, 16, 17, 34]
    engine = imagined_engine(windows, widths, placement, recurrent=recurrent)
    for prompt in prompts:
        longest = 2 * widths[-1] + 1
        lengths = range(1, longest + 1) if PROFILE == "deep" else {1, 2, 3, longest // 2, longest}
        for length, keep in itertools.product(lengths, range(longest + 1)):
            engine.reset(0)
            engine.prefill(block_of(prompt, 1))
            cursor = engine.processed_token_count
            if keep > length or length > engine.max_verify_block_length:
                continue
            one_forward = length <= engine.one_forward_draft_budget + 1
            forwards = engine.verify(block_of(length, 2)).forwards
            assert forwards == 1 or not one_forward
            engine.reset(cursor + keep)
            check_rewinds(engine)
            again = min(widths[-1], engine.max_verify_block_length)
            engine.verify(block_of(again, 3))
            engine.reset(cursor + keep)


@given(
    setup=st.sampled_from(SETUPS),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["verify", "prefill", "rewind", "far"]),
            st.integers(0, 40),
            st.integers(0, 40),
        ),
        max_size=12,
    ),
)
def test_no_sequence_of_calls_makes_a_forward_miss_a_key(setup, steps):
    windows, widths, placement, recurrent = setup
    engine = _kept(setup, lambda: imagined_engine(windows, widths, placement, recurrent=recurrent))
    engine.reset(0)
    for turn, (step, length, other) in enumerate(steps):
        cursor = engine.processed_token_count
        if step == "verify":
            length = min(1 + length % 20, engine.max_verify_block_length)
            if length:
                engine.verify(block_of(length, turn))
                engine.reset(cursor + min(other % 20, length))
        elif step == "prefill":
            engine.prefill(block_of(min(length, max(0, 199 - cursor)), turn))
        else:
            to = max(0, cursor - length) if step == "rewind" else length
            if to <= cursor and engine.allows_rewind(to):
                engine.reset(to)
        assert engine.allows_rewind(engine.processed_token_count)
        check_rewinds(engine)


_ENGINES: dict[str, object] = {}


def _kept(key, make):
    key = str(key)
    if key not in _ENGINES:
        _ENGINES[key] = make()
    return _ENGINES[key]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("fail_after", [0, 1, 2, 3])
def test_a_prefill_that_fails_on_the_way_leaves_every_layer_as_it_was(setup, fail_after):
    windows, widths, placement, recurrent = setup
    engine = imagined_engine(windows, widths, placement, recurrent=recurrent)
    for prompt in (0, 3, 45):
        engine.reset(0)
        engine.prefill(block_of(prompt, 1))
        cursor = engine.processed_token_count
        engine.verify(block_of(widths[-1], 2))
        engine.reset(cursor + 1)
        before = state_of(engine)
        calls = itertools.count()

        def fail(processed, total, calls=calls):
            if next(calls) == fail_after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.prefill(block_of(60, 3), fail)
        after = state_of(engine)
        # Slots past the cursor may differ: nobody reads them before they are written again, or
        # cleared, as nobody knows whether they hold numbers.
        assert after[:2] == before[:2]
        assert after[3:5] == before[3:5]
        check_rewinds(engine)
        engine.verify(block_of(1, 4))


@pytest.mark.parametrize("setup", [s for s in SETUPS if s[3]], ids=str)
def test_a_prefill_after_drafting_runs_the_tiles_it_would_run_without(setup):
    """Where its tiles begin decides how sums are rounded, so it must not tell what was drafted."""
    windows, widths, placement, recurrent = setup
    engine = imagined_engine(windows, widths, placement, recurrent=recurrent)
    tiles = []
    forward = engine._forward

    def recording(start, rows, width, span, capture, *rest):
        tiles.append((start, width, capture is None))
        return forward(start, rows, width, span, capture, *rest)

    engine._forward = recording

    def wide_tiles_after(kept_tokens, drafted=3):
        engine.reset(0)
        engine.prefill(block_of(19, 1))
        for kept in kept_tokens:
            cursor = engine.processed_token_count
            engine.verify(block_of(min(kept + drafted, engine.max_verify_block_length), 5))
            engine.reset(cursor + kept)
        del tiles[:]
        engine.prefill(block_of(40, 6))
        return [tile for tile in tiles if tile[2]]

    for length in (6, 9, 10, 11):
        plain = wide_tiles_after([1] * length, drafted=0)
        assert plain == wide_tiles_after([1] * length)
        assert plain == wide_tiles_after([2] * (length // 2) + [1] * (length % 2))
        assert plain == wide_tiles_after([4] * (length // 4) + [1] * (length % 4))
        assert plain == wide_tiles_after([1] * (length % 3) + [3] * (length // 3))


@pytest.mark.parametrize("setup", [s for s in SETUPS if s[2] != "free"], ids=str)
def test_a_tile_at_0_begins_the_rings_anew(setup):
    """Going back into the first tile is legal however far the rings were written before."""
    windows, widths, placement, recurrent = setup
    engine = imagined_engine(windows, widths, placement, recurrent=recurrent)
    engine.prefill(block_of(60, 1))
    engine.verify(block_of(2, 2))
    assert engine.allows_rewind(1)
    engine.reset(1)
    for turn in range(30):
        engine.verify(block_of(1, turn))
        check_rewinds(engine)


def test_the_error_says_that_the_rings_bound_the_block():
    engine = imagined_engine([16], (1, 2, 4, 8), "free")
    engine.prefill(block_of(40, 1))
    longest = engine.max_verify_block_length
    assert longest == 16
    with pytest.raises(ValueError, match=r"at most 16 tokens, got 17.*sliding windows"):
        engine.verify(block_of(17, 2))
    engine.reset(0)
    engine.prefill(block_of(190, 1))
    assert engine.max_verify_block_length == 9
    with pytest.raises(ValueError, match="context holds 200"):
        engine.verify(block_of(10, 2))
