"""Keyword arguments reach what they are for."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

import mlxspec
from mlxspec.engine.support import model_from_config
from tests.families.tiny import set_random_weights, tiny_configs

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8]


@pytest.fixture(scope="module")
def model():
    """A llama whose heads are long enough for a group of 64."""
    model = model_from_config(tiny_configs()["llama"] | {"head_dim": 128})
    set_random_weights(model, seed=0)
    return model


@pytest.mark.parametrize("start", [0, 20])
def test_keys_and_values_are_quantised_as_mlx_lm_does_it(model, start):
    options = {"kv_bits": 2, "kv_group_size": 128, "quantized_kv_start": start, "max_tokens": 40}
    theirs = [token for token, _ in generate_step(mx.array(PROMPT), model, **options)]
    for drafting in ({}, {"prompt_lookup": True}):
        ours = [t for t, _, _ in mlxspec.generate_step(PROMPT, model, **options, **drafting)]
        assert ours == theirs
    # It does something, so that an option that was lost on the way would be noticed.
    for other in ({}, options | {"kv_group_size": 32}, options | {"quantized_kv_start": 30}):
        changed = [
            t for t, _, _ in mlxspec.generate_step(PROMPT, model, **{"max_tokens": 40, **other})
        ]
        assert changed != theirs


def test_a_start_of_quantisation_that_is_no_position_is_refused(model):
    with pytest.raises(ValueError, match="quantized_kv_start: expected a position"):
        mlxspec.generate_step(PROMPT, model, kv_bits=8, quantized_kv_start=-1)


def test_special_tokens_of_xtc_outside_the_vocabulary_change_nothing(model):
    options = {"temp": 1.0, "seed": 1, "xtc_probability": 1.0, "xtc_threshold": 0.001}
    texts = [
        [t for t, _, _ in mlxspec.generate_step(PROMPT, model, max_tokens=9, **options, **special)]
        for special in ({}, {"xtc_special_tokens": (-1, 1000, 2**31)})
    ]
    assert texts[0] == texts[1]
