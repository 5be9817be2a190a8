"""`verify` holds where nothing is wrong, looks everywhere it says, and says where it did not."""

from __future__ import annotations

import json

import pytest

from mlxspec import StaticShapeEngine
from mlxspec.cli.verify import table
from mlxspec.engine.costs import TileCosts
from mlxspec.verification import probe_model, verify_model
from mlxspec.verification.places import places
from mlxspec.verification.verdict import Price
from tests.cases import varied_model
from tests.families.tiny import tiny_model

PROMPT = [5, 9, 2, 6, 5, 9, 2, 6]
OPTIONS = {"max_context_length": 128, "span_step": 16, "max_tokens": 24, "widened": False}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "lfm2", "mamba2"])
def test_every_promised_check_holds(family):
    verdict = verify_model(tiny_model(family), PROMPT, **OPTIONS)
    assert verdict.passed
    assert [check for check in verdict.checks if check.status == "fault"] == []
    names = {check.name for check in verdict.checks if check.place == "prompt"}
    assert names >= {
        *(f"scored in tiles of {width}" for width in verdict.widths),
        "drafted by prompt lookup",
        "drafted by a drafter always wrong",
        "drafted by the model itself",
        "drafted by a drafter always wrong, over several tiles",
        "sampled, drafted by an oracle half wrong",
        "mlx-lm's own rows",
    }
    assert ("aligned tiles of 16" in names) is (family != "mamba2")
    assert json.loads(json.dumps(verdict.as_dict()))["passed"] is True
    assert "Speculation changes nothing here." in table(family, verdict)


def test_half_precision_is_compared_bit_for_bit_too():
    import mlx.core as mx

    verdict = verify_model(tiny_model("llama", dtype=mx.bfloat16), PROMPT, **OPTIONS)
    assert verdict.passed


def test_a_draft_model_drafts_where_one_is_given():
    verdict = verify_model(
        tiny_model("llama"), PROMPT, draft_model=tiny_model("llama", seed=3), **OPTIONS
    )
    assert verdict.passed
    assert "drafted by the draft model" in {check.name for check in verdict.checks}


def test_widths_that_drafting_is_given_because_they_pay_are_verified_too(monkeypatch):
    cheap = TileCosts(((1, 1.0), (16, 1.1), (24, 1.2), (32, 3.0)))
    monkeypatch.setattr("mlxspec.engine.survey.remembered_costs", lambda circumstances: cheap)
    options = OPTIONS | {"widened": True, "max_context_length": 256, "span_step": 48}
    verdict = verify_model(tiny_model("llama"), PROMPT, **options)
    assert verdict.passed
    assert 24 in verdict.widths
    assert "scored in tiles of 24" in {check.name for check in verdict.checks if check.in_use}


def test_a_probe_says_what_it_measured_and_what_it_remembered(monkeypatch, tmp_path):
    monkeypatch.setattr("mlxspec.engine.measurements.cache_dir", lambda: tmp_path)
    model = tiny_model("llama")
    options = {"max_context_length": 64, "span_step": 16}
    first, second = probe_model(model, **options), probe_model(model, **options)
    assert not any(first.remembered.values())
    assert set(first.remembered) == {"tile costs", "width classes"}
    assert all(second.remembered.values())
    assert second.milliseconds == first.milliseconds
    assert second.classes == first.classes
    assert set(first.widths) <= {width for group in first.classes for width in group}
    assert "measured now" in str(first)
    assert "remembered from an earlier run" in str(second)
    assert all(str(width) in str(first) for width in first.milliseconds)


def engine_of(**changes):
    model = varied_model("gemma3_text", **changes)
    return StaticShapeEngine(model, max_context_length=20_000, tile_widths=(1, 2, 4, 8, 16))


def test_places_are_the_prompts_end_the_next_spans_end_and_past_every_window():
    seen, later = places(engine_of(sliding_window=512), 10, 24, None)
    assert [place.name for place in seen] == ["prompt", "span of 256", "window of 512"]
    assert [place.name for place in later] == ["1024 keys", "4096 keys", "8192 keys"]
    first, span, window = seen
    assert (first.start, first.end) == (9, 33)
    assert span.start < 256 < span.end
    # Past the ring that holds the window, which is deeper by two of the widest tiles.
    assert window.start < 512
    assert window.end > 512 + 2 * 16


def test_further_places_are_looked_at_where_that_is_asked_for():
    seen, later = places(engine_of(sliding_window=512), 10, 24, 5000)
    assert [place.name for place in seen][2:] == ["window of 512", "1024 keys", "4096 keys"]
    assert [place.name for place in later] == ["8192 keys"]
    seen, later = places(engine_of(sliding_window=512), 10, 24, 1)
    assert [place.name for place in seen] == ["prompt"]


def test_a_window_far_off_is_left_out_of_a_quick_look_and_named():
    seen, later = places(engine_of(sliding_window=4096), 10, 24, None)
    assert [place.name for place in seen] == ["prompt", "span of 256"]
    assert "window of 4096" in ", ".join(place.name for place in later)


def test_no_place_lies_past_the_context_or_inside_the_prompt():
    for context in (12, 40, 300, 520, 600):
        engine = StaticShapeEngine(
            varied_model("gemma3_text", sliding_window=512), max_context_length=context
        )
        for prompt_length in (1, 11, context - 1):
            for place in [p for found in places(engine, prompt_length, 24, None) for p in found]:
                assert place.start >= 0
                assert place.length >= 1
                assert place.end < context


def test_what_was_not_looked_at_is_said_with_the_option_that_would():
    options = OPTIONS | {"span_step": 64, "tile_widths": (1, 4), "up_to": 1}
    verdict = verify_model(tiny_model("llama"), PROMPT, **options)
    assert verdict.places == ["prompt"]
    (line,) = verdict.not_reached
    assert line.startswith("span of 64 (--up-to ")
    assert f"Not looked at: {line}" in table("llama", verdict)


def test_the_price_of_exactness_is_that_of_the_narrowest_tile():
    same = Price(exact_width=1, exact_ms=10.0, free_width=1, free_ms=9.0, mlx_lm_ms=11.0)
    assert same.exactness == 0
    assert str(same).startswith("none")
    dear = Price(exact_width=8, exact_ms=13.0, free_width=1, free_ms=10.0, mlx_lm_ms=11.0)
    assert dear.exactness == pytest.approx(0.3)
    assert "+30%" in str(dear)
    assert "--no-exact" in str(dear)
    cheap = Price(exact_width=2, exact_ms=10.2, free_width=1, free_ms=10.0, mlx_lm_ms=11.0)
    assert "--no-exact" not in str(cheap)
