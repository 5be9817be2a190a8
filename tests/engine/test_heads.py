"""The final soft cap: left to the scan, it changes no choice and no weight."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step as mlx_lm_generate_step

import mlxspec
from mlxspec import Capture, LogitRowScan, StaticShapeEngine
from mlxspec.engine import tiles
from mlxspec.engine.heads import raw_head
from tests.families.tiny import tiny_model

CAPPED = ("gemma2", "gemma3n", "gemma4", "gemma4_text")


def saturated(family, scale=40.0):
    """A model whose logits are so large that the cap rounds many of them to one value."""
    model = tiny_model(family)
    for name, array in tree_flatten(model.parameters()):
        if name.endswith("embed_tokens.weight"):
            model.load_weights([(name, array * scale)], strict=False)
    return model


@pytest.mark.parametrize("family", CAPPED)
def test_raw_logits_capped_are_the_models_own_bit_for_bit(family):
    model = tiny_model(family)
    head = raw_head(model)
    assert head.cap is not None
    tokens = mx.array([[5, 9, 2]])
    own = model(tokens)
    raw = head.forward(tokens, cache=None)
    assert not mx.array_equal(raw, own)
    assert mx.array_equal(mx.tanh(raw / head.cap) * head.cap, own)
    assert mx.array_equal(model(tokens), own)


@pytest.mark.parametrize("family", CAPPED)
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_the_scans_choice_is_the_argmax_of_the_models_capped_logits(family, scale):
    model = saturated(family, scale)
    engine = StaticShapeEngine(model, max_context_length=64, span_step=16)
    text = [(11 * i + 5) % 97 for i in range(40)]
    engine.prefill(text[:3])
    for begin in range(3, 35, 4):
        block = text[begin : begin + 4]
        own = engine.verify(block, Capture(logits=True))
        engine.reset(begin)
        scanned = engine.verify(block, Capture(top_k=2))
        assert scanned.argmax == mx.argmax(own.logits, axis=-1).tolist() == own.argmax
        assert scanned.top_indices[:, 0].tolist() == own.argmax


@pytest.mark.parametrize("family", CAPPED)
def test_generation_leaves_the_cap_to_the_scan_and_gives_the_models_log_probabilities(
    family, monkeypatch
):
    caps = []
    model, prompt = tiny_model(family), [5, 9, 2, 6]
    engine = StaticShapeEngine(model, max_context_length=64)
    monkeypatch.setattr(
        tiles, "LogitRowScan", lambda **options: caps.append(options) or LogitRowScan(**options)
    )
    ours = list(
        mlxspec.generate_step(prompt, model, max_tokens=6, prompt_lookup=True, engine=engine)
    )
    assert {options["cap"] for options in caps} == {raw_head(model).cap}
    theirs = mlx_lm_generate_step(mx.array(prompt), model, max_tokens=6)
    assert [token for token, _, _ in ours] == [token for token, _ in theirs]
    # A processor of the caller's own is given what the model itself capped.
    capped = mlxspec.generate_step(
        prompt, model, max_tokens=6, engine=engine, logits_processors=[lambda _, logits: logits]
    )
    for (token, logprobs, _), (expected, expected_logprobs, _) in zip(ours, capped, strict=True):
        assert token == expected
        assert mx.array_equal(logprobs, expected_logprobs)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_model_without_a_final_cap_is_taken_as_it_is(family):
    model = tiny_model(family)
    assert raw_head(model) == (model, None)
