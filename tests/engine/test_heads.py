"""The final soft cap: left to the scan, it changes no choice and no weight."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxspec import Capture, StaticShapeEngine
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


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_model_without_a_final_cap_is_taken_as_it_is(family):
    model = tiny_model(family)
    assert raw_head(model) == (model, None)
