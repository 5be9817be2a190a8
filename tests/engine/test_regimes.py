"""Widths are compared wherever a context meets other kernels, and nothing is touched by it."""

from __future__ import annotations

import random
import re
from contextlib import contextmanager

import mlx.core as mx
import pytest

from mlxspec import (
    Capture,
    PromptLookup,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
    StaticShapeEngine,
)
from mlxspec.engine import survey
from mlxspec.engine.regimes import Regime, reachable
from mlxspec.engine.spans import SpanRule
from mlxspec.engine.state import ModelState
from mlxspec.engine.state.frame import TileFrame
from mlxspec.engine.support import model_from_config
from mlxspec.verification import probe_model
from mlxspec.verification.drafters import Oracle
from tests.families.tiny import set_random_weights, tiny_configs, tiny_model

PROMPT = [1 + i % 50 for i in range(1000)]
N = 1200


def test_a_context_meets_kernels_by_its_length_and_its_quantised_keys():
    spans = SpanRule()
    assert reachable(spans, None, 200) == [Regime()]
    whole = [Regime(keys) for keys in (0, 1024, 4096, 8192)]
    assert reachable(spans, None, 10_000) == whole
    assert reachable(spans, 5000, 6000) == [*whole[:3], Regime(4096, True)]
    assert reachable(spans, 0, 2000) == [Regime(0, True), Regime(1024, True)]
    for regime in whole:
        position = regime.position(spans, None)
        assert spans.span(position) >= regime.keys
        assert position == 0 or spans.span(position - 1) == position
    assert Regime(4096, True).position(spans, 5000) >= 5000


def loses_a_key_far_out(monkeypatch, widths=(8,)):
    """Tiles of these widths do not see the first key of a context of 1024 keys."""
    right = TileFrame.causal_mask

    def mask(self, window=None):
        seen = right(self, window)
        if self.width in widths and self.span >= 1024:
            return seen & (mx.arange(self.span) > 0)[None]
        return seen

    monkeypatch.setattr(TileFrame, "causal_mask", mask)


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("mlxspec.engine.measurements.cache_dir", lambda: tmp_path)


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_width_that_rounds_differently_far_out_is_given_up_there(family, monkeypatch):
    loses_a_key_far_out(monkeypatch)
    engine = StaticShapeEngine(tiny_model(family), max_context_length=N)
    assert engine.tile_widths == (1, 2, 4, 8, 16)
    engine.prefill(PROMPT[:700])
    assert engine.tile_widths == (1, 2, 4, 8, 16)
    engine.prefill(PROMPT[700:])
    # Where a state is moved by full tiles, the widest is compared behind one of 8 rows.
    assert engine.tile_widths == ((1, 2, 4) if family == "lfm2" else (1, 2, 4, 16))
    assert "round differently" in engine.note
    engine.reset(0)
    drafted = SpeculativeDecoder(engine, PromptLookup()).generate(PROMPT, max_tokens=40)
    alone = StaticShapeEngine(tiny_model(family), max_context_length=N, tile_widths=(1,))
    plain = SpeculativeDecoder(alone).generate(PROMPT, max_tokens=40)
    assert [e.token for e in drafted] == [e.token for e in plain]


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize(
    ("family", "start", "left"), [("llama", 766, (4, 8, 16)), ("lfm2", 740, (1, 2))]
)
def test_a_draft_changes_nothing_where_widths_are_given_up_behind_it(
    family, start, left, monkeypatch
):
    loses_a_key_far_out(monkeypatch, widths=(4, 8, 16))
    model = tiny_model(family)

    def generated(drafter, align):
        engine = StaticShapeEngine(model, max_context_length=N)
        options = SpeculativeDecodingOptions(num_draft_tokens=30, align_proposals=align)
        decoder = SpeculativeDecoder(engine, drafter, options)
        tokens = [e.token for e in decoder.generate(PROMPT[:start], max_tokens=40)]
        assert engine.tile_widths == left
        assert "round differently" in decoder.stats.note
        if align:
            assert decoder.stats.forwards == decoder.stats.rounds
        return tokens, engine.longest_rewind(start + 10), engine.longest_rewind(start - 1)

    plain = generated(None, True)
    text = PROMPT[:start] + plain[0]
    for align in (True, False):
        # Among these are drafts that cross the place and are rejected before it.
        for seed in (0, 1):
            rng = random.Random(seed)
            spoiled = Oracle(text, lambda _, t, rng=rng: t if rng.random() < 0.7 else (t + 1) % 50)
            assert generated(spoiled, align) == plain


@pytest.mark.usefixtures("fresh_cache")
def test_where_a_context_has_no_room_to_compare_one_width_is_left():
    engine = StaticShapeEngine(tiny_model("llama"), max_context_length=780)
    engine.prefill(PROMPT[:766])
    assert engine.tile_widths == (1, 2, 4, 8, 16)
    assert engine.max_verify_block_length == 2
    with pytest.raises(ValueError, match="run on other kernels"):
        engine.verify([1, 2, 3])
    engine.verify([1, 2])
    assert engine.one_forward_draft_budget == 0
    engine.verify([3])
    assert engine.tile_widths == (1,)


@contextmanager
def no_room_to_compare():
    """There is no memory for another state that stands far out."""

    def no_room(state, position):
        raise RuntimeError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelState, "pretend", no_room)
        yield


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_where_widths_cannot_be_compared_the_text_goes_on_in_the_narrowest(family):
    model = tiny_model(family)
    engine = StaticShapeEngine(model, max_context_length=N)
    engine._notes["copies"] = "said before"

    with no_room_to_compare():
        engine.prefill(PROMPT)
    assert list(engine.tokens) == PROMPT
    assert engine.tile_widths == (1,)
    assert engine.note == (
        "said before; one position a forward from 768 tokens on: the rows of tile widths 1, 2, 4, "
        "8, 16 could not be compared (no room)"
    )
    alone = StaticShapeEngine(model, max_context_length=N, tile_widths=(1,))
    alone.prefill(PROMPT)
    logits = Capture(logits=True)
    ours, theirs = (e.verify([1], logits).logits for e in (engine, alone))
    assert mx.array_equal(ours, theirs)
    # A lack of memory passes, and so is nowhere remembered.
    to = 0 if family == "lfm2" else 700
    engine.reset(to)
    engine.prefill([])
    assert engine.tile_widths == (1, 2, 4, 8, 16)
    assert engine.note == "said before"
    engine.reset(0)
    engine.prefill(PROMPT[:to])
    engine.prefill(PROMPT[to:])
    fresh = StaticShapeEngine(model, max_context_length=N)
    fresh.prefill(PROMPT)
    assert engine.tile_widths == fresh.tile_widths


@pytest.mark.usefixtures("fresh_cache")
def test_a_text_is_decoded_in_the_widths_it_would_have_alone(monkeypatch):
    """Whatever one before it has met farther out, in whichever way the engine went back."""
    monkeypatch.setattr(
        survey,
        "width_classes",
        lambda engine, widths: {0: [widths], 768: [(4, 8, 16)], 3840: [(1,)]}[
            engine.processed_token_count
        ],
    )
    model = tiny_model("llama")
    engine = StaticShapeEngine(model, max_context_length=6000)
    image = engine.image()
    far = PROMPT * 4
    for to, expected in ((0, (1, 2, 4, 8, 16)), (500, (1, 2, 4, 8, 16)), (900, (4, 8, 16))):
        engine.reset(0)
        engine.prefill(far)
        assert engine.tile_widths == (1,)
        engine.reset(to)
        engine.verify([1])
        assert engine.tile_widths == expected
        assert ("3840" in (engine.note or "")) is False
    engine.reset(0)
    engine.prefill(far)
    engine.restore(image)
    engine.prefill([])
    assert engine.tile_widths == (1, 2, 4, 8, 16)


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("align", [True, False])
def test_a_rejected_draft_leaves_the_widths_that_plain_decoding_has(align, failing, monkeypatch):
    """At the second place too, where what is one class is no part of the class at the first."""
    tried = []

    def classes(engine, widths):
        place = engine.processed_token_count
        tried.append(place)
        if failing and place == 3840 and tried.count(place) == 1:
            raise MemoryError
        return {0: [widths], 768: [(1, 2), (4, 8, 16)], 3840: [(1, 2, 4), (8, 16)]}[place]

    def rounded_apart(window_mask):
        def mask(self, window=None):
            seen = window_mask(self, window)
            # Kernels of these widths sum in another way out there.
            apart = self.width in ((1, 2) if self.span < 4096 else (8, 16)) and self.span >= 1024
            return seen & (mx.arange(self.span) > 200)[None] if apart else seen

        return mask

    monkeypatch.setattr(survey, "width_classes", classes)
    monkeypatch.setattr(TileFrame, "causal_mask", rounded_apart(TileFrame.causal_mask))
    prompt = (PROMPT * 4)[:3825]

    def generated(drafter):
        tried.clear()
        engine = StaticShapeEngine(tiny_model("llama"), max_context_length=6000)
        engine.prefill(prompt[:800])
        decoder = SpeculativeDecoder(
            engine, drafter, SpeculativeDecodingOptions(7, align_proposals=align)
        )
        tokens = [e.token for e in decoder.generate(prompt, max_tokens=50)]
        assert tried.count(3840) <= 1
        return tokens, engine.tile_widths

    plain = generated(None)
    assert plain[1] == ((1,) if failing else (1, 2, 4))
    text = prompt + plain[0]
    for wrong in (0.0, 0.3, 1.0):
        rng = random.Random(2)
        oracle = Oracle(
            text,
            lambda _, t, rng=rng, wrong=wrong: t if rng.random() >= wrong else (t + 1) % 50,
        )
        assert generated(oracle) == plain


@pytest.mark.usefixtures("fresh_cache")
def test_where_the_first_span_is_long_the_widths_compared_first_are_those_in_use(monkeypatch):
    loses_a_key_far_out(monkeypatch, widths=(1,))
    engine = StaticShapeEngine(tiny_model("llama"), max_context_length=3000, span_step=1024)
    assert engine.width_classes == [(1,), (2, 4, 8, 16)]
    assert engine.tile_widths == (2, 4, 8, 16)
    engine.prefill(PROMPT[:20])
    engine.verify([1, 2, 3])
    assert engine.tile_widths == (2, 4, 8, 16)
    assert engine.note.count("tile widths") == 1


@pytest.mark.usefixtures("fresh_cache")
def test_quantised_keys_that_no_span_begins_with_are_decoded_one_by_one():
    model = model_from_config(tiny_configs()["llama"] | {"head_dim": 32})
    set_random_weights(model, seed=0)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 730}
    engine = StaticShapeEngine(model, max_context_length=N, **options)
    engine.prefill(PROMPT[:740])
    assert engine.tile_widths == (1,)
    assert "one position a forward from 768" in engine.note
    engine.prefill(PROMPT[740:800])
    assert engine.tile_widths == (1, 2, 4, 8, 16)
    places = [each.regime for each in engine.measured()]
    assert Regime(1024, True) in places
    assert Regime(0, True) not in places


@pytest.mark.usefixtures("fresh_cache")
def test_a_restored_text_is_compared_again_where_that_failed():
    engine = StaticShapeEngine(tiny_model("llama"), max_context_length=N)

    with no_room_to_compare():
        engine.prefill(PROMPT[:800])
    assert engine.tile_widths == (1,)
    engine.restore(engine.image())
    engine.prefill([])
    assert engine.tile_widths == (1, 2, 4, 8, 16)


@pytest.mark.usefixtures("fresh_cache")
def test_a_kept_engine_drafts_in_the_text_after_one_that_left_it_one_row(monkeypatch):
    monkeypatch.setattr(
        survey,
        "width_classes",
        lambda engine, widths: [widths[:1]] if engine.processed_token_count else [widths],
    )
    engine = StaticShapeEngine(tiny_model("llama"), max_context_length=N)
    for prompt, row in ((PROMPT[:800], 1), (PROMPT[:100], 16)):
        decoder = SpeculativeDecoder(engine, PromptLookup(), SpeculativeDecodingOptions(4))
        list(decoder.generate(prompt, max_tokens=30))
        assert engine.verify_tile_width == row
        assert decoder.stats.why_off is None
        assert (decoder.stats.drafted > 0) is (row > 1)
        assert (decoder.stats.note is None) is (row > 1)


def in_no_row_alike(window_mask, keys=1024):
    """A mask as of kernels whose every row but the first sums in another way from so many keys."""

    def mask(self, window=None):
        seen = window_mask(self, window)
        if self.width <= 16 and self.span >= keys:
            late = (mx.arange(self.width) > 0)[:, None]
            return seen & ~(late & (mx.arange(self.span) < 400)[None])
        return seen

    return mask


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("why", ["round differently", "could not be compared", "no room"])
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_where_no_width_is_known_to_agree_a_draft_changes_nothing(family, why, monkeypatch):
    """As on a device where one row is another kernel's, so that two rows are the narrowest tile."""
    width_classes = survey.width_classes

    def classes(engine, widths):
        if engine.processed_token_count == 0:
            return [(1,), (2, 4, 8, 16)]
        if why == "could not be compared":
            raise MemoryError
        return width_classes(engine, widths)

    monkeypatch.setattr(survey, "width_classes", classes)
    monkeypatch.setattr(TileFrame, "causal_mask", in_no_row_alike(TileFrame.causal_mask))
    model = tiny_model(family)
    length = 783 if why == "no room" else N

    def generated(drafter, align):
        engine = StaticShapeEngine(model, max_context_length=length)
        options = SpeculativeDecodingOptions(num_draft_tokens=6, align_proposals=align)
        decoder = SpeculativeDecoder(engine, drafter, options)
        tokens = [e.token for e in decoder.generate(PROMPT[:750], max_tokens=60)]
        assert engine.tile_widths == (2,)
        assert why in decoder.stats.note
        assert ("one position a forward from 768" in decoder.stats.note) is (family == "llama")
        return tokens

    plain = generated(None, True)
    for align in (True, False):
        for wrong in (0.0, 0.3):
            rng = random.Random(1)
            spoiled = Oracle(
                PROMPT[:750] + plain,
                lambda _, t, rng=rng, wrong=wrong: t if rng.random() >= wrong else (t + 1) % 50,
            )
            assert generated(spoiled, align) == plain


@pytest.mark.usefixtures("fresh_cache")
def test_the_rows_of_a_width_that_is_left_alone_are_compared_farther_out_too(monkeypatch):
    width_classes = survey.width_classes

    def classes(engine, widths):
        places = {0: [(1,), (2, 4, 8, 16)], 768: [(2,), (4, 8)]}
        return places.get(engine.processed_token_count) or width_classes(engine, widths)

    monkeypatch.setattr(survey, "width_classes", classes)
    monkeypatch.setattr(survey, "best_class", lambda classes: classes[0])
    monkeypatch.setattr(TileFrame, "causal_mask", in_no_row_alike(TileFrame.causal_mask, 4096))
    prompt = (PROMPT * 4)[:3830]

    def generated(drafter):
        engine = StaticShapeEngine(tiny_model("llama"), max_context_length=6000)
        engine.prefill(prompt[:800])
        assert engine.tile_widths == (2,)
        decoder = SpeculativeDecoder(engine, drafter, SpeculativeDecodingOptions(4))
        return [e.token for e in decoder.generate(prompt, max_tokens=60)]

    plain = generated(None)
    assert generated(Oracle(prompt + plain, lambda _, token: token)) == plain


@pytest.mark.usefixtures("fresh_cache")
def test_what_is_given_up_at_one_place_is_still_said_after_another(monkeypatch):
    engine = StaticShapeEngine(tiny_model("llama"), max_context_length=6000)
    monkeypatch.setattr(
        "mlxspec.engine.survey.width_classes",
        lambda engine, widths: [(1, 2, 4, 16) if engine.processed_token_count < 2000 else (1, 2)],
    )
    engine.prefill(PROMPT)
    assert engine.tile_widths == (1, 2, 4, 16)
    engine.prefill(PROMPT * 3)
    assert engine.tile_widths == (1, 2)
    assert re.findall("from ([0-9]+) tokens on", engine.note) == ["768", "3840"]


@pytest.mark.usefixtures("fresh_cache")
def test_a_rollout_may_cross_a_place_and_go_on_behind_it():
    engine = StaticShapeEngine(tiny_model("llama"), max_context_length=N)
    engine.prefill(PROMPT[:766])
    rollout = engine.roll_out([5], 20)
    engine.keep(rollout.processed)
    assert engine.processed_token_count > 780
    assert engine._regimes.compared == {Regime()}
    engine.roll_out([5, 6, 7], 8)
    assert engine._regimes.compared == {Regime(1024)}


@pytest.mark.usefixtures("fresh_cache")
def test_a_rollout_takes_as_many_tokens_as_its_limit_said(monkeypatch):
    monkeypatch.setattr(
        survey,
        "width_classes",
        lambda engine, widths: (
            [(1,), (2, 4, 8, 16)] if engine.processed_token_count else [(1, 2, 4, 8, 16)]
        ),
    )
    engine = StaticShapeEngine(tiny_model("gemma3_text"), max_context_length=N)
    engine.prefill(PROMPT[:766])
    engine.keep(engine.roll_out([5], 6).processed)
    limit = engine.roll_out_limit(1)
    with pytest.raises(ValueError, match="tokens to choose"):
        engine.roll_out([5], limit + 1)
    engine = StaticShapeEngine(tiny_model("gemma3_text"), max_context_length=N)
    engine.prefill(PROMPT[:766])
    engine.keep(engine.roll_out([5], 6).processed)
    assert len(engine.roll_out([5], limit).steps) == limit - 1
    assert engine.tile_widths == (2, 4, 8, 16)


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_looking_leaves_the_state_as_it_was(family):
    model = tiny_model(family)
    looked = StaticShapeEngine(model, max_context_length=N)
    looked.prefill(PROMPT)
    assert looked._regimes.compared == {Regime(1024)}
    assert looked.tile_widths == (1, 2, 4, 8, 16)
    blind = StaticShapeEngine(model, max_context_length=N, tile_widths=looked.tile_widths)
    blind.prefill(PROMPT)
    assert blind._regimes.compared == {Regime()}
    assert all(map(mx.array_equal, looked._state.slots, blind._state.slots))
    assert looked._state.high_water == blind._state.high_water
    assert looked.verify([1, 2, 3]).argmax == blind.verify([1, 2, 3]).argmax


@pytest.mark.usefixtures("fresh_cache")
def test_all_regimes_are_measured_once_and_then_remembered():
    model = model_from_config(tiny_configs()["llama"] | {"head_dim": 32})
    set_random_weights(model, seed=0)
    options = {"max_context_length": N, "kv_bits": 8, "kv_group_size": 32}

    def measured():
        return StaticShapeEngine(model, quantized_kv_start=300, **options).measured()

    first = measured()
    assert [each.regime for each in first] == [Regime(), Regime(0, True), Regime(1024, True)]
    assert not any(each.remembered for each in first)
    assert all(each.costs.of(1) > 0 for each in first)
    assert all({1, 2, 4, 8, 16} <= set(each.classes[0]) for each in first)
    again = measured()
    assert all(each.remembered for each in again)
    assert [each.classes for each in again] == [each.classes for each in first]


@pytest.mark.usefixtures("fresh_cache")
def test_a_probe_shows_every_regime_and_the_faulty_width_of_one(monkeypatch):
    loses_a_key_far_out(monkeypatch)
    probe = probe_model(tiny_model("llama"), max_context_length=N)
    (far,) = probe.regimes
    assert (far["keys"], far["quantized"], far["remembered"]) == (1024, False, False)
    assert len(probe.classes) == 1
    assert len(far["classes"]) == 2
    assert "From 1024 keys on (measured now)" in str(probe)
