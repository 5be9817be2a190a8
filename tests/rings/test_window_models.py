"""Sliding-window models: speculation changes nothing once the window has gone round."""

from __future__ import annotations

import gc
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec import Capture, RewindRefused, StaticShapeEngine, UnsupportedModel
from tests.cases import PLANS, decode, exact, mlx_lm_tokens, prompt_of, varied_model
from tests.conftest import PROFILE
from tests.families.tiny import tiny_model
from tests.hostile import PlannedDrafter

WINDOW = 16
COUNT = 64
PROMPTS = (1, 8, 15, 16, 17, 40, 100)
CASES = [(length, "free") for length in PROMPTS] + [
    pytest.param(length, "aligned", marks=() if length == 40 else pytest.mark.deep)
    for length in PROMPTS
]
LONGEST = 100 + COUNT + 3
# gemma4's first five of seven layers own keys, of which one sees everything; two share them.
FAMILIES = {
    "gemma3_text": {"sliding_window": WINDOW},
    "gpt_oss": {"sliding_window": WINDOW},
    "gemma4_text": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "sliding_window_pattern": 3,
    },
}


@cache
def model_of(family):
    return varied_model(family, **FAMILIES[family])


@cache
def engine_of(family, placement="free"):
    return StaticShapeEngine(
        model_of(family),
        max_context_length=LONGEST,
        tile_widths=(1, 2, 4, 8, 16) if placement == "free" else (8,),
        placement=placement,
        prefill_step_size=32,
        span_step=64,
    )


@cache
def plain(family, length, placement="free"):
    return decode(engine_of(family, placement), prompt_of(length), COUNT)[0]


def some_k(index):
    """1 to 15; in the fast profile every fifth, others than the neighbouring cases take."""
    return range(1, 16) if PROFILE == "deep" else range(1 + index % 5, 16, 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_models_have_windows_of_sixteen_and_a_layer_without(family):
    windows = {rule.window for rule in engine_of(family)._state.layout.rings}
    assert windows == {WINDOW}
    assert any(
        type(layer).__name__ == "FullAttentionLayer"
        for layer in engine_of(family)._state.layout.layers
    )


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_ids_are_mlx_lms(family, length):
    """A rotating cache sums in another order, so where an id differs the margin must be nothing."""
    prompt = prompt_of(length)
    ours, theirs = plain(family, length), mlx_lm_tokens(model_of(family), prompt, COUNT)
    if ours != theirs:
        at = next(i for i in range(COUNT) if ours[i] != theirs[i])
        row = model_of(family)(mx.array([prompt + ours[:at]]))[0, -1]
        pytest.fail(f"id {at}: margin {abs(row[ours[at]] - row[theirs[at]]).item()}")


@pytest.mark.parametrize(("length", "placement"), CASES)
@pytest.mark.parametrize("plan", ["noisy", "hostile"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_drafter_changes_a_token_at_any_k(family, length, plan, placement):
    prompt, expected = prompt_of(length), plain(family, length, placement)
    engine = engine_of(family, placement)
    for k in some_k(PROMPTS.index(length) + (plan == "hostile")):
        drafter = PlannedDrafter(prompt + expected, PLANS[plan], engine.vocab_size)
        tokens, stats = decode(engine, prompt, COUNT, drafter, num_draft_tokens=k)
        assert tokens == expected, f"k = {k}"
        assert stats.forwards == stats.rounds


@pytest.mark.parametrize("family", FAMILIES)
def test_acceptance_past_the_window_equals_acceptance_before_it(family):
    """A drafter that is right is believed on both sides, and drafts are as long."""
    for length in (2, 40):
        prompt, expected = prompt_of(length), plain(family, length)
        engine = engine_of(family)
        drafter = PlannedDrafter(prompt + expected, PLANS["right"], engine.vocab_size)
        tokens, stats = decode(engine, prompt, COUNT, drafter, num_draft_tokens=5)
        assert tokens == expected
        assert stats.acceptance_rate == 1
        # 64 tokens in blocks of six; one block is cut where a span ends, one by the count.
        assert stats.rounds <= 12


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_around_the_windows_edge_are_those_of_a_forward_without_cache(family):
    """Off by one in a window is seen where the first key leaves it."""
    text = prompt_of(3 * WINDOW, seed=2)
    whole = exact(model_of(family)(mx.array([text]))[0])
    without_first = exact(model_of(family)(mx.array([[7, *text[1:]]]))[0])
    for offset in range(WINDOW - 2, WINDOW + 3):
        for block in (1, 3, 5):
            engine = engine_of(family)
            engine.reset(0)
            engine.prefill(text[:offset])
            rows = engine.verify(text[offset : offset + block], Capture(logits=True))
            at = slice(offset, offset + block)
            np.testing.assert_allclose(exact(rows.logits), whole[at], atol=1e-4)
            assert rows.argmax == whole[at].argmax(axis=-1).tolist()
    # The comparison can tell: one key more or less moves the logits by much more than that.
    assert np.abs(whole[WINDOW] - without_first[WINDOW]).max() > 1e-2


@cache
def engines(family):
    """Two of a kind, and their model."""
    model = varied_model(family, sliding_window=6)
    options = {"max_context_length": 120, "span_step": 64, "prefill_step_size": 8}
    engine, fresh = (
        StaticShapeEngine(model, tile_widths=(1, 2, 4, 8), **options) for _ in range(2)
    )
    return engine, fresh, model


@given(
    family=st.sampled_from(["gemma3_text", "gpt_oss"]),
    steps=st.lists(
        st.tuples(st.integers(0, 3).map(lambda n: n == 3), st.integers(1, 20), st.integers(0, 20)),
        min_size=1,
        max_size=6,
    ),
)
def test_rows_after_any_rewinds_are_those_of_the_tokens_themselves(family, steps):
    """Near those without a cache; without prefill, bit for bit those of decoding one by one."""
    engine, fresh, model = engines(family)
    engine.reset(0)
    for turn, (wide, length, keep) in enumerate(steps):
        cursor = engine.processed_token_count
        tokens = prompt_of(length, seed=turn)
        if wide:
            engine.prefill(tokens[: 118 - cursor])
        else:
            engine.verify(tokens[: max(1, engine.max_verify_block_length)])
        to = max(0, engine.processed_token_count - keep)
        if engine.allows_rewind(to):
            engine.reset(to)
        if engine.max_verify_block_length < 3:
            break
    text = list(engine.tokens)
    ours = engine.verify([5, 6, 7], Capture(logits=True)).logits
    if not any(wide for wide, _, _ in steps):
        fresh.reset(0)
        for token in text:
            fresh.verify([token])
        theirs = [fresh.verify([token], Capture(logits=True)).logits for token in (5, 6, 7)]
        assert mx.array_equal(ours, mx.concatenate(theirs))
    whole = model(mx.array([[*text, 5, 6, 7]]))[0, -3:]
    assert mx.allclose(ours, whole, atol=1e-4)


def snapshot(engine):
    """Every array bit for bit, the tokens, the cursor and the marks."""
    state = engine._state
    arrays = [*state.slots, *(a for checkpoint in state.checkpoints for a in checkpoint.arrays)]
    return (
        list(engine.tokens),
        engine.processed_token_count,
        [bytes(memoryview(mx.contiguous(array).view(mx.uint8))) for array in arrays],
        [checkpoint.position for checkpoint in state.checkpoints],
        (state.pinned, state.high_water, state.non_finite_until, state.capacity),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_refused_rewind_changes_no_layer(family):
    engine = engine_of(family)
    engine.reset(0)
    engine.prefill(prompt_of(100))
    engine.verify(prompt_of(9, seed=1))
    before = snapshot(engine)
    refused = [to for to in range(1, 109) if not engine.allows_rewind(to)]
    # A window of 16 and two tiles of 16 behind it: what lies further back is gone.
    assert refused == list(range(1, refused[-1] + 1))
    assert 60 < refused[-1] < 100
    for to in refused[::9] + refused[-1:]:
        with pytest.raises(RewindRefused, match="sliding windows"):
            engine.reset(to)
    assert snapshot(engine) == before
    engine.reset(refused[-1] + 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_used_again_only_as_far_as_it_is_held(family):
    """The rest of a wrapped ring belongs to later tokens, however long the common prefix is."""
    engine = engine_of(family)
    first, second = prompt_of(100), [*prompt_of(90), 3, 4, 5]
    rows = []
    for _ in range(2):
        engine.reset(0)
        engine.prefill(first)
        engine.verify(prompt_of(4, seed=3))
        common = 90
        if len(rows) == 1:
            assert engine.allows_rewind(common)
            engine.reset(common)
            assert not engine.allows_rewind(50)
        else:
            engine.reset(0)
        engine.prefill(second[engine.processed_token_count :])
        rows.append(exact(engine.verify([8], Capture(logits=True)).logits))
    assert np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("placement", ["free", "aligned"])
def test_a_rejected_row_that_is_no_number_does_not_poison_a_ring(placement):
    poison, prompt = 11, prompt_of(30, seed=4)
    assert poison not in prompt + prompt_of(25, seed=6)
    model = tiny_model("gemma3_text", seed=3)
    model.model.embed_tokens.weight[poison] = mx.nan
    widths = (1, 2, 4, 8) if placement == "free" else (8,)
    options = {"tile_widths": widths, "placement": placement, "span_step": 16}
    engine, clean = (StaticShapeEngine(model, max_context_length=90, **options) for _ in "ab")
    for e in (engine, clean):
        e.prefill(prompt[:-1])
    rows = engine.verify([prompt[-1], 4, poison, 5, 6])
    assert rows.nan_count[2:] == [engine.vocab_size] * 3
    engine.reset(29)
    for token in prompt_of(25, seed=6):
        ours, theirs = (e.verify([token], Capture(logits=True)).logits for e in (engine, clean))
        assert mx.array_equal(ours, theirs, equal_nan=True)


def test_rings_grow_with_use_and_keep_what_they_hold():
    model, text = varied_model("gemma3_text", sliding_window=100), prompt_of(300)
    options = {"max_context_length": 400, "span_step": 16, "tile_widths": (1, 8)}
    small = StaticShapeEngine(model, **options)
    large = StaticShapeEngine(model, initial_capacity=400, **options)
    ring = min(array.shape[2] for array in large._state.slots)
    assert min(array.shape[2] for array in small._state.slots) < ring == 123
    for begin in range(0, 300, 20):
        ours, theirs = (
            e.verify(text[begin : begin + 8], Capture(logits=True)).logits for e in (small, large)
        )
        assert mx.array_equal(ours, theirs)
        for e in (small, large):
            e.prefill(text[begin + 8 : begin + 20])
    assert min(array.shape[2] for array in small._state.slots) == ring


@pytest.mark.parametrize("capacity", [512, 16384])
def test_decoding_copies_neither_rings_nor_slots(capacity):
    engine = StaticShapeEngine(
        varied_model("gemma3_text", sliding_window=200),
        max_context_length=20_000,
        span_step=512,
        initial_capacity=capacity,
        tile_widths=(8,),
    )
    engine.prefill(prompt_of(250))
    for _ in range(3):
        engine.verify(prompt_of(8))
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    resting = mx.get_active_memory()
    for _ in range(5):
        engine.verify(prompt_of(8))
    assert mx.get_peak_memory() - resting < 2**20


def test_prefill_tiles_wider_than_the_ring_lose_nothing():
    """Written first, a wide tile would overwrite the keys its own first rows need."""
    model, text = varied_model("gemma3_text", sliding_window=6), prompt_of(130)
    options = {"max_context_length": 200, "tile_widths": (1, 2), "span_step": 64}
    wide = StaticShapeEngine(model, prefill_step_size=128, **options)
    narrow = StaticShapeEngine(model, prefill_step_size=1, **options)
    for engine in (wide, narrow):
        engine.prefill(text)
    assert wide.prefill_forward_count == 2
    ours, theirs = (e.verify([5, 6], Capture(logits=True)).logits for e in (wide, narrow))
    assert mx.array_equal(ours, theirs)
    whole = model(mx.array([[*text, 5, 6]]))[0, -2:]
    assert mx.allclose(ours, whole, atol=1e-4)


def test_a_window_that_depends_on_the_width_is_refused_by_name():
    """plamo3 masks one key more than its cache holds, so a prompt sees what decoding does not."""
    with pytest.raises(UnsupportedModel, match=r"plamo3: .*window"):
        StaticShapeEngine(tiny_model("plamo3"))


def test_a_mask_wider_than_the_ring_is_an_error_and_not_clipped(monkeypatch):
    monkeypatch.setattr("mlxspec.engine.static.require_static", lambda model: None)
    engine = StaticShapeEngine(tiny_model("plamo3"), max_context_length=40, tile_widths=(1,))
    with pytest.raises(ValueError, match="mask of 9 positions over a cache of 8"):
        engine.verify([1])
    assert engine.processed_token_count == 0
