"""Draft models made for the measurements: recorded as they would draft, and whole where cut."""

from __future__ import annotations

import json

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import mlxspec
from bench.common import RESULTS
from bench.draft_models import bytes_in_half_precision, keep_first_layers
from bench.record_drafts import BITS, LAYERS, agreement
from bench.simulate import CURVES, DRAFT_TRACES, TRACES, all_texts, recorded_draft_texts
from mlxspec import DraftModel, SpeculationStats
from tests.families.tiny import same_model, tiny_configs, tiny_model

PROMPT = [5, 9, 2, 6]
LENGTH = 40
OPTIONS = {"max_tokens": LENGTH, "max_context_length": 64}


def answer_of(model, **options):
    return [token for token, _, _ in mlxspec.generate_step(PROMPT, model, **OPTIONS, **options)]


def cut_model(family, count):
    model = tiny_model(family)
    keep_first_layers(model, count)
    return model


def test_every_draft_model_was_compared_with_every_token_of_every_answer():
    recorded = json.loads(DRAFT_TRACES.read_text())
    answers = json.loads((TRACES / recorded["answers"]).read_text())["texts"]
    assert len(recorded["drafts"]) == len(BITS) + len(LAYERS)
    for draft in recorded["drafts"].values():
        lengths = {name: len(agrees) for name, agrees in draft["agrees"].items()}
        assert lengths == {name: len(text["answer"]) for name, text in answers.items()}
        assert set("".join(draft["agrees"].values())) == {"0", "1"}
        assert 0 < draft["bytes"] < recorded["bytes"]


def test_recorded_draft_models_are_in_the_simulation_and_in_its_result():
    texts = {text.name for text in all_texts()}
    assert {text.name for text in recorded_draft_texts()} < texts
    kept = json.loads((RESULTS / "simulate.json").read_text())["runs"]
    assert {(run["text"], run["curve"]) for run in kept} == {
        (text, curve.name) for text in texts for curve in CURVES
    }


def test_an_agreement_is_what_the_draft_model_proposes_token_by_token():
    target, draft = tiny_model("llama"), tiny_model("llama")
    nn.quantize(draft, bits=4)
    answer = answer_of(target)
    drafter = DraftModel(draft, max_context_length=64)
    alone = ""
    for i, said in enumerate(answer):
        proposal = drafter.propose(PROMPT + answer[:i], 1)
        alone += str(int(np.array(proposal.tokens).item() == said))
    assert agreement(draft, PROMPT, answer) == alone
    assert set(alone) == {"0", "1"}
    assert agreement(target, PROMPT, answer) == "1" * LENGTH


@pytest.mark.parametrize("family", ["llama", "llama+swa", "gemma3_text"])
def test_layers_left_out_make_the_model_that_never_had_them(family):
    config = tiny_configs()[family] | {"num_hidden_layers": 2}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    never = same_model(config)
    cut = cut_model(family, 2)
    never.load_weights(tree_flatten(cut.parameters()))
    caches = [[type(cache) for cache in make_prompt_cache(model)] for model in (cut, never)]
    assert caches[0] == caches[1]
    assert answer_of(cut) == answer_of(never)
    assert bytes_in_half_precision(cut) < bytes_in_half_precision(tiny_model(family))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_model_is_drafted_by_its_own_first_layers_and_says_the_same(family):
    model, stats = tiny_model(family), SpeculationStats()
    draft = cut_model(family, 2)
    assert answer_of(model, draft_model=draft, stats=stats) == answer_of(model)
    assert stats.drafted


@pytest.mark.parametrize("count", [0, 1, 4])
def test_layers_that_are_not_there_or_must_be_are_refused_with_those_that_may_be_kept(count):
    with pytest.raises(ValueError, match=f"expected 2 to 3 for this model, got {count}"):
        cut_model("gemma3_text", count)
