"""A rollout chooses what plain decoding would, unread by the host, and leaves a defined state."""

from __future__ import annotations

import re
from functools import cache

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec import Capture, StaticShapeEngine
from mlxspec.decoding import Sampling
from mlxspec.decoding.sampling import noise_key
from mlxspec.engine.support import model_from_config
from tests.cases import varied_model
from tests.families.exactness import ladder
from tests.families.tiny import set_random_weights, tiny_configs, tiny_model

N = 72
# Attention, sliding window, anchored and aligned recurrent state, recurrent state with a window.
FAMILIES = ("llama", "gemma3_text", "lfm2", "mamba2", "recurrent_gemma", "cohere2")
KEY = noise_key(5)


@cache
def engines(family, widths=None, count=2):
    """One that rolls out, one that decodes plainly, and as many more as are wanted."""
    model = tiny_model(family)
    regime = ladder(model, *(widths or ()))
    options = {"tile_widths": regime.widths, "placement": regime.placement}
    return [
        StaticShapeEngine(model, max_context_length=N, span_step=16, **options)
        for _ in range(count)
    ]


def plain(engine, tokens, count, capture=Capture()):  # noqa: B008
    """`tokens`, then what the engine says by itself."""
    engine.reset(0)
    engine.prefill(tokens[:-1])
    text = list(tokens)
    while len(text) < len(tokens) + count:
        text += engine.verify(text[-1:], capture, KEY).argmax
    return text


@given(
    family=st.sampled_from(FAMILIES),
    widths=st.sampled_from([None, (2, 4, 8), (1, 2)]),
    length=st.integers(1, 40),
    sampled=st.booleans(),
    rounds=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 8), st.integers(0, 3)), min_size=1, max_size=6
    ),
)
def test_rolling_out_keeping_some_and_going_on_is_plain_decoding(
    family, widths, length, sampled, rounds
):
    """Every round: choose `count`, keep some, feed some that the rollout did not foresee."""
    engine, other = engines(family, widths)
    capture = Capture(scores=Sampling(1.0)) if sampled else Capture()
    text = [(5 * i + i * i // 3) % 60 + 1 for i in range(length)]
    engine.reset(0)
    engine.prefill(text[:-1])
    for count, kept, strange in rounds:
        pending = text[engine.processed_token_count :]
        count = min(count, engine.roll_out_limit(len(pending)))
        if count < 1 or len(pending) > engine.max_verify_block_length:
            break
        rollout = engine.roll_out(pending, count, capture, KEY)
        assert engine.processed_token_count == len(text)
        assert list(engine.tokens) == text
        chosen = rollout.ids(count)
        assert text + chosen == plain(other, text, count, capture)
        kept = min(kept, rollout.processed)
        engine.keep(kept)
        assert engine.processed_token_count == len(text) + kept
        text += chosen[:kept]
        assert list(engine.tokens) == text
        text += [(chosen[0] + 1 + i) % 90 for i in range(strange)]
        if strange == 0 and engine.processed_token_count == len(text):
            text.append(7)
        if len(text) >= N - 1:
            break


@pytest.mark.parametrize("widths", [None, (1, 2), (2,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_kept_leaves_the_state_that_a_verify_of_the_tokens_would(family, widths):
    """Rings of narrow tiles are shallow: there the limit is theirs and not the context's."""
    engine, other = engines(family, widths)
    text = [(3 * i) % 50 + 1 for i in range(30)]
    for one in (engine, other):
        one.reset(0)
        one.prefill(text[:-1])
    limit = engine.roll_out_limit(1)
    if widths and family in ("gemma3_text", "cohere2"):
        assert 2 <= limit < N - 30
    engine.roll_out(text[-1:], limit)
    other.verify(text[-1:])
    for token in range(20, 32):
        capture = Capture(logits=True)
        rows, expected = (one.verify([token], capture).logits for one in (engine, other))
        assert mx.array_equal(rows, expected)


def test_a_recurrent_state_arrives_where_a_rollout_begins_so_that_no_step_feeds_a_token_twice():
    engine, _ = engines("lfm2", (1, 2, 4, 8))
    engine.reset(0)
    engine.prefill([1, 2, 3, 4, 5])
    for pending, count in ((3, 5), (1, 4), (2, 6)):
        rollout = engine.roll_out([7] * pending, count)
        assert len(rollout.nan_counts) == pending + count - 1
        engine.keep(count - 1)


def test_what_cannot_be_rolled_out_is_refused_and_changes_nothing():
    engine, _ = engines("llama")
    engine.reset(0)
    engine.prefill([1, 2, 3])
    for tokens, count, message in (
        ([], 2, "at least one token"),
        ([1000], 2, "outside the model's vocabulary"),
        ([4], 0, f"expected 1 to {N - 4} tokens"),
        ([4], N - 3, f"expected 1 to {N - 4} tokens"),
        ([4] * N, 1, "the context holds"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.roll_out(tokens, count)
        assert list(engine.tokens) == [1, 2, 3]
    with pytest.raises(ValueError, match="expected 0 to 0 tokens"):
        engine.keep(1)
    engine.roll_out([4], 4)
    with pytest.raises(ValueError, match="expected 0 to 3 tokens"):
        engine.keep(4)
    engine.verify([9])
    with pytest.raises(ValueError, match="expected 0 to 0 tokens"):
        engine.keep(1)
    assert list(engine.tokens) == [1, 2, 3, 4, 9]


def test_a_rollout_reaches_the_contexts_last_position_and_no_further():
    engine, other = engines("llama")
    text = list(range(1, N - 3))
    engine.reset(0)
    engine.prefill(text[:-1])
    assert engine.roll_out_limit(1) == 4
    rollout = engine.roll_out(text[-1:], 4)
    engine.keep(3)
    assert engine.processed_token_count == N - 1
    other.reset(0)
    other.prefill(text[:-1])
    expected = []
    for _ in range(4):
        expected += other.verify([*text, *expected][-1:]).argmax
    assert rollout.ids(4) == expected


def test_the_host_reads_nothing_while_it_rolls_out(monkeypatch):
    engine, _ = engines("llama")
    engine.reset(0)
    engine.roll_out([1, 2, 3], 5)
    engine.reset(0)
    waits = []
    monkeypatch.setattr(mx, "eval", lambda *arrays: waits.append(arrays))
    rollout = engine.roll_out([1, 2, 3], 5)
    assert not waits
    monkeypatch.undo()
    assert len(rollout.ids(5)) == 5


def large(family="llama"):
    """An engine whose slots would be dear to copy."""
    options = {"max_context_length": 1 << 17, "initial_capacity": 1 << 17, "tile_widths": (1, 2)}
    return StaticShapeEngine(tiny_model(family), **options)


def test_steps_submitted_unread_copy_no_slots_here():
    engine = large()
    slots = sum(array.nbytes for array in engine._state.slots)
    assert slots > 16 << 20
    engine.prefill([1, 2, 3])
    token = engine.verify([4], ahead=True).argmax[0]
    before = mx.get_active_memory()
    for _ in range(20):
        rows = engine.verify([token], ahead=True)
        assert rows.ahead
        token = rows.argmax[0]
        assert mx.get_active_memory() - before < slots / 4
    engine.roll_out([token], 20)
    assert mx.get_active_memory() - before < slots / 4
    assert engine.note is None


@pytest.mark.parametrize("how", ["ahead", "rollout"])
def test_where_steps_submitted_unread_copy_the_slots_they_are_awaited_and_that_is_said(how):
    """As on a device whose commands hold what they read until they are done."""
    engine, other = large(), large()
    expected = plain(other, [1, 2, 3], 12)
    held = []
    decode_tile, evaluate = engine._decode_tile, engine._evaluate

    def submitted(*tile):
        outputs = decode_tile(*tile)
        held.append(list(engine._state.slots))
        return outputs

    def done(outputs, *, with_state=True):
        evaluate(outputs, with_state=with_state)
        waits.append(1)
        del held[: len(held) if with_state else -1]

    engine.prefill([1, 2])
    waits = []
    engine._decode_tile, engine._evaluate = submitted, done
    if how == "rollout":
        text = [1, 2, 3, *engine.roll_out([3], 12).ids(12)]
        # Three steps of five show it; the two between and the six after them are awaited.
        assert len(waits) == 8
    else:
        text, went = [1, 2, 3], []
        for _ in range(12):
            rows = engine.verify(text[-1:], ahead=True)
            went.append(rows.ahead)
            text += rows.argmax
        # Submitted with nothing under way, then ahead: three times shows it.
        assert went == [True, False, True, False, True] + 7 * [False]
    assert text == expected
    slots = sum(array.nbytes for array in engine._state.slots)
    said = re.search("submitted ahead, one takes ([0-9]+) MB more of memory", engine.note)
    assert int(said[1]) == pytest.approx(slots >> 20, abs=1)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_temporaries_of_a_large_vocabulary_are_not_taken_for_copies(sampled):
    model = varied_model("llama", vocab_size=1 << 18)
    options = {"max_context_length": 1 << 15, "initial_capacity": 1 << 15, "tile_widths": (8,)}
    engine = StaticShapeEngine(model, **options)
    slots = sum(array.nbytes for array in engine._state.slots)
    assert 16 << 20 < slots < 64 << 20
    engine.prefill([1, 2])
    capture = Capture(scores=Sampling(1.0, top_p=0.9)) if sampled else Capture()
    token = 3
    went = []
    for _ in range(8):
        rows = engine.verify([token], capture, KEY, ahead=True)
        went.append(rows.ahead)
        token = rows.argmax[0]
    engine.roll_out([token], 8, capture, KEY)
    assert engine.note is None
    # A doubt, which costs one wait, may come by chance where the machine is busy.
    assert sum(went) >= 4


def test_drafts_on_the_device_are_verified_as_drafts_on_the_host_are():
    engine, other = engines("llama")
    for one in (engine, other):
        one.reset(0)
        one.prefill([1, 2, 3])
    rows = engine.verify([4], Capture(logits=True), None, mx.array([5, 6, 999]))
    expected = other.verify([4, 5, 6, 999], Capture(logits=True))
    assert list(rows.drafted) == [5, 6, 999]
    assert rows.argmax == expected.argmax
    assert rows.forwards == 1
    assert mx.array_equal(rows.logits, expected.logits)
    assert list(engine.tokens) == [1, 2, 3, 4, 5, 6, 999]
    for bad in (1000, -1, 2**31 - 1):
        with pytest.raises(ValueError, match=f"token id {bad} at index 1 is outside"):
            engine.verify([7], Capture(), None, mx.array([8, bad]))
        assert list(engine.tokens) == [1, 2, 3, 4, 5, 6, 999]
    with pytest.raises(ValueError, match="verify: expected at most"):
        engine.verify([7], Capture(), None, mx.arange(N))


def test_a_rollout_that_met_no_numbers_leaves_none_behind():
    """NaN past the cursor would poison every later row on CPU."""
    model = model_from_config(tiny_configs()["llama"] | {"tie_word_embeddings": False})
    set_random_weights(model, seed=3)
    engine = StaticShapeEngine(model, max_context_length=N, span_step=16)
    chosen = engine.roll_out([1, 2], 1).ids(1)[0]
    engine.reset(0)
    clean = engine.verify([1, 2, 3], Capture(logits=True)).logits
    model.model.embed_tokens.weight[chosen] = mx.nan
    broken = StaticShapeEngine(model, max_context_length=N, span_step=16)
    rollout = broken.roll_out([1, 2], 3)
    assert rollout.ids(1) == [chosen]
    assert mx.any(rollout.nan_counts == 1000).item()
    logits = broken.verify([3], Capture(logits=True)).logits
    assert mx.array_equal(logits[0], clean[2])


def test_a_rollout_writes_in_place_however_large_the_cache():
    """Unread and unfinished steps must not make MLX copy the slots."""
    model = tiny_model("llama")
    peaks = {}
    for capacity in (1 << 10, 1 << 16):
        engine = StaticShapeEngine(
            model, max_context_length=1 << 17, initial_capacity=capacity, tile_widths=(1, 2, 4, 8)
        )
        engine.prefill(list(range(1, 9)))
        for _ in range(3):
            engine.roll_out([5], 8).ids(8)
            engine.reset(8)
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for _ in range(3):
            engine.roll_out([5], 8).ids(8)
            engine.reset(8)
        peaks[capacity] = mx.get_peak_memory() - before
        slot = max(array.nbytes for array in engine._state.slots)
    assert slot > 1 << 20
    assert peaks[1 << 16] < peaks[1 << 10] + slot // 2
