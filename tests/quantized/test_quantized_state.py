"""Quantised keys and values: mlx-lm's ids, the same with drafts, and rewinds that are exact."""

from __future__ import annotations

import gc
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlxspec import Capture, RewindRefused, StaticShapeEngine, UnsupportedModel
from tests.cases import PLANS, decode, exact, mlx_lm_tokens, prompt_of, varied_model
from tests.conftest import PROFILE
from tests.families.tiny import tiny_model
from tests.hostile import PlannedDrafter
from tests.rings.test_window_models import snapshot

COUNT = 40
# Head sizes that a group of 32 divides.
WIDE = {"hidden_size": 128, "head_dim": 32}
FAMILIES = {
    "llama": WIDE,
    "qwen3": WIDE,
    "lfm2": {"hidden_size": 128, "block_dim": 128},
    "qwen3_next": WIDE,
}


@cache
def model_of(family):
    return varied_model(family, **FAMILIES[family])


def quantized_engine(family="llama", *, start, bits=4, placement=None, **options):
    options = {"max_context_length": 120, "span_step": 32, "prefill_step_size": 16} | options
    if placement is None:
        placement = "free" if family in ("llama", "qwen3") else "anchored"
    widths = (8,) if placement == "aligned" else (1, 4, 8)
    return StaticShapeEngine(
        model_of(family),
        tile_widths=widths,
        placement=placement,
        kv_bits=bits,
        kv_group_size=32,
        quantized_kv_start=start,
        **options,
    )


def fill(engine, text, prefilled):
    engine.reset(0)
    engine.prefill(text[:prefilled])
    return [
        exact(engine.verify([token], Capture(logits=True)).logits)[0] for token in text[prefilled:]
    ]


CASES = [
    (family, bits, length, start)
    for family in FAMILIES
    for bits in (4, 8)
    for length in (1, 15, 30, 50)
    for start in (0, 12, 40)
    if PROFILE == "deep" or (length + start + bits) % 5 == len(family) % 5
]


@pytest.mark.parametrize(("family", "bits", "length", "start"), CASES)
def test_plain_ids_are_mlx_lms_and_no_drafter_changes_one(family, bits, length, start):
    """mlx-lm converts after a forward: the prompt chunk or the token that reaches the start."""
    prompt = prompt_of(length)
    options = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}
    expected = mlx_lm_tokens(model_of(family), prompt, COUNT, prefill_step_size=16, **options)
    engine = quantized_engine(family, start=start, bits=bits)
    assert decode(engine, prompt, COUNT)[0] == expected
    assert engine._state.is_quantized == (engine.processed_token_count > start)
    for plan in PLANS:
        drafter = PlannedDrafter(prompt + expected, PLANS[plan], engine.vocab_size)
        tokens, stats = decode(engine, prompt, COUNT, drafter)
        assert tokens == expected, plan
        assert stats.forwards == stats.rounds
        if plan == "right":
            assert stats.acceptance_rate == 1


def test_an_aligned_model_speculates_as_it_decodes_plainly():
    engine = quantized_engine("lfm2", start=24, placement="aligned")
    prompt = prompt_of(11)
    expected, _ = decode(engine, prompt, COUNT)
    for plan in PLANS:
        drafter = PlannedDrafter(prompt + expected, PLANS[plan], engine.vocab_size)
        assert decode(engine, prompt, COUNT, drafter)[0] == expected, plan


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_depend_on_their_position_alone(family):
    """Whole before the start, quantised from it on, whatever was drafted and rejected around it."""
    text, start, first = prompt_of(60), 32, 20
    engine = quantized_engine(family, start=start)
    plain = fill(engine, text, first)
    whole = StaticShapeEngine(
        model_of(family), tile_widths=(1,), span_step=32, max_context_length=120,
        placement=None if family in ("llama", "qwen3") else "anchored",
    )  # fmt: skip
    unquantized = fill(whole, text, first)
    assert all(np.array_equal(plain[i], unquantized[i]) for i in range(start - first))
    assert not np.array_equal(plain[start - first], unquantized[start - first])
    for keep in (1, 2, 3):
        engine.reset(0)
        engine.prefill(text[:first])
        cursor = first
        while cursor < 50:
            budget = engine.one_forward_draft_budget
            assert cursor >= start or cursor + budget < start
            kept = min(keep, budget + 1)
            wrong = prompt_of(budget + 1 - kept, seed=3)
            rows = engine.verify(text[cursor : cursor + kept] + wrong, Capture(logits=True))
            at = slice(cursor - first, cursor - first + kept)
            assert np.array_equal(exact(rows.logits)[:kept], plain[at])
            cursor += kept
            engine.reset(cursor)


def test_a_block_across_the_start_is_refused_with_the_reason():
    engine = quantized_engine(start=32)
    engine.prefill(prompt_of(29))
    assert engine.max_verify_block_length == 3
    assert engine.one_forward_draft_budget == 2
    before = snapshot(engine)
    with pytest.raises(ValueError, match="at most 3 tokens, got 4: keys become quantised at"):
        engine.verify(prompt_of(4))
    assert snapshot(engine) == before
    engine.verify(prompt_of(3))
    assert engine.max_verify_block_length == 120 - 1 - 32


def test_a_rewind_below_the_start_is_refused_once_converted_and_only_then():
    text, engine = prompt_of(60), quantized_engine(start=32)
    plain = fill(engine, text, 20)
    engine.reset(0)
    engine.prefill(text[:20])
    for cursor in (20, 24, 28):
        engine.verify(text[cursor : cursor + 4])
    # All before the start is processed, and nothing converted: that may be taken back.
    assert all(engine.allows_rewind(to) for to in range(33))
    engine.reset(30)
    engine.verify(text[30:32])
    for cursor in range(32, 60):
        engine.verify(text[cursor : cursor + 1])
    before = snapshot(engine)
    for to in range(1, 60):
        assert engine.allows_rewind(to) == (to >= 32)
        if to < 32:
            with pytest.raises(RewindRefused, match="quantised since position 32"):
                engine.reset(to)
    assert snapshot(engine) == before
    engine.reset(40)
    rows = engine.verify(text[40:44], Capture(logits=True))
    assert np.array_equal(exact(rows.logits), plain[20:24])
    again = fill(engine, text, 20)
    assert all(np.array_equal(a, b) for a, b in zip(again, plain, strict=True))


def test_quantised_slots_are_smaller_and_written_in_place():
    engine = quantized_engine(
        start=0, bits=4, max_context_length=20_000, initial_capacity=16_384, span_step=512
    )
    whole = sum(array.nbytes for array in engine._state.slots)
    engine.prefill(prompt_of(20))
    for _ in range(3):
        engine.verify(prompt_of(8))
    # 4 bits and two float32 per 32 numbers are 6 bits a number, against 32.
    assert sum(array.nbytes for array in engine._state.slots) * 5 < whole
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    resting = mx.get_active_memory()
    for _ in range(5):
        engine.verify(prompt_of(8))
    assert mx.get_peak_memory() - resting < 2**20


def test_capacity_grows_after_the_conversion():
    text = prompt_of(110)
    small, large = quantized_engine(start=8), quantized_engine(start=8, initial_capacity=120)
    assert small.capacity < large.capacity
    ours, theirs = fill(small, text, 4), fill(large, text, 4)
    assert small.capacity == large.capacity
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_no_tile_is_traced_again_for_a_second_text():
    engine = quantized_engine(start=24, initial_capacity=120)
    decode(engine, prompt_of(10), COUNT)
    traces = engine.trace_count
    decode(engine, prompt_of(10, seed=1), COUNT)
    assert engine.trace_count == traces
    assert engine.compiled is True


def test_a_rejected_row_that_is_no_number_does_not_poison_quantised_slots():
    poison = 11
    model = varied_model("llama", vocab_size=997, **WIDE)
    model.model.embed_tokens.weight[poison] = mx.nan
    engine, clean = (
        StaticShapeEngine(
            model, max_context_length=60, kv_bits=8, kv_group_size=32, quantized_kv_start=2
        )
        for _ in range(2)
    )
    for e in (engine, clean):
        e.prefill([1, 2, 3])
    assert engine.verify([4, poison, 5]).nan_count[1:] == [engine.vocab_size] * 2
    engine.reset(3)
    for token in (4, 7, 8, 9):
        ours, theirs = (e.verify([token], Capture(logits=True)).logits for e in (engine, clean))
        assert mx.array_equal(ours, theirs, equal_nan=True)


def test_a_failing_prefill_that_converted_on_the_way_is_undone():
    text, engine = prompt_of(60), quantized_engine(start=32)
    plain = fill(engine, text, 20)
    engine.reset(0)
    engine.prefill(text[:20])
    engine.verify(text[20:24])

    def stop(processed, total):
        if processed > 24:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(prompt_of(80, seed=3), stop)
    assert not engine._state.is_quantized
    assert engine.allows_rewind(10)
    rows = engine.verify(text[24:30], Capture(logits=True))
    assert np.array_equal(exact(rows.logits), plain[4:10])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny_model("gemma3_text"), "sliding-window layers, which mlx-lm cannot"),
        (lambda: tiny_model("gpt_oss"), "sliding-window layers, which mlx-lm cannot"),
        (lambda: tiny_model("llama"), "mlx-lm cannot run it with KVQuantization"),
        (lambda: tiny_model("mamba2"), "no layer whose keys and values mlx-lm would quantise"),
        (lambda: tiny_model("falcon_h1"), "no layer whose keys and values mlx-lm would quantise"),
    ],
)
def test_what_mlx_lm_cannot_quantise_is_refused_by_name(make, reason):
    with pytest.raises(UnsupportedModel, match=f"kv_bits cannot be honoured.*{reason}"):
        StaticShapeEngine(make(), max_context_length=60, kv_bits=4, kv_group_size=32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_bits": 7}, "kv_bits: expected 2, 3, 4"),
        ({"kv_bits": True}, "kv_bits"),
        ({"kv_bits": 4, "kv_group_size": 48}, "kv_group_size"),
        ({"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": -1}, "quantized_kv_start"),
        ({"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 2.5}, "quantized_kv_start"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StaticShapeEngine(model_of("llama"), max_context_length=60, **options)


def test_quantisation_cannot_begin_inside_an_aligned_tile():
    with pytest.raises(ValueError, match="a multiple of 8, the tile width of aligned placement"):
        quantized_engine("lfm2", start=20, placement="aligned")


def test_without_kv_bits_the_other_options_ask_for_nothing():
    engine = StaticShapeEngine(
        model_of("llama"), max_context_length=60, kv_group_size=64, quantized_kv_start=5
    )
    engine.prefill(prompt_of(20))
    assert not engine._state.is_quantized
